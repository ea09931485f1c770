"""Ops on heads that have parameters and buffers, and the op on features that sees them as heads."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fuzz.functions import _angles, _halves, _pairs, _unpaired, fitted
from tests.fuzz.modules import free, parameter
from tests.fuzz.vocabulary import FEATURES, HEADS, Op, Ops, Sizes, Spec, draw_ops, op

__all__ = ["InHeads"]


def _along(sizes: Sizes) -> tuple[int, ...]:
    """A number per head, to be broadcast."""
    return tuple(sizes.heads if dim == sizes.at else 1 for dim in range(1, 4))


def _both(sizes: Sizes) -> tuple[int, ...]:
    return (*(sizes.heads if dim == sizes.at else 1 for dim in range(1, 3)), sizes.head_dim)


def head_parameter(name: str, shape: Any, run: Any, *, trap: bool = False) -> None:
    parameter(name, shape, run, trap=trap, table=HEADS)


head_parameter("temperature", lambda s: (1,), lambda x, w, p, at: x * p)
head_parameter("scale_in_a_head", lambda s: (s.head_dim,), lambda x, w, p, at: x * p)
head_parameter("shift_in_a_head", lambda s: (s.head_dim,), lambda x, w, p, at: x + p.tanh())
head_parameter(
    "rms_by_hand", lambda s: (s.head_dim,),
    lambda x, w, p, at: p * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3),
)  # fmt: skip
head_parameter("matrix_of_a_head", lambda s: (s.head_dim, s.head_dim), lambda x, w, p, at: x @ p)
head_parameter(
    "einsum_of_a_head", lambda s: (s.head_dim, s.head_dim), lambda x, w, p, at: torch.einsum("...d,de", x, p)
)
head_parameter("affine_of_a_head", lambda s: (s.head_dim + 1, s.head_dim), lambda x, w, p, at: F.linear(x, p[1:], p[0]))
head_parameter("scale_of_heads", _along, lambda x, w, p, at: x * p, trap=True)
head_parameter("shift_of_heads", _both, lambda x, w, p, at: x + p, trap=True)
head_parameter("scale_of_first_heads", _along, lambda x, w, p, at: x * p.narrow(at - 1, 0, x.shape[at]), trap=True)
head_parameter(
    "heads_mixed_by_matrix", lambda s: (s.heads, s.heads),
    lambda x, w, p, at: (x.movedim(at, -1) @ p).movedim(-1, at), trap=True,
)  # fmt: skip
head_parameter(
    "matrix_per_head", lambda s: (s.heads, s.head_dim, s.head_dim),
    lambda x, w, p, at: torch.einsum("bshd,hde->bshe" if at == 2 else "bhsd,hde->bhse", x, p), trap=True,
)  # fmt: skip
head_parameter("positions", lambda s: (s.length, s.head_dim), lambda x, w, p, at: x + p.unsqueeze(at - 1))
head_parameter(
    "learned_phase", lambda s: (s.head_dim // 2,) if s.head_dim % 2 == 0 else (1,),
    lambda x, w, p, at: _unpaired(_pairs(x) * torch.polar(torch.ones_like(p), p)) if x.shape[-1] % 2 == 0 else x * p,
)  # fmt: skip
head_parameter(
    "complex_parameter", lambda s: (s.head_dim // 2, 2) if s.head_dim % 2 == 0 else (1, 2),
    lambda x, w, p, at: _unpaired(_pairs(x) * torch.view_as_complex(p)) if x.shape[-1] % 2 == 0 else x * p[0, 0],
)  # fmt: skip
head_parameter(
    "scale_of_part_and_whole", lambda s: (s.head_dim,),
    lambda x, w, p, at: x * p + (fitted(w, p.view(1, 1, -1)) * p).sum(-1).unsqueeze(at).unsqueeze(-1).detach(),
    trap=True,
)  # fmt: skip
head_parameter(
    "scale_of_part_and_loss", lambda s: (s.head_dim,),
    lambda x, w, p, at: x * p + 0 * (fitted(w, p.view(1, 1, -1)) * p).sum(), trap=True,
)  # fmt: skip


@op(HEADS, "normed_by_module")
class NormedHead(Op):
    """q_norm and k_norm."""

    def __init__(self, sizes: Sizes, rms: bool = True) -> None:
        super().__init__(sizes)
        self.norm: Any = nn.RMSNorm(sizes.head_dim) if rms else nn.LayerNorm(sizes.head_dim)

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"rms": rng.random() < 0.5}

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        return y


@op(HEADS, "norm_on_both", trap=True)
class NormOnBoth(Op):
    def __init__(self, sizes: Sizes, rms: bool = True) -> None:
        super().__init__(sizes)
        self.norm: Any = nn.RMSNorm(sizes.head_dim) if rms else nn.LayerNorm(sizes.head_dim)

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec | None:
        return {"rms": rng.random() < 0.5} if sizes.head_dim <= sizes.width else None

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        return self.norm(x) + self.norm(whole[..., : x.shape[-1]]).sum() * 0.01


@op(HEADS, "linear_of_a_head")
class LinearOfHead(Op):
    """A layer on the features of each head: its weight is whole on every rank, its gradient a sum over them."""

    def __init__(self, sizes: Sizes, bias: bool = True) -> None:
        super().__init__(sizes)
        self.linear = nn.Linear(sizes.head_dim, sizes.head_dim, bias=bias)

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


@op(HEADS, "talking_heads", trap=True)
class TalkingHeads(Op):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.mix, self.at = nn.Linear(sizes.heads, sizes.heads, bias=False), sizes.at

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        return self.mix(x.transpose(self.at, -1)).transpose(self.at, -1)


@op(HEADS, "gate_per_head")
class GatePerHead(Op):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.gate, self.at = nn.Linear(sizes.width, sizes.heads), sizes.at

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        g = self.gate(whole).sigmoid()
        return x * (g if self.at == 2 else g.transpose(1, 2)).unsqueeze(-1)


@op(HEADS, "buffer_per_head", trap=True)
class BufferPerHead(Op):
    def __init__(self, sizes: Sizes, boolean: bool = False) -> None:
        super().__init__(sizes)
        value = torch.rand(_along(sizes)) + 0.5
        self.register_buffer("scale", value > 1 if boolean else value)

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"boolean": rng.random() < 0.3}

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        scale: Any = self.scale
        return x.masked_fill(scale, 0.0) if scale.dtype == torch.bool else x * scale


@op(HEADS, "attribute_per_head", trap=True)
class Counted(Op):
    """Divides by its number of heads, which is an attribute."""

    def __init__(self, sizes: Sizes, how: str = "divide") -> None:
        super().__init__(sizes)
        self.num_heads, self.at, self.how = sizes.heads, sizes.at, how
        self.scales = [0.5 + i for i in range(sizes.heads)]

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"how": rng.choice(["divide", "power", "list", "slopes"])}

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        shape = [-1 if dim == self.at else 1 for dim in range(1, 4)]
        if self.how == "divide":
            return x / self.num_heads
        if self.how == "power":
            return x * self.num_heads**-0.5
        if self.how == "list":
            return x * torch.tensor(self.scales[: x.shape[self.at]], dtype=x.dtype).view(shape)
        slopes = 2.0 ** -(torch.arange(1, self.num_heads + 1, dtype=x.dtype) * 8 / self.num_heads)
        return x * slopes.view(shape)


@op(HEADS, "rotary_by_buffer")
class Rotary(Op):
    """Angles in a buffer: sines and cosines, or complex numbers, or a parameter's."""

    def __init__(self, sizes: Sizes, kind: str = "halves") -> None:
        super().__init__(sizes)
        angles = _angles(torch.empty(1, sizes.length, 1, 1), 2, sizes.head_dim // 2).squeeze(1).double()
        self.kind, self.at = kind, sizes.at
        if kind == "complex":
            self.register_buffer("table", torch.polar(torch.ones_like(angles), angles))
        elif kind == "learned":
            self.frequencies = nn.Parameter(angles[1].clone())
        else:
            self.register_buffer("cos", angles.cos().repeat(1, 2))
            self.register_buffer("sin", angles.sin().repeat(1, 2))

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec | None:
        return {"kind": rng.choice(["halves", "complex", "learned"])} if sizes.head_dim % 2 == 0 else None

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        if self.kind == "halves":
            cos, sin = self.cos.to(x.dtype).unsqueeze(self.at - 1), self.sin.to(x.dtype).unsqueeze(self.at - 1)  # type: ignore[operator]
            return x * cos + _halves(x) * sin
        table: Any = self.table if self.kind == "complex" else None
        if table is None:
            angles = torch.outer(torch.arange(x.shape[3 - self.at], dtype=x.dtype), self.frequencies)
            table = torch.polar(torch.ones_like(angles), angles)
        return _unpaired(_pairs(x) * table.unsqueeze(self.at - 1))


@op(HEADS, "extra_heads", trap=True)
class ExtraHeads(Op):
    """A head of its own beside those that layers make, or a row, as for attention sinks."""

    def __init__(self, sizes: Sizes, where: str = "heads") -> None:
        super().__init__(sizes)
        self.where, self.at = where, sizes.at
        self.extra = free(1, 1, 1, sizes.head_dim)

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"where": rng.choice(["heads", "length"])}

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        dim = self.at if self.where == "heads" else 3 - self.at
        shape = [1 if i == dim else size for i, size in enumerate(x.shape)]
        return torch.cat([self.extra.expand(shape), x], dim).softmax(dim).narrow(dim, 1, x.shape[dim])


