"""The six ops over mail: everybody sends everything to everybody, and computes behind it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tests.backends.toy.mailbox import Mailbox
from tpkernels import dispatch
from tpkernels.backends.row_gemms import Epilogue, gemm, product, reduce_rows, take_rows
from tpkernels.comm import resources
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
from tpkernels.partition import Layout


def all_gather(context: Context, call: AllGather) -> Callable[[], Tensor]:
    box, layout, x = _box(context), call.layout, call.x
    number, ranks = box.post(x, context.fingerprint), range(context.group.size)

    def finish() -> Tensor:
        shapes = [(layout.shard_rows(r), layout.sizes[r] if layout.feature else x.shape[1]) for r in ranks]
        shards = box.collect(number, context.fingerprint, shapes, x.dtype)
        whole = x.new_empty(layout.total_rows, sum(layout.sizes) if layout.feature else x.shape[1])
        for rank, shard in enumerate(shards):
            if layout.feature:
                low, high = layout.columns(rank)
                whole[:, low:high] = shard
                continue
            for segment in layout.segments(rank, 0, shard.shape[0]):
                whole[segment.dst : segment.dst + segment.stop - segment.start] = shard[segment.start : segment.stop]
        return whole

    return finish


def all_gather_matmul(context: Context, call: AllGatherMatmul) -> Gathered:
    whole, epilogue = all_gather(context, AllGather(call.x, call.layout))(), Epilogue(call)
    epilogue.fill(whole, 0)
    return Gathered(epilogue.outs, epilogue.preactivations, whole if call.keep_whole else None)


def reduce_scatter(context: Context, call: ReduceScatter) -> Tensor:
    return _sum(context, call.x, None, lambda whole: _own(whole, call.layout, context.group.rank))


def matmul_reduce_scatter(context: Context, call: MatmulReduceScatter) -> Tensor:
    partial = product(call)
    call.meanwhile()
    out = _sum(context, partial, call.bias, lambda whole: _own(whole, call.layout, context.group.rank))
    if call.tail is not None:
        call.tail.fill(out, 0)
    return out


def all_reduce(context: Context, call: AllReduce) -> Tensor:
    return _sum(context, call.x, None, lambda whole: whole)


def matmul_all_reduce(context: Context, call: MatmulAllReduce) -> Tensor:
    partial, earlier = call.like.new_empty(call.xs[0].shape[0], call.matrices[0].shape[1]), None
    for x, matrix in zip(call.xs, call.matrices, strict=True):
        gemm(x, matrix, partial, earlier)
        earlier = partial
    call.meanwhile()
    out = _sum(context, partial, call.bias, lambda whole: whole)
    if call.tail is not None:
        call.tail.fill(out, 0)
    return out


def _sum(context: Context, partial: Tensor, bias: Tensor | None, part: Callable[[Tensor], Tensor]) -> Tensor:
    box, fingerprint = _box(context), context.fingerprint
    shapes = [partial.shape] * context.group.size
    parts = [part(one) for one in box.collect(box.post(partial, fingerprint), fingerprint, shapes, partial.dtype)]
    out = parts[0].new_empty(parts[0].shape)
    reduce_rows(parts, out, bias)
    return out


def _own(whole: Tensor, layout: Layout, rank: int) -> Tensor:
    if layout.feature:
        low, high = layout.columns(rank)
        return whole[:, low:high]
    return take_rows(whole, layout, rank, 0, layout.shard_rows(rank))


def _box(context: Context) -> Mailbox:
    box: Mailbox = context.group.resources[Mailbox.name]
    return box


def _refuses(problem: Problem) -> str | None:
    return problem.refusal(Mailbox.name)


def _estimate(problem: Problem, costs: Costs) -> float:
    """As if a round carried a megabyte."""
    rounds = 1 + problem.world_size * problem.m * problem.row_bytes / 1e6
    return costs.gemm_us(problem) + rounds * (costs.own_cost("mailbox_round_us") or 1000.0)


OPS = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
    "matmul_all_reduce": matmul_all_reduce,
}


def register() -> None:
    resources.register(Mailbox)
    for op, run in OPS.items():
        dispatch.register(Implementation("toy", op, _refuses, _estimate, run))
