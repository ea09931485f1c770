"""A small GPT twice: in plain torch, and with the modules of tpkernels, with the same names.

Made under one seed, both start from the same weights: the modules initialise as their torch counterparts do.  Called
with tokens and targets, both give the mean loss.  The default sizes are chosen so that they do not divide evenly: 127
positions, 773 hidden features, 257 tokens.  Heads stay whole on each rank, so their number must be a multiple of the
number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import tpkernels as tpk
from tpkernels.demo.text import VOCABULARY
from tpkernels.nn import (
    ColumnParallelLinear,
    ColumnParallelLinears,
    LayerNorm,
    ParallelMLP,
    RowParallelLinear,
    replicate_parameters,
    vocab_parallel_cross_entropy,
)
from tpkernels.partition import array_split_sizes

__all__ = ["Config", "ParallelGPT", "PlainGPT"]


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    layers: int = 2
    width: int = 288
    heads: int = 12
    d_ff: int = 773
    length: int = 127

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.width % self.heads:
            raise ValueError(f"width ({self.width}) must be a multiple of heads ({self.heads})")

    @property
    def head_size(self) -> int:
        return self.width // self.heads


def _attention(query: Tensor, key: Tensor, value: Tensor, head_size: int) -> Tensor:
    """Causal attention of the heads that are here; all are ``[batch, length, heads * head_size]``."""
    q, k, v = (x.unflatten(-1, (-1, head_size)).transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class _Embedding(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.length, config.width)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        result: Tensor = self.token(tokens) + self.position(positions)
        return result


# --- one process, plain torch -----------------------------------------------------------------------------------------


class PlainGPT(nn.Module):
    """The reference."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = _Embedding(config)
        self.blocks = nn.ModuleList(_PlainBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class _PlainBlock(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv = nn.ModuleDict({name: nn.Linear(config.width, config.width) for name in ("query", "key", "value")})
        self.out = nn.Linear(config.width, config.width)
        self.mlp = nn.ModuleDict(
            {"up": nn.Linear(config.width, config.d_ff), "down": nn.Linear(config.d_ff, config.width)}
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        query, key, value = (self.qkv[name](h) for name in ("query", "key", "value"))
        x = x + self.out(_attention(query, key, value, self.head_size))
        result: Tensor = x + self.mlp["down"](F.gelu(self.mlp["up"](self.norm2(x))))
        return result


# --- the same on the ranks of a group ---------------------------------------------------------------------------------


class ParallelGPT(nn.Module):
    """With sequence parallelism each rank holds its part of the sequence between the blocks, else all of it.

    The logits are cut over the vocabulary, and the loss is computed from the parts; it is equal on all ranks.
    """

    def __init__(self, config: Config, mesh: DeviceMesh, *, sequence_parallel: bool = True) -> None:
        super().__init__()
        self.mesh, self.sequence_parallel = mesh, sequence_parallel
        self.embedding = replicate_parameters(_Embedding(config), mesh)
        self.blocks = nn.ModuleList(_ParallelBlock(config, mesh, sequence_parallel) for _ in range(config.layers))
        self.norm = LayerNorm(config.width, mesh, sequence_parallel=sequence_parallel)
        self.head = ColumnParallelLinear(
            config.width, VOCABULARY, mesh, bias=False, sequence_parallel=sequence_parallel
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        sizes = None
        if self.sequence_parallel:
            sizes = array_split_sizes(tokens.shape[1], self.mesh.size())
            x = tpk.shard(x, self.mesh, dim=1, shard_sizes=sizes)
        for block in self.blocks:
            x = block(x, sizes)
        logits = self.head(self.norm(x), shard_sizes=sizes)
        return vocab_parallel_cross_entropy(logits, targets, self.mesh, shard_sizes=self.head.shard_sizes)


class _ParallelBlock(nn.Module):
    def __init__(self, config: Config, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        super().__init__()
        width, self.head_size = config.width, config.head_size
        unit = self.head_size
        self.norm1 = LayerNorm(width, mesh, sequence_parallel=sequence_parallel)
        self.norm2 = LayerNorm(width, mesh, sequence_parallel=sequence_parallel)
        outputs = {"query": width, "key": width, "value": width}
        self.qkv = ColumnParallelLinears(width, outputs, mesh, sequence_parallel=sequence_parallel, unit=unit)
        self.out = RowParallelLinear(width, width, mesh, sequence_parallel=sequence_parallel, unit=unit)
        self.mlp = ParallelMLP(width, config.d_ff, mesh, activation="gelu", sequence_parallel=sequence_parallel)

    def forward(self, x: Tensor, sizes: tuple[int, ...] | None) -> Tensor:
        query, key, value = self.qkv(self.norm1(x), shard_sizes=sizes)  # one gather for the three
        heads = _attention(query, key, value, self.head_size)
        x = x + self.out(heads, shard_sizes=sizes)
        result: Tensor = x + self.mlp(self.norm2(x), shard_sizes=sizes)
        return result
