"""Blocks around linears: what stands between them is drawn from the ops."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fuzz.modules import free
from tests.fuzz.vocabulary import FEATURES, Op, Ops, Sizes, Spec, block, draw_ops

__all__ = ["HIDDEN"]

HIDDEN = (8, 12, 13, 16, 18, 20, 24, 30, 36)


def _draw(rng: random.Random, sizes: Sizes, most: int = 3, traps: float = 0.12) -> Spec:
    hidden = rng.choice(HIDDEN)
    return {"hidden": hidden, "bias": rng.random() < 0.6,
            "ops": draw_ops(FEATURES, rng, sizes.of(hidden), most, traps)}  # fmt: skip


class Wide(Op):
    """A column, ops, a row."""

    def __init__(self, sizes: Sizes, hidden: int = 16, bias: bool = False, ops: list[Spec] | None = None) -> None:
        super().__init__(sizes)
        self.ops = Ops(FEATURES, sizes.of(hidden), ops or [])
        self.up, self.down = nn.Linear(sizes.width, hidden, bias=bias), nn.Linear(hidden, sizes.width, bias=bias)

    draw = staticmethod(_draw)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Any:
        return self.down(self.ops(self.up(x), x))


block("mlp")(Wide)


@block("in_place_mlp")
class InPlace(Wide):
    """Works in place on what its layers give."""

    def __init__(self, sizes: Sizes, how: str = "relu", **options: Any) -> None:
        super().__init__(sizes, **options)
        self.how = how

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"how": rng.choice(["relu", "mul", "slice", "view", "out", "half"]), **_draw(rng, sizes, 2)}

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        if self.how == "relu":
            h = F.relu(h, inplace=True)
        elif self.how == "mul":
            h *= 0.5
        elif self.how == "slice":
            h[:, :1] += 1
        elif self.how == "view":
            h.view(-1, h.shape[-1]).mul_(0.5)
        elif self.how == "half":
            h[..., : h.shape[-1] // 2] *= 2
        y = self.down(self.ops(h, x))
        if self.how == "out":
            y += x
        return y


@block("gated_mlp")
class Gated(Wide):
    def __init__(self, sizes: Sizes, how: str = "silu", gate_ops: list[Spec] | None = None, **options: Any) -> None:
        super().__init__(sizes, **options)
        hidden = self.up.out_features
        self.gate, self.how = nn.Linear(sizes.width, hidden, bias=False), how
        self.gate_ops = Ops(FEATURES, sizes.of(hidden), gate_ops or [])

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        spec = _draw(rng, sizes, 2)
        how = rng.choice(["silu", "softmax", "sigmoid", "max", "cat", "lerp", "normed"])
        return {"how": how, "gate_ops": draw_ops(FEATURES, rng, sizes.of(spec["hidden"]), 1, 0.1), **spec}

    def forward(self, x: Tensor) -> Any:
        g, u = self.gate_ops(self.gate(x), x), self.ops(self.up(x), x)
        if self.how == "cat":
            a, b = torch.cat([g, u], -1).chunk(2, -1)
            return self.down(a.tanh() * b)
        how = {
            "silu": lambda: F.silu(g) * u, "sigmoid": lambda: g.sigmoid() * u, "max": lambda: torch.maximum(g, u),
            "softmax": lambda: g.softmax(-1) * u, "lerp": lambda: torch.lerp(g, u, 0.3),
            "normed": lambda: F.normalize(g, dim=-1) * u,
        }[self.how]  # fmt: skip
        return self.down(how())


@block("packed_gate")
class PackedGate(Op):
    """Gate and up in one layer, taken apart in one of many ways."""

    def __init__(
        self, sizes: Sizes, hidden: int = 16, how: str = "chunk", bias: bool = False, ops: list[Spec] | None = None
    ) -> None:
        super().__init__(sizes)
        self.hidden, self.how = hidden, how
        self.both, self.down = nn.Linear(sizes.width, 2 * hidden, bias=bias), nn.Linear(hidden, sizes.width, bias=bias)
        self.ops = Ops(FEATURES, sizes.of(hidden), ops or [])

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        ways = ["chunk", "split", "slice", "negative", "glu", "view", "pairs", "every_other", "hidden", "flipped"]
        how = rng.choice(ways)
        return {"how": how, **_draw(rng, sizes, 2)}

    def forward(self, x: Tensor) -> Any:
        y = self.both(x)
        half = y.shape[-1] // 2
        if self.how == "glu":
            return self.down(self.ops(F.glu(y, -1), x))
        g, u = {
            "chunk": lambda: y.chunk(2, -1),
            "split": lambda: y.split(half, -1),
            "slice": lambda: (y[..., :half], y[..., half:]),
            "negative": lambda: (y[..., :-half], y[..., -half:]),
            "view": lambda: y.view(*y.shape[:-1], 2, half).unbind(-2),
            "pairs": lambda: y.view(*y.shape[:-1], half, 2).unbind(-1),
            "every_other": lambda: (y[..., ::2], y[..., 1::2]),
            "hidden": lambda: y.split([self.hidden, self.hidden], -1),
            "flipped": lambda: (y[..., :half].flip(-1), y[..., half:]),
        }[self.how]()
        return self.down(self.ops(F.silu(g) * u, x))


@block("two_packed")
class TwoPacked(PackedGate):
    """Two layers of gate and up, of which one is taken apart before they meet and both after it."""

    def __init__(self, sizes: Sizes, **options: Any) -> None:
        super().__init__(sizes, **options)
        self.other = nn.Linear(sizes.width, 2 * self.hidden)

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"how": rng.choice(["first", "last"]), **_draw(rng, sizes, 2)}

    def forward(self, x: Tensor) -> Any:
        a, b = self.both(x).chunk(2, -1)
        apart, other = torch.cat([a.tanh(), b], -1), self.other(x)
        g, u = (apart * other if self.how == "first" else other * apart).chunk(2, -1)
        return self.down(self.ops(F.silu(g) * u, x))


@block("deep_mlp")
class Deep(Wide):
    """Three layers or more."""

    def __init__(self, sizes: Sizes, inner: list[Spec] | None = None, middle: int = 1, **options: Any) -> None:
        super().__init__(sizes, **options)
        hidden = self.up.out_features
        self.middle = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(middle))
        self.inner = Ops(FEATURES, sizes.of(hidden), inner or [])

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        spec = _draw(rng, sizes, 2)
        inner = draw_ops(FEATURES, rng, sizes.of(spec["hidden"]), 2, 0.2)
        return {"inner": inner, "middle": rng.randint(1, 2), **spec}

    def forward(self, x: Tensor) -> Any:
        h = self.ops(self.up(x), x)
        for layer in self.middle:
            h = self.inner(layer(h), x)
        return self.down(h)


@block("layer_called_twice")
class CalledTwice(Wide):
    """The same layers on two inputs."""

    def __init__(self, sizes: Sizes, how: str = "both", **options: Any) -> None:
        super().__init__(sizes, **options)
        self.how = how

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"how": rng.choice(["both", "up", "down", "nested", "same"]), **_draw(rng, sizes, 1)}

    def forward(self, x: Tensor) -> Any:
        once = self.ops(self.up(x), x)
        if self.how == "up":
            return self.down(once * self.up(x.tanh()))
        if self.how == "down":
            return self.down(once) + self.down(once.tanh())
        if self.how == "nested":
            return self.down(self.ops(self.up(self.down(once)), x))
        if self.how == "same":
            return self.down(once + self.up(x))
        return self.down(once) + self.down(self.ops(self.up(x.flip(1)), x))


@block("tied_layers")
class Tied(Wide):
    """Two layers with one weight."""

    def __init__(self, sizes: Sizes, how: str = "alike", **options: Any) -> None:
        super().__init__(sizes, **options)
        self.other = nn.Linear(sizes.width, self.up.out_features, bias=False)
        self.how = how
        if how == "alike":
            self.other.weight = self.up.weight
        elif how == "square" and self.up.weight.shape == self.down.weight.shape:
            self.down.weight = self.up.weight
        elif how == "transposed":
            self.down.weight = nn.Parameter(self.up.weight.detach().t().clone())

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"how": rng.choice(["alike", "functional", "transposed", "square"]), **_draw(rng, sizes, 2)}

    def forward(self, x: Tensor) -> Any:
        h = self.ops(self.up(x), x) + self.other(x)
        if self.how == "functional":
            return F.linear(h, self.up.weight.t())
        return self.down(h)


@block("scaled_mlp")
class Scaled(Wide):
    """A number on the features, and one on what the row gives: the same one, or another one of the same module."""

    def __init__(self, sizes: Sizes, how: str = "another", **options: Any) -> None:
        super().__init__(sizes, **options)
        self.inside, self.outside = free(1), free(1) if how == "another" else None

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"how": rng.choice(["another", "same"]), **_draw(rng, sizes, 1)}

    def forward(self, x: Tensor) -> Any:
        y = self.down(self.ops(self.up(x), x) * self.inside)
        return y * (self.inside if self.outside is None else self.outside)


@block("added_to_zeros")
class AddedToZeros(Wide):
    """Features that are added to a view of zeros, which a row takes, or another layer, or the caller gets."""

    def __init__(self, sizes: Sizes, how: str = "row", gives: bool = False, **options: Any) -> None:
        super().__init__(sizes, **options)
        self.gives = gives
        self.other = nn.Linear(self.up.out_features, sizes.width) if how == "layer" else None

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"how": rng.choice(["row", "layer"]), "gives": rng.random() < 0.3, **_draw(rng, sizes, 1)}

    def forward(self, x: Tensor) -> Any:
        h = self.ops(self.up(x), x)
        found = torch.zeros(h.shape, dtype=h.dtype)
        found[:, 0].add_(h[:, 0])
        y = self.down(h + found) if self.other is None else self.down(h) + self.other(found)
        return (y, found) if self.gives else y


@block("reads_the_weight")
class ReadsWeight(Wide):
    """Uses a layer's weight itself."""

    def __init__(self, sizes: Sizes, how: str = "linear", **options: Any) -> None:
        super().__init__(sizes, **options)
        self.how = how

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        how = rng.choice(["linear", "matmul", "norm", "shape", "dtype", "down", "bias", "called_too", "data"])
        return {"how": how, **_draw(rng, sizes, 2)}

    def forward(self, x: Tensor) -> Any:
        up, down = self.up, self.down
        if self.how == "linear":
            h = F.linear(x, up.weight, up.bias)
        elif self.how == "matmul":
            h = x @ up.weight.t()
        elif self.how == "norm":
            h = up(x) / (1 + up.weight.norm())
        elif self.how == "shape":
            h = up(x) * up.weight.shape[0] ** -0.5
        elif self.how == "dtype":
            h = up(x.to(up.weight.dtype))
        elif self.how == "bias":
            h = up(x) + (up.bias if up.bias is not None else 0)
        elif self.how == "called_too":
            h = up(x) + F.linear(x.tanh(), up.weight)
        elif self.how == "data":
            h = up(x) + up.weight.data.mean()
        else:
            return F.linear(self.ops(up(x), x), down.weight, down.bias)
        return down(self.ops(h, x))


