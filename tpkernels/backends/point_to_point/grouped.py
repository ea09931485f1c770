"""``unfused`` and ``chunked`` for grouped GEMMs; the exchanges are those of the dense ops.

``unfused``: all tokens are gathered, then multiplied; or multiplied, then summed over the ranks.

``chunked``: x is on its way before the tokens' experts are waited for.  A rank multiplies its own tokens, then each
chunk as it lands: for every expert of the chunk one GEMM, straight into its rows of the output.  When reducing, the
tokens that other ranks own are computed first, summed over their experts, and leave chunk by chunk.  A further chunk
goes through the weights of its experts again, with a few rows each, so there are fewer chunks the more experts there
are (:meth:`tpkernels.dispatch.Costs.gemm_us`).  The number of chunks changes no bit of a result where that of the
dense ops does not, because the rows of one token meet in the order of their experts.

Refuses CUDA for ``chunked``: a GEMM per chunk and expert was not built for GPUs.
"""

from __future__ import annotations

from torch import Tensor

from tpkernels import dispatch
from tpkernels.backends.canonical_rows import KEEP_BITS
from tpkernels.backends.grouped_gemms import GroupedEpilogue, partial_tokens
from tpkernels.backends.point_to_point import chunked, same_bits, unfused
from tpkernels.backends.point_to_point.exchange import ShardExchange
from tpkernels.backends.row_gemms import accumulation_dtype, whole_like
from tpkernels.comm import timeline
from tpkernels.dispatch import Implementation, Problem
from tpkernels.ops.contract import (
    AllGather,
    AllGatherGroupedMatmul,
    Context,
    Gathered,
    GroupedMatmulAllReduce,
    GroupedMatmulReduceScatter,
)
from tpkernels.partition import Layout, array_split_sizes, offsets

__all__ = [
    "all_gather_grouped_matmul",
    "all_gather_grouped_matmul_unfused",
    "grouped_matmul_all_reduce",
    "grouped_matmul_all_reduce_unfused",
    "grouped_matmul_reduce_scatter",
    "grouped_matmul_reduce_scatter_unfused",
    "refuses_chunks",
]


def all_gather_grouped_matmul_unfused(context: Context, call: AllGatherGroupedMatmul) -> Gathered:
    if context.problem.same_bits:
        return same_bits.all_gather_grouped_matmul(context._replace(num_chunks=1), call)
    whole = call.x
    if context.group.size > 1:
        whole = unfused.all_gather(context, AllGather(call.x, call.layout))()
    epilogue = GroupedEpilogue(call, call.rows())
    with timeline.span("gemm", "gemm"):
        epilogue.fill_tokens(whole, 0)
    if not call.keep_whole:
        return Gathered(epilogue.outs, epilogue.preactivations)
    return Gathered(epilogue.outs, epilogue.preactivations, whole.clone() if whole is call.x else whole)


def grouped_matmul_reduce_scatter_unfused(context: Context, call: GroupedMatmulReduceScatter) -> Tensor:
    if context.problem.same_bits:
        return same_bits.matmul_reduce_scatter(context._replace(num_chunks=1), call)
    partial = _partial(call)
    if context.group.size == 1:
        return _alone(call, partial)
    call.meanwhile()
    return unfused.sum_own_rows(context, partial, call.layout, call.bias)


def grouped_matmul_all_reduce_unfused(context: Context, call: GroupedMatmulAllReduce) -> Tensor:
    if context.problem.same_bits:
        return same_bits.matmul_all_reduce(context._replace(num_chunks=1), call)
    partial = _partial(call)
    if context.group.size == 1:
        return _alone(call, partial)
    call.meanwhile()
    return unfused.sum_everywhere(context, partial, call.bias)


def _partial(call: GroupedMatmulAllReduce) -> Tensor:
    partial = call.like.new_empty(call.rows.num_tokens, call.columns)
    with timeline.span("gemm", "gemm"):
        partial_tokens(call, 0, call.rows.num_tokens, partial)
    return partial


def _alone(call: GroupedMatmulAllReduce, partial: Tensor) -> Tensor:
    call.meanwhile()
    if call.bias is not None:
        partial.copy_(partial.to(accumulation_dtype(partial.dtype)) + call.bias)
    return partial


def all_gather_grouped_matmul(context: Context, call: AllGatherGroupedMatmul) -> Gathered:
    context, layout, rank = chunked.with_chunks(context, call.layout), call.layout, context.group.rank
    if context.problem.same_bits:
        return same_bits.all_gather_grouped_matmul(context, call)
    starts = offsets(layout.sizes)
    whole = whole_like(call.x, layout) if call.keep_whole else None
    incoming = ShardExchange(context, call.x, layout, whole)
    epilogue = GroupedEpilogue(call, call.rows())
    with timeline.span("gemm local", "gemm", peer=rank):
        epilogue.fill_tokens(call.x, starts[rank])
        if whole is not None:
            whole[starts[rank] : starts[rank] + layout.sizes[rank]] = call.x
    for peer, start, rows in incoming.arrivals():
        with timeline.span("gemm", "gemm", peer=peer):
            epilogue.fill_tokens(rows, starts[peer] + start)
    incoming.finish()
    return Gathered(epilogue.outs, epilogue.preactivations, whole)


def grouped_matmul_reduce_scatter(context: Context, call: GroupedMatmulReduceScatter) -> Tensor:
    if context.problem.same_bits:
        return same_bits.matmul_reduce_scatter(chunked.with_chunks(context, call.layout), call)
    starts = offsets(call.layout.sizes)

    def fill(owner: int, start: int, stop: int, out: Tensor) -> None:
        partial_tokens(call, starts[owner] + start, starts[owner] + stop, out)

    context = chunked.with_chunks(context, call.layout)
    return chunked.reduce_scatter_rows(context, call.layout, call.columns, call.like, fill, call)


def grouped_matmul_all_reduce(context: Context, call: GroupedMatmulAllReduce) -> Tensor:
    if context.problem.same_bits:
        layout = Layout(1, array_split_sizes(call.rows.num_tokens, context.group.size), 1)
        return same_bits.matmul_all_reduce(chunked.with_chunks(context, layout), call)

    def fill(start: int, stop: int, out: Tensor) -> None:
        partial_tokens(call, start, stop, out)

    return chunked.all_reduce_rows(context, call.rows.num_tokens, call.columns, call.like, fill, call)


def refuses_chunks(problem: Problem) -> str | None:
    if problem.device != "cpu":
        return f"a GEMM per chunk and expert was built for CPUs, the device here is {problem.device!r}"
    return chunked.refuses(problem)


for _op, _plain, _run in (
    ("all_gather_grouped_matmul", all_gather_grouped_matmul_unfused, all_gather_grouped_matmul),
    ("grouped_matmul_reduce_scatter", grouped_matmul_reduce_scatter_unfused, grouped_matmul_reduce_scatter),
    ("grouped_matmul_all_reduce", grouped_matmul_all_reduce_unfused, grouped_matmul_all_reduce),
):
    _keeps = _op in KEEP_BITS
    dispatch.register(Implementation("unfused", _op, unfused.refuses, unfused.estimate, _plain, keeps_bits=_keeps))
    dispatch.register(
        Implementation(
            "chunked", _op, refuses_chunks, chunked.estimate, _run, describe=chunked.describe, keeps_bits=_keeps
        )
    )
