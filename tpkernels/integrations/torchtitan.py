"""torchtitan: our ops in its attention and feed-forward blocks, as overrides of its configuration.

::

    --override.imports tpkernels.integrations.torchtitan.model

:func:`model` puts our blocks into a whole model, and names in one line what runs no op of ours; ``strict`` refuses that
instead.  :func:`attention` and :func:`feed_forward` are overrides of one kind of block each.

Both blocks take and give the residual cut along the sequence: one gather feeds query, key and value (or gate and up,
with the activation behind their GEMMs), and the last GEMM scatters its sums.  Parameters, their cuts and the names in
checkpoints are torchtitan's own.

Serves ``spmd_backend="spmd_types"``, where the blocks see local tensors, and ``"partial_dtensor"``, where they see
DTensors on the mesh of tensor parallelism.  With torch 2.13 torchtitan's trainer runs the second one alone: its FSDP
names the data-parallel axes of the whole mesh (``resolve_fsdp_mesh``), and ``fully_shard`` then refuses the plain
parameters of ``spmd_types``; later versions of torch read their annotations.

Assumes sequence parallelism, as torchtitan's ``dist_gemm`` does, and no type checks of spmd_types, which do not know
our ops.  Refuses ``"full_dtensor"``, a sequence that does not divide, and a bias behind a reduction.  Without tensor
parallelism the blocks are torchtitan's.

All that this touches of torchtitan is imported here, where an import that fails names what has changed, or listed in
:data:`FIELDS`, of which a factory names the first that is not there.
"""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tpkernels.nn.parameters import local
from tpkernels.ops.all_gather_matmul import all_gather_matmul
from tpkernels.ops.matmul_reduce_scatter import matmul_reduce_scatter
from tpkernels.packages import needed

with needed("torchtitan", "tpkernels.integrations.torchtitan"):
    from torchtitan.config import derive, override
    from torchtitan.distributed.spmd_types import current_spmd_mesh
    from torchtitan.distributed.utils import get_spmd_backend
    from torchtitan.models.common.attention import FusedQKVLinear, GQAttention, QKVLinear
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.models.common.decoder_sharding import dense_sequence_parallel_placement
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.linear import Linear
    from torchtitan.protocols.module import Module
    from torchtitan.protocols.sharding import ShardingConfig, SpmdLayout
with needed("torchtitan", "tpkernels.integrations.torchtitan"):
    import spmd_types  # behind torchtitan, which needs it: where both are missing, that one is named

__all__ = [
    "GatheringFeedForward",
    "GatheringFusedQKV",
    "GatheringQKV",
    "ScatteringLinear",
    "attention",
    "feed_forward",
    "first_missing",
    "model",
]

FIELDS: dict[type[Any], tuple[str, ...]] = {
    FeedForward.Config: ("w1", "w2", "w3", "sharding_config"),
    GQAttention.Config: ("qkv_linear", "wo", "sharding_config"),
    QKVLinear.Config: ("wq", "wkv", "head_dim"),
    FusedQKVLinear.Config: ("wqkv", "n_heads", "n_kv_heads", "head_dim"),
    Linear.Config: ("bias", "sharding_config"),
    ShardingConfig: ("state_shardings", "in_src_shardings"),
    SpmdLayout: ("axis_types",),
}
"""What our blocks read and replace of torchtitan's configurations."""
BACKENDS = ("spmd_types", "partial_dtensor")
SEQUENCE, HEADS = 1, 2
"""The dimensions of ``[batch, sequence, features]`` and ``[batch, sequence, heads, features]`` that ranks share."""


