"""``symmetric``: GPUs that address each other's memory; copy engines move chunks while one GEMM kernel computes others.

All-gather: each rank puts its shard into its slot and signals; copy engines pull the peers' chunks into the gathered
tensor on side streams and raise a local flag behind each; one persistent Triton kernel per weight starts on the rank's
own rows and takes the chunks as they come.  Reduce-scatter: the kernel computes the rows of remote owners first and
announces finished chunks; copy engines push them into the owners' slots and signal; behind the GEMM a CUDA kernel sums
the partials of all ranks in rank order, in fp32, adds the bias and rounds once.  All-reduce: one kernel that pushes to
everybody and sums, for little data; one kernel that sums shares and pushes the sums, for more; else reduce-scatter,
then all-gather.  Where the GPUs have NVLS, kernels push with stores that reach everybody at once.  They never let
the switch sum, which adds in an order and with roundings of its own.

The gathered tensor is ordinary memory, so it can be given out; slots hold shards and partials, never results.  Shards
of few rows, and of features, are gathered (or reduced) around a library GEMM: a kernel that reads the weight once per
shard would cost more than it hides.

Memory: a slot holds the largest shard (gathers), W partials of the largest owner's rows (scatters), W whole tensors
(all-reduce in one step), two of them (in two), or the whole sum (gathered by multicast); there are two slots, and two
of the largest started gather.

Streams: everything is enqueued on the current stream, or forked from it and joined to it; the host waits for nothing
once a call's kind is known, so calls can be captured in CUDA graphs after one that was not; all ranks replay at the
same places of their sequences of calls, on a stream that is ordered with those of the group's other calls.  A wait
that fails ends its kernels and leaves a record; the next call on the group, or whoever asks
``Group.symmetric.check()`` after having synchronised, raises, and outputs since then are void.

One GPU, for tests and measurements: W processes with ``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1`` in a gloo group
run this very file (NCCL refuses several ranks on one GPU), each with a share of the SMs: call
``Group.symmetric.share_gpu`` on every rank before the first op.  Or W threads of one process, each with a stream,
a ``Group`` made by hand, and a ``Device`` whose ``allocate`` hands out ordinary tensors of all of them: then
``CUDA_DEVICE_MAX_CONNECTIONS=32``, and all spinning CTAs must fit at once.

Ideas: copy-engine producers with signals after Flux and PyTorch's async TP; one GEMM over arriving chunks after Flux
and Triton-distributed; remote rows first with a separate reducer after FlashOverlap and Flux.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpkernels import dispatch
from tpkernels.backends.canonical_rows import KEEP_BITS, check_sum
from tpkernels.backends.row_gemms import Epilogue, earlier_products, product, whole_like
from tpkernels.backends.symmetric import costs as symmetric_costs
from tpkernels.backends.symmetric import same_bits, self_check, tuning
from tpkernels.backends.symmetric.channels import Channel
from tpkernels.backends.symmetric.copy_engine_traffic import (
    DTYPES,
    Matrix,
    gather,
    largest_shard,
    matrices_of,
    part_bytes,
    pull,
    push,
    reduce,
    staged,
)
from tpkernels.backends.symmetric.cuda_native import MAX_CHUNKS, Steps
from tpkernels.backends.symmetric.kernel_launches import Launch, gather_launches, own_rows, scatter_launch
from tpkernels.backends.symmetric.memory import Device
from tpkernels.backends.symmetric.one_kernel import one_shot, one_shot_norm, two_shot
from tpkernels.backends.symmetric.resource import MULTICAST, SymmetricMemory, channels_of
from tpkernels.backends.symmetric.self_check import Way
from tpkernels.comm import resources
from tpkernels.comm.groups import Group
from tpkernels.dispatch import Costs, Implementation, Problem
from tpkernels.errors import UnsupportedProblem
from tpkernels.kernels.config import Tiles
from tpkernels.ops.contract import (
    AllGather,
    AllGatherMatmul,
    AllReduce,
    Context,
    Gathered,
    GroupedMatmulReduceScatter,
    MatmulAllReduce,
    MatmulReduceScatter,
    ReduceScatter,
)
from tpkernels.partition import Layout, array_split_sizes

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "has_kernel",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
]

# Shards of fewer rows than a tile leave tensor cores idle, and the weight would be read once per shard.
FUSE_FROM_ROWS = 64
# Up to here every rank sends everything to every other. Beyond, two steps move less: (W - 1) n bytes against 2 n. In
# one kernel they cost one launch, but its blocks are few, and what copies can hide behind a GEMM stays visible. Both
# limits are modelled: no machine with several GPUs has measured them yet.
ONE_SHOT_BYTES = 512 * 1024
TWO_SHOT_BYTES = 8 * 1024 * 1024
# Modelled, too: from here on a second copy within the GPU, at some 2 TB/s, takes longer than enqueuing the copies does.
MULTICAST_BYTES = 32 * 1024 * 1024
START, FINISH = Steps.BEGIN | Steps.MOVE, Steps.JOIN | Steps.END
CHECKED_ROWS = 80


def all_gather_matmul(context: Context, call: AllGatherMatmul) -> Gathered:
    channel, layout = channels_of(context.group).main, call.layout
    whole = whole_like(call.x, layout)
    epilogue = Epilogue(call)
    launches: list[Launch] = []
    later: list[Launch] = []
    num_chunks, in_blocks, complete = 1, context.problem.same_bits > 0, _nothing
    fuses = layout.max_shard_rows >= FUSE_FROM_ROWS and has_kernel(channel.device, call.out_dtype)
    if not layout.feature and (fuses or in_blocks):
        launches, num_chunks = gather_launches(context, channel, call, layout, call.operand(whole), epilogue)
    elif in_blocks:  # the same kernel, when everything is there
        operand, complete = same_bits.features(call, whole)
        later, _ = gather_launches(context, channel, call, own_rows(channel, layout.total_rows), operand, epilogue)
    gather(channel, context, "all_gather_matmul", call.x, layout, whole, num_chunks, launches)
    complete()
    for launch in later:
        launch()
    if not launches and not later:
        epilogue.fill(whole, 0)
    return Gathered(epilogue.outs, epilogue.preactivations, whole if call.keep_whole else None)


def matmul_reduce_scatter(context: Context, call: MatmulReduceScatter) -> Tensor:
    layout = call.layout
    channel, bias = channels_of(context.group).main, _contiguous(call.bias)
    if context.problem.same_bits:
        check_sum(context, call)
        return same_bits.sum_of_shard(context, channel, "matmul_reduce_scatter", call, bias)
    if layout.feature or layout.max_shard_rows < FUSE_FROM_ROWS or not has_kernel(channel.device, call.out_dtype):
        out = scatter(channel, context, "matmul_reduce_scatter", product(call), layout, bias, call.meanwhile)
    else:
        out = fused_scatter(channel, context, "matmul_reduce_scatter", call, bias, _dense(context, channel, call))
    return _finished(call, out)


def _dense(context: Context, channel: Channel, call: MatmulReduceScatter) -> Callable[..., tuple[list[Launch], int]]:
    """The GEMM of a :func:`fused_scatter`; products before the last one are made at once."""
    addend = earlier_products(call)

    def launches_of(parts: Sequence[Matrix], staging: Tensor) -> tuple[list[Launch], int]:
        launch, num_chunks = scatter_launch(context, channel, call, addend, parts, staging, call.like.dtype)
        return [launch], num_chunks

    return launches_of


def _finished(call: MatmulReduceScatter | MatmulAllReduce, out: Tensor) -> Tensor:
    if call.tail is not None:
        call.tail.fill(out, 0)
    return out


def matmul_all_reduce(context: Context, call: MatmulAllReduce) -> Tensor:
    channel, like = channels_of(context.group).main, call.like
    rows, columns, bias = call.xs[0].shape[0], call.matrices[0].shape[1], _contiguous(call.bias)
    layout = Layout(1, array_split_sizes(rows, channel.size), 1)
    as_scatter = MatmulReduceScatter(call.xs, call.matrices, layout, None, None, call.meanwhile, call.out_dtype)
    if context.problem.same_bits:
        check_sum(context, call)
        own = same_bits.sum_of_shard(context, channel, "matmul_all_reduce", as_scatter, bias)
        return gather_sums(channel, context, "matmul_all_reduce", own, layout)
    in_kernel = in_one_kernel(channel.size, rows * columns * like.element_size())
    if in_kernel is one_shot and call.tail is not None:
        out = one_shot_norm(channel, context, product(as_scatter), bias, call.tail)
        call.meanwhile()
        return out
    if in_kernel is not None:
        out = in_kernel(channel, context, "matmul_all_reduce", product(as_scatter), bias)
        call.meanwhile()
        return _finished(call, out)
    if layout.max_shard_rows < FUSE_FROM_ROWS or not has_kernel(channel.device, call.out_dtype):
        own = scatter(channel, context, "matmul_all_reduce", product(as_scatter), layout, bias, call.meanwhile)
    else:
        launches_of = _dense(context, channel, as_scatter)
        own = fused_scatter(channel, context, "matmul_all_reduce", as_scatter, bias, launches_of)
    return _finished(call, gather_sums(channel, context, "matmul_all_reduce", own, layout))


def all_gather(context: Context, call: AllGather) -> Callable[[], Tensor]:
    """On a channel of its own: an op may run until the caller asks for the whole."""
    channel = channels_of(context.group).side
    whole = whole_like(call.x, call.layout)
    channel.prepare(largest_shard(call.layout, call.x), context.fingerprint, context.text)
    try:
        started = pull(channel, "all_gather", call.x, call.layout, whole, 1, flags=False)
    except BaseException:
        channel.settle()
        raise

    def finish(kept: Tensor = call.x) -> Tensor:  # the shard is read until then
        with channel.device.current():
            channel.device.order()
            channel.run(started, FINISH)
        return whole

    return finish


def reduce_scatter(context: Context, call: ReduceScatter) -> Tensor:
    return scatter(channels_of(context.group).main, context, "reduce_scatter", call.x, call.layout, None, _nothing)


def all_reduce(context: Context, call: AllReduce) -> Tensor:
    channel, x = channels_of(context.group).main, call.x
    if (in_kernel := in_one_kernel(channel.size, x.numel() * x.element_size())) is not None:
        return in_kernel(channel, context, "all_reduce", x, None)
    layout = Layout(1, array_split_sizes(x.shape[0], channel.size), 1)
    own = scatter(channel, context, "all_reduce", x, layout, None, _nothing)
    return gather_sums(channel, context, "all_reduce", own, layout)


# --- calls of the protocol --------------------------------------------------------------------------------------------


def gather_sums(channel: Channel, context: Context, op: str, own: Tensor, layout: Layout) -> Tensor:
    """The second half of an all-reduce: everybody's sums, from everybody. Multicast, each leaves its rank once.

    That takes one launch, but passes through slots; copy engines put them in place.
    """
    out = whole_like(own, layout)
    if not channel.multicasts or out.numel() * out.element_size() > MULTICAST_BYTES:
        gather(channel, context, op, own, layout, out, 1, phase=1)
        return out
    part = channel.device.library.one_shot_slot_bytes(largest_shard(layout, own))
    channel.prepare(channel.size * part, context.fingerprint + 1, context.text)
    channel.group.all_gather(
        channel.one_shot(op), element_bytes=own.element_size(), x=own.data_ptr(), out=out.data_ptr(),
        counts=[layout.shard_rows(rank) * out.shape[1] for rank in range(channel.size)],
        stream=channel.device.stream(),
    )  # fmt: skip
    return out


def scatter(
    channel: Channel,
    context: Context,
    op: str,
    x: Tensor,
    layout: Layout,
    bias: Tensor | None,
    meanwhile: Callable[[], None],
    sums: torch.dtype | None = None,
) -> Tensor:
    """A whole call: the sum over ranks of this rank's rows (or columns) of a contiguous ``x`` that exists.

    sums: the dtype of the result, if it is not that of ``x``.
    """
    rank, itemsize = channel.rank, x.element_size()
    parts = matrices_of(layout, x.shape[0], x.shape[1], itemsize)
    columns = layout.sizes[rank] if layout.feature else x.shape[1]
    out = x.new_empty(layout.shard_rows(rank), columns, dtype=sums)
    num_chunks = min(MAX_CHUNKS, context.num_chunks if layout.outer == 1 and not layout.feature else 1)
    repeats = parts[rank].columns // max(1, columns)
    bias = bias.repeat(repeats) if bias is not None and repeats > 1 else bias
    channel.prepare(channel.size * max(part_bytes(part, itemsize) for part in parts), context.fingerprint, context.text)
    try:
        push(channel, op, x, parts, itemsize, num_chunks, False, START)
        meanwhile()
        reduce(channel, op, _placed(parts[rank], x), x.dtype, bias, out, num_chunks)
    finally:
        channel.settle()
    return out


def fused_scatter(
    channel: Channel,
    context: Context,
    op: str,
    call: MatmulReduceScatter | GroupedMatmulReduceScatter,
    bias: Tensor | None,
    launches_of: Callable[[Sequence[Matrix], Tensor], tuple[Sequence[Launch], int]],
    sums: torch.dtype | None = None,
) -> Tensor:
    """A whole call: the GEMM announces chunks of partial rows, which leave while it goes on.

    launches_of: from the owners' parts of a staging buffer, kernels of which the last one announces, and the number of
    chunks of every shard.  sums: the dtype of the result, if it is not that of the partials.
    """
    rank, layout, like, columns = channel.rank, call.layout, call.like, call.columns
    parts, num_bytes = staged(layout, columns, like.element_size())
    staging = channel.device.empty((num_bytes,), torch.uint8)
    out = like.new_empty(layout.shard_rows(rank), columns, dtype=sums)
    launches, num_chunks = launches_of(parts, staging)
    channel.prepare(
        channel.size * max(part_bytes(part, like.element_size()) for part in parts), context.fingerprint, context.text
    )
    try:
        sent = push(channel, op, staging, parts, like.element_size(), num_chunks, True, Steps.BEGIN)
        for launch in launches:
            channel.device.launch(launch)
        channel.run(sent, Steps.MOVE, staging.data_ptr())
        call.meanwhile()
        reduce(channel, op, _placed(parts[rank], staging), like.dtype, bias, out, num_chunks)
    finally:
        channel.settle()
    return out


def _placed(part: Matrix, whole: Tensor) -> Matrix:
    """At its address in a tensor."""
    return part._replace(address=whole.data_ptr() + part.address)


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def _nothing() -> None:
    return None


# --- selection --------------------------------------------------------------------------------------------------------


def checked(work: Callable[[Context, Any], Any], context: Context, call: Any) -> Any:
    """Any op: unless an earlier call has failed meanwhile, on the group's device."""
    channels = channels_of(context.group)
    channels.check()
    with channels.device.current():
        channels.device.order()
        try:
            return work(context, call)
        except UnsupportedProblem as refusal:
            raise UnsupportedProblem(f"{context.text}: {refusal}") from refusal


