"""Attention whose code picks the best queries of each head by numbers of rows that it counts, as Informer's does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["BEST", "EACH", "HEADS", "LENGTH", "WIDTH", "PickedRows"]

HEADS, EACH, LENGTH, BEST = 6, 4, 5, 2
WIDTH = HEADS * EACH


class PickedRows(nn.Module):
    """All heads of a batch are rows; ``what`` else becomes of the numbers of these rows."""

    def __init__(self, what: str = "nothing", *, dropout: float = 0.0) -> None:
        super().__init__()
        self.what, self.heads, self.dropout, self.kept = what, HEADS, dropout, None
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def rows_of(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        rows = x.view(batch, length, self.heads, EACH).transpose(1, 2)
        return rows.reshape(batch * self.heads, length, EACH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (self.rows_of(layer(x)) for layer in (self.q, self.k, self.v))
        some = k[:, torch.randint(0, length, (3,))]
        scores = q @ some.transpose(1, 2)
        best = (scores.amax(-1) - scores.mean(-1)).topk(BEST, sorted=False)[1]
        rows = self.counted(q)
        context = v.cumsum(1)
        if self.what == "all rows alike":
            best = torch.arange(BEST).unsqueeze(0)
        elif self.what == "of other rows":
            best = torch.zeros(best.shape, dtype=torch.long)
        elif self.what == "by place":
            best = rows.unsqueeze(-1)
        elif self.what == "in other places":
            context = context[:, rows[:1]] + context
        elif self.what == "largest":
            context = context + rows.max()
        elif self.what == "sum":
            context = context + rows.sum()
        elif self.what == "of some rows":
            context[torch.arange(self.heads).unsqueeze(-1), torch.arange(BEST)] = 0.0
        picked = q[rows.unsqueeze(-1), best]
        weights = F.dropout((picked @ k.transpose(1, 2)).softmax(-1), self.dropout, self.training)
        context[rows.unsqueeze(-1), best, :] = weights @ v
        heads = context.view(batch, self.heads, length, EACH).transpose(1, 2)
        y: Tensor = self.out(heads.reshape(batch, length, -1))
        return y

    def counted(self, q: Tensor) -> Tensor:
        """The numbers of the rows of ``q``, or others."""
        rows = torch.arange(q.shape[0])
        if self.what == "backwards":
            return rows.flip(0)
        if self.what == "from one on":
            return torch.arange(1, q.shape[0] + 1) - 1
        if self.what == "to a number":
            return torch.arange(2 * HEADS - q.shape[0], 2 * HEADS)
        if self.what == "picked":
            return rows[torch.arange(1) * torch.ones(q.shape[0], dtype=torch.long)]
        if self.what == "moved":
            return rows + 0
        if self.what == "kept":
            self.kept = rows
        return rows
