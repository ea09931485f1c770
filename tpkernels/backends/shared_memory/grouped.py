"""``shared_memory`` for grouped GEMMs: chunks are shards, read where they lie.

All-gather: a rank stages its tokens once, multiplies its own, then those of each peer out of the peer's segment; where
a GEMM per expert and shard costs more than copying, all tokens are gathered first.  When reducing, each rank writes the
weighted sums of all tokens to its segment in one grouped GEMM, because cutting it by owners would go through the
weights of all experts again, and every owner sums its tokens in place.  An all-reduce sums everything everywhere; of
much data each rank sums its share.

Sums with a bias, which has a row per token, are made by torch, all others by the compiled core, with the same bits.
"""

from __future__ import annotations

from torch import Tensor

from tpkernels import dispatch
from tpkernels.backends.canonical_rows import KEEP_BITS
from tpkernels.backends.grouped_gemms import GroupedEpilogue, partial_tokens
from tpkernels.backends.row_gemms import reduce_rows, whole_like
from tpkernels.backends.shared_memory import implementations as dense
from tpkernels.backends.shared_memory import same_bits
from tpkernels.comm import timeline
from tpkernels.dispatch import Implementation
from tpkernels.ops.contract import (
    AllGatherGroupedMatmul,
    Context,
    Gathered,
    GroupedMatmulAllReduce,
    GroupedMatmulReduceScatter,
)
from tpkernels.partition import offsets, peers_after

__all__ = ["all_gather_grouped_matmul", "grouped_matmul_all_reduce", "grouped_matmul_reduce_scatter"]


def all_gather_grouped_matmul(context: Context, call: AllGatherGroupedMatmul) -> Gathered:
    segments, layout, rank = dense.segments_of(context), call.layout, context.group.rank
    if context.problem.same_bits:
        return same_bits.all_gather_grouped_matmul(context, call, segments, dense.largest_shard(layout, call.x))
    in_place = not dense.in_one_gemm(context.problem, context.costs)
    whole = whole_like(call.x, layout) if call.keep_whole or not in_place else None
    epilogue, starts = GroupedEpilogue(call, call.rows()), offsets(layout.sizes)
    segments.reserve(dense.largest_shard(layout, call.x))
    with segments.call(context.fingerprint, context.text) as channel:
        segments.stage(call.x)
        channel.signal()
        if not in_place:
            assert whole is not None
            dense.gather_shards(channel, layout, call.x, whole)
            with timeline.span("gemm", "gemm"):
                epilogue.fill_tokens(whole, 0)
        else:
            for peer in (rank, *peers_after(rank, segments.size)):
                rows = call.x
                if peer != rank:
                    channel.wait(peer, 1)
                    rows = segments.view(peer, (layout.shard_rows(peer), call.x.shape[1]), call.x.dtype)
                with timeline.span("gemm", "gemm", peer=peer):
                    epilogue.fill_tokens(rows, starts[peer])
                if whole is not None:
                    whole[starts[peer] : starts[peer] + layout.sizes[peer]] = rows
    return Gathered(epilogue.outs, epilogue.preactivations, whole if call.keep_whole else None)


def grouped_matmul_reduce_scatter(context: Context, call: GroupedMatmulReduceScatter) -> Tensor:
    if context.problem.same_bits:
        return same_bits.matmul_reduce_scatter(context, call, dense.segments_of(context))
    first = offsets(call.layout.sizes)[context.group.rank]
    return _sum_tokens(context, call, first, first + call.layout.sizes[context.group.rank], everywhere=False)


def grouped_matmul_all_reduce(context: Context, call: GroupedMatmulAllReduce) -> Tensor:
    if context.problem.same_bits:
        return same_bits.matmul_all_reduce(context, call, dense.segments_of(context))
    return _sum_tokens(context, call, 0, call.rows.num_tokens, everywhere=True)


def _sum_tokens(context: Context, call: GroupedMatmulAllReduce, start: int, stop: int, *, everywhere: bool) -> Tensor:
    """The sum over the ranks of the partials of tokens ``[start, stop)``, of all of them ``everywhere``."""
    segments, shape = dense.segments_of(context), (call.rows.num_tokens, call.columns)
    out = call.like.new_empty(stop - start, call.columns)
    segments.reserve(shape[0] * shape[1] * out.element_size())
    with segments.call(context.fingerprint, context.text) as channel:
        with timeline.span("gemm", "gemm"):
            partial_tokens(call, 0, shape[0], segments.view(segments.rank, shape, out.dtype))
        channel.signal()
        call.meanwhile()
        by_shares = everywhere and segments.size > 2 and out.nbytes > dense.ONE_SHOT_BYTES
        if call.bias is None and by_shares:
            dense.sum_shares(segments, segments.view(segments.rank, shape, out.dtype), None, out, None)
        elif call.bias is None:
            dense.sum_slots(channel, start * call.columns, call.columns, None, out, None, 0)
        else:
            for peer in peers_after(segments.rank, segments.size):
                channel.wait(peer, 1)
            parts = [segments.view(peer, shape, out.dtype)[start:stop] for peer in range(segments.size)]
            reduce_rows(parts, out, call.bias)
    return out


for _op, _run in (
    ("all_gather_grouped_matmul", all_gather_grouped_matmul),
    ("grouped_matmul_reduce_scatter", grouped_matmul_reduce_scatter),
    ("grouped_matmul_all_reduce", grouped_matmul_all_reduce),
):
    dispatch.register(
        Implementation("shared_memory", _op, dense.refuses, dense.estimate, _run, keeps_bits=_op in KEEP_BITS)
    )
