"""``chunked``: the collective in chunks, hidden behind the GEMM; any c10d group.

All-gather: every chunk is posted at once, the local shard is multiplied first, then each chunk as it lands, straight
into its rows of the output.  Reduce-scatter: the rows that other ranks own are computed first and leave chunk by chunk,
our own rows last; partials are summed in fp32 in rank order.  On gloo the sockets' thread moves bytes while this
thread computes; on CUDA the group's own stream does, with events between chunks; or copy engines do, see
:mod:`tpkernels.backends.point_to_point.copy_engines`.

Costs memory: receive buffers of one shard per peer; the gathered tensor exists only if it was asked for.  The chunk
count does not change results where the library's GEMM computes a row independently of how many rows there are, which
holds for bf16 and integers in fp32 but not always for fp32 and fp64 in MKL (last bits differ).

Ideas: decomposed collectives after Wang et al., "Overlap Communication with Dependent Computation via Decomposition"
(ASPLOS 2023); local shard first and remote rows first after Flux (Chang et al., 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from torch import Tensor

from tpkernels import dispatch
from tpkernels.backends.canonical_rows import KEEP_BITS
from tpkernels.backends.point_to_point import same_bits
from tpkernels.backends.point_to_point.collectives import CollectiveGather, CollectivePartials, fits
from tpkernels.backends.point_to_point.copy_engines import CopyEngines
from tpkernels.backends.point_to_point.exchange import PartialExchange, ShardExchange
from tpkernels.backends.row_gemms import Epilogue, bias_of, partial_rows, place_rows, reduce_rows, whole_like
from tpkernels.comm import resources, timeline, transport
from tpkernels.dispatch import Costs, Implementation, Problem
from tpkernels.ops.contract import (
    AllGatherMatmul,
    Context,
    Gathered,
    MatmulAllReduce,
    MatmulReduceScatter,
    ResidualNorm,
)
from tpkernels.partition import Layout, array_split_sizes, chunk_ranges, offsets

__all__ = [
    "Fill",
    "all_gather_matmul",
    "all_reduce_rows",
    "describe",
    "estimate",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter_rows",
    "refuses",
    "with_chunks",
]

# A GEMM of fewer rows leaves most of a GPU idle: 1024 rows and 2048 columns are 64 tiles of 128 x 256, for 132 SMs. Not
# measured yet.
MIN_CUDA_CHUNK_ROWS = 1024
# What cutting a grouped GEMM costs, in times of its estimate, with many and with few rows for each expert in a part.
# On one host, where transfers take next to nothing, layers of `benchmarks/experts.py` took no longer in two parts with
# 256 rows (Mixtral), and longer by 1.8 to 2.1 times the estimate of the lab's costs with fewer (2026-11-28; why was not
# looked into, and the estimates are of another run than the times).
GROUPED_CUT, GROUPED_CUT_OF_FEW_ROWS, MANY_ROWS = 1.0, 2.5, 256


def all_gather_matmul(context: Context, call: AllGatherMatmul) -> Gathered:
    context, layout, group = with_chunks(context, call.layout), call.layout, context.group
    if context.problem.same_bits:
        return same_bits.all_gather_matmul(context, call)
    whole = whole_like(call.x, layout) if call.keep_whole or layout.feature else None
    incoming: ShardExchange | CollectiveGather
    if fits(context, layout):
        incoming = CollectiveGather(context, call.x, layout)
    else:
        incoming = ShardExchange(context, call.x, layout, whole)
    epilogue = Epilogue(call)
    if layout.feature:
        assert whole is not None
        _multiply_complete_rows(context, call, incoming, epilogue, whole)
    else:
        with timeline.span("gemm local", "gemm", peer=group.rank):
            place_rows(layout, group.rank, 0, call.x, epilogue, whole)
        for peer, start, rows in incoming.arrivals():
            with timeline.span("gemm", "gemm", peer=peer):
                place_rows(layout, peer, start, rows, epilogue, whole)
    incoming.finish()
    return Gathered(epilogue.outs, epilogue.preactivations, whole if call.keep_whole else None)


def _multiply_complete_rows(
    context: Context,
    call: AllGatherMatmul,
    incoming: ShardExchange | CollectiveGather,
    epilogue: Epilogue,
    whole: Tensor,
) -> None:
    """Features are gathered: a row can be multiplied when all ranks' parts of it are there."""
    layout, group = call.layout, context.group
    low, high = layout.columns(group.rank)
    whole[:, low:high] = call.x
    arrived = 0
    for peer, start, rows in incoming.arrivals():
        low, high = layout.columns(peer)
        whole[start : start + rows.shape[0], low:high] = rows
        arrived += 1
        if arrived == group.size - 1:
            arrived = 0
            with timeline.span("gemm", "gemm"):
                epilogue.fill(whole[start : start + rows.shape[0]], start)


