"""Blocks that branch on a condition of tensors, each in a way of its own."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

LARGEST = 1000.0


class Block(nn.Module):
    """A pair of layers that can be cut, and a rest after a condition."""

    def __init__(self, how: str = "clamp", seen: SimpleNamespace | None = None) -> None:
        super().__init__()
        self.how, self.seen = how, seen
        self.width = 16
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.late, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("offset", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).relu()
        hidden = hidden.view(*x.shape[:-1], self.width)
        y: Tensor = x + self.down(hidden)
        if self.how == "offset":
            y = y + self.offset
        if self.how == "training" and not self.training:
            return y
        if self.how == "two" and (y.isinf().any() or y.isnan().any()):
            return y.clamp(-LARGEST, LARGEST)
        if self.how == "many":
            for _ in range(4):
                if not y.isfinite().all():
                    y = y / 2
            return y
        if self.how == "loop":
            while (y > 0).all():
                y = y - 1
            return y
        if self.how == "equal":
            return y if torch.equal(y, y) else y.nan_to_num()
        if not y.isfinite().all():
            return self.otherwise(x, hidden, y)
        return y

    def otherwise(self, x: Tensor, hidden: Tensor, y: Tensor) -> Tensor:
        """The path of a False condition that all is finite; the other one gives ``y``."""
        if self.how == "part":  # of the features
            return y + hidden.sum(-1, keepdim=True)
        if self.how == "gives":
            return hidden
        if self.how == "shape":
            return y[:, :1]
        if self.how == "dtype":
            return y.double() if y.dtype is torch.float32 else y.float()
        if self.how == "writes":
            x.add_(1)
        if self.how == "counts":
            self.count.add_(1)
        if self.how == "detaches":
            return y.detach()
        if self.how == "channels":
            y = self.norm(y.transpose(1, 2)).transpose(1, 2)
        if self.how == "changes":
            self.how = "clamp"
        if self.how == "layer":
            y = self.late(y)
        if self.how == "number" and y.sum().item() > 3:
            return y / 2
        if self.how == "rows":
            y = y + y[y > 0].sum()
        if self.how == "width":
            return y.clamp(-self.width, self.width)
        if self.how == "lists" and self.seen is not None:
            self.seen.names.append("seen")
        return y.clamp(-LARGEST, LARGEST)


class Blocks(nn.Module):
    """Two blocks."""

    def __init__(self, how: str = "clamp") -> None:
        super().__init__()
        self.how = how
        self.seen = SimpleNamespace(names=[])
        self.layers = nn.ModuleList(Block(how, self.seen) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.names.clear()
        for layer in self.layers:
            x = layer(x)
        return x / 2 if len(self.seen.names) == 1 else x  # neither if all take one path, nor if all take the other


class Guard(nn.Module):
    """What a layer gives, with numbers alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.equal(x, x) else x.nan_to_num()


class Guarded(nn.Module):
    def __init__(self, *, between: bool) -> None:
        super().__init__()
        self.between = between
        self.up, self.guard, self.down = nn.Linear(8, 16), Guard(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.between:
            y: Tensor = self.down(self.guard(self.up(x)))
            return y
        y = self.guard(self.down(self.up(x).relu()))
        return y


class AskingNorm(nn.Module):
    """A norm that other modules could stand for, if it did not ask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        y = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight
        return y if y.isfinite().all() else y.nan_to_num()


class Normed(nn.Module):
    """A norm over the features between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), AskingNorm(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.norm(self.up(x)))
        return y
