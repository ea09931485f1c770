"""``unfused``: the collective, then the GEMM (or the reverse), with nothing in between.

The contract in its plainest form, the baseline of every benchmark, and what "auto" falls back to.  It runs on any c10d
group and for any problem.  Partials cross the wire once, in the output's dtype, and are summed in fp32 in rank order:
gloo's own ``reduce_scatter`` sends twice the bytes, and ring reductions round once per rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tpkernels import dispatch
from tpkernels.backends.canonical_rows import KEEP_BITS
from tpkernels.backends.point_to_point import same_bits
from tpkernels.backends.point_to_point.exchange import PartialExchange, ShardExchange
from tpkernels.backends.row_gemms import Epilogue, bias_of, gemm, reduce_rows, take_rows, whole_like
from tpkernels.comm import timeline
from tpkernels.dispatch import Costs, Implementation, Problem
from tpkernels.ops.contract import (
    AllGather,
    AllGatherMatmul,
    AllReduce,
    Context,
    Gathered,
    MatmulAllReduce,
    MatmulReduceScatter,
    ReduceScatter,
)
from tpkernels.partition import Layout, array_split_sizes

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "estimate",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
    "refuses",
    "sum_everywhere",
    "sum_own_rows",
]


def all_gather(context: Context, call: AllGather) -> Callable[[], Tensor]:
    layout, rank = call.layout, context.group.rank
    whole = whole_like(call.x, layout)
    incoming = ShardExchange(context._replace(num_chunks=1), call.x, layout, whole)

    def finish() -> Tensor:
        _lay(whole, layout, rank, call.x)
        for peer, _, rows in incoming.arrivals():
            _lay(whole, layout, peer, rows)
        incoming.finish()
        return whole

    return finish


def all_gather_matmul(context: Context, call: AllGatherMatmul) -> Gathered:
    if context.problem.same_bits:
        return same_bits.all_gather_matmul(context._replace(num_chunks=1), call)
    whole = all_gather(context, AllGather(call.x, call.layout))()
    epilogue = Epilogue(call)
    with timeline.span("gemm", "gemm"):
        epilogue.fill(whole, 0)
    return Gathered(epilogue.outs, epilogue.preactivations, whole if call.keep_whole else None)


def reduce_scatter(context: Context, call: ReduceScatter) -> Tensor:
    return sum_own_rows(context, call.x, call.layout, None)


def matmul_reduce_scatter(context: Context, call: MatmulReduceScatter) -> Tensor:
    if context.problem.same_bits:
        return same_bits.matmul_reduce_scatter(context._replace(num_chunks=1), call)
    if context.group.size == 1:
        return _alone(call)
    partial = _partial(call)
    call.meanwhile()
    return _finished(call, sum_own_rows(context, partial, call.layout, call.bias))


def all_reduce(context: Context, call: AllReduce) -> Tensor:
    return sum_everywhere(context, call.x, None)


def matmul_all_reduce(context: Context, call: MatmulAllReduce) -> Tensor:
    if context.problem.same_bits:
        return same_bits.matmul_all_reduce(context._replace(num_chunks=1), call)
    if context.group.size == 1:
        return _alone(call)
    partial = _partial(call)
    call.meanwhile()
    return _finished(call, sum_everywhere(context, partial, call.bias))


def _alone(call: MatmulReduceScatter | MatmulAllReduce) -> Tensor:
    """One rank: a plain linear, whose bias is part of the one rounding."""
    call.meanwhile()
    return _finished(call, _partial(call, call.bias))


def _finished(call: MatmulReduceScatter | MatmulAllReduce, out: Tensor) -> Tensor:
    if call.tail is not None:
        call.tail.fill(out, 0)
    return out


def _partial(call: MatmulReduceScatter | MatmulAllReduce, bias: Tensor | None = None) -> Tensor:
    partial = call.like.new_empty(call.xs[0].shape[0], call.matrices[0].shape[1])
    if isinstance(call, MatmulReduceScatter) and call.addend is not None:
        bias = call.addend  # the gradient's own sum, which has no bias
    with timeline.span("gemm", "gemm"):
        for x, matrix in zip(call.xs, call.matrices, strict=True):
            gemm(x, matrix, partial, bias)
            bias = partial
    return partial


def sum_own_rows(context: Context, partial: Tensor, layout: Layout, bias: Tensor | None) -> Tensor:
    """Each owner gets everybody's rows of its shard and sums them; one message per pair of ranks.

    ``bias``: one row, or those of this rank's shard.
    """
    context = context._replace(num_chunks=1)
    rank = context.group.rank
    outgoing = PartialExchange(context, layout, partial.shape[1], partial)
    outgoing.post(0, [(peer, _owned(partial, layout, peer).contiguous()) for peer in outgoing.peers])
    own = _owned(partial, layout, rank)
    out = own.new_empty(own.shape)
    reduce_rows(outgoing.parts(0, own), out, bias)
    outgoing.finish()
    return out


def sum_everywhere(context: Context, partial: Tensor, bias: Tensor | None) -> Tensor:
    """Reduce-scatter and all-gather by rows; with two ranks both simply exchange everything."""
    context = context._replace(num_chunks=1)
    group = context.group
    layout = Layout(1, array_split_sizes(partial.shape[0], group.size), 1)
    if group.size == 2:
        outgoing = PartialExchange(context, layout, partial.shape[1], partial, everything=True)
        outgoing.post(0, [(peer, partial) for peer in outgoing.peers])
        reduced = torch.empty_like(partial)
        reduce_rows(outgoing.parts(0, partial), reduced, bias)
        outgoing.finish()
        return reduced
    first = sum(layout.sizes[: group.rank])
    own = sum_own_rows(context, partial, layout, bias_of(bias, first, first + layout.sizes[group.rank]))
    return all_gather(context._replace(tag=context.tag + 1), AllGather(own, layout))()


def _owned(partial: Tensor, layout: Layout, owner: int) -> Tensor:
    if layout.feature:
        low, high = layout.columns(owner)
        return partial[:, low:high]
    return take_rows(partial, layout, owner, 0, layout.shard_rows(owner))


def _lay(whole: Tensor, layout: Layout, rank: int, rows: Tensor) -> None:
    """Copy a shard to its place, unless it was received there."""
    if layout.feature:
        low, high = layout.columns(rank)
        whole[:, low:high] = rows
        return
    target = whole.view(layout.outer, sum(layout.sizes) * layout.inner, whole.shape[1])
    start = sum(layout.sizes[:rank]) * layout.inner
    target = target[:, start : start + layout.sizes[rank] * layout.inner]
    if target.data_ptr() != rows.data_ptr():
        target.copy_(rows.view(target.shape))


def refuses(problem: Problem) -> str | None:
    return None


def estimate(problem: Problem, costs: Costs) -> float:
    gemm = costs.gemm_us(problem) if problem.flops else 0.0
    if problem.world_size == 1:
        return gemm
    rounds = 2 if problem.facts.everywhere and problem.world_size > 2 else 1
    return gemm + costs.link_us(problem.wire_bytes, rounds) + costs.local_us(problem)


for _op, _run in (
    ("all_gather", all_gather),
    ("reduce_scatter", reduce_scatter),
    ("all_reduce", all_reduce),
    ("all_gather_matmul", all_gather_matmul),
    ("matmul_reduce_scatter", matmul_reduce_scatter),
    ("matmul_all_reduce", matmul_all_reduce),
):
    dispatch.register(Implementation("unfused", _op, refuses, estimate, _run, keeps_bits=_op in KEEP_BITS))
