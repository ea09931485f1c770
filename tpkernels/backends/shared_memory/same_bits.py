"""``shared_memory`` where a call gives the same bits at every degree (:mod:`tpkernels.gemm.canonical`).

A gather copies the peers' shards, one after the other as they are staged, and multiplies each chunk of the whole when
its last row is there.  A sum stages this rank's subtree, in fp32 (fp64 for fp64), and each rank adds the rows that it
needs of all of them: of an all-reduce all rows.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tpkernels.backends.canonical_experts import ExpertArrivals, Sum, shape_of_sums, tree_of
from tpkernels.backends.canonical_rows import Arrivals, combine
from tpkernels.backends.row_gemms import take_rows
from tpkernels.backends.shared_memory.segments import SharedSegments
from tpkernels.ops.contract import (
    AllGatherGroupedMatmul,
    AllGatherMatmul,
    Context,
    Gathered,
    GroupedMatmulAllReduce,
    GroupedMatmulReduceScatter,
    MatmulAllReduce,
    MatmulReduceScatter,
    accumulation_dtype,
)
from tpkernels.partition import peers_after

__all__ = ["all_gather_grouped_matmul", "all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"]


def all_gather_matmul(context: Context, call: AllGatherMatmul, segments: SharedSegments, largest: int) -> Gathered:
    """``largest``: bytes of the largest shard."""
    return _gathered(context, call, Arrivals(context, call), segments, largest)


def all_gather_grouped_matmul(
    context: Context, call: AllGatherGroupedMatmul, segments: SharedSegments, largest: int
) -> Gathered:
    return _gathered(context, call, ExpertArrivals(context, call), segments, largest)


def _gathered(
    context: Context,
    call: AllGatherMatmul | AllGatherGroupedMatmul,
    rows: Arrivals | ExpertArrivals,
    segments: SharedSegments,
    largest: int,
) -> Gathered:
    layout, x = call.layout, call.x
    segments.reserve(largest)
    with segments.call(context.fingerprint, context.text) as channel:
        segments.stage(x)
        channel.signal()
        rows.add(segments.rank, 0, x)
        for peer in peers_after(segments.rank, segments.size):
            channel.wait(peer, 1)
            columns = layout.sizes[peer] if layout.feature else x.shape[1]
            rows.add(peer, 0, segments.view(peer, (layout.shard_rows(peer), columns), x.dtype))
    return rows.gathered()


def matmul_reduce_scatter(
    context: Context, call: MatmulReduceScatter | GroupedMatmulReduceScatter, segments: SharedSegments
) -> Tensor:
    layout, rank = call.layout, segments.rank

    def own(sums: Tensor) -> Tensor:
        if not layout.feature:
            return take_rows(sums, layout, rank, 0, layout.shard_rows(rank))
        low, high = layout.columns(rank)
        return sums[:, low:high]

    return _sum(context, call, segments, own)


def matmul_all_reduce(
    context: Context, call: MatmulAllReduce | GroupedMatmulAllReduce, segments: SharedSegments
) -> Tensor:
    return _sum(context, call, segments, lambda sums: sums)


def _sum(
    context: Context,
    call: Sum,
    segments: SharedSegments,
    needed: Callable[[Tensor], Tensor],
) -> Tensor:
    """``needed``: what this rank adds of all ranks' sums."""
    like = call.like
    shape, wide = shape_of_sums(call), accumulation_dtype(like.dtype)
    segments.reserve(shape[0] * shape[1] * wide.itemsize)
    with segments.call(context.fingerprint, context.text) as channel:
        tree_of(context, call, segments.view(segments.rank, shape, wide)).complete()
        channel.signal()
        call.meanwhile()
        for peer in peers_after(segments.rank, segments.size):
            channel.wait(peer, 1)
        parts = [needed(segments.view(rank, shape, wide)) for rank in range(segments.size)]
        out = like.new_empty(parts[0].shape)
        combine(parts, out, call.bias)
    return out
