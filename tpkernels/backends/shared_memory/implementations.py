"""``shared_memory``: ranks of one host read each other's shards and partials where they lie; CPU.

All-gather: each rank stages its shard once in its segment, multiplies its own shard from where it is, then multiplies
the peers' shards *in place*: nothing is gathered.  Where a GEMM per shard costs more than copying, the rows are
gathered first: when they are so few that reading the weight takes longest, or when the library lays the weight out anew
at every call (oneDNN for AMX does).  That choice is a function of costs the ranks agreed on.
Reduce-scatter: the GEMM writes the rows of another owner straight into this rank's segment and signals; the owner sums
all partials in place, in rank order and fp32; or, by the same choice, one GEMM writes the rows of all.
All-reduce: one shot for little data (everybody sums everything), else reduce-scatter and all-gather in place.

Memory: a call stages one shard (gather), the rows of the other owners (reduce-scatter; in one GEMM all), or one partial
(all-reduce), twice, because slots alternate.  The gathered tensor exists where it was asked for, or for one GEMM.
Results equal those of ``unfused`` bit for bit wherever the library's GEMM computes a row independently of how many
there are.  Protocol, failures and their detection: ``csrc/README.md``.

Ideas: in-place shared-memory collectives after DeepSpeed's CPU all-reduce; decomposed collectives as in ``chunked``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from tpkernels import config, dispatch
from tpkernels.backends.canonical_rows import KEEP_BITS
from tpkernels.backends.row_gemms import Epilogue, gemm, partial_rows, place_rows, whole_like
from tpkernels.backends.shared_memory import same_bits
from tpkernels.backends.shared_memory.segments import SharedMemory, SharedSegments
from tpkernels.comm import agreement, resources, timeline
from tpkernels.comm.groups import Group
from tpkernels.dispatch import Costs, Implementation, Problem
from tpkernels.gemm import few_rows
from tpkernels.gemm.fp8 import Operand
from tpkernels.gemm.native import native, native_dtype
from tpkernels.gemm.widened import MatrixOperand, Widened
from tpkernels.ops.contract import (
    AllGather,
    AllGatherMatmul,
    AllReduce,
    Context,
    Gathered,
    MatmulAllReduce,
    MatmulReduceScatter,
    ReduceScatter,
    RepeatedSum,
    ResidualNorm,
    nothing,
)
from tpkernels.partition import Layout, array_split_sizes, offsets, peers_after

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "estimate",
    "gather_shards",
    "in_one_gemm",
    "largest_shard",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
    "refuses",
    "segments_of",
    "sum_shares",
    "sum_slots",
]

# Up to here every rank sums everything itself; above, each sums its share and copies the others'.
ONE_SHOT_BYTES = 256 * 1024
# A block of rows that a tail (see the contract) finds in the second-level cache when it follows their sum.
BLOCK_BYTES = 128 * 1024
# Up to here a copy into the segment costs less than the steps that save it: the call is as long as its Python.
COPIED_BYTES = 32 * 1024
_ALIGNMENT = 64


def all_gather_matmul(context: Context, call: AllGatherMatmul) -> Gathered:
    segments, layout = segments_of(context), call.layout
    if context.problem.same_bits:
        return same_bits.all_gather_matmul(context, call, segments, largest_shard(layout, call.x))
    in_place = not layout.feature and not in_one_gemm(context.problem, context.costs)
    whole = whole_like(call.x, layout) if call.keep_whole or not in_place else None
    epilogue = Epilogue(call)
    segments.reserve(largest_shard(layout, call.x))
    with segments.call(context.fingerprint, context.text) as channel:
        segments.stage(call.x)
        channel.signal()
        if not in_place:
            assert whole is not None
            gather_shards(channel, layout, call.x, whole)
            with timeline.span("gemm", "gemm"):
                epilogue.fill(whole, 0)
        else:
            with timeline.span("gemm local", "gemm", peer=segments.rank):
                place_rows(layout, segments.rank, 0, call.x, epilogue, whole)
            for peer in peers_after(segments.rank, segments.size):
                channel.wait(peer, 1)
                rows = segments.view(peer, (layout.shard_rows(peer), call.x.shape[1]), call.x.dtype)
                with timeline.span("gemm", "gemm", peer=peer):
                    place_rows(layout, peer, 0, rows, epilogue, whole)
    return Gathered(epilogue.outs, epilogue.preactivations, whole if call.keep_whole else None)


def matmul_reduce_scatter(context: Context, call: MatmulReduceScatter) -> Tensor:
    if context.problem.same_bits:
        return same_bits.matmul_reduce_scatter(context, call, segments_of(context))
    if in_one_gemm(context.problem, context.costs):
        return _sum_after_one_gemm(context, call)
    return _sum_owner_by_owner(context, call)


def _sum_after_one_gemm(context: Context, call: MatmulReduceScatter) -> Tensor:
    segments, layout, like = segments_of(context), call.layout, call.like
    rank, rows, columns = segments.rank, call.xs[0].shape[0], call.matrices[0].shape[1]
    own = like.new_empty(layout.shard_rows(rank), layout.sizes[rank] if layout.feature else columns)
    bias, first = _contiguous(call.bias), offsets(layout.sizes)[rank]
    starts = [(o * sum(layout.sizes) + first) * layout.inner * columns for o in range(max(1, layout.outer))]
    starts = [first] if layout.feature else starts
    segments.reserve(rows * columns * like.element_size())
    with segments.call(context.fingerprint, context.text) as channel:
        _multiply(call.xs, call.matrices, segments.view(rank, (rows, columns), like.dtype), call.addend)
        channel.signal()
        call.meanwhile()
        outer = len(starts)
        for place, out in enumerate(own.chunk(outer) if own.shape[0] else [own] * outer):
            sum_slots(channel, starts[place], columns, bias, out, call.tail, place * out.shape[0])
    return own


def _sum_owner_by_owner(context: Context, call: MatmulReduceScatter) -> Tensor:
    """Owner o is the ((o - r) mod W)-th that rank r computes for, and waits for so many of its signals."""
    segments, layout, like = segments_of(context), call.layout, call.like
    rank, size = segments.rank, segments.size
    shapes = [(layout.shard_rows(o), layout.sizes[o] if layout.feature else call.columns) for o in range(size)]
    places = [_places(shapes, like.element_size(), producer) for producer in range(size)]
    segments.reserve(max(place[-1] for place in places))
    own = like.new_empty(shapes[rank])
    bias = _contiguous(call.bias)
    with segments.call(context.fingerprint, context.text) as channel:
        for owner in peers_after(rank, size):
            part = segments.view(rank, shapes[owner], like.dtype, places[rank][owner])
            with timeline.span("gemm", "gemm", peer=owner):
                partial_rows(call.xs, call.matrices, call.addend, layout, owner, 0, shapes[owner][0], part)
            channel.signal()
        call.meanwhile()
        with timeline.span("gemm", "gemm", peer=rank):
            partial_rows(call.xs, call.matrices, call.addend, layout, rank, 0, shapes[rank][0], own)
        for producer in peers_after(rank, size):
            channel.wait(producer, (rank - producer) % size)
        parts = [channel.address(producer) + places[producer][rank] for producer in range(size)]
        parts[rank] = own.data_ptr()
        row_bytes = own.shape[1] * own.element_size()
        for low, high in _blocks(own, call.tail):
            _sum([part + low * row_bytes for part in parts], bias, own[low:high])
            if call.tail is not None:
                call.tail.fill(own[low:high], low)
    return own


def matmul_all_reduce(context: Context, call: MatmulAllReduce) -> Tensor:
    """One shot for two ranks or little data: everybody sums everything.  Else each rank sums its share of the rows."""
    segments, like = segments_of(context), call.like
    if context.problem.same_bits:
        return same_bits.matmul_all_reduce(context, call, segments)
    rows, columns = call.xs[0].shape[0], call.matrices[0].shape[1]
    num_bytes = rows * columns * like.element_size()
    if num_bytes <= COPIED_BYTES and call.bias is None and call.meanwhile is nothing:
        single = len(call.xs) == 1 and isinstance(call.matrices[0], Tensor)
        if not single or timeline.active() or context.agreed:
            out = like.new_empty(rows, columns)
            _multiply(call.xs, call.matrices, out, by_rows=bool(context.agreed))
        else:
            out = torch.mm(like, cast(Tensor, call.matrices[0]))
        segments.all_reduce(context.fingerprint, context.text, out, out)
        if call.tail is not None:
            call.tail.fill(out, 0)
        return out
    segments.reserve(num_bytes)
    bias = _contiguous(call.bias)
    out = like.new_empty(rows, columns)
    with segments.call(context.fingerprint, context.text) as channel:
        partial = segments.view(segments.rank, (rows, columns), like.dtype)
        _multiply(call.xs, call.matrices, partial, by_rows=bool(context.agreed))
        channel.signal()
        call.meanwhile()
        if segments.size == 2 or num_bytes <= ONE_SHOT_BYTES:
            sum_slots(channel, 0, columns, bias, out, call.tail, 0)
        else:
            sum_shares(segments, partial, bias, out, call.tail)
    return out


def repeat_matmul_all_reduce(context: Context, call: MatmulAllReduce) -> RepeatedSum | None:
    """What a small call needs after its GEMM; staged, signalled and summed as :func:`matmul_all_reduce` does."""
    rows, columns, dtype = call.xs[0].shape[0], call.matrices[0].shape[1], call.like.dtype
    if rows * columns * dtype.itemsize > COPIED_BYTES or context.problem.same_bits:
        return None
    if isinstance(call.matrices[0], Widened) and not context.agreed:
        return None  # a repetition has the compiled kernel's GEMM or the library's
    return segments_of(context).repeated_sum(
        context.fingerprint, context.text, (rows, columns), dtype, multiplies=bool(context.agreed)
    )


def agree_on_few_rows(group: Group, call: int, problem: Problem, layout: Layout) -> bool:
    """Whether the compiled kernel for few rows makes the partials of such calls.  Collective.

    It does if it wins on every rank.  Sums would be right if ranks differed, but none could tell how they came about.
    """
    if not _may_take_few_rows(problem):
        return False
    facts = {"wins": few_rows.wins(problem.m, problem.n, _local_contraction(problem), problem.dtype)}
    records = agreement.exchange_records(group, call, agreement.Record("few rows", facts), part="few-rows")
    return all(record.facts["wins"] for record in records)


def _may_take_few_rows(problem: Problem) -> bool:
    """The same on every rank."""
    if problem.out_dtype is not None or problem.facts.grouped or problem.same_bits or not config.load().calibrate:
        return False
    return few_rows.serves(problem.m, problem.n, _local_contraction(problem), problem.dtype)


def _local_contraction(problem: Problem) -> int:
    return -(-problem.k // problem.world_size)


def sum_slots(
    channel: Any, start: int, stride: int, bias: Tensor | None, out: Tensor, tail: ResidualNorm | None, row: int
) -> None:
    """out = sum over ranks of their slots, from element ``start`` on; ``row``: the place of ``out`` in the tail."""
    itemsize, columns = out.element_size(), out.shape[1]
    for low, high in _blocks(out, tail):
        channel.reduce_slots(
            native_dtype(out.dtype), (start + low * stride) * itemsize, stride, high - low, columns, 1, _address(bias),
            out.data_ptr() + low * columns * itemsize, columns,
        )  # fmt: skip
        if tail is not None:
            tail.fill(out[low:high], row + low)


def _blocks(out: Tensor, tail: ResidualNorm | None) -> Iterator[tuple[int, int]]:
    """All rows; with a tail blocks of them, at least one: a call with nothing to sum waits for its peers, too."""
    rows = out.shape[0]
    step = max(1, rows if tail is None else BLOCK_BYTES // max(1, out.shape[1] * out.element_size()))
    for low in range(0, max(1, rows), step):
        yield low, min(rows, low + step)


def sum_shares(
    segments: SharedSegments, partial: Tensor, bias: Tensor | None, out: Tensor, tail: ResidualNorm | None
) -> None:
    """Each rank sums its share of the rows, then copies everybody's sums."""
    channel, rank, size = segments.channel, segments.rank, segments.size
    sizes = array_split_sizes(out.shape[0], size)
    shares = [(start, start + count) for start, count in zip(offsets(sizes), sizes, strict=True)]
    for producer in peers_after(rank, size):
        channel.wait(producer, 1)
    # Our share of our own slot is read by nobody before the next signal: the sum may take the partial's place.
    start, stop = shares[rank]
    first = start * out.shape[1] * out.element_size()
    _sum([channel.address(producer) + first for producer in range(size)], bias, partial[start:stop])
    channel.signal()
    for peer in (rank, *peers_after(rank, size)):
        if peer != rank:
            channel.wait(peer, 2)
        start, stop = shares[peer]
        out[start:stop].copy_(segments.view(peer, tuple(out.shape), out.dtype)[start:stop])
        if tail is not None:
            tail.fill(out[start:stop], start)


