"""Experts, and blocks made of blocks."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fuzz.blocks import HIDDEN, Wide
from tests.fuzz.modules import free
from tests.fuzz.vocabulary import BLOCKS, FEATURES, Op, Sizes, Spec, block, build, draw_ops


class Router(nn.Module):
    """Weights of experts for each row, ``[batch, length, experts]``, 0 for most."""

    def __init__(self, width: int, experts: int, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(width, experts, bias=False), kind

    def forward(self, x: Tensor) -> Tensor:
        scores = self.linear(x).softmax(-1) if self.kind != "sigmoid" else self.linear(x).sigmoid()
        if self.kind == "all":
            return scores
        top, index = scores.topk(2, -1)
        if self.kind == "mask":
            return scores * F.one_hot(index, scores.shape[-1]).sum(-2)
        if self.kind == "fill":
            return scores.masked_fill(scores < top[..., -1:], 0.0)
        return torch.zeros_like(scores).scatter(-1, index, top / top.sum(-1, keepdim=True))


@block("experts")
class Experts(Op):
    """A list of experts; all rows through each, or the rows that chose it."""

    def __init__(
        self, sizes: Sizes, hidden: int = 12, count: int = 3, router: str = "top", rows: str = "all",
        ops: list[Spec] | None = None, gives: bool = False, shared: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(sizes)
        self.num_experts, self.rows, self.gives = count, rows, gives
        self.router = Router(sizes.width, count, router)
        inner = ops if rows == "all" else []
        self.experts = nn.ModuleList(Wide(sizes, hidden=hidden, ops=inner) for _ in range(count))
        self.shared = Wide(sizes, hidden=hidden) if shared else None

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        hidden = rng.choice(HIDDEN)
        return {"hidden": hidden, "count": rng.randint(2, 4), "gives": rng.random() < 0.2,
                "router": rng.choice(["top", "mask", "fill", "all", "sigmoid"]),
                "rows": rng.choice(["all", "all", "chosen", "sorted"]), "shared": rng.random() < 0.3,
                "ops": draw_ops(FEATURES, rng, sizes.of(hidden), 1, 0.1)}  # fmt: skip

    def forward(self, x: Tensor) -> Any:
        weights = self.router(x)
        if self.rows == "all":
            y = sum(expert(x) * weights[..., i : i + 1] for i, expert in enumerate(self.experts))
        else:
            flat, w = x.flatten(0, 1), weights.flatten(0, 1)
            out = torch.zeros_like(flat)
            for i, expert in enumerate(self.experts):
                rows = torch.where(w[:, i] > 0)[0] if self.rows == "chosen" else (w[:, i] > 0).nonzero().squeeze(-1)
                out.index_add_(0, rows, expert(flat[None, rows])[0] * w[rows, i, None])
            y = out.view(x.shape)
        if self.shared is not None:
            y = y + self.shared(x)
        return (y, weights) if self.gives else y


@block("fused_experts")
class FusedExperts(Op):
    """Experts in one parameter of three dimensions."""

    def __init__(
        self, sizes: Sizes, hidden: int = 12, count: int = 3, how: str = "bmm", ops: list[Spec] | None = None
    ) -> None:
        super().__init__(sizes)
        self.router, self.how = Router(sizes.width, count, "top"), how
        self.up, self.down = free(count, sizes.width, hidden, scale=0.3), free(count, hidden, sizes.width, scale=0.3)
        self.out = nn.Linear(sizes.width, sizes.width)
        self.before = nn.Linear(sizes.width, sizes.width)

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"hidden": rng.choice(HIDDEN), "count": rng.randint(2, 4),
                "how": rng.choice(["bmm", "einsum", "gathered", "between"])}  # fmt: skip

    def forward(self, x: Tensor) -> Any:
        weights = self.router(x).flatten(0, 1)
        flat = x.flatten(0, 1)
        if self.how == "between":
            flat = self.before(flat)
        if self.how == "gathered":
            chosen = weights.argmax(-1)
            y = (F.silu(flat.unsqueeze(1) @ self.up[chosen]) @ self.down[chosen]).squeeze(1)
        elif self.how == "einsum":
            y = torch.einsum("neh,ehd,ne->nd", F.silu(torch.einsum("nd,edh->neh", flat, self.up)), self.down, weights)
        else:
            each = torch.bmm(F.silu(torch.bmm(flat.expand(self.up.shape[0], -1, -1), self.up)), self.down)
            y = (each * weights.t().unsqueeze(-1)).sum(0)
        return self.out(y).view(x.shape)


@block("loop")
class Loop(Op):
    """The same block several times."""

    def __init__(self, sizes: Sizes, inner: Spec | None = None, times: int = 2) -> None:
        super().__init__(sizes)
        self.inner, self.times = build(BLOCKS, sizes, inner or {"is": "mlp"}), times

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        kind = rng.choice(["mlp", "gated_mlp", "attention", "packed_gate"])
        inner = {"is": kind, **(BLOCKS[kind].draw(rng, sizes) or {})}
        return {"inner": inner | ({"gives": False} if kind == "attention" else {}), "times": rng.randint(2, 3)}

    def forward(self, x: Tensor) -> Any:
        for _ in range(self.times):
            x = x + self.inner(x).tanh()
        return x


@block("branches")
class Branches(Op):
    """Blocks side by side, one of which may not be called."""

    def __init__(self, sizes: Sizes, left: Spec | None = None, right: Spec | None = None, how: str = "add") -> None:
        super().__init__(sizes)
        self.left = build(BLOCKS, sizes, left or {"is": "mlp"})
        self.right = build(BLOCKS, sizes, right or {"is": "mlp"})
        self.how = how

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        def inner() -> Spec:
            kind = rng.choice(["mlp", "gated_mlp", "packed_attention", "two_ways", "convolution_block"])
            return {"is": kind, **(BLOCKS[kind].draw(rng, sizes) or {})}

        how = rng.choice(["add", "times", "training", "data", "one", "in turn", "stop", "gated"])
        return {"left": inner(), "right": inner(), "how": how}

    def forward(self, x: Tensor) -> Any:
        if self.how == "add":
            return self.left(x) + self.right(x)
        if self.how == "times":
            return self.left(x) * self.right(x).sigmoid()
        if self.how == "training":
            return self.left(x) if self.training else self.right(x)
        if self.how == "data":
            return self.left(x) if x.detach().sum() > 0 else self.right(x)
        if self.how == "one":
            return self.left(x)
        if self.how == "stop":
            return self.left(x) + self.right(x).detach()
        if self.how == "gated":
            g = x[..., :1].sigmoid()
            return g * self.left(x) + (1 - g) * self.right(x)
        return self.right(self.left(x))


@block("norms")
class Norms(Op):
    """Nothing to cut: norms and a scale, over any dimension."""

    def __init__(self, sizes: Sizes, dim: int = -1, then: str = "scale") -> None:
        super().__init__(sizes)
        size = {-1: sizes.width, 1: sizes.length}[dim]
        self.dim, self.norm, self.scale = dim, nn.LayerNorm(size), free(sizes.width)
        self.then = then

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return {"dim": rng.choice([-1, 1]), "then": rng.choice(["scale", "complex", "cumsum", "sort"])}

    def forward(self, x: Tensor) -> Any:
        y = self.norm(x) if self.dim == -1 else self.norm(x.transpose(1, 2)).transpose(1, 2)
        if self.then == "complex":
            return torch.fft.fft2(y).real * 0.1 * self.scale
        if self.then == "cumsum":
            return y.cumsum(-1) * self.scale * 0.1
        if self.then == "sort":
            return y.sort(-1).values * self.scale
        return y * self.scale
