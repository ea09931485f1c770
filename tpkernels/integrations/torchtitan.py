"""torchtitan: our ops in its attention and feed-forward blocks, as overrides of its configuration.

::

    --override.imports tpkernels.integrations.torchtitan.attention,tpkernels.integrations.torchtitan.feed_forward

Both blocks take and give the residual cut along the sequence: one gather feeds query, key and value (or gate and up,
with the activation behind their GEMMs), and the last GEMM scatters its sums.  Parameters, their cuts and the names in
checkpoints are torchtitan's own.

Assumes ``spmd_backend="spmd_types"`` and sequence parallelism, as torchtitan's ``dist_gemm`` does, and no type checks
of spmd_types, which do not know our ops.  Refuses anything else, and a bias behind a reduction.  Without tensor
parallelism the blocks are torchtitan's.

All that this touches of torchtitan is imported here; an import that fails names what has changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tpkernels.ops.all_gather_matmul import all_gather_matmul
from tpkernels.ops.matmul_reduce_scatter import matmul_reduce_scatter
from tpkernels.packages import needed

with needed("torchtitan", "tpkernels.integrations.torchtitan"):
    from torchtitan.config import derive, override
    from torchtitan.distributed.spmd_types import current_spmd_mesh
    from torchtitan.distributed.utils import get_spmd_backend
    from torchtitan.models.common.attention import FusedQKVLinear, GQAttention, QKVLinear
    from torchtitan.models.common.decoder_sharding import dense_sequence_parallel_placement
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.linear import Linear
    from torchtitan.protocols.sharding import ShardingConfig
with needed("torchtitan", "tpkernels.integrations.torchtitan"):
    import spmd_types  # behind torchtitan, which needs it: where both are missing, that one is named

__all__ = [
    "GatheringFeedForward",
    "GatheringFusedQKV",
    "GatheringQKV",
    "ScatteringLinear",
    "attention",
    "feed_forward",
]

SEQUENCE = -2
"""The dimension of ``[batch, sequence, features]`` that is gathered and scattered."""


def _group() -> dist.ProcessGroup | None:
    """The tensor-parallel group of the mesh that the trainer has entered; None where there is one rank in it."""
    mesh = current_spmd_mesh()
    if mesh is None or "tp" not in (mesh.mesh_dim_names or ()):
        return None
    if spmd_types.is_type_checking():
        raise ValueError("spmd_types does not know the types of tpkernels' ops: turn its type checks off")
    group: dist.ProcessGroup = mesh.get_group("tp")
    return group if group.size() > 1 else None


class GatheringFeedForward(FeedForward):  # type: ignore[misc]
    """w2 (silu(w1 x) * w3 x), from a shard of the sequence to one."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):  # type: ignore[misc]
        """The fields of torchtitan's; what it builds is this module."""

    def forward(self, x: Tensor) -> Tensor:
        group = _group()
        if group is None:
            plain: Tensor = super().forward(x)
            return plain
        weights = [self.w1.weight, self.w3.weight]
        hidden = all_gather_matmul(x, weights, group, gather_dim=SEQUENCE, activation="swiglu")
        return matmul_reduce_scatter(hidden, self.w2.weight, group, scatter_dim=SEQUENCE)


class ScatteringLinear(Linear):  # type: ignore[misc]
    """A linear layer cut along its inputs, whose sums go to the ranks of the sequence."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        """The fields of torchtitan's; what it builds is this module."""

    def forward(self, input: Tensor) -> Tensor:
        group = _group()
        if group is None:
            plain: Tensor = super().forward(input)
            return plain
        return matmul_reduce_scatter(input, self.weight, group, scatter_dim=SEQUENCE)


