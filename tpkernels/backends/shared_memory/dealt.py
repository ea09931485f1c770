"""``shared_memory`` where experts are dealt out: each rank picks its tokens, and their sums, out of its peers' memory.

A rank stages its tokens once; who has experts of theirs copies those out and multiplies them, own tokens first; where
a GEMM per expert and rank costs more than to wait, all of them in one grouped GEMM.  On the way back it writes the sums
of all received tokens to its segment, and their owners add them up from there.  With ``same_bits`` it multiplies when
all tokens are there, and writes the product of each expert of a token.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from tpkernels import dispatch
from tpkernels.backends.canonical_experts import fill_slots, products_of
from tpkernels.backends.canonical_rows import KEEP_BITS
from tpkernels.backends.dealt_sums import sum_returned
from tpkernels.backends.grouped_gemms import GroupedEpilogue, partial_tokens
from tpkernels.backends.shared_memory import implementations as dense
from tpkernels.comm import timeline
from tpkernels.dispatch import Implementation
from tpkernels.ops.contract import Context, DispatchGroupedMatmul, Gathered, GroupedMatmulCombine
from tpkernels.partition import offsets, peers_after

__all__ = ["dispatch_grouped_matmul", "grouped_matmul_combine"]


def dispatch_grouped_matmul(context: Context, call: DispatchGroupedMatmul) -> Gathered:
    segments, layout, rank, x = dense.segments_of(context), call.layout, context.group.rank, call.x
    rows, firsts, at_once = call.rows(), offsets(call.layout.sizes), dense.in_one_gemm(context.problem, context.costs)
    received, in_blocks = x.new_empty(rows.num_tokens, x.shape[1]), context.problem.same_bits > 0
    epilogue = None if in_blocks else GroupedEpilogue(call, rows)
    segments.reserve(dense.largest_shard(layout, x))
    with segments.call(context.fingerprint, context.text) as channel:
        segments.stage(x)
        channel.signal()
        for peer in (rank, *peers_after(rank, segments.size)):
            tokens = x
            if peer != rank:
                channel.wait(peer, 1)
                tokens = segments.view(peer, (layout.sizes[peer], x.shape[1]), x.dtype)
            start, stop = rows.sources[peer]
            received[start:stop] = tokens.index_select(0, rows.received[start:stop] - firsts[peer])
            if epilogue is not None and not at_once:
                with timeline.span("gemm", "gemm", peer=peer):
                    epilogue.fill_tokens(received[start:stop], start)
        if epilogue is not None and at_once:
            with timeline.span("gemm", "gemm"):
                epilogue.fill_tokens(received, 0)
    if epilogue is None:
        return products_of(call, rows, received, 1)
    return Gathered(epilogue.outs, epilogue.preactivations, received if call.keep_whole else None)


def grouped_matmul_combine(context: Context, call: GroupedMatmulCombine) -> Tensor:
    segments, rows, columns = dense.segments_of(context), call.rows, call.columns
    dtype, rank = call.like.dtype, context.group.rank
    arrived = [sum(source[peer] for source in rows.counts) for peer in range(segments.size)]
    segments.reserve(max(arrived) * columns * dtype.itemsize)
    with segments.call(context.fingerprint, context.text) as channel:
        partial = segments.view(rank, (rows.num_tokens, columns), dtype)
        if context.problem.same_bits:
            fill_slots(call, partial)
        else:
            with timeline.span("gemm", "gemm"):
                partial_tokens(call, 0, rows.num_tokens, partial)
        channel.signal()
        call.meanwhile()

        def parts() -> Iterator[Tensor]:
            for peer in range(segments.size):
                if peer != rank:
                    channel.wait(peer, 1)
                start = sum(source[peer] for source in rows.counts[:rank])
                whole = segments.view(peer, (arrived[peer], columns), dtype)
                yield whole[start : start + rows.counts[rank][peer]]

        return sum_returned(call, parts())


for _op, _run in (
    ("dispatch_grouped_matmul", dispatch_grouped_matmul),
    ("grouped_matmul_combine", grouped_matmul_combine),
):
    dispatch.register(
        Implementation("shared_memory", _op, dense.refuses, dense.estimate, _run, keeps_bits=_op in KEEP_BITS)
    )
