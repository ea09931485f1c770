"""Ops on features that have parameters and layers."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fuzz.vocabulary import FEATURES, HEADS, Op, Sizes, Spec, op

__all__ = ["free"]


def free(*shape: int, scale: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * scale)


class WithParameter(Op):
    """``p`` of a shape that a subclass gives."""

    shape: Any = staticmethod(lambda sizes: (1,))

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.p = free(*type(self).shape(sizes))


def parameter(name: str, shape: Any, run: Any, *, trap: bool = False, table: Any = FEATURES) -> None:
    """An op of one parameter: ``run(x, whole, p)``, for heads ``run(x, whole, p, dimension of heads)``."""

    def init(self: Any, sizes: Sizes) -> None:
        nn.Module.__init__(self)
        self.p = free(*shape(sizes))
        self.at = sizes.at if table is HEADS else 0

    def forward(self: Any, x: Tensor, whole: Tensor) -> Tensor:
        y: Tensor = run(x, whole, self.p, self.at) if table is HEADS else run(x, whole, self.p)
        return y

    members = {"__init__": init, "forward": forward, "__module__": __name__}
    op(table, name, trap=trap)(type(name.title().replace("_", ""), (Op,), members))


def _one(sizes: Sizes) -> tuple[int, ...]:
    return (1,)


def _each(sizes: Sizes) -> tuple[int, ...]:
    return (sizes.features,)


parameter("temperature", _one, lambda x, w, p: x * F.softplus(p))
parameter("shift", lambda s: (), lambda x, w, p: x + p)
parameter("phase", _one, lambda x, w, p: x * torch.polar(torch.ones_like(p), p).real)
parameter("magnitude", _one, lambda x, w, p: x * torch.complex(p, p * 2).abs())
parameter("scaled_by_one_over_length", _one, lambda x, w, p: x * p / x.shape[1])
parameter("positions", lambda s: (s.length, 1), lambda x, w, p: x + p[: x.shape[1]])
parameter("rows_scaled", lambda s: (s.batch, 1, 1), lambda x, w, p: x * p.exp())
parameter("shift_through_exp", _one, lambda x, w, p: x + p.exp().cumsum(0).expand(x.shape[1], 1))
parameter("scale_of_features", _each, lambda x, w, p: x * p, trap=True)
parameter("shift_of_features", _each, lambda x, w, p: x + p, trap=True)
parameter("scale_of_first_features", _each, lambda x, w, p: x * p[: x.shape[-1]], trap=True)
parameter("matrix", lambda s: (s.features, s.features), lambda x, w, p: x @ p * 0.3, trap=True)
parameter("matrix_first", lambda s: (s.features, s.features), lambda x, w, p: F.linear(x, p) * 0.3, trap=True)
parameter(
    "einsum", lambda s: (s.features, s.features), lambda x, w, p: torch.einsum("bsf,gf->bsg", x, p) * 0.3, trap=True
)
parameter("rows_mixed", lambda s: (s.length, s.length), lambda x, w, p: p[: x.shape[1], : x.shape[1]].softmax(-1) @ x)
parameter("from_whole", lambda s: (s.width, s.features), lambda x, w, p: x + w @ p * 0.3, trap=True)
parameter("from_whole_to_one", lambda s: (s.width, 1), lambda x, w, p: x * (w @ p).sigmoid(), trap=True)
parameter("used_twice", _one, lambda x, w, p: x * p + (w.mean(-1, keepdim=True) * p).detach(), trap=True)
parameter("used_on_both", _one, lambda x, w, p: x * p + (w * p).sum() * 0, trap=True)
parameter("slopes", _each, lambda x, w, p: F.prelu(x.transpose(1, 2), p).transpose(1, 2), trap=True)
parameter("looked_up", lambda s: (5, s.features), lambda x, w, p: x + p[w.argmax(-1) % 5], trap=True)
parameter("looked_up_one", lambda s: (5, 1), lambda x, w, p: x + F.embedding(w.argmax(-1) % 5, p))
parameter(
    "looked_up_by_part",
    lambda s: (5, 1),
    # Equal tokens have equal rows but for rounding: the place decides between them.
    lambda x, w, p: x + p[(x + 1e-3 * torch.arange(x.shape[1])[:, None]).argmax(1) % 5].squeeze(-1).unsqueeze(1),
)


@op(FEATURES, "linear")
class Middle(Op):
    """One more linear between the first and the last."""

    def __init__(self, sizes: Sizes, bias: bool = True) -> None:
        super().__init__(sizes)
        self.linear = nn.Linear(sizes.features, sizes.features, bias=bias)

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"bias": rng.random() < 0.5}

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


@op(FEATURES, "gate")
class Gate(Op):
    """A column beside the one that made x."""

    def __init__(self, sizes: Sizes, how: str = "times") -> None:
        super().__init__(sizes)
        self.gate, self.how = nn.Linear(sizes.width, sizes.features), how

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"how": rng.choice(["times", "plus", "where", "in place", "highway"])}

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        g = self.gate(whole)
        if self.how == "times":
            return x * F.silu(g)
        if self.how == "plus":
            return x + g
        if self.how == "where":
            return torch.where(g > 0, x, g)
        if self.how == "in place":
            y = x * 1
            y *= g.sigmoid()
            return y
        return torch.lerp(x, g, g.sigmoid())


@op(FEATURES, "two_layouts", trap=True)
class TwoLayouts(Op):
    """As many features again, made of two halves that are cut each by itself, joined along another dimension."""

    def __init__(self, sizes: Sizes, how: str = "cat") -> None:
        super().__init__(sizes)
        half = sizes.features // 2
        self.left, self.right = nn.Linear(sizes.width, half), nn.Linear(sizes.width, sizes.features - half)
        self.how = how

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"how": rng.choice(["cat", "stack"])}

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        halves = torch.cat([self.left(whole), self.right(whole)], -1)
        if self.how == "stack":
            return torch.stack([x, halves]).amax(0)
        return torch.cat([x, halves], 1).unflatten(1, (2, x.shape[1])).mean(1)


@op(FEATURES, "tiled_to_a_size", trap=True)
class TiledToSize(Op):
    """Repeated as often as it takes to be of one size."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.total = 2 * sizes.features

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        return x - x.repeat(1, 1, self.total // x.shape[-1]).mean(-1, keepdim=True)


@op(FEATURES, "chosen_by_size", trap=True)
class ChosenBySize(Op):
    """The same op on another tensor where there are fewer features."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.by_size = {sizes.features: 0}

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        waves = x.sin(), x.cos()
        return x * waves[self.by_size.get(x.shape[-1], 1)]


@op(FEATURES, "gate_of_one", trap=True)
class GateOfOne(Op):
    """A whole activation that a layer made."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.gate = nn.Linear(sizes.width, 1)

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        return x * self.gate(whole).sigmoid()


@op(FEATURES, "adapter")
class Adapter(Op):
    """A low rank beside the identity."""

    def __init__(self, sizes: Sizes, rank: int = 4) -> None:
        super().__init__(sizes)
        self.down, self.up = nn.Linear(sizes.features, rank, bias=False), nn.Linear(rank, sizes.features, bias=False)

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        return x + self.up(self.down(x))


@op(FEATURES, "low_rank_of_whole")
class LowRank(Op):
    """As LoRA beside a column."""

    def __init__(self, sizes: Sizes, rank: int = 4) -> None:
        super().__init__(sizes)
        self.a, self.b = nn.Linear(sizes.width, rank, bias=False), nn.Linear(rank, sizes.features, bias=False)

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        return x + self.b(self.a(whole))


def _norm_named(name: str, make: Any, channels: bool = False) -> None:
    def init(self: Any, sizes: Sizes) -> None:
        nn.Module.__init__(self)
        self.norm = make(sizes)

    def forward(self: Any, x: Tensor, whole: Tensor) -> Tensor:
        y: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2) if channels else self.norm(x)
        return y

    members = {"__init__": init, "forward": forward, "__module__": __name__}
    op(FEATURES, name, trap=True)(type(name.title().replace("_", ""), (Op,), members))