def _multiply(
    xs: Sequence[Operand],
    matrices: Sequence[MatrixOperand],
    out: Tensor,
    addend: Tensor | None = None,
    *,
    by_rows: bool = False,
) -> None:
    """out = sum_i xs[i] @ matrices[i] + addend; several accumulate in the dtype of ``out``.

    ``by_rows``: by the compiled kernel for few rows, where this is one product with a weight that lies by its rows.
    """
    bias = addend
    with timeline.span("gemm", "gemm"):
        if by_rows and len(xs) == 1 and addend is None:
            weight = matrices[0].numbers if isinstance(matrices[0], Widened) else cast(Tensor, matrices[0])
            if few_rows.multiply(cast(Tensor, xs[0]), weight.t(), out):
                return
        for x, matrix in zip(xs, matrices, strict=True):
            gemm(x, matrix, out, bias)
            bias = out


def all_reduce(context: Context, call: AllReduce) -> Tensor:
    """One native call, piece by piece through a small slot."""
    out = torch.empty_like(call.x)
    segments_of(context).all_reduce(context.fingerprint, context.text, call.x, out)
    return out


def all_gather(context: Context, call: AllGather) -> Callable[[], Tensor]:
    """Gathers at once: a copy by this very core can hide behind nothing, and the slot is free again."""
    segments = segments_of(context)
    whole = whole_like(call.x, call.layout)
    segments.reserve(largest_shard(call.layout, call.x))
    with segments.call(context.fingerprint, context.text) as channel:
        segments.stage(call.x)
        channel.signal()
        gather_shards(channel, call.layout, call.x, whole)
    return lambda: whole


