"""Attention that takes heads apart, looks at windows of keys, or reads a large table of rows as long as one head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, EACH = 4, 4
WIDTH = HEADS * EACH
ROWS = 300
"""Of a table: it has more numbers than all other layers."""


class Cache:
    """Keys and values of all calls."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys = k if self.keys is None else torch.cat((self.keys, k), 2)
        self.values = v if self.values is None else torch.cat((self.values, v), 2)
        return self.keys, self.values


class Places(nn.Embedding):
    """A table with code of its own, which makes the numbers of the rows."""

    def forward(self, length: int) -> Tensor:  # type: ignore[override]
        return super().forward(torch.arange(length))


class Apart(nn.Module):
    """``how``: "pairs" subtracts from each head of the first half its partner in the second one, as DiffLlama does, and
    "kernel" with torch's kernel; "windows" looks at three keys at a time, as Gemma 4 does in sound, and "windows of
    heads" at three heads; "turned" multiplies queries and keys by what a frozen table says of their places, as RoFormer
    does; "keys in halves" takes the halves of keys and values apart, and puts them together again.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        if how == "turned":
            self.places = Places(ROWS, EACH, _freeze=True)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor] | None = None, cache: Cache | None = None) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, EACH)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        if cache is not None:
            k, v = cache.update(k, v)
        if turns is not None:
            q, k = q * turns[0], k + turns[1]
        if self.how == "turned":
            places = self.places(x.shape[1])
            q, k = q * places, k * places
        if self.how.startswith("windows"):
            y = self.windows(q, k, v)
        elif self.how in ("pairs", "kernel"):
            first, second = (torch.cat((half, half), 1) for half in v.chunk(2, 1))
            both = torch.cat((self.attend(q, k, first), self.attend(q, k, second)), -1)
            y = both[:, : both.shape[1] // 2] - 0.5 * both[:, both.shape[1] // 2 :]
        else:
            if self.how == "keys in halves":
                k, v = (torch.cat(one.chunk(2, 1), 1) for one in (k, v))
            y = F.scaled_dot_product_attention(q, k, v)
        z: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return z

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.how == "kernel":
            return F.scaled_dot_product_attention(q, k, v)
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v

    def windows(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.how == "windows of heads":
            k, v = (F.pad(one, (0, 0, 0, 0, 1, 1)).unfold(1, 3, 1) for one in (k, v))
        else:
            k, v = (F.pad(one, (0, 0, 1, 1)).unfold(2, 3, 1) for one in (k, v))
        scores = q.unsqueeze(-2) @ k
        return (scores.softmax(-1) @ v.transpose(-2, -1)).squeeze(-2)


class Numbered(nn.Module):
    """Turns heads by their numbers, as XCodec 2 does, with two constants that are handed on together."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Apart("numbered")

    def forward(self, x: Tensor) -> Tensor:
        numbers = torch.arange(HEADS, dtype=x.dtype)[:, None, None]
        y: Tensor = self.attention(x, turns=(numbers.cos(), numbers.sin()))
        return y