def _features_of(layer: nn.Linear) -> int:
    return len(layer.weight)


@block("asks_elsewhere")
class AsksElsewhere(Wide):
    """A function that is none of the model's classes asks a layer for its weight's length."""

    def forward(self, x: Tensor) -> Any:
        return self.down(self.ops(self.up(x) * _features_of(self.up) ** -0.5, x))


@block("matmul_mlp")
class Matmul(Op):
    """Weights that are parameters of the block itself."""

    def __init__(self, sizes: Sizes, hidden: int = 16, how: str = "@", bias: bool = False, ops: Any = None) -> None:
        super().__init__(sizes)
        self.w, self.v = free(sizes.width, hidden, scale=0.3), free(hidden, sizes.width, scale=0.3)
        self.how = how
        self.out = nn.Linear(hidden, sizes.width) if how == "mixed" else None
        self.ops = Ops(FEATURES, sizes.of(hidden), ops or [])

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"how": rng.choice(["@", "einsum", "linear", "mixed"]), **_draw(rng, sizes, 2)}

    def forward(self, x: Tensor) -> Any:
        if self.how == "einsum":
            return torch.einsum("bsf,fd->bsd", self.ops(torch.einsum("bsd,df->bsf", x, self.w), x), self.v)
        h = self.ops(F.linear(x, self.w.t()) if self.how == "linear" else x @ self.w, x)
        return self.out(h) if self.out is not None else h @ self.v