class _Ranks(NamedTuple):
    """Those that share a block's work, and the mesh of its DTensors; there is none where it sees local tensors."""

    group: dist.ProcessGroup
    mesh: DeviceMesh | None

    @classmethod
    def of(cls, x: Tensor) -> _Ranks | None:
        """Of the block that is given ``x``; None where one rank does it all."""
        if isinstance(x, DTensor):
            mesh = x.device_mesh
            if mesh.mesh_dim_names != ("tp",):
                raise ValueError(f"our blocks take DTensors of the mesh ('tp',), got one of {mesh.mesh_dim_names}")
            group: dist.ProcessGroup = mesh.get_group("tp")
        else:
            mesh, entered = None, current_spmd_mesh()
            if entered is None or "tp" not in (entered.mesh_dim_names or ()):
                return None
            if spmd_types.is_type_checking():
                raise ValueError("spmd_types does not know the types of tpkernels' ops: turn its type checks off")
            group = entered.get_group("tp")
        return cls(group, mesh) if group.size() > 1 else None

    def part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of an activation that is cut along ``dim``, as its gradient is."""
        if self.mesh is None:
            return x
        placement = Shard(dim)
        if not isinstance(x, DTensor) or x.placements != (placement,):
            raise ValueError(
                f"our block takes a DTensor with the placements {(placement,)}, got {getattr(x, 'placements', type(x))}"
            )
        if x.shape[dim] % self.group.size():
            raise ValueError(f"dimension {dim} of {tuple(x.shape)} does not divide by {self.group.size()} ranks")
        return x.to_local(grad_placements=(placement,))

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """What ``part`` undoes: the activation that the next layer of torchtitan takes."""
        return x if self.mesh is None else DTensor.from_local(x, self.mesh, (Shard(dim),), run_check=False)


class GatheringFeedForward(FeedForward):  # type: ignore[misc]
    """w2 (silu(w1 x) * w3 x), from a shard of the sequence to one."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):  # type: ignore[misc]
        """The fields of torchtitan's; what it builds is this module."""

    def forward(self, x: Tensor) -> Tensor:
        ranks = _Ranks.of(x)
        if ranks is None:
            plain: Tensor = super().forward(x)
            return plain
        weights = [_local(self.w1.weight), _local(self.w3.weight)]
        part = ranks.part(x, SEQUENCE)
        hidden = all_gather_matmul(part, weights, ranks.group, gather_dim=SEQUENCE, activation="swiglu")
        y = matmul_reduce_scatter(hidden, _local(self.w2.weight), ranks.group, scatter_dim=SEQUENCE)
        return ranks.whole(y, SEQUENCE)


class ScatteringLinear(Linear):  # type: ignore[misc]
    """A linear layer cut along its inputs, whose sums go to the ranks of the sequence."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        """The fields of torchtitan's; what it builds is this module."""

    def forward(self, input: Tensor) -> Tensor:
        ranks = _Ranks.of(input)
        if ranks is None:
            plain: Tensor = super().forward(input)
            return plain
        part = ranks.part(input, HEADS)  # heads and their features are one dimension here
        return ranks.whole(
            matmul_reduce_scatter(part, _local(self.weight), ranks.group, scatter_dim=SEQUENCE), SEQUENCE
        )


class GatheringFusedQKV(FusedQKVLinear):  # type: ignore[misc]
    """Query, key and value of the whole sequence from a shard of it, by one weight."""

    @dataclass(kw_only=True, slots=True)
    class Config(FusedQKVLinear.Config):  # type: ignore[misc]
        """The fields of torchtitan's; what it builds is this module."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ranks = _Ranks.of(x)
        if ranks is None:
            plain: tuple[Tensor, Tensor, Tensor] = super().forward(x)
            return plain
        weight, bias = _local(self.wqkv.weight), local(self.wqkv.bias)
        y = all_gather_matmul(ranks.part(x, SEQUENCE), weight, ranks.group, gather_dim=SEQUENCE, bias=bias)
        batch, sequence, _ = y.shape
        parts = y.view(batch, sequence, -1, self.r_dim, self.head_dim).split([self.heads_per_kv, 1, 1], dim=-2)
        heads = (part.reshape(batch, sequence, -1, self.head_dim).contiguous() for part in parts)
        query, key, value = (ranks.whole(part, HEADS) for part in heads)
        return query, key, value


class GatheringQKV(QKVLinear):  # type: ignore[misc]
    """The same by three weights, for which the sequence is gathered once."""

    @dataclass(kw_only=True, slots=True)
    class Config(QKVLinear.Config):  # type: ignore[misc]
        """The fields of torchtitan's; what it builds is this module."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ranks = _Ranks.of(x)
        if ranks is None:
            plain: tuple[Tensor, Tensor, Tensor] = super().forward(x)
            return plain
        layers = [self.wq, self.wk, self.wv]
        weights, biases = [_local(layer.weight) for layer in layers], [local(layer.bias) for layer in layers]
        parts = all_gather_matmul(ranks.part(x, SEQUENCE), weights, ranks.group, gather_dim=SEQUENCE, bias=biases)
        query, key, value = (ranks.whole(part.unflatten(-1, (-1, self.head_dim)), HEADS) for part in parts)
        return query, key, value


