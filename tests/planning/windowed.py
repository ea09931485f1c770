"""Attention within windows that overlap, taken by their places in memory, with words that attend to all others."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EACH, WINDOW = 2, 2


class Windowed(nn.Module):
    """As Longformer's code: it transposes its input, reads the width there, and merges heads with the batch.

    "shared": its windows reach into other heads; "features": it moves features, too; "added": it adds its input;
    "swapped": it moves rows by a function that is not followed; "asks": it asks for the marked words between layers;
    "twice": it writes heads of all sequences, one after the other, where those of each sequence are.
    """

    def __init__(self, heads: int, how: str = "") -> None:
        super().__init__()
        self.heads, self.how, self.width = heads, how, heads * EACH
        self.query, self.key, self.value = (nn.Linear(self.width, self.width) for _ in range(3))
        self.everywhere, self.out = nn.Linear(self.width, self.width), nn.Linear(self.width, self.width)

    def forward(self, x: Tensor, marked: Tensor, some: bool) -> Tensor:
        rows = x.swapaxes(0, 1) if self.how == "swapped" else x.transpose(0, 1)
        query, key, value = self.query(rows), self.key(rows), self.value(rows)
        length, batch, width = rows.size()
        assert width == self.width
        heads = [y.view(length, batch, self.heads, EACH).transpose(0, 1) for y in (query, key, value)]
        products = torch.einsum("bcxd,bcyd->bcxy", *(self.windows(y) for y in heads[:2]))
        scores = products.new_zeros(batch * self.heads, products.shape[1] + 1, WINDOW, 2 * WINDOW)
        if self.how == "twice":
            scores[:, 0, :, 0] = heads[0].permute(2, 0, 1, 3).reshape(self.heads * batch, length, EACH)[:, :WINDOW, 0]
        scores[:, :-1] = products[:, :, :WINDOW]
        scores[:, -1] = products[:, -1, WINDOW:]
        weights = scores.view(batch, self.heads, length, 2 * WINDOW).transpose(1, 2).tanh().sum(-1, keepdim=True)
        y = (weights * heads[2]).transpose(0, 1).reshape(length, batch, width)
        if (marked > 0).any() if self.how == "asks" else some:
            self.write_everywhere(rows, marked, y)
        z: Tensor = self.out(y.transpose(0, 1))
        return z + x if self.how == "added" else z

    def windows(self, y: Tensor) -> Tensor:
        """[batch, length, heads, each] as [batch * heads, windows, 2 * WINDOW, each]; each overlaps half the next."""
        batch, length = y.shape[:2]
        merged = y.transpose(1, 2).reshape(batch * self.heads, length, EACH).view(batch * self.heads, -1, 4, EACH)
        size, stride = list(merged.size()), list(merged.stride())
        size[1], stride[1] = 2 * size[1] - 1, stride[1] // 2
        if self.how == "shared":
            stride[0] = stride[0] // 2
        return merged.as_strided(size, stride)

    def write_everywhere(self, rows: Tensor, marked: Tensor, y: Tensor) -> None:
        counts = marked.sum(1)
        most = counts.max()
        places, found = (torch.arange(most) < counts[:, None]).nonzero(as_tuple=True), marked.nonzero(as_tuple=True)
        some = rows.new_zeros(most, rows.shape[1], self.width)
        some[places[::-1]] = rows[found[::-1]]
        if self.how == "features":
            some = some.transpose(1, 2).transpose(1, 2)
        given = self.everywhere(some)
        assert list(given.shape[:1]) == [most]
        y[found[::-1]] = given[places[::-1]]


class Words(nn.Module):
    """Words, of which those of the number 1 attend to all others."""

    def __init__(self, heads: int, how: str = "") -> None:
        super().__init__()
        self.words, self.attention = nn.Embedding(9, heads * EACH), Windowed(heads, how)

    def forward(self, ids: Tensor) -> Tensor:
        marked = (ids == 1).long()
        y: Tensor = self.attention(self.words(ids), marked, bool((marked > 0).any()))
        return y


IDS = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [2, 3, 1, 1, 4, 5, 6, 7], [8, 7, 6, 5, 4, 3, 2, 2]])
COLUMNS = [f"attention.{name}" for name in ("query", "key", "value", "everywhere")]
ROW = "attention.out"