Fill = Callable[[int, int, int, Tensor], None]
"""Writes this rank's partial of rows ``[start, stop)`` of an owner's shard: ``fill(owner, start, stop, out)``."""


class Tail(Protocol):
    """What a reducing call has beside its partial."""

    @property
    def bias(self) -> Tensor | None: ...
    @property
    def meanwhile(self) -> Callable[[], None]: ...
    @property
    def tail(self) -> ResidualNorm | None: ...


def matmul_reduce_scatter(context: Context, call: MatmulReduceScatter) -> Tensor:
    layout = call.layout
    if context.problem.same_bits:
        return same_bits.matmul_reduce_scatter(with_chunks(context, layout), call)

    def fill(owner: int, start: int, stop: int, out: Tensor) -> None:
        partial_rows(call.xs, call.matrices, call.addend, layout, owner, start, stop, out)

    return reduce_scatter_rows(with_chunks(context, layout), layout, call.columns, call.like, fill, call)


def reduce_scatter_rows(
    context: Context, layout: Layout, num_columns: int, like: Tensor, fill: Fill, call: Tail
) -> Tensor:
    """This rank's rows of the sum of all partials; a bias has one row, or those of this rank."""
    group = context.group
    outgoing: PartialExchange | CollectivePartials
    if fits(context, layout):
        outgoing = CollectivePartials(context, layout, num_columns, like)
    else:
        outgoing = PartialExchange(context, layout, num_columns, like)
    fill = _timed(fill)
    for chunk in range(context.num_chunks):
        outgoing.send(chunk, fill)
    columns = layout.sizes[group.rank] if layout.feature else num_columns
    own = like.new_empty(layout.shard_rows(group.rank), columns)
    fill(group.rank, 0, own.shape[0], own)
    call.meanwhile()
    for chunk in range(context.num_chunks):
        start, stop = outgoing.rows(group.rank, chunk)
        reduce_rows(outgoing.parts(chunk, own), own[start:stop], bias_of(call.bias, start, stop))
        if call.tail is not None:
            call.tail.fill(own[start:stop], start)
    outgoing.finish()
    return own


def _timed(fill: Fill) -> Fill:
    def timed(owner: int, start: int, stop: int, out: Tensor) -> None:
        with timeline.span("gemm", "gemm", peer=owner):
            fill(owner, start, stop, out)

    return timed


def matmul_all_reduce(context: Context, call: MatmulAllReduce) -> Tensor:
    """Sum of all partials on every rank: in one round where that is expected to be quicker, else in two."""
    everything = Layout(1, (call.xs[0].shape[0],), 1)
    if context.problem.same_bits:
        layout = Layout(1, array_split_sizes(call.xs[0].shape[0], context.group.size), 1)
        return same_bits.matmul_all_reduce(with_chunks(context, layout), call)

    def fill(start: int, stop: int, out: Tensor) -> None:
        partial_rows(call.xs, call.matrices, None, everything, 0, start, stop, out)

    return all_reduce_rows(context, call.xs[0].shape[0], call.matrices[0].shape[1], call.like, fill, call)