@override(target=FeedForward.Config, exact=True, description="tpkernels: gather, GEMM and activation; GEMM and scatter")  # type: ignore[untyped-decorator]
def feed_forward(cfg: Any) -> Any:
    """The factory for ``--override.imports``.

    Raises:
        ValueError: a layout or a bias that our block does not have.
    """
    _check_block("FeedForward", cfg)
    return _our_feed_forward(cfg)


@override(target=GQAttention.Config, exact=True, description="tpkernels: gather and GEMM; GEMM and scatter")  # type: ignore[untyped-decorator]
def attention(cfg: Any) -> Any:
    """The factory for ``--override.imports``.

    Raises:
        ValueError: a layout, a bias or a projection that our block does not have.
    """
    _check_block("GQAttention", cfg)
    return _our_attention(cfg)


@override(target=Decoder.Config, description="tpkernels: every block that ours can take the place of")  # type: ignore[untyped-decorator]
def model(cfg: Any, *, strict: bool = False, leave: Sequence[str] = ()) -> Any:
    """The factory for ``--override.imports`` that does what the two above do, in place in a whole model.

    Layers whose weights tensor parallelism cuts, and that run no op of ours, are named in one line of rank 0 with the
    reason.  torchtitan has such ones outside its blocks: ``tok_embeddings`` and ``lm_head``.

    Args (in the entry, as ``tpkernels.integrations.torchtitan.model={"strict": true, "leave": ["lm_head"]}``):
        strict: what would be named raises.
        leave: modules that may stay torchtitan's and need not be named, as patterns of :mod:`fnmatch`.

    Raises:
        ValueError: there is no block that ours can take the place of; with ``strict``, a layer that would be named; a
            pattern that no such layer has.
    """
    _check_torchtitan("model")
    nodes, ours, left = list(cfg.traverse(Module.Config, recurse=True)), [], {}
    for path, node, parent, place in nodes:
        block = BLOCKS.get(type(node))
        if block is None:
            continue
        why = block.why_not(node)
        if why is not None:
            left[path] = why
            continue
        ours.append(path)
        if isinstance(parent, list):
            parent[place] = block.make(node)
        else:
            setattr(parent, place, block.make(node))
    if not ours:
        raise ValueError(f"no block of {type(cfg).__qualname__} runs an op of tpkernels{_named(left)}")
    blocks = tuple(f"{path}." for path in (*ours, *left))
    for path, node, *_ in nodes:
        if _is_cut(node) and not path.startswith(blocks):
            left[path] = f"torchtitan's {type(node).__qualname__.partition('.')[0]}, in no block that ours replace"
    unknown = [pattern for pattern in leave if not fnmatch.filter(left, pattern)]
    if unknown:
        raise ValueError(f"leave has {unknown[0]!r}, which is none of the layers without an op of ours: {list(left)}")
    left = {path: why for path, why in left.items() if not any(fnmatch.fnmatch(path, one) for one in leave)}
    if left and strict:
        raise ValueError(f"some layers run no op of tpkernels{_named(left)}")
    if left and (not dist.is_initialized() or dist.get_rank() == 0):
        warnings.warn(f"some layers run no op of tpkernels{_named(left)}", stacklevel=2)
    return cfg


def _named(left: dict[str, str]) -> str:
    """Layers of the same name in several blocks are named once."""
    return "".join(dict.fromkeys(f"; {re.sub(r'[.][0-9]+[.]', '.*.', path)}: {why}" for path, why in left.items()))