class GatheringFusedQKV(FusedQKVLinear):  # type: ignore[misc]
    """Query, key and value of the whole sequence from a shard of it, by one weight."""

    @dataclass(kw_only=True, slots=True)
    class Config(FusedQKVLinear.Config):  # type: ignore[misc]
        """The fields of torchtitan's; what it builds is this module."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        group = _group()
        if group is None:
            plain: tuple[Tensor, Tensor, Tensor] = super().forward(x)
            return plain
        y = all_gather_matmul(x, self.wqkv.weight, group, gather_dim=SEQUENCE, bias=self.wqkv.bias)
        batch, sequence, _ = y.shape
        parts = y.view(batch, sequence, -1, self.r_dim, self.head_dim).split([self.heads_per_kv, 1, 1], dim=-2)
        query, key, value = (part.reshape(batch, sequence, -1, self.head_dim).contiguous() for part in parts)
        return query, key, value


class GatheringQKV(QKVLinear):  # type: ignore[misc]
    """The same by three weights, for which the sequence is gathered once."""

    @dataclass(kw_only=True, slots=True)
    class Config(QKVLinear.Config):  # type: ignore[misc]
        """The fields of torchtitan's; what it builds is this module."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        group = _group()
        if group is None:
            plain: tuple[Tensor, Tensor, Tensor] = super().forward(x)
            return plain
        layers = [self.wq, self.wk, self.wv]
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        parts = all_gather_matmul(x, weights, group, gather_dim=SEQUENCE, bias=biases)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        return query, key, value


@override(target=FeedForward.Config, exact=True, description="tpkernels: gather, GEMM and activation; GEMM and scatter")  # type: ignore[untyped-decorator]
def feed_forward(cfg: Any) -> Any:
    """The factory for ``--override.imports``.

    Raises:
        ValueError: a layout or a bias that our block does not have.
    """
    _check("FeedForward", cfg, "x", cfg.w2)
    if cfg.w1.bias or cfg.w3.bias:
        raise ValueError("FeedForward has a bias in w1 or w3, which our block does not have")
    new = derive(cfg, GatheringFeedForward.Config)
    new.sharding_config = None
    new.w2 = replace(cfg.w2, sharding_config=_states(cfg.w2))
    return new


@override(target=GQAttention.Config, exact=True, description="tpkernels: gather and GEMM; GEMM and scatter")  # type: ignore[untyped-decorator]
def attention(cfg: Any) -> Any:
    """The factory for ``--override.imports``.

    Raises:
        ValueError: a layout, a bias or a projection that our block does not have.
    """
    _check("GQAttention", cfg, "x_BLD", cfg.wo)
    kinds = {FusedQKVLinear.Config: GatheringFusedQKV.Config, QKVLinear.Config: GatheringQKV.Config}
    kind = kinds.get(type(cfg.qkv_linear))
    if kind is None or type(cfg.wo) is not Linear.Config:
        raise ValueError(
            f"GQAttention has a {type(cfg.qkv_linear).__qualname__} and a {type(cfg.wo).__qualname__}; our block takes "
            "the place of QKVLinear or FusedQKVLinear and of Linear"
        )
    output = derive(cfg.wo, ScatteringLinear.Config)
    output.sharding_config = _states(cfg.wo)
    return replace(cfg, sharding_config=None, qkv_linear=derive(cfg.qkv_linear, kind), wo=output)


def _states(cfg: Any) -> ShardingConfig:
    """How a layer's parameters are cut, without what torchtitan does to its output."""
    return ShardingConfig(state_shardings=cfg.sharding_config.state_shardings)


def _check(what: str, cfg: Any, argument: str, last: Any) -> None:
    backend, given = get_spmd_backend(), cfg.sharding_config
    if backend != "spmd_types":
        raise ValueError(f"our {what} needs parallelism.spmd_backend='spmd_types', got {backend!r}")
    if given is None or last.sharding_config is None:
        raise ValueError(f"{what} has no sharding_config yet: overrides come after update_from_config()")
    if (given.in_src_shardings or {}).get(argument) != dense_sequence_parallel_placement():
        raise ValueError(f"our {what} needs parallelism.enable_sequence_parallel: it gathers and scatters the sequence")
    if last.bias:
        raise ValueError(f"the last layer of {what} has a bias, whose gradient torchtitan would have to sum")