def all_reduce_rows(
    context: Context, rows: int, columns: int, like: Tensor, fill: Callable[[int, int, Tensor], None], call: Tail
) -> Tensor:
    """The sum of all partials; ``fill(start, stop, out)`` writes rows of this rank's."""
    layout = Layout(1, array_split_sizes(rows, context.group.size), 1)
    context = with_chunks(context, layout)
    out = like.new_empty(rows, columns)
    if _in_one_round(context.problem, context.costs):
        _all_reduce_one_shot(context, fill, call, layout, out)
    else:
        _all_reduce_two_phases(context, fill, call, layout, out)
    return out


def _in_one_round(problem: Problem, costs: Costs) -> bool:
    """Whether everybody gets the whole partial: more bytes than by reduce-scatter and all-gather, one latency less."""
    whole = problem.m * problem.row_bytes * (problem.world_size - 1)
    return costs.link_us(whole, 1) <= costs.link_us(problem.wire_bytes, 2)


def _all_reduce_one_shot(
    context: Context, fill: Callable[[int, int, Tensor], None], call: Tail, layout: Layout, out: Tensor
) -> None:
    outgoing = PartialExchange(context, layout, out.shape[1], out, everything=True)
    for chunk in range(context.num_chunks):
        outgoing.send(chunk, _timed(lambda _, start, stop, part: fill(start, stop, part)))
    call.meanwhile()
    for chunk in range(context.num_chunks):
        start, stop = outgoing.rows(context.group.rank, chunk)
        reduce_rows(outgoing.parts(chunk), out[start:stop], bias_of(call.bias, start, stop))
        if call.tail is not None:
            call.tail.fill(out[start:stop], start)
    outgoing.finish()


def _all_reduce_two_phases(
    context: Context, fill_rows: Callable[[int, int, Tensor], None], call: Tail, layout: Layout, out: Tensor
) -> None:
    """Chunk c of our rows is summed and sent on while chunk c + 1 is computed."""
    group = context.group
    outgoing = PartialExchange(context, layout, out.shape[1], out)
    starts = offsets(layout.sizes)
    first = starts[group.rank]
    own = out[first : first + layout.sizes[group.rank]]
    outbound: list[transport.Transfer] = []
    patience = transport.Patience(group.timeout)
    inbound: list[tuple[transport.Transfer, int, int]] = []
    fill = _timed(lambda owner, start, stop, part: fill_rows(starts[owner] + start, starts[owner] + stop, part))

    def pass_on(chunk: int) -> None:
        start, stop = outgoing.rows(group.rank, chunk)
        done = own[start:stop]
        reduce_rows(outgoing.parts(chunk, own), done, bias_of(call.bias, first + start, first + stop))
        places = {}
        for peer in reversed(outgoing.peers):
            low, high = chunk_ranges(layout.sizes[peer], context.num_chunks)[chunk]
            places[peer] = starts[peer] + low, starts[peer] + high
        sent, received = transport.exchange(
            group, context.tag, context.num_chunks + chunk, [(peer, done) for peer in outgoing.peers],
            [(peer, out[low:high]) for peer, (low, high) in places.items()], patience,
        )  # fmt: skip
        outbound.extend(sent)
        inbound.extend((transfer, *places[transfer.peer]) for transfer in received)

    for chunk in range(context.num_chunks):
        outgoing.send(chunk, fill)
        start, stop = outgoing.rows(group.rank, chunk)
        fill(group.rank, start, stop, own[start:stop])
        if chunk > 0:
            pass_on(chunk - 1)
    call.meanwhile()
    pass_on(context.num_chunks - 1)
    for transfer, low, high in inbound:
        transport.wait_all([transfer])
        if call.tail is not None:
            call.tail.fill(out[low:high], low)
    transport.wait_all(outbound)
    if call.tail is not None:
        call.tail.fill(own, first)  # now that nothing of it is on its way
    outgoing.finish()


