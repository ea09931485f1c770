"""``symmetric`` for grouped GEMMs: the traffic of the dense ops around one Triton kernel for all experts.

All-gather: copy engines bring the peers' tokens while the host waits for the routing; the kernel begins with the
experts of this rank's tokens, and takes the chunks as they come.  When reducing, it computes the tokens that other
ranks own first, sums each token's rows in fp32, and announces finished chunks, which leave while it goes on.  Where
tokens are few they are gathered first, or summed in one kernel afterwards, so that an expert's weights are read once;
the GEMM is the same kernel.

The table of tiles is made from the routing of each call and uploaded, so these calls cannot be captured in CUDA graphs.
What else a launch needs is made at the first call of its kind.

Biases of a reduction, which differ from token to token, are added to the sums in fp32 by torch, and rounded with them.

No GPU has timed these calls: they are made where ``implementation="symmetric"`` asks for them, and "auto" leaves them.
Refuses fp8 operands on GPUs without fp8.  Experts that are dealt out over the ranks: ``dealt.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpkernels import dispatch
from tpkernels.backends.canonical_rows import KEEP_BITS, check_sum
from tpkernels.backends.row_gemms import whole_like
from tpkernels.backends.symmetric import implementations as dense
from tpkernels.backends.symmetric import same_bits
from tpkernels.backends.symmetric.channels import Channel
from tpkernels.backends.symmetric.copy_engine_traffic import Matrix, largest_shard, pull
from tpkernels.backends.symmetric.grouped_launches import Outputs, chunks_of, combining_launches, gather_launches
from tpkernels.backends.symmetric.resource import channels_of
from tpkernels.dispatch import Costs, Implementation, Problem
from tpkernels.errors import UnsupportedProblem
from tpkernels.ops.contract import (
    GATED,
    AllGatherGroupedMatmul,
    Context,
    Gathered,
    GroupedMatmulAllReduce,
    GroupedMatmulReduceScatter,
)
from tpkernels.partition import Layout, array_split_sizes, offsets

__all__ = [
    "all_gather_grouped_matmul",
    "grouped_matmul_all_reduce",
    "grouped_matmul_reduce_scatter",
    "is_cut",
    "outputs_of",
    "partial_sums",
    "register",
]


def all_gather_grouped_matmul(context: Context, call: AllGatherGroupedMatmul) -> Gathered:
    channel, layout, op = channels_of(context.group).main, call.layout, "all_gather_grouped_matmul"
    whole, outputs = whole_like(call.x, layout), outputs_of(call, layout.total_rows * context.problem.top_k)
    num_chunks = chunks_of(context, channel) if is_cut(context, layout) else 0
    launches_of = gather_launches(context, channel, call, layout, whole, outputs, num_chunks)
    channel.prepare(largest_shard(layout, call.x), context.fingerprint, context.text)
    try:
        if num_chunks:
            moved = pull(channel, op, call.x, layout, whole, num_chunks, True, dense.START)
            for launch in launches_of(call.rows()):
                channel.device.launch(launch)
            channel.run(moved, dense.FINISH)
        else:
            pull(channel, op, call.x, layout, whole, 1, False, dense.START | dense.FINISH)
    finally:
        channel.settle()
    if not num_chunks:
        for launch in launches_of(call.rows()):
            launch()
    return Gathered(outputs.outs, outputs.preactivations, whole if call.keep_whole else None)


def outputs_of(call: AllGatherGroupedMatmul, rows: int) -> Outputs:
    dtype = call.out_dtype or call.x.dtype
    empty = [partial(call.x.new_empty, (rows, matrix.shape[2]), dtype=dtype) for matrix in call.matrices]
    kept = empty if call.keep_preactivation and call.activation is not None else []
    return Outputs([make() for make in (empty[:1] if call.activation in GATED else empty)], [make() for make in kept])


def grouped_matmul_reduce_scatter(context: Context, call: GroupedMatmulReduceScatter) -> Tensor:
    channel = channels_of(context.group).main
    return _sum_shard(channel, context, call, call.layout)


def grouped_matmul_all_reduce(context: Context, call: GroupedMatmulAllReduce) -> Tensor:
    channel, like, op = channels_of(context.group).main, call.like, context.problem.op
    layout = Layout(1, array_split_sizes(call.rows.num_tokens, channel.size), 1)
    if context.problem.same_bits:
        return dense.gather_sums(channel, context, op, _sum_shard(channel, context, call, layout), layout)
    # With biases the sums stay in fp32 until these are added, and so do what is sent of few tokens.
    sums = like.dtype if call.bias is None else torch.float32
    in_kernel = dense.in_one_kernel(channel.size, call.rows.num_tokens * call.columns * sums.itemsize)
    if in_kernel is None:
        return dense.gather_sums(channel, context, op, _sum_shard(channel, context, call, layout), layout)
    out = in_kernel(channel, context, op, partial_sums(channel, context, call).to(sums), None)
    call.meanwhile()
    return _with_bias(out, call.bias, like)


def _sum_shard(channel: Channel, context: Context, call: GroupedMatmulAllReduce, layout: Layout) -> Tensor:
    """The sum over the ranks of this rank's tokens, with their biases."""
    op, bias = context.problem.op, call.bias
    if bias is not None and bias.shape[0] != layout.sizes[channel.rank]:  # of all tokens
        first = offsets(layout.sizes)[channel.rank]
        bias = bias[first : first + layout.sizes[channel.rank]]
    if context.problem.same_bits:
        check_sum(context, call)
        return same_bits.sum_of_tokens(context, channel, op, call, layout, bias)
    sums = None if bias is None else torch.float32
    if is_cut(context, layout):
        cut = call if isinstance(call, GroupedMatmulReduceScatter) else _scattered(call, layout)
        own = dense.fused_scatter(
            channel, context, op, cut, None, partial(combining_launches, context, channel, call, layout), sums
        )
    else:
        own = dense.scatter(
            channel, context, op, partial_sums(channel, context, call), layout, None, call.meanwhile, sums
        )  # fmt: skip
    return _with_bias(own, bias, call.like)


