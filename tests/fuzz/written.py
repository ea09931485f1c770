"""Ops on features with closures, buffers, control flow and shared modules: what hangs on how models are written."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.functions import fitted
from tests.fuzz.modules import free
from tests.fuzz.vocabulary import FEATURES, Op, Ops, Sizes, Spec, draw_ops, op

__all__ = ["Branch", "Closure"]


@op(FEATURES, "closure")
class Closure(Op):
    """What it computes with hangs on functions, and is no attribute of a module."""

    def __init__(self, sizes: Sizes, kind: str = "scalar", registered: bool = True) -> None:
        super().__init__(sizes)
        p = free(*{"scalar": (1,), "features": (sizes.features,), "length": (sizes.length, 1)}[kind])
        if registered:
            self.p = p
        held = torch.rand(p.shape) + 0.5
        self.run = lambda x: x * held.to(x.dtype)
        if registered:
            self.then: Any = functools.partial(torch.mul, torch.linspace(0.5, 1, p.shape[0]).double().view(p.shape))
        else:
            self.then = torch.tanh

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"kind": rng.choice(["scalar", "features", "length"]), "registered": rng.random() < 0.7}

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        y: Tensor = self.then(self.run(x))
        return y * self.p if "p" in self._parameters else y


@op(FEATURES, "captured")
class Captured(Op):
    """A function that holds a module, which the op registers, too."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.scale = nn.Linear(1, 1)
        weight = self.scale.weight
        self.run = functools.partial(lambda w, x: x * w, weight)

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        return self.scale(x.detach().mean().view(1, 1)).sum() * 0 + x * self.scale.weight[0]


@op(FEATURES, "buffer")
class Buffer(Op):
    def __init__(self, sizes: Sizes, kind: str = "length", how: str = "times") -> None:
        super().__init__(sizes)
        shape = {"length": (sizes.length, 1), "features": (sizes.features,), "one": (1,)}[kind]
        self.register_buffer("mask", (torch.rand(shape) < 0.7) if how == "fill" else torch.rand(shape) + 0.5)
        self.how = how

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {
            "kind": rng.choice(["length", "one", "features"]), "how": rng.choice(["times", "fill", "divide", "add"])
        }  # fmt: skip

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        mask: Any = self.mask
        if self.how == "fill":
            return x.masked_fill(mask, 0.0)
        return {"times": torch.mul, "divide": torch.div, "add": torch.add}.get(self.how, torch.mul)(x, mask)


@op(FEATURES, "running", trap=True)
class Running(Op):
    """Running statistics of what is cut."""

    def __init__(self, sizes: Sizes, kind: str = "features", used: bool = True) -> None:
        super().__init__(sizes)
        self.kind, self.used = kind, used
        self.register_buffer("mean", torch.zeros(sizes.features if kind == "features" else 1))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"kind": rng.choice(["features", "one", "whole"]), "used": rng.random() < 0.6}

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        mean: Any = self.mean
        now = {"features": lambda: x.mean((0, 1)), "one": lambda: x.mean(), "whole": lambda: whole.mean()}[self.kind]()
        with torch.no_grad():
            self.steps += 1  # type: ignore[operator, misc]
            mean.mul_(0.9).add_(now.detach(), alpha=0.1)
        return x - mean if self.used else x


@op(FEATURES, "reordered", trap=True)
class Reordered(Op):
    """A permutation that a buffer holds."""

    def __init__(self, sizes: Sizes, how: str = "index_select", dim: int = -1) -> None:
        super().__init__(sizes)
        size = sizes.features if dim == -1 else sizes.length
        self.register_buffer("order", torch.randperm(size))
        self.how, self.dim = how, dim

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"how": rng.choice(["index_select", "index", "gather", "take_along", "add", "put", "scatter"]),
                "dim": rng.choice([-1, 1])}  # fmt: skip

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        order: Any = self.order
        if self.how == "index_select":
            return x.index_select(self.dim, order)
        if self.how == "index":
            return x[..., order] if self.dim == -1 else x[:, order]
        if self.how == "add":
            return x.index_add(self.dim, order, x)
        if self.how == "put":
            return x.index_copy(self.dim, order, x)
        places = (order if self.dim == -1 else order.unsqueeze(-1)).expand(x.shape)
        if self.how == "gather":
            return x.gather(self.dim, places)
        if self.how == "scatter":
            return torch.zeros_like(x).scatter_add(self.dim, places, x)
        return torch.take_along_dim(x, places, self.dim)


@op(FEATURES, "branch")
class Branch(Op):
    """Control flow of Python."""

    def __init__(self, sizes: Sizes, on: str = "length", ops: list[Spec] | None = None) -> None:
        super().__init__(sizes)
        self.on, self.flag, self.steps = on, True, 2
        self.inner = Ops(FEATURES, sizes, ops or [])

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        on = rng.choice(["length", "training", "flag", "loop", "data", "features", "grad", "item", "requires",
                         "detached"])  # fmt: skip
        return {"on": on, "ops": draw_ops(FEATURES, rng, sizes, 1, 0.2)}

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        if self.on == "loop":
            for i in range(self.steps):
                x = self.inner(x, whole) * (1 + i)
            return x
        taken = {
            "length": lambda: x.shape[1] > 2,
            "training": lambda: self.training,
            "flag": lambda: self.flag,
            "data": lambda: bool(whole.sum() > 0),
            "item": lambda: whole.detach().abs().max().item() > 1.0,
            "features": lambda: x.shape[-1] > 7,
            "grad": torch.is_grad_enabled,
            "requires": lambda: x.requires_grad,
            "detached": lambda: whole.detach().requires_grad,
        }[self.on]()
        return self.inner(x, whole) if taken else x * 2


@op(FEATURES, "checkpointed")
class Checkpointed(Op):
    def __init__(self, sizes: Sizes, ops: list[Spec] | None = None, reentrant: bool = False) -> None:
        super().__init__(sizes)
        self.inner, self.reentrant = Ops(FEATURES, sizes, ops or []), reentrant

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"ops": draw_ops(FEATURES, rng, sizes, 2, 0.1), "reentrant": rng.random() < 0.4}

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, whole, use_reentrant=self.reentrant)  # type: ignore[assignment]
        return y


@op(FEATURES, "on_both", trap=True)
class OnBoth(Op):
    """One module works on the part and on the whole."""

    def __init__(self, sizes: Sizes, module: str = "prelu", used: bool = True) -> None:
        super().__init__(sizes)
        self.shared: Any = nn.PReLU() if module == "prelu" else nn.Linear(sizes.features, sizes.features)
        self.used = used

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"module": rng.choice(["prelu", "linear"]), "used": rng.random() < 0.7}

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        y: Tensor = self.shared(x)
        return y + self.shared(fitted(whole, x)).sum(-1, keepdim=True) * 0.1 if self.used else y


@op(FEATURES, "table")
class Table(Op):
    """Positions from a table of their own."""

    def __init__(self, sizes: Sizes, by_ids: bool = False) -> None:
        super().__init__(sizes)
        self.table, self.by_ids = nn.Embedding(sizes.length + 3, sizes.features), by_ids

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"by_ids": rng.random() < 0.5}

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        ids = whole.argmax(-1) % 3 if self.by_ids else torch.arange(x.shape[1])
        return x + self.table(ids)