@block("two_ways")
class TwoWays(Wide):
    """Columns that go on separately, and meet in the row or behind it."""

    def __init__(self, sizes: Sizes, how: str = "add", other: list[Spec] | None = None, **options: Any) -> None:
        super().__init__(sizes, **options)
        hidden = self.up.out_features
        self.second, self.how = nn.Linear(sizes.width, hidden), how
        self.other = Ops(FEATURES, sizes.of(hidden), other or [])
        self.last = nn.Linear(2 * hidden if how.startswith("cat") else hidden, sizes.width)

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        spec = _draw(rng, sizes, 2)
        how = rng.choice(["add", "cat", "cat whole", "apart", "cross", "detached", "swap", "stack"])
        return {"how": how, "other": draw_ops(FEATURES, rng, sizes.of(spec["hidden"]), 2, 0.15), **spec}

    def forward(self, x: Tensor) -> Any:
        a, b = self.ops(self.up(x), x), self.other(self.second(x), x)
        if self.how == "add":
            return self.last(a + b)
        if self.how == "cat":
            return self.last(torch.cat([a, b], -1))
        if self.how == "cat whole":
            return self.last(torch.cat([a, self.second(x.tanh())], -1))
        if self.how == "cross":
            return self.last(a) * self.down(b).sigmoid()
        if self.how == "detached":
            return self.last(a * b.detach())
        if self.how == "swap":
            return self.down(a) + self.last(b) + self.last(a)
        if self.how == "stack":
            return self.last(torch.stack([a, b]).amax(0))
        return self.down(a) + self.last(b)


