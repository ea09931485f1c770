"""Attention in many spellings."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fuzz.modules import free
from tests.fuzz.vocabulary import FEATURES, HEADS, Op, Ops, Sizes, Spec, block, draw_ops

SCORES = ("none", "causal", "alibi", "table", "embedding", "sinks", "softcap", "mask_of_heads", "learned", "given_bias",
          "shared_table")  # fmt: skip


class Scores(nn.Module):
    """What happens to ``[batch, heads, length, length]`` before the softmax."""

    def __init__(self, sizes: Sizes, kind: str) -> None:
        super().__init__()
        self.kind, h, s = kind, sizes.heads, sizes.length
        if kind in ("table", "shared_table"):
            self.table = free(2 * s, h if kind == "table" else 1)
        elif kind == "alibi":
            self.register_buffer("slopes", torch.rand(h, 1, 1))
        elif kind == "embedding":
            self.bias = nn.Embedding(2 * s, h)
        elif kind == "sinks":
            self.sinks = free(h)
        elif kind == "mask_of_heads":
            self.register_buffer("mask", torch.rand(h, s, s) < 0.3)
        elif kind == "learned":
            self.scale = free(1)
        elif kind == "given_bias":
            self.row = nn.Linear(sizes.width, 1)

    def bias_of(self, scores: Tensor, whole: Tensor) -> Tensor | None:
        size = scores.shape[-1]
        positions = torch.arange(size)
        apart = positions[:, None] - positions[None, :] + size
        if self.kind == "causal":
            return torch.zeros(size, size, dtype=scores.dtype).masked_fill(apart < size, -1e9)
        if self.kind == "alibi":
            return self.slopes * (size - apart).abs().neg()  # type: ignore[operator]
        if self.kind in ("table", "shared_table"):
            return self.table[apart].permute(2, 0, 1).unsqueeze(0)
        if self.kind == "embedding":
            return self.bias(apart).permute(2, 0, 1).unsqueeze(0)  # type: ignore[no-any-return]
        if self.kind == "given_bias":
            return self.row(whole).transpose(1, 2).unsqueeze(1)  # type: ignore[no-any-return]
        return None

    def forward(self, scores: Tensor, whole: Tensor) -> Tensor:
        bias = self.bias_of(scores, whole)
        if bias is not None:
            scores = scores + bias
        if self.kind == "softcap":
            scores = (scores / 3).tanh() * 3
        if self.kind == "learned":
            scores = scores * self.scale.exp()
        if self.kind == "mask_of_heads":
            scores = scores.masked_fill(self.mask, -5.0)  # type: ignore[arg-type]
        if self.kind == "sinks":
            sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return scores.softmax(-1)


def draw_attention(rng: random.Random, sizes: Sizes, grouped: bool = True) -> Spec:
    heads, head_dim = rng.randint(2, 6), rng.choice([2, 4, 4, 6])
    kv = rng.choice([n for n in range(1, heads + 1) if heads % n == 0]) if grouped and rng.random() < 0.5 else heads
    inner = sizes.of(heads * head_dim, heads, "bhsd")
    spec: Spec = {"heads": heads, "head_dim": head_dim, "bias": rng.random() < 0.5}
    spec["kv_heads"] = kv
    spec["scores"] = rng.choice(SCORES) if rng.random() < 0.6 else "none"
    spec["kernel"] = rng.choice(["sdpa", "matmul", "einsum", "gqa", "linear", "baddbmm"])
    spec["how"] = rng.choice(["minus_one", "attribute", "dim", "unflatten"])
    q = draw_ops(HEADS, rng, inner, 2, 0.1)
    spec["q_ops"], spec["k_ops"] = q, draw_ops(HEADS, rng, inner.of(kv * head_dim, kv, "bhsd"), 2, 0.1)
    spec["out_ops"] = draw_ops(FEATURES, rng, sizes.of(heads * head_dim), 1, 0.1)
    return spec


@block("attention")
class Attention(Op):
    """Separate projections, grouped key-value heads where there are fewer of them."""

    def __init__(
        self, sizes: Sizes, heads: int = 2, head_dim: int = 4, kv_heads: int = 0, bias: bool = False,
        scores: str = "none", kernel: str = "matmul", how: str = "minus_one", gives: bool = False,
        q_ops: list[Spec] | None = None, k_ops: list[Spec] | None = None, out_ops: list[Spec] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(sizes)
        kv_heads = kv_heads if kv_heads and heads % kv_heads == 0 else heads
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, kv_heads, head_dim
        self.num_key_value_groups = heads // kv_heads
        self.kernel, self.how, self.gives = kernel, how, gives
        self.make(sizes, heads * head_dim, kv_heads * head_dim, bias)
        self.o_proj = nn.Linear(heads * head_dim, sizes.width, bias=bias)
        inner, narrow = sizes.of(heads * head_dim, heads, "bhsd"), sizes.of(kv_heads * head_dim, kv_heads, "bhsd")
        self.scores = Scores(inner, scores)
        self.q_ops, self.k_ops = Ops(HEADS, inner, q_ops or []), Ops(HEADS, narrow, k_ops or [])
        self.out_ops = Ops(FEATURES, sizes.of(heads * head_dim), out_ops or [])

    def make(self, sizes: Sizes, wide: int, narrow: int, bias: bool) -> None:
        self.q_proj = nn.Linear(sizes.width, wide, bias=bias)
        self.k_proj, self.v_proj = nn.Linear(sizes.width, narrow, bias=bias), nn.Linear(sizes.width, narrow, bias=bias)

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return draw_attention(rng, sizes) | {"gives": rng.random() < 0.07}

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, kv = self.num_heads, self.num_key_value_heads
        return self.as_heads(self.q_proj(x), h), self.as_heads(self.k_proj(x), kv), self.as_heads(self.v_proj(x), kv)

    def as_heads(self, x: Tensor, count: int) -> Tensor:
        if self.how == "attribute":
            return x.view(*x.shape[:2], count, -1).transpose(1, 2)
        if self.how == "dim":
            return x.reshape(x.shape[0], x.shape[1], count, self.head_dim).permute(0, 2, 1, 3)
        if self.how == "unflatten":
            return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def repeated(self, x: Tensor) -> Tensor:
        groups = self.num_key_value_groups
        if groups == 1:
            return x
        if self.how == "dim":
            return x.repeat_interleave(groups, 1)
        b, h, s, d = x.shape
        return x[:, :, None].expand(b, h, groups, s, d).reshape(b, h * groups, s, d)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.projected(x)
        q, k = self.q_ops(q, x), self.k_ops(k, x)
        weights: Tensor | None = None
        if self.kernel == "gqa" and self.scores.kind in ("none", "causal"):
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=self.scores.kind == "causal", enable_gqa=self.num_key_value_groups > 1
            )
        elif self.kernel == "linear":
            k, v = self.repeated(k), self.repeated(v)
            y = q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v)
        else:
            k, v = self.repeated(k), self.repeated(v)
            y, weights = self.attend(q, k, v, x)
        y = self.out_ops(y.transpose(1, 2).reshape(*x.shape[:2], -1), x)
        out = self.o_proj(y)
        return (out, weights) if self.gives and weights is not None else out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
        scale = self.head_dim**-0.5
        if self.kernel == "sdpa" and self.scores.kind != "sinks":
            mask = self.scores.bias_of(x.new_empty(x.shape[0], 1, x.shape[1], x.shape[1]), x)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask), None
        if self.kernel == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q * scale, k)
        elif self.kernel == "baddbmm":
            b, h, s, d = q.shape
            zero = torch.zeros(1, s, s, dtype=q.dtype)
            if self.scores.kind == "shared_table":
                zero = self.scores.bias_of(zero, x)[0]  # type: ignore[index]
            flat = torch.baddbmm(zero, q.reshape(b * h, s, d), k.reshape(b * h, s, d).transpose(1, 2), alpha=scale)
            scores = flat.view(b, h, s, s)
            if self.scores.kind == "shared_table":  # is in it already
                weights = scores.softmax(-1)
                return weights @ v, weights
        else:
            scores = q @ k.transpose(-1, -2) * scale
        weights = self.scores(scores, x)
        return weights @ v, weights


@block("packed_attention")
class Packed(Attention):
    """Query, key and value in one layer."""

    def __init__(self, sizes: Sizes, packing: str = "chunk", **options: Any) -> None:
        self.packing = packing
        super().__init__(sizes, **options)

    def make(self, sizes: Sizes, wide: int, narrow: int, bias: bool) -> None:
        nn.Module.__setattr__(self, "qkv", nn.Linear(sizes.width, wide + 2 * narrow, bias=bias))

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        packing = rng.choice(["chunk", "three_first", "heads_first", "split", "slices"])
        return draw_attention(rng, sizes, packing in ("split", "slices")) | {"packing": packing}

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, h, kv = self.qkv(x), self.num_heads, self.num_key_value_heads
        d = self.head_dim
        if self.packing == "three_first" and h == kv:
            q, k, v = y.reshape(*y.shape[:2], 3, h, d).permute(2, 0, 3, 1, 4).unbind(0)
            return q, k, v
        if self.packing == "heads_first" and h == kv:
            q, k, v = y.view(*y.shape[:2], h, 3 * d).transpose(1, 2).chunk(3, -1)
            return q, k, v
        if self.packing == "chunk" and h == kv:
            q, k, v = y.chunk(3, -1)
        elif self.packing == "slices":
            q, k, v = y[..., : h * d], y[..., h * d : (h + kv) * d], y[..., -kv * d :]
        else:
            q, k, v = y.split([h * d, kv * d, kv * d], -1)
        return self.as_heads(q, h), self.as_heads(k, kv), self.as_heads(v, kv)


@block("latent_attention")
class Latent(Attention):
    """Keys and values from a narrow latent, with a part for positions that all heads share."""

    def make(self, sizes: Sizes, wide: int, narrow: int, bias: bool) -> None:
        self.q_proj = nn.Linear(sizes.width, wide, bias=bias)
        self.rank = 4
        self.down = nn.Linear(sizes.width, 4 + 2, bias=False)
        self.norm = nn.RMSNorm(4)
        self.up = nn.Linear(4, 2 * narrow, bias=False)

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec:
        return draw_attention(rng, sizes, False)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        latent, shared = self.down(x).split([self.rank, 2], -1)
        k, v = self.up(self.norm(latent)).view(*x.shape[:2], -1, 2 * self.head_dim).transpose(1, 2).chunk(2, -1)
        q = self.as_heads(self.q_proj(x), self.num_heads)
        common = shared.unsqueeze(1).expand(-1, k.shape[1], -1, -1)
        if self.head_dim > 2:
            k = torch.cat([k[..., :-2], common], -1)
        return q, k, v


@block("latent_query")
class LatentQuery(Latent):
    """As latent attention, without the shared part."""

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        latent, _ = self.down(x).split([self.rank, 2], -1)
        k, v = self.up(self.norm(latent)).view(*x.shape[:2], -1, 2 * self.head_dim).transpose(1, 2).chunk(2, -1)
        return self.as_heads(self.q_proj(x), self.num_heads), k, v


@block("torch_attention")
class TorchAttention(Op):
    """torch's own module."""

    def __init__(
        self, sizes: Sizes, heads: int = 2, layer: bool = False, bias: bool = True, first: bool = False
    ) -> None:
        super().__init__(sizes)
        self.layer = layer
        self.inner: Any = (
            nn.TransformerEncoderLayer(sizes.width, heads, 20, 0.0, batch_first=True, norm_first=first)
            if layer else nn.MultiheadAttention(sizes.width, heads, batch_first=True, bias=bias)
        )  # fmt: skip

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec | None:
        able = [n for n in range(1, 7) if sizes.width % n == 0]
        return {"heads": rng.choice(able), "layer": rng.random() < 0.5, "bias": rng.random() < 0.5,
                "first": rng.random() < 0.5}  # fmt: skip

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) if self.layer else self.inner(x, x, x, need_weights=False)[0]