def with_chunks(context: Context, layout: Layout) -> Context:
    """The number of chunks that suits the problem, from facts that are equal on all ranks."""
    if context.forced_chunks:
        return context
    count = _num_chunks(context.problem, context.costs, layout.max_shard_rows, context.num_chunks)
    return context._replace(num_chunks=count)


@lru_cache(maxsize=1024)
def _num_chunks(problem: Problem, costs: Costs, shard_rows: int, most: int) -> int:
    """At most so many; on a CPU, once costs were measured, as few as are expected to take the least time.

    Where a library lays out the weight anew at every GEMM, a cut may cost more than it hides.  A cut of a grouped GEMM
    goes through the weights of all experts again, for a few rows of each, so that built-in costs decide there too.
    """
    if problem.device == "cuda":
        return max(1, min(most, shard_rows // MIN_CUDA_CHUNK_ROWS))
    if not costs.measured and not problem.facts.grouped:
        return most
    return min(range(1, most + 1), key=lambda count: _estimate_us(problem, costs, count))


def refuses(problem: Problem) -> str | None:
    if problem.world_size == 1:
        return "one rank has nothing to transfer"
    if problem.backend not in ("gloo", "nccl"):
        return f"point-to-point chunks were built for gloo and nccl, the backend here is {problem.backend!r}"
    return None


def estimate(problem: Problem, costs: Costs) -> float:
    shard_rows = -(-problem.m // problem.world_size)
    return _estimate_us(problem, costs, _num_chunks(problem, costs, shard_rows, problem.num_chunks))


def _estimate_us(problem: Problem, costs: Costs, chunks: int) -> float:
    """Transfers run beside the GEMM, and take their share of the processor.

    The first chunk of a gather hides behind the GEMM of our own rows, as does the last one of a scatter; and the link
    rests while the GEMM of the last chunk runs, or of the first one.  An all-reduce ends with a chunk that nothing
    hides.
    """
    peers = problem.world_size - 1
    pieces, num_bytes, rounds = 1 + chunks * peers, problem.wire_bytes, 1
    if problem.facts.everywhere:
        once = _in_one_round(problem, costs)
        num_bytes, rounds = (problem.m * problem.row_bytes * peers, 1) if once else (num_bytes, 2)
    gemm = costs.gemm_us(problem, pieces)
    if problem.facts.grouped:
        whole = costs.gemm_us(problem)
        rows = problem.m * problem.top_k / (problem.experts * pieces)
        factor = GROUPED_CUT if rows >= MANY_ROWS else GROUPED_CUT_OF_FEW_ROWS
        gemm = whole + factor * max(0.0, gemm - whole)
    if problem.facts.reduces:
        gemm += costs.local_us(problem)
    link = costs.link_us(num_bytes, 0)
    busy = gemm + costs.link_cpu * link + rounds * pieces * 0.3 * costs.link_latency_us
    exposed = link / (chunks * peers) + rounds * costs.link_latency_us
    if problem.facts.everywhere:
        return max(busy + exposed * (1 - costs.link_cpu), link)
    own = gemm / problem.world_size
    return max(busy + max(0.0, exposed - own), link + costs.link_latency_us + (gemm - own) / (chunks * peers))


def describe(problem: Problem) -> str:
    return f"up to {problem.num_chunks} chunk(s) per shard"


resources.register(CopyEngines)
for _op, _run in (
    ("all_gather_matmul", all_gather_matmul),
    ("matmul_reduce_scatter", matmul_reduce_scatter),
    ("matmul_all_reduce", matmul_all_reduce),
):
    keeps_bits = _op in KEEP_BITS
    dispatch.register(Implementation("chunked", _op, refuses, estimate, _run, describe=describe, keeps_bits=keeps_bits))