def _is_cut(cfg: Any) -> bool:
    """Whether tensor parallelism cuts a weight of this layer."""
    given = getattr(cfg, "sharding_config", None)
    cuts = (layout.axis_types.get("tp") for layout in given.state_shardings.values()) if given else ()
    return any(isinstance(cut, spmd_types.Shard) for cut in cuts)


def first_missing() -> str | None:
    """The first field that the installed torchtitan does not have, as a sentence; None where it has all."""
    for kind, names in FIELDS.items():
        missing = sorted(set(names) - {field.name for field in fields(kind)}, key=names.index)
        if missing:
            return f"torchtitan {version('torchtitan')} has no {kind.__module__}.{kind.__qualname__}.{missing[0]}"
    return None


def _states(cfg: Any) -> ShardingConfig:
    """How a layer's parameters are cut, without what torchtitan does to its output."""
    return ShardingConfig(state_shardings=cfg.sharding_config.state_shardings)


def _local(weight: Tensor) -> Tensor:
    return cast(Tensor, local(weight))


def _our_feed_forward(cfg: Any) -> Any:
    new = derive(cfg, GatheringFeedForward.Config)
    new.sharding_config = None
    new.w2 = replace(cfg.w2, sharding_config=_states(cfg.w2))
    return new


def _our_attention(cfg: Any) -> Any:
    output = derive(cfg.wo, ScatteringLinear.Config)
    output.sharding_config = _states(cfg.wo)
    projections = derive(cfg.qkv_linear, PROJECTIONS[type(cfg.qkv_linear)])
    return replace(cfg, sharding_config=None, qkv_linear=projections, wo=output)


def _check_torchtitan(what: str) -> None:
    """Refuse what holds for all blocks."""
    missing = first_missing()
    if missing is not None:
        raise ValueError(f"{missing}: this integration was tested with 0.3")
    backend = get_spmd_backend()
    if backend not in BACKENDS:
        raise ValueError(f"our {what} needs a parallelism.spmd_backend of {BACKENDS}, got {backend!r}")


def _check_block(what: str, cfg: Any) -> None:
    _check_torchtitan(what)
    why = BLOCKS[type(cfg)].why_not(cfg)
    if why is not None:
        raise ValueError(f"{what}: {why}")


def _why_not_feed_forward(cfg: Any) -> str | None:
    if cfg.w1.bias or cfg.w3.bias:
        return "it has a bias in w1 or w3, which our block does not have"
    return _why_not(cfg, "x", cfg.w2)


def _why_not_attention(cfg: Any) -> str | None:
    if type(cfg.qkv_linear) not in PROJECTIONS or type(cfg.wo) is not Linear.Config:
        return (
            f"it has a {type(cfg.qkv_linear).__qualname__} and a {type(cfg.wo).__qualname__}; our block takes the "
            "place of QKVLinear or FusedQKVLinear and of Linear"
        )
    return _why_not(cfg, "x_BLD", cfg.wo)


def _why_not(cfg: Any, argument: str, last: Any) -> str | None:
    """What a block is told to do that ours does not."""
    given = cfg.sharding_config
    if given is None or last.sharding_config is None:
        return "it has no sharding_config yet: overrides come after update_from_config()"
    if (given.in_src_shardings or {}).get(argument) != dense_sequence_parallel_placement():
        return "its input is not cut along the sequence (parallelism.enable_sequence_parallel), which our block gathers"
    if last.bias:
        return "its last layer has a bias, whose gradient torchtitan would have to sum"
    return None


class _Block(NamedTuple):
    why_not: Callable[[Any], str | None]
    make: Callable[[Any], Any]


PROJECTIONS = {FusedQKVLinear.Config: GatheringFusedQKV.Config, QKVLinear.Config: GatheringQKV.Config}
BLOCKS = {
    FeedForward.Config: _Block(_why_not_feed_forward, _our_feed_forward),
    GQAttention.Config: _Block(_why_not_attention, _our_attention),
}
"""What ours take the place of, by the class of its configuration alone: a subclass may compute something else."""