@op(HEADS, "convolved_head")
class Convolved(Op):
    """Each head's features along the sequence."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.conv, self.at = nn.Conv1d(sizes.head_dim, sizes.head_dim, 3, padding=1), sizes.at

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        y = x.movedim(3 - self.at, -1)
        return self.conv(y.flatten(0, 1)).view(y.shape).movedim(-1, 3 - self.at)


@op(HEADS, "reordered_heads", trap=True)
class ReorderedHeads(Op):
    def __init__(self, sizes: Sizes, how: str = "select", inside: bool = False) -> None:
        super().__init__(sizes)
        self.how, self.dim = how, -1 if inside else sizes.at
        self.register_buffer("order", torch.randperm(sizes.head_dim if inside else sizes.heads))

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"how": rng.choice(["select", "index", "add"]), "inside": rng.random() < 0.5}

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        order: Any = self.order
        if self.how == "select":
            return x.index_select(self.dim, order)
        if self.how == "add":
            return x.index_add(self.dim, order, x.tanh())
        return x[..., order] if self.dim == -1 else x[(slice(None),) * self.dim + (order,)]


@op(FEATURES, "in_heads")
class InHeads(Op):
    """Sees the features as heads, in one of the ways that models do."""

    def __init__(
        self, sizes: Sizes, heads: int = 2, how: str = "minus_one", layout: str = "bshd", ops: list[Spec] | None = None
    ) -> None:
        super().__init__(sizes)
        self.num_heads, self.head_dim, self.how = heads, sizes.features // heads, how
        self.hidden, self.layout = sizes.features, layout
        self.inner = Ops(HEADS, sizes.of(sizes.features, heads, layout), ops or [])

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec | None:
        able = [heads for heads in range(2, 7) if sizes.features % heads == 0]
        if not able:
            return None
        heads, layout = rng.choice(able), rng.choice(["bshd", "bhsd"])
        how = rng.choice(["minus_one", "minus_one", "attribute", "unflatten", "split", "hidden", "heads_last"])
        return {"heads": heads, "how": how, "layout": layout,
                "ops": draw_ops(HEADS, rng, sizes.of(sizes.features, heads, layout), 3, 0.2)}  # fmt: skip

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        if self.how == "minus_one":
            y = x.view(*x.shape[:2], -1, self.head_dim)
        elif self.how == "attribute":
            y = x.reshape(x.shape[0], x.shape[1], self.num_heads, self.head_dim)
        elif self.how == "unflatten":
            y = x.unflatten(-1, (-1, self.head_dim))
        elif self.how == "split":
            y = torch.stack(x.split(self.head_dim, -1), 2)
        elif self.how == "hidden":
            y = x.view(*x.shape[:2], self.num_heads, -1)
        else:  # the features of a head lie apart
            y = x.view(*x.shape[:2], self.head_dim, -1).transpose(2, 3)
        if self.layout == "bhsd":
            y = y.transpose(1, 2)
        y = self.inner(y, whole)
        if self.layout == "bhsd":
            y = y.transpose(1, 2)
        if self.how == "heads_last":
            y = y.transpose(2, 3)
        if self.how == "attribute":
            return y.reshape(*y.shape[:2], self.hidden)
        if self.how == "split":
            return torch.cat(y.unbind(2), -1)
        return F.dropout(y, 0.0).flatten(2)
