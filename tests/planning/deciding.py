"""Models that ask conditions of their inputs and of random numbers, and call layers behind them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Pair(nn.Module):
    """Two layers that can be cut, with a condition before or between them where that is said."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "before" and torch.rand([]) < 0.5:
            x = x / 2
        hidden = self.up(x).relu()
        if self.how == "between" and torch.rand([]) < 0.5:
            hidden = hidden / 2
        y: Tensor = x + self.down(hidden)
        return y


class Dropped(nn.Module):
    """LayerDrop: in training blocks are skipped, by a number that is drawn for each."""

    def __init__(self, count: int, how: str = "") -> None:
        super().__init__()
        self.how, self.dropped = how, 0.5
        self.layers = nn.ModuleList(Pair(how) for _ in range(count))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, sizes: Tensor | None = None) -> Tensor:
        skipped = 0
        if sizes is not None and (sizes != torch.tensor(x.shape)).any():
            raise ValueError("these are other sizes")
        for layer in self.layers:
            if self.how not in ("before", "between") and self.training and self._skips(x):
                skipped += 1
                continue
            x = layer(x)
            if self.how == "counts":
                x = x.flatten(0, 1).unflatten(0, (3, 5)) if skipped else x
        return x

    def _skips(self, x: Tensor) -> bool:
        number = torch.rand([])
        if self.how == "parameter":
            number = number * self.scale
        if self.how == "written":
            number.mul_(self.scale)
        if self.how == "activation":
            number = number + x.sum()
        return bool(number < self.dropped)


class Padded(nn.Module):
    """Words of which some may be padding, and what is to be done about it."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.words, self.layer = nn.Embedding(11, 8), Pair()
        self.rare = Pair()

    def forward(self, ids: Tensor) -> Tensor:
        padding = ids.eq(0)
        if self.how == "two" and (padding.any() or ids.dim() > 2):
            raise ValueError("the model refuses these")
        if self.how == "refuses" and ids.ge(11).any():
            raise ValueError("no such word")
        x = self.words(ids)
        if padding.any():
            x = x.masked_fill(padding.unsqueeze(-1), 0.0)
            if self.how == "part":
                x = self.rare.down(self.rare.up(x).cumsum(-1) + self.rare.up(x))
        y: Tensor = self.layer(x)
        return y


class Chooses(nn.Module):
    """A block that looks at one of two conditions, and on which of them depends on its number of features."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 16
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu().view(*x.shape[:-1], self.width))
        return y / 2 if (first if self.width == 16 else second) else y


class Sized(nn.Module):
    """Asks for a size first, and for one more in each block: where it is 0, features are mixed between its layers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(count))

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        if not sizes[0] > 0:
            raise ValueError("there is nothing")
        for layer, size in zip(self.layers, sizes[1:], strict=True):
            hidden = layer.up(x)
            x = x + layer.down(hidden.relu() if size > 0 else hidden.softmax(-1))
        return x


class SizedAround(Sized):
    """The same, with all of what depends on a size behind its condition."""

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        if not sizes[0] > 0:
            raise ValueError("there is nothing")
        for layer, size in zip(self.layers, sizes[1:], strict=True):
            x = x + layer.down(layer.up(x).relu()) if size > 0 else layer.down(layer.up(x).softmax(-1))
        return x
