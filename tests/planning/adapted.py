"""Layers with a pair of narrow ones beside them, as LoRA adds."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, WIDE, RANK = 24, 40, 4


class Adapted(nn.Module):
    """``base(x) + 2 * last(first(dropout(x)))``."""

    def __init__(self, base: nn.Linear, dropout: float = 0.0) -> None:
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(dropout)
        self.first = nn.Linear(base.in_features, RANK, bias=False)
        self.last = nn.Linear(RANK, base.out_features, bias=False)
        base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + 2 * self.last(self.first(self.dropout(x)))
        return y


class Block(nn.Module):
    """A packed attention and an MLP; ``up`` and ``down``: dropout of the MLP's pairs, ``inside`` that of its own."""

    def __init__(self, up: float = 0.0, down: float = 0.0, inside: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = Adapted(nn.Linear(WIDTH, 3 * WIDTH)), Adapted(nn.Linear(WIDTH, WIDTH))
        self.up, self.down = Adapted(nn.Linear(WIDTH, WIDE), up), Adapted(nn.Linear(WIDE, WIDTH), down)
        self.width, self.inside = WIDTH, inside

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(x).split(self.width, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.dropout(F.gelu(self.up(x)), self.inside, self.training))
        return y
