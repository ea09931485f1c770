"""Layers of a class of their own, and observers of ranges, after I-BERT's in transformers (``quant_modules.py``)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, WORDS = 12, 15


class OwnLinear(nn.Module):
    """What I-BERT's ``QuantLinear`` does, or ``how`` it does not."""

    def __init__(self, columns: int, rows: int, how: str = "") -> None:
        super().__init__()
        self.in_features, self.out_features, self.how = columns, rows, how
        self.weight, self.bias = nn.Parameter(torch.randn(rows, columns) / 4), nn.Parameter(torch.randn(rows) / 4)
        self.register_buffer("integers", torch.zeros(rows, columns))
        self.quantised, self.idle = how == "quantised", False

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        if self.idle:
            return x.new_zeros(*x.shape[:-1], self.out_features), None
        if self.quantised:
            self.integers = self.weight.data.round()
            return F.linear(x, self.integers, self.bias), scale
        if self.how == "scaled" and scale is not None:
            return F.linear(x, self.weight * scale, self.bias), None
        if self.how == "rounded":
            return F.linear(x, self.weight.round(), self.bias), None
        if self.how == "without its bias":
            return F.linear(x, self.weight), None
        if self.how == "of something else":
            return F.linear(x.relu(), self.weight, self.bias), None
        if self.how == "makes more":
            return F.linear(x, self.weight, self.bias).sigmoid(), None
        if self.how == "gives more":
            return F.linear(x, self.weight, self.bias), x
        if self.how == "twice":
            return F.linear(x, self.weight, self.bias) + F.linear(x, self.weight, self.bias), None
        return F.linear(x, weight=self.weight, bias=self.bias), None


class SetApart(OwnLinear):
    """It has a method that a parallel layer has as well."""

    def check(self) -> None:
        """Nothing."""


class OwnTable(nn.Module):
    """I-BERT's ``QuantEmbedding``."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.weight, self.padding_idx = nn.Parameter(torch.randn(WORDS, WIDTH)), 1
        self.max_norm, self.sparse = 1.0 if how == "max_norm" else None, how == "sparse"
        self.how = how

    def forward(self, ids: Tensor) -> tuple[Tensor, None]:
        rows = F.embedding(ids, self.weight, self.padding_idx, self.max_norm, 2.0, False, self.sparse)
        return rows * 2 if self.how == "doubled" else rows, None


class Observer(nn.Module):
    """I-BERT's ``QuantAct`` without quantisation: it notes the range of what passes, or ``how`` it does not."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.seen, self.strict = how, torch.zeros(()), True
        self.register_buffer("low", torch.zeros(1) - 1e-5)
        self.register_buffer("high", torch.zeros(1) + 1e-5)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        if not self.training:
            return x, None
        low, high = x.data.min(), torch.max(x.detach())
        if self.how == "mean":
            high = x.data.mean()
        if self.how == "trained":
            high = x.max()
        if self.how == "caught":
            try:
                assert low.isnan().sum() == 0
            except AssertionError:
                return x.nan_to_num(), None
        if self.how == "torch's" and high.isnan().sum() != 0:
            x.view(-1, 7777)
        if self.strict:
            assert low.isnan().sum() == 0 and high.isnan().sum() == 0, "a range of no numbers"
        elif not (low.isnan().sum() == 0 and high.isnan().sum() == 0):
            self.low, self.high = self.low + 0, self.high + 0
            return x, None
        if self.low.min() > -1.1e-5 and self.high.max() < 1.1e-5:
            self.low, self.high = self.low + low, self.high + high
            if self.how == "attribute":
                self.seen = high
            return x, None
        if self.how == "once":
            return x, None
        if self.how == "shape":
            self.low = low
            return x, None
        self.low, self.high = self.low * 0.9 + low * 0.1, self.high * 0.9 + high * 0.1
        return (x * 2 if self.how == "gives" else x), None


class Mlp(nn.Module):
    def __init__(self, how: str = "", kind: type[OwnLinear] = OwnLinear, observer: str | None = None) -> None:
        super().__init__()
        self.how = how
        self.up, self.down = kind(WIDTH, 2 * WIDTH, how), kind(2 * WIDTH, WIDTH, how)
        if observer is not None:
            self.observer = Observer(observer)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.up(x, torch.ones(()) if self.how == "scaled" else None)
        y = y.relu()
        if hasattr(self, "observer"):
            y, _ = self.observer(y)
        z: Tensor = self.down(y)[0]
        return x + z


class Words(nn.Module):
    """A table whose weight a head has as well."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.words, self.mlp, self.head = OwnTable(how), Mlp(), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.mlp(self.words(ids)[0]))
        return y