def has_kernel(device: Device, out_dtype: torch.dtype | None) -> bool:
    """Whether the fused kernels run on this kind of GPU, which all ranks have; fp8 came with capability 8.9."""
    return out_dtype is None or device.capability >= tuning.FP8_CAPABILITY


_Sums = Callable[[Channel, Context, str, Tensor, Tensor | None], Tensor]


def in_one_kernel(size: int, num_bytes: int) -> _Sums | None:
    """What sums so much over all ranks in one kernel; None if that is too much for one."""
    if num_bytes <= _one_shot_bytes(size):
        return one_shot
    return two_shot if num_bytes <= TWO_SHOT_BYTES else None


def _one_shot_bytes(size: int) -> int:
    return (4 if size == 2 else 1) * ONE_SHOT_BYTES


def agree(work: Callable[..., Any], group: Group, call: int, problem: Problem, layout: Layout) -> Tiles | None:
    """Check the kernels of this problem on this group (self_check), then return measured tiles that all ranks share."""
    everywhere = problem.facts.everywhere
    sums = in_one_kernel(problem.world_size, problem.m * problem.row_bytes) if everywhere else None
    if problem.same_bits and problem.facts.multiplies:  # tiles follow from the blocks, whoever has measured what
        self_check.check(work, group, call, problem, Way("in blocks", CHECKED_ROWS))
        return None
    if everywhere:
        layout = Layout(1, array_split_sizes(problem.m, problem.world_size), 1)
    rows = layout.max_shard_rows * problem.top_k
    fused = problem.facts.multiplies and not layout.feature and rows >= FUSE_FROM_ROWS
    self_check.check(work, group, call, problem, _way(sums, fused, problem))
    if sums is not None or not fused or problem.facts.grouped:
        return None
    if not has_kernel(channels_of(group).device, problem.out_dtype):
        return None
    return tuning.agree(group, call, tuning.gemm_of(problem), layout)