@block("bottleneck")
class Bottleneck(Op):
    """Narrow, normed, wide: as in latent attention."""

    def __init__(self, sizes: Sizes, rank: int = 4, hidden: int = 16, how: str = "rms", ops: Any = None) -> None:
        super().__init__(sizes)
        self.narrow, self.wide = nn.Linear(sizes.width, rank, bias=False), nn.Linear(rank, hidden, bias=False)
        self.norm: Any = {"rms": nn.RMSNorm(rank), "layer": nn.LayerNorm(rank), "none": nn.Identity()}[how]
        self.ops, self.out = Ops(FEATURES, sizes.of(hidden), ops or []), nn.Linear(hidden, sizes.width)

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        spec = _draw(rng, sizes, 2)
        del spec["bias"]
        return {"rank": rng.choice([3, 4, 6]), "how": rng.choice(["rms", "layer", "none"]), **spec}

    def forward(self, x: Tensor) -> Any:
        return self.out(self.ops(self.wide(self.norm(self.narrow(x))), x))


@block("convolution_block")
class Convolution(Wide):
    """Along the sequence, between layers or instead of one."""

    def __init__(self, sizes: Sizes, how: str = "depthwise", **options: Any) -> None:
        super().__init__(sizes, **options)
        n = self.up.out_features
        self.how = how
        width = sizes.width if how == "before" else n
        self.conv = nn.Conv1d(width, width, 3, padding=2, groups=width if how != "full" else 1)

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"how": rng.choice(["depthwise", "full", "before", "weights"]), **_draw(rng, sizes, 1)}

    def forward(self, x: Tensor) -> Any:
        length = x.shape[1]
        if self.how == "before":
            x = self.conv(x.transpose(1, 2))[..., :length].transpose(1, 2)
        h = self.up(x)
        if self.how in ("depthwise", "full"):
            h = self.conv(h.transpose(1, 2))[..., :length].transpose(1, 2)
        elif self.how == "weights":
            taps = self.conv.weight.squeeze(1)
            h = sum(F.pad(h, (0, 0, i, 0))[:, :length] * taps[:, i] for i in range(taps.shape[1]))
        return self.down(self.ops(F.silu(h), x))


@block("state_space")
class StateSpace(Op):
    """One layer makes input, gate and step; a scan; a gate; a norm."""

    def __init__(self, sizes: Sizes, hidden: int = 16, norm: bool = False, per_feature: bool = False) -> None:
        super().__init__(sizes)
        self.hidden = hidden
        self.inside, self.out = nn.Linear(sizes.width, 3 * hidden), nn.Linear(hidden, sizes.width)
        self.decay = free(hidden if per_feature else 1)
        self.norm = nn.RMSNorm(hidden) if norm else None

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"hidden": rng.choice(HIDDEN), "norm": rng.random() < 0.3, "per_feature": rng.random() < 0.4}

    def forward(self, x: Tensor) -> Any:
        value, gate, step = self.inside(x).chunk(3, -1)
        decay = torch.exp(-F.softplus(step) * self.decay.exp())
        state, found = torch.zeros_like(value[:, 0]), []
        for i in range(x.shape[1]):
            state = decay[:, i] * state + value[:, i]
            found.append(state)
        y = torch.stack(found, 1) * F.silu(gate)
        return self.out(y if self.norm is None else self.norm(y))
