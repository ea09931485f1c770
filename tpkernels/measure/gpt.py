"""A small GPT, in plain torch and made of tpkernels' parts: what `demo`, `train-demo`, `profile` and `test` run.

Owns: one set of modules and names for both.  `GPT` is plain; `ParallelGPT.from_plain` cuts a copy of it over the ranks
of a group, with or without sequence parallelism.  Both turn tokens and labels into the mean loss of all tokens.
Positions are rotary, so there is no table of them; sizes need not divide by the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels import dispatch
from tpkernels.nn import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelAttention,
    ParallelMLP,
    VocabParallelEmbedding,
    vocab_parallel_linear_cross_entropy,
)
from tpkernels.nn.rotary import apply_rotary
from tpkernels.partition import array_split_sizes

__all__ = ["GPT", "Block", "ParallelGPT", "Sizes", "parallel_block"]

ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of one step, which takes `batch` sequences of `length` tokens."""

    layers: int = 2
    width: int = 512
    heads: int = 8
    d_ff: int = 2048
    vocabulary: int = 512
    length: int = 512
    batch: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.width % self.heads or self.width // self.heads % 2:
            raise ValueError(f"width ({self.width}) must be heads ({self.heads}) of an even number of features each")

    @property
    def tokens(self) -> int:
        return self.batch * self.length


class Attention(nn.Module):
    """Causal attention with rotary positions, of one process."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.query, self.key, self.value, self.out = (nn.Linear(sizes.width, sizes.width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        at = torch.arange(x.shape[1], device=x.device)
        q, k = (apply_rotary(one, at, base=ROTARY_BASE) for one in (q, k))
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return y


class MLP(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(sizes.width, sizes.d_ff), nn.Linear(sizes.d_ff, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """x + attention(norm(x)), then + mlp(norm(x)); its parts may be plain or parallel, and `cut` is what those take."""

    def __init__(self, norm1: nn.Module, attention: nn.Module, norm2: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = norm1, attention, norm2, mlp

    def forward(self, x: Tensor, **cut: Any) -> Tensor:
        x = x + self.attention(self.norm1(x), **cut)
        y: Tensor = x + self.mlp(self.norm2(x), **cut)
        return y


class GPT(nn.Module):
    """The reference, of one process."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(
            Block(nn.LayerNorm(sizes.width), Attention(sizes), nn.LayerNorm(sizes.width), MLP(sizes))
            for _ in range(sizes.layers)
        )
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of `labels`, both `[batch, length]`."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels.flatten())


class ParallelGPT(nn.Module):
    """The same over the ranks of a group; every rank gets the same tokens and the same loss."""

    def __init__(
        self, embedding: nn.Module, blocks: nn.ModuleList, norm: nn.Module, head: ColumnParallelLinear
    ) -> None:
        super().__init__()
        self.embedding, self.blocks, self.norm, self.head = embedding, blocks, norm, head

    @classmethod
    def from_plain(
        cls,
        plain: GPT,
        mesh: DeviceMesh,
        *,
        sequence_parallel: bool = True,
        save_gathered: bool = False,
        implementation: str = "auto",
    ) -> ParallelGPT:
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "implementation": implementation}
        alone = {offer.name for offer in dispatch.implementations("all_reduce")}  # of collectives without a GEMM
        table = options | ({} if implementation in alone else {"implementation": "auto"})
        return cls(
            VocabParallelEmbedding.from_embedding(plain.embedding, mesh, **table),
            nn.ModuleList(
                parallel_block(block, mesh, save_gathered=save_gathered, **options)  # type: ignore[arg-type]
                for block in plain.blocks
            ),
            LayerNorm.from_norm(plain.norm, mesh, sequence_parallel=sequence_parallel),
            ColumnParallelLinear.from_linear(plain.head, mesh, **options),
        )

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        mesh = self.head.mesh
        shards = array_split_sizes(tokens.shape[1], mesh.size()) if self.head.sequence_parallel else None
        x = self.embedding(tokens, shard_sizes=shards)
        for block in self.blocks:
            x = block(x, shard_sizes=shards)
        return vocab_parallel_linear_cross_entropy(self.norm(x), self.head, labels, shard_sizes=shards)


def parallel_block(
    block: Block,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool = True,
    save_gathered: bool = False,
    implementation: str = "auto",
) -> Block:
    """A copy of a plain block, cut over the ranks of a group."""
    attention, mlp, norms = block.attention, block.mlp, (block.norm1, block.norm2)
    assert isinstance(attention, Attention) and isinstance(mlp, MLP)
    assert all(isinstance(norm, nn.LayerNorm) for norm in norms)
    options: dict[str, Any] = {
        "sequence_parallel": sequence_parallel, "save_gathered": save_gathered, "implementation": implementation,
    }  # fmt: skip
    norm1, norm2 = (
        LayerNorm.from_norm(norm, mesh, sequence_parallel=sequence_parallel)  # type: ignore[arg-type]
        for norm in norms
    )
    linears = attention.query, attention.key, attention.value, attention.out
    return Block(
        norm1,
        ParallelAttention.from_linears(
            *linears, mesh, num_heads=attention.heads, causal=True, rotary_base=ROTARY_BASE, **options
        ),
        norm2,
        ParallelMLP.from_linears(mlp.up, mlp.down, mesh, activation="gelu", **options),
    )
