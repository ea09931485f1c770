"""A model whose hidden features look as if each rank could have its own, and in most variants are not."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Unit(torch.autograd.Function):
    """The identity, whose gradient has length one: over all features, and not over those of a rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy / dy.norm()


class Leaking(nn.Module):
    """Features that look local and are not: each variant must not be cut by features in one go."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.gate = nn.Linear(6, 12)
        self.scale = nn.Parameter(torch.ones(12))
        self.one = nn.Parameter(torch.ones(1))
        for name in ("low", "high"):
            self.register_buffer(name, torch.ones(1))

    low: Tensor
    high: Tensor

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = self.up(x)
        if self.how == "softmax":
            h = h.softmax(-1)
        elif self.how == "sum":
            h = h - h.sum((-2, -1), keepdim=True)  # one of the last dimension is taken over all ranks
        elif self.how == "roll":
            h = h.roll(1, -1)
        elif self.how == "residual":
            h = h + torch.cat([x, x], -1)
        elif self.how == "scalar activation":
            h = h * x.mean(-1, keepdim=True)
        elif self.how == "vector parameter":
            h = h * self.scale.flip(0)
        elif self.how == "size":
            h = h / h.shape[-1]
        elif self.how == "shuffle":
            h = h.view(*h.shape[:-1], 3, 4).transpose(-1, -2).reshape(h.shape)
        elif self.how == "second output":
            return self.down(h) + h[..., :6]
        elif self.how == "flip":
            h = h.flip(-1)
        elif self.how == "interleaved pairs":
            h = h.view(*h.shape[:-1], 4, 3)[..., :2].reshape(*h.shape[:-1], 8)
            h = F.pad(h, (0, 4))
        elif self.how == "weight read":
            h = h + self.up.weight.sum()
        elif self.how == "whole matrix":
            h = h @ torch.ones(12, 12)
        elif self.how == "complex":
            turned = torch.view_as_complex(x.view(*x.shape[:-1], 3, 2)) * 1j
            h = h * torch.view_as_real(turned).flatten(-2).mean(-1, keepdim=True)
        elif self.how == "integer":
            h = h * (x.argmax(-1, keepdim=True) + 1)
        elif self.how == "size of a tensor":
            h = h * torch.tensor(float(h.shape[-1]))
        elif self.how == "size that fills":
            h = h * torch.full((1,), float(h.shape[-1]))
        elif self.how == "size that scales":
            q = h.view(1, *h.shape[:-1], -1, 2).transpose(1, 2)
            h = F.scaled_dot_product_attention(q, q, q, scale=1 / h.shape[-1]).transpose(1, 2).reshape(h.shape)
        elif self.how == "size that chooses":
            h = h * (self.low if h.shape[-1] == 12 else self.high)
        elif self.how == "own backward":
            h = _Unit.apply(h)
        elif self.how == "evaluation":
            h = h if self.training else h.softmax(-1)
        elif self.how == "kept":
            self.kept = h
        elif self.how == "parameter returned":
            return self.down(h * self.one), self.one * 2
        y: Tensor = self.down(h)
        return y