def _scattered(call: GroupedMatmulAllReduce, layout: Layout) -> GroupedMatmulReduceScatter:
    return GroupedMatmulReduceScatter(
        call.xs, call.matrices, call.rows, call.weights, None, call.addend, call.meanwhile, call.expert_biases,
        call.out_dtype, layout=layout,
    )  # fmt: skip


def _with_bias(sums: Tensor, bias: Tensor | None, like: Tensor) -> Tensor:
    return sums if bias is None else (sums + bias).to(like.dtype)


def partial_sums(channel: Channel, context: Context, call: GroupedMatmulAllReduce) -> Tensor:
    """This rank's sums of all tokens, on the current stream."""
    rows, columns = call.rows.num_tokens, call.columns
    sums = call.like.new_empty(rows, columns)
    launches, _ = combining_launches(context, channel, call, None, (Matrix(0, rows, columns, columns),), sums)
    for launch in launches:
        launch()
    return sums


def is_cut(context: Context, layout: Layout) -> bool:
    """Whether tokens come and leave in chunks beside the GEMM: where those of a shard make a tile's rows."""
    return layout.max_shard_rows * context.problem.top_k >= dense.FUSE_FROM_ROWS


def register(op: str, work: Callable[[Context, Any], Any]) -> None:
    """By name alone, with the checks of the dense ops, and of the GPU where operands are fp8."""
    runs, keeps = partial(dense.checked, partial(_with_kernel, work)), op in KEEP_BITS
    agree = partial(dense.agree, runs)
    dispatch.register(
        Implementation(
            "symmetric", op, dense.refuses, _estimate, runs, agree, None, _describe, keeps_bits=keeps, has_own_bits=True
        )
    )


def _with_kernel(work: Callable[[Context, Any], Any], context: Context, call: Any) -> Any:
    """All ranks have one kind of GPU."""
    device = channels_of(context.group).device
    if not dense.has_kernel(device, call.out_dtype):
        raise UnsupportedProblem(f"fp8 operands of experts need capability 8.9, this GPU has {device.capability / 10}")
    return work(context, call)


def _estimate(problem: Problem, costs: Costs) -> None:
    return None


def _describe(problem: Problem) -> str:
    return "by name alone: no GPU has timed it"


register("all_gather_grouped_matmul", all_gather_grouped_matmul)
register("grouped_matmul_reduce_scatter", grouped_matmul_reduce_scatter)
register("grouped_matmul_all_reduce", grouped_matmul_all_reduce)