_norm_named("layer_norm", lambda s: nn.LayerNorm(s.features))
_norm_named("layer_norm_bare", lambda s: nn.LayerNorm(s.features, elementwise_affine=False))
_norm_named("rms_norm", lambda s: nn.RMSNorm(s.features))
_norm_named("batch_norm", lambda s: nn.BatchNorm1d(s.features), True)
_norm_named("batch_norm_bare", lambda s: nn.BatchNorm1d(s.features, affine=False, track_running_stats=False), True)
_norm_named("group_norm", lambda s: nn.GroupNorm(2 if s.features % 2 == 0 else 1, s.features), True)
_norm_named("instance_norm", lambda s: nn.InstanceNorm1d(s.features), True)
_norm_named("prelu", lambda s: nn.PReLU())
_norm_named("prelu_of_features", lambda s: nn.PReLU(s.features), True)
_norm_named("convolution", lambda s: nn.Conv1d(s.features, s.features, 3, padding=1), True)
_norm_named("depthwise", lambda s: nn.Conv1d(s.features, s.features, 3, padding=1, groups=s.features), True)
_norm_named("dropout", lambda s: nn.Dropout(0.0))
_norm_named("bilinear", lambda s: nn.Sequential(nn.Linear(s.features, s.features), nn.Tanh(), nn.LayerNorm(s.features)))


@op(FEATURES, "norm_over_length")
class NormOverLength(Op):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.norm = nn.LayerNorm(sizes.length)

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        y: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return y


@op(FEATURES, "recurrent", trap=True)
class Recurrent(Op):
    """A loop over the sequence with a layer in it."""

    def __init__(self, sizes: Sizes, gru: bool = False) -> None:
        super().__init__(sizes)
        n = sizes.features
        self.cell: Any = nn.GRU(n, n, batch_first=True) if gru else nn.Linear(n, n)

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"gru": rng.random() < 0.3}

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        if isinstance(self.cell, nn.GRU):
            y: Tensor = self.cell(x)[0]
            return y
        state, found = torch.zeros_like(x[:, 0]), []
        for step in x.unbind(1):
            state = torch.tanh(self.cell(state) + step)
            found.append(state)
        return torch.stack(found, 1)


@op(FEATURES, "scan")
class Scan(Op):
    """A recurrence without parameters, as in a state space model."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.decay = free(1)

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        state, found = x.new_zeros(x.shape[0], x.shape[-1]), []
        for i in range(x.shape[1]):
            state = state * self.decay.sigmoid() + x[:, i]
            found.append(state)
        return torch.stack(found, dim=1)
