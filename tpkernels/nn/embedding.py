"""The embedding table whose rows, the vocabulary, are cut over the ranks of a group.

::

    w_r = rows [a, b) of weight,  p_r = w_r[ids - a] where a <= ids < b, else 0

    sequence_parallel   y_r = (sum over ranks of p_r)[r], a shard of the sequence      reduce_scatter
    otherwise           y   =  sum over ranks of p_r, equal on all ranks               all_reduce

Each row has one owner, so the sums are exact.  The weight is a DTensor, ``Shard(0)``; its gradient is local.

Assumes that all ranks of the group hold the same ids.  Refuses ids outside the vocabulary, which masking would turn
into zeros, before anything is sent (reading them makes a CUDA device catch up with the host; during the capture of a
CUDA graph they are not read, and an id outside stops the device as ``F.embedding`` does).

The masked look-up is that of Megatron-LM's ``VocabParallelEmbedding`` (``megatron/core/tensor_parallel/layers.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpkernels import dispatch
from tpkernels.comm import agreement
from tpkernels.comm.groups import GroupLike, group_name, resolve
from tpkernels.comm.same_bits import refuse, same_bits_of
from tpkernels.nn.blocks import Blocks
from tpkernels.nn.column import ColumnParallelLinear
from tpkernels.nn.parameters import local, mesh_of, shard_parameter, shard_places, tp_mesh
from tpkernels.ops import all_gather, all_reduce, reduce_scatter
from tpkernels.ops.registration import call, define
from tpkernels.partition import chunk_sizes, offsets

__all__ = ["VocabParallelEmbedding"]


class VocabParallelEmbedding(nn.Module):
    """``y = weight[ids]`` with the vocabulary cut over the ranks, for any size of it.

    =====================  ======================================  =================================================
    mode                   ids on rank r                           y on rank r
    =====================  ======================================  =================================================
    default                ``[..., S]``, equal on all ranks        ``[..., S, embedding_dim]``, equal on all ranks
    ``sequence_parallel``  ``[..., S]``, equal on all ranks        ``[..., S_r, embedding_dim]``
    =====================  ======================================  =================================================

    Args:
        group: ProcessGroup, one-dimensional DeviceMesh, or a mesh with a "tp" axis.
        padding_idx: the row that gets no gradient (and starts as zeros), as in ``nn.Embedding``.
        max_norm: rows that are looked up and longer than this are shortened in place, as in ``nn.Embedding``.
        sequence_dim: the dimension of y that sequence parallelism cuts; 0 where ids are ``[S, B]``.
        implementation: "auto" or the name of one, for the sum.

    Examples:
        >>> embedding = tpk.nn.VocabParallelEmbedding(100, 8, mesh["tp"])
        >>> embedding(torch.tensor([3, 99])).shape
        torch.Size([2, 8])

    Raises:
        ValueError: bad arguments; in ``forward`` ids that are no integers or outside the vocabulary.

    Initialised as ``nn.Embedding`` is: under one seed on every rank the gathered weight equals ``nn.Embedding``'s.
    :meth:`tie` gives an output head this very weight.
    """

    weight: nn.Parameter
    blocks: Blocks | None = None
    """How the rows lie in the blocks of ``same_bits``, where they do not divide into them: then the weight is
    ``[places, 1, embedding_dim]``."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        group: GroupLike,
        *,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("num_embeddings", num_embeddings), ("embedding_dim", embedding_dim)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx ({padding_idx}) must be within num_embeddings ({num_embeddings})")
        if sequence_dim == -1:
            raise ValueError("sequence_dim (-1) is the features' dimension of the output, not one of the ids'")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type = max_norm, norm_type
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.implementation = implementation
        dispatch.check_name(self._op(), implementation)
        mesh = tp_mesh(group, device)
        self.blocks = Blocks.of(num_embeddings, 1, mesh)
        self._take(self._fresh(device, dtype), mesh)

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        group: GroupLike,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        implementation: str = "auto",
    ) -> Self:
        """The same table, cut: copies this rank's rows with dtype, device, ``requires_grad``; ``embedding`` stays.

        Ranks whose weights differ take the first one's, or raise (:func:`init_weights`).

        Raises:
            ValueError: options whose gradient needs all rows at once (``sparse``, ``scale_grad_by_freq``).
        """
        for option in ("sparse", "scale_grad_by_freq"):
            if getattr(embedding, option):
                raise ValueError(f"nn.Embedding({option}=True) cannot be cut over the ranks: use {option}=False")
        mesh = tp_mesh(group, embedding)
        module = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            mesh,
            padding_idx=embedding.padding_idx,
            max_norm=embedding.max_norm,
            norm_type=embedding.norm_type,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            implementation=implementation,
            device="meta",
        )
        return module._take(embedding, mesh)

    def _fresh(self, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Embedding:
        sizes = self.num_embeddings, self.embedding_dim
        return nn.Embedding(*sizes, padding_idx=self.padding_idx, device=device, dtype=dtype)

    def _take(self, embedding: nn.Embedding, mesh: DeviceMesh) -> Self:
        weight = embedding.weight
        if isinstance(weight, DTensor):
            raise ValueError(f"the embedding's weight is a DTensor already (placements {weight.placements})")
        self.weight = self._shard(weight, mesh)
        return self.train(embedding.training)

    def _shard(self, full: Tensor, mesh: DeviceMesh) -> nn.Parameter:
        if self.blocks is None:
            return shard_parameter(full, mesh, 0, requires_grad=full.requires_grad)
        rows = full.detach().unsqueeze(1)
        return shard_places(rows, mesh, 0, self.blocks, requires_grad=full.requires_grad)

    def parameters_by_unit(self) -> dict[str, int]:
        """As of a column layer: which parameters have a dimension for units, of which a row is one."""
        return {} if self.blocks is None else {"weight": 0}

    def units_held(self) -> tuple[int, ...]:
        """How many rows each rank has, or with ``blocks`` each block."""
        return self.shard_sizes if self.blocks is None else self.blocks.counts

    @property
    def has_free_places(self) -> bool:
        """Whether a block has more places than rows."""
        return self.blocks is not None

    @property
    def mesh(self) -> DeviceMesh:
        """The one-dimensional mesh that the weight lives on; its group is the one that communicates."""
        return mesh_of(self.weight)

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """Rows that each rank holds."""
        if self.blocks is not None:
            return self.blocks.sizes(self.mesh.size())
        return chunk_sizes(self.num_embeddings, self.mesh.size())

    def reset_parameters(self) -> None:
        """Initialise anew like ``nn.Embedding``, equal to it under the first rank's seed; all ranks call it."""
        fresh = self._fresh(self.weight.device, self.weight.dtype)
        with torch.no_grad():
            self.weight.copy_(self._shard(fresh.weight, self.mesh))

    def tie(self, head: ColumnParallelLinear) -> ColumnParallelLinear:
        """Make this weight the weight of ``head``: one parameter, whose gradient is the sum of both uses.

        Raises:
            ValueError: another shape, dtype, device or mesh.
        """
        mine, other = self.weight, head.weight
        for what, a, b in (
            ("shape", tuple(mine.shape), tuple(other.shape)),
            ("dtype", mine.dtype, other.dtype),
            ("device", mine.device, other.device),
            ("mesh", self.mesh, head.mesh),
        ):
            if a != b:
                raise ValueError(f"cannot tie an embedding and a head of different {what}: {a} and {b}")
        head.weight = self.weight
        # Megatron's mark of a weight with a second use, for optimizers with main_grad: see tpkernels.ops.main_grad.
        self.weight.zero_out_wgrad = True  # type: ignore[attr-defined]
        return head

    def forward(self, ids: Tensor, *, shard_sizes: Sequence[int] | None = None) -> Tensor:
        """``shard_sizes``: every rank's length of the sequence; default ``tpk.array_split``'s (10 over 3: 4, 3, 3)."""
        mesh = self.mesh
        if shard_sizes is not None and not self.sequence_parallel:
            self._refuse(f"shard_sizes ({list(shard_sizes)}) cuts a sequence: it needs sequence_parallel=True")
        if ids.dtype not in (torch.int64, torch.int32):
            self._refuse(f"ids must be int64 or int32, got {ids.dtype} of shape {tuple(ids.shape)}")
        partial = self._look_up(ids, mesh)
        if same_bits_of(mesh):
            return self._of_owners(partial, mesh)
        if mesh.size() == 1:
            return partial
        if not self.sequence_parallel:
            return all_reduce(partial, mesh, implementation=self.implementation)
        return reduce_scatter(
            partial, mesh, dim=self.sequence_dim, shard_sizes=shard_sizes, implementation=self.implementation
        )

    def _of_owners(self, partial: Tensor, mesh: DeviceMesh) -> Tensor:
        """The sum of rows each of which one rank has, in any order; a look-up of -0 gives 0 on one rank, too.

        The ranks' rows are gathered (W times a sum's bytes), because a sum over ranks promises nothing.
        """
        if self.sequence_parallel:
            refuse(mesh, "an embedding with sequence_parallel", "its group has no sum of parts that promises the bits")
        return all_gather(partial.unsqueeze(0), mesh, dim=0, replicated_grad=True).sum(0) + 0.0

    def _look_up(self, ids: Tensor, mesh: DeviceMesh) -> Tensor:
        """This rank's rows of the table, and zeros for ids whose row another rank has."""
        rank, sizes = mesh.get_local_rank(), self.shard_sizes
        start, rows = offsets(sizes)[rank], sizes[rank]
        index, foreign = call("own_ids", ids, self.num_embeddings, start, rows, group_name(mesh))
        if self.blocks is not None:
            return self._look_up_places(index, foreign, start, mesh)
        if self.max_norm is not None and rows:
            with torch.no_grad():
                table = cast(Tensor, local(self.weight))
                torch.embedding_renorm_(table, index[~foreign].contiguous(), self.max_norm, self.norm_type)
        weight = cast(Tensor, local(self.weight))
        if rows == 0:
            weight = F.pad(weight, (0, 0, 0, 1))  # a row to look up; this rank's gradient exists and has no rows
        padding = None if self.padding_idx is None else self.padding_idx - start
        if padding is not None and not 0 <= padding < weight.shape[0]:
            padding = None
        return F.embedding(index, weight, padding).masked_fill(foreign.unsqueeze(-1), 0)

    def _look_up_places(self, index: Tensor, foreign: Tensor, start: int, mesh: DeviceMesh) -> Tensor:
        """The same where rows lie in blocks, each of which has at least one place."""
        assert self.blocks is not None
        index = self.blocks.places_of(index, mesh)
        if self.max_norm is not None:
            with torch.no_grad():
                table = cast(Tensor, local(self.weight)).flatten(0, 1)
                torch.embedding_renorm_(table, index[~foreign].contiguous(), self.max_norm, self.norm_type)
        padding = None
        if self.padding_idx is not None and 0 <= self.padding_idx - start < self.shard_sizes[mesh.get_local_rank()]:
            padding = int(self.blocks.places_of(torch.tensor(self.padding_idx - start), mesh))
        weight = cast(Tensor, local(self.weight)).flatten(0, 1)
        return F.embedding(index, weight, padding).masked_fill(foreign.unsqueeze(-1), 0)

    def _refuse(self, message: str) -> NoReturn:
        if self.mesh.size() > 1:
            agreement.refuse(resolve(self.mesh), self._op(), message)
        raise ValueError(message)

    def _op(self) -> str:
        return "reduce_scatter" if self.sequence_parallel else "all_reduce"

    def extra_repr(self) -> str:
        text = f"{self.num_embeddings}, {self.embedding_dim}, shards={'/'.join(map(str, self.shard_sizes))}"
        text += f", sequence_parallel={self.sequence_parallel}"
        for name in ("padding_idx", "max_norm"):
            value = getattr(self, name)
            text += f", {name}={value}" if value is not None else ""
        return text + (f", implementation={self.implementation!r}" if self.implementation != "auto" else "")


def _own_ids(ids: Tensor, total: int, start: int, rows: int, name: str) -> tuple[Tensor, Tensor]:
    """Ids as rows of this rank's shard, 0 where another rank has the row; and a mask of those places."""
    valid = (ids >= 0) & (ids < total)
    if not (ids.is_cuda and torch.cuda.is_current_stream_capturing()) and not bool(valid.all()):
        _refuse_ids(ids, valid, total, name)
    index = ids - start
    foreign = valid & ((index < 0) | (index >= rows))
    return index.masked_fill(foreign, 0), foreign


def _refuse_ids(ids: Tensor, valid: Tensor, total: int, name: str) -> NoReturn:
    group = resolve(name)
    wrong = (~valid).nonzero()
    place = wrong[0].tolist()
    message = (
        f"ids must be within [0, {total}), the vocabulary: {len(wrong)} of {ids.numel()} are not, the first is "
        f"ids{place} = {int(ids[tuple(place)])} (rank {group.rank} of {group.size})"
    )
    if group.size > 1:
        agreement.refuse(group, "look-up of ids", message)
    raise ValueError(message)


def _own_ids_fake(ids: Tensor, total: int, start: int, rows: int, name: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(ids), torch.empty_like(ids, dtype=torch.bool)


define(
    "own_ids",
    "(Tensor ids, SymInt num_embeddings, SymInt start, SymInt rows, str group_name) -> (Tensor, Tensor)",
    kernel=_own_ids,
    fake=_own_ids_fake,
)