def reduce_scatter(context: Context, call: ReduceScatter) -> Tensor:
    segments, layout, x = segments_of(context), call.layout, call.x
    rank, itemsize = segments.rank, x.element_size()
    rows, stride = (x.shape[0], x.shape[1]) if layout.feature else (layout.outer, x.numel() // max(1, layout.outer))
    width = stride // max(1, sum(layout.sizes))  # elements of one unit of the sharded dimension
    start, count = offsets(layout.sizes)[rank] * width, layout.sizes[rank] * width
    segments.reserve(x.numel() * itemsize)
    out = x.new_empty(layout.shard_rows(rank), layout.sizes[rank] if layout.feature else x.shape[1])
    with segments.call(context.fingerprint, context.text) as channel:
        segments.stage(x)
        channel.signal()
        channel.reduce_slots(native_dtype(x.dtype), start * itemsize, stride, rows, count, 1, 0, out.data_ptr(), count)
    return out


def segments_of(context: Context) -> SharedSegments:
    segments: SharedSegments | None = context.group.resources[SharedMemory.name].segments
    assert segments is not None, "selected without shared memory"
    return segments


def gather_shards(channel: Any, layout: Layout, own: Tensor, whole: Tensor) -> None:
    """Lay all shards side by side: per row of a feature layout, else per outer index."""
    width = own.element_size() * (1 if layout.feature else layout.inner * own.shape[1])
    rows = own.shape[0] if layout.feature else layout.outer
    channel.gather_slots(rows, [size * width for size in layout.sizes], own.data_ptr(), whole.data_ptr())


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _sum(parts: Sequence[int], bias: Tensor | None, out: Tensor) -> None:
    """out = sum of the contiguous matrices at these addresses + bias."""
    rows, columns = out.shape
    module: Any = native()
    with timeline.span("reduce", "reduce"):
        module.sum_rows(
            native_dtype(out.dtype), parts, columns, _address(bias), out.data_ptr(), columns, rows,
            columns,
        )  # fmt: skip


def _places(shapes: Sequence[tuple[int, int]], itemsize: int, producer: int) -> list[int]:
    """Where ``producer`` stages the rows of each owner, in bytes, and (last) how many bytes that takes."""
    places = [0]
    for owner, (rows, columns) in enumerate(shapes):
        num_bytes = 0 if owner == producer else rows * columns * itemsize
        places.append(places[-1] + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
    return places


def largest_shard(layout: Layout, x: Tensor) -> int:
    columns = max(layout.sizes) if layout.feature else x.shape[1]
    return layout.max_shard_rows * columns * x.element_size()


@lru_cache(maxsize=1024)
def in_one_gemm(problem: Problem, costs: Costs) -> bool:
    """Whether one GEMM, and what is copied for it, is expected to beat a GEMM per shard.

    By more than the memory that it takes is worth.
    """
    return _in_one_gemm_us(problem, costs) < 0.98 * costs.gemm_us(problem, calls=problem.world_size)


def _in_one_gemm_us(problem: Problem, costs: Costs) -> float:
    """A gather copies all rows first; a sum finds its own partial in the segment instead of elsewhere."""
    copied = problem.m * problem.row_bytes if problem.facts.gathers else 0
    return costs.gemm_us(problem) + costs.copy_us(copied, 0)


def refuses(problem: Problem) -> str | None:
    if problem.world_size == 1:
        return "one rank has nothing to share"
    if problem.device != "cpu":
        return f"shared memory serves CPU tensors, these are on {problem.device}"
    no_memory = problem.refusal(SharedMemory.name)
    if no_memory is not None:
        return no_memory
    module: Any = native()
    whole = problem.m * problem.row_bytes
    if whole > module.SLOT_BYTES:
        return f"a call can stage at most {module.SLOT_BYTES} bytes, this one may need {whole}"
    return None


def estimate(problem: Problem, costs: Costs) -> float:
    facts = problem.facts
    if facts.gathers and facts.multiplies:
        return _either_way_us(problem, costs) + costs.copy_us(problem.wire_bytes / (problem.world_size - 1))
    gemm = _product_us(problem, costs) if facts.everywhere else _either_way_us(problem, costs)
    return (gemm if problem.flops else 0.0) + costs.copy_us(2 * problem.wire_bytes)


def _product_us(problem: Problem, costs: Costs) -> float:
    """Of an all-reduce; whichever GEMM is taken is measured for its sizes, and was the faster one."""
    gemm_us = costs.gemm_us(problem)
    return min(gemm_us, costs.few_rows_us(problem)) if _may_take_few_rows(problem) else gemm_us


def _either_way_us(problem: Problem, costs: Costs) -> float:
    return min(costs.gemm_us(problem, calls=problem.world_size), _in_one_gemm_us(problem, costs))


def _describe_product(problem: Problem) -> str:
    """The same on every rank, and nothing is measured for it: which GEMM wins, the ranks agree on at the first call."""
    if not _may_take_few_rows(problem):
        return ""
    return f"{few_rows.name(problem.dtype)} if every rank measures it to be faster than torch's GEMM"


_OF_FEW_ROWS: dict[str, dict[str, Any]] = {
    "matmul_all_reduce": {
        "agree": agree_on_few_rows, "repeat": repeat_matmul_all_reduce, "describe": _describe_product,
    }
}  # fmt: skip
resources.register(SharedMemory)
for _op, _run in (
    ("all_gather", all_gather),
    ("reduce_scatter", reduce_scatter),
    ("all_reduce", all_reduce),
    ("all_gather_matmul", all_gather_matmul),
    ("matmul_reduce_scatter", matmul_reduce_scatter),
    ("matmul_all_reduce", matmul_all_reduce),
):
    _options = {"keeps_bits": _op in KEEP_BITS} | _OF_FEW_ROWS.get(_op, {})
    dispatch.register(Implementation("shared_memory", _op, refuses, estimate, _run, **_options))