def _way(sums: _Sums | None, fused: bool, problem: Problem) -> Way:
    """What the first call of its kind is checked with; more rows than the smaller tiles have, where it is fused."""
    rows = max(FUSE_FROM_ROWS, CHECKED_ROWS) if fused else 1
    if not problem.facts.everywhere:
        return Way("beside the GEMM" if fused else "by itself", rows)
    if sums is one_shot:
        return Way("in one step", norm=problem.facts.multiplies)
    row_bytes = self_check.K * (problem.out_dtype or problem.dtype).itemsize
    in_one_step = _one_shot_bytes(problem.world_size)
    if sums is two_shot:
        return Way("in one kernel of two steps", 1, 1 + in_one_step // row_bytes)
    return Way("in two steps", rows, 1 + max(in_one_step, TWO_SHOT_BYTES) // row_bytes)


def refuses(problem: Problem) -> str | None:
    if problem.world_size == 1 and not problem.same_bits:
        return "one rank has nothing to share"
    if problem.same_bits > same_bits.MOST_BLOCKS:
        return f"it adds at most {same_bits.MOST_BLOCKS} blocks, and same_bits={problem.same_bits}"
    no_memory = problem.refusal(SymmetricMemory.name)
    if no_memory is not None:
        return no_memory
    if problem.dtype not in DTYPES and problem.out_dtype not in DTYPES:
        return f"its kernels compute in {', '.join(str(dtype) for dtype in DTYPES)}, not in {problem.dtype}"
    return None


def estimate(problem: Problem, costs: Costs) -> float | None:
    if problem.same_bits and problem.facts.multiplies:
        return None  # the other implementations share their bits; these are others
    everywhere = problem.facts.everywhere
    sums = in_one_kernel(problem.world_size, problem.m * problem.row_bytes) if everywhere else None
    if sums is not None:
        return symmetric_costs.of_one_kernel(problem, costs, steps=1 if sums is one_shot else 2)
    fused = bool(problem.flops) and problem.m >= FUSE_FROM_ROWS * problem.world_size
    return symmetric_costs.of_copies(problem, costs, calls=2 if everywhere else 1, fused=fused)


def describe(problem: Problem) -> str:
    if problem.same_bits and problem.facts.multiplies:
        return "by name alone, on all ranks of all degrees: its products have bits of their own"
    if not problem.facts.everywhere:
        return ""
    sums = in_one_kernel(problem.world_size, problem.m * problem.row_bytes)
    how = "reduce-scatter, then all-gather of the sums"
    if sums is not None:
        how = "in one step" if sums is one_shot else f"in one kernel: {how}"
    # The switch could add them (multimem.ld_reduce), in an order and a rounding of its own: see ARCHITECTURE.md.
    pushed = "pushed by multicast stores (NVLS), summed by the ranks in fixed order"
    return f"{how}, {pushed}" if MULTICAST in problem.features(SymmetricMemory.name) else how


resources.register(SymmetricMemory)
for _op, _work in (
    ("all_gather", all_gather),
    ("reduce_scatter", reduce_scatter),
    ("all_reduce", all_reduce),
    ("all_gather_matmul", all_gather_matmul),
    ("matmul_reduce_scatter", matmul_reduce_scatter),
    ("matmul_all_reduce", matmul_all_reduce),
):
    _runs = partial(checked, _work)
    dispatch.register(
        Implementation(
            "symmetric",
            _op,
            refuses,
            estimate,
            _runs,
            partial(agree, _runs),
            describe=describe,
            keeps_bits=_op in KEEP_BITS,
            has_own_bits=True,
        )
    )
