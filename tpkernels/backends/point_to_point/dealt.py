"""``unfused`` and ``chunked`` where experts are dealt out: tokens go to the ranks that have their experts, and back.

``unfused``: all tokens arrive, then they are multiplied; or all are multiplied and summed, then the sums go back.

``chunked``: what a rank sends to another one is cut into chunks.  On the way there, everything is posted at once, and a
rank multiplies its own tokens first, then each chunk as it lands.  On the way back the tokens of other ranks are
multiplied and summed first, and leave chunk by chunk; its own come last.  The rows of a token meet in the order of
their experts, and the sums of the ranks in the order of the ranks, so the number of chunks changes no bit where the
library's GEMM computes a row independently of how many rows there are.

With ``same_bits`` both multiply when everything has arrived, and send when everything is multiplied: an expert's rows
are those of all tokens, in calls of the same sizes at every degree.

What travels between two ranks has as many rows as there are tokens of the one with experts of the other, which both
know.  Refuses CUDA for ``chunked``, as the other grouped GEMMs do.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tpkernels import dispatch
from tpkernels.backends.canonical_experts import fill_slots, products_of
from tpkernels.backends.canonical_rows import KEEP_BITS
from tpkernels.backends.dealt_sums import sum_returned
from tpkernels.backends.grouped_gemms import GroupedEpilogue, partial_tokens
from tpkernels.backends.point_to_point import chunked, grouped, unfused, workspace
from tpkernels.comm import timeline
from tpkernels.comm.transport import Patience, Transfer, exchange, wait_all
from tpkernels.dispatch import Implementation
from tpkernels.gemm.dealt import DealtRows
from tpkernels.ops.contract import Context, DispatchGroupedMatmul, Gathered, GroupedMatmulCombine
from tpkernels.partition import chunk_ranges, peers_after

__all__ = [
    "dispatch_grouped_matmul",
    "dispatch_grouped_matmul_unfused",
    "grouped_matmul_combine",
    "grouped_matmul_combine_unfused",
]


class _Dispatched:
    """Tokens on their way to their experts; everything is posted, and those of other ranks land in ``received``."""

    def __init__(self, context: Context, x: Tensor, rows: DealtRows, received: Tensor) -> None:
        group = context.group
        peers = peers_after(group.rank, group.size)
        self._sent: list[Transfer] = []
        self._arrivals: list[tuple[Transfer, int, int]] = []
        outboxes = {peer: workspace.shared.take((len(rows.picks[peer]), x.shape[1]), x) for peer in peers}
        self._taken = list(outboxes.values())
        patience = Patience(group.timeout)
        for chunk in range(context.num_chunks):
            sends, recvs, places = [], [], {}
            for peer in peers:
                low, high = chunk_ranges(len(rows.picks[peer]), context.num_chunks)[chunk]
                part = outboxes[peer][low:high]
                sends.append((peer, torch.index_select(x, 0, rows.picks[peer][low:high], out=part)))
            for peer in reversed(peers):  # predecessors send to us first, so we look at them first
                start, stop = rows.sources[peer]
                low, high = chunk_ranges(stop - start, context.num_chunks)[chunk]
                places[peer] = start + low, start + high
                recvs.append((peer, received[start + low : start + high]))
            sent, arriving = exchange(group, context.tag, chunk, sends, recvs, patience)
            self._sent += sent
            self._arrivals += [(transfer, *places[transfer.peer]) for transfer in arriving]

    def arrivals(self) -> Iterator[tuple[int, int, int]]:
        """Yield (source, first, behind the last) of received tokens, each waited for when its turn comes."""
        for transfer, start, stop in self._arrivals:
            transfer.wait()
            yield transfer.peer, start, stop

    def finish(self) -> None:
        wait_all(self._sent)
        for buffer in self._taken:
            workspace.shared.give(buffer)


def dispatch_grouped_matmul_unfused(context: Context, call: DispatchGroupedMatmul) -> Gathered:
    return _dispatch(context._replace(num_chunks=1), call, at_once=True)


def dispatch_grouped_matmul(context: Context, call: DispatchGroupedMatmul) -> Gathered:
    return _dispatch(chunked.with_chunks(context, call.layout), call, at_once=False)


def _dispatch(context: Context, call: DispatchGroupedMatmul, *, at_once: bool) -> Gathered:
    rows, rank, x = call.rows(), context.group.rank, call.x
    shape = (rows.num_tokens, x.shape[1])
    received = x.new_empty(shape) if call.keep_whole else workspace.shared.take(shape, x)
    incoming = _Dispatched(context, x, rows, received)
    start, stop = rows.sources[rank]
    received[start:stop] = x.index_select(0, rows.picks[rank])
    if context.problem.same_bits:
        for _ in incoming.arrivals():
            pass
        incoming.finish()
        found = products_of(call, rows, received, 1)
        if not call.keep_whole:
            workspace.shared.give(received)
        return found
    epilogue = GroupedEpilogue(call, rows)
    if at_once:
        for _ in incoming.arrivals():
            pass
        with timeline.span("gemm", "gemm"):
            epilogue.fill_tokens(received, 0)
    else:
        with timeline.span("gemm local", "gemm", peer=rank):
            epilogue.fill_tokens(received[start:stop], start)
        for peer, start, stop in incoming.arrivals():
            with timeline.span("gemm", "gemm", peer=peer):
                epilogue.fill_tokens(received[start:stop], start)
    incoming.finish()
    if call.keep_whole:
        return Gathered(epilogue.outs, epilogue.preactivations, received)
    workspace.shared.give(received)
    return Gathered(epilogue.outs, epilogue.preactivations)


class _Returned:
    """Sums of tokens on their way back to where the tokens came from; all receives are posted at once."""

    def __init__(self, context: Context, call: GroupedMatmulCombine, partial: Tensor) -> None:
        self._context, self._rows, self._partial = context, call.rows, partial
        self._rank = context.group.rank
        self.peers = peers_after(self._rank, context.group.size)
        self._sent: list[Transfer] = []
        self._patience = Patience(context.group.timeout)
        self._arriving: dict[int, list[Transfer]] = {peer: [] for peer in self.peers}
        self._inboxes = {
            peer: workspace.shared.take((len(call.rows.picks[peer]), call.columns), partial) for peer in self.peers
        }
        # A posted receive lets a gloo peer send at once; NCCL wants sends and receives of a chunk in one group.
        device = partial.device.type
        self._receives_early = device != "cuda" and not context.group.backends.waits_in_streams(device)
        if self._receives_early:
            for chunk in range(context.num_chunks):
                self._post(chunk, [], self._receives(chunk))

    def chunk(self, peer: int, chunk: int) -> tuple[int, int]:
        """The received tokens that go back to ``peer`` as its chunk ``chunk``."""
        start, stop = self._rows.sources[peer]
        low, high = chunk_ranges(stop - start, self._context.num_chunks)[chunk]
        return start + low, start + high

    def send(self, chunk: int, peers: tuple[int, ...]) -> None:
        """Send rows of the partial that are there."""
        sends = [(peer, self._partial[slice(*self.chunk(peer, chunk))]) for peer in peers]
        self._post(chunk, sends, [] if self._receives_early else self._receives(chunk))

    @property
    def sends_one_by_one(self) -> bool:
        """Whether a chunk may leave for one peer before the other peers' is there."""
        return self._receives_early

    def parts(self) -> Iterator[Tensor]:
        """By rank, the sums of this rank's tokens that went there; each is waited for when its turn comes."""
        for rank in range(self._context.group.size):
            if rank == self._rank:
                yield self._partial[slice(*self._rows.sources[rank])]
                continue
            wait_all(self._arriving[rank])
            yield self._inboxes[rank]

    def finish(self) -> None:
        """Wait until the partial may be written again; the parts are gone afterwards."""
        wait_all(self._sent)
        for buffer in self._inboxes.values():
            workspace.shared.give(buffer)

    def _receives(self, chunk: int) -> list[tuple[int, Tensor]]:
        found = []
        for peer in reversed(self.peers):
            low, high = chunk_ranges(len(self._rows.picks[peer]), self._context.num_chunks)[chunk]
            found.append((peer, self._inboxes[peer][low:high]))
        return found

    def _post(self, chunk: int, sends: list[tuple[int, Tensor]], recvs: list[tuple[int, Tensor]]) -> None:
        sent, arriving = exchange(self._context.group, self._context.tag, chunk, sends, recvs, self._patience)
        self._sent += sent
        for transfer in arriving:
            self._arriving[transfer.peer].append(transfer)


def grouped_matmul_combine_unfused(context: Context, call: GroupedMatmulCombine) -> Tensor:
    partial = call.like.new_empty(call.rows.num_tokens, call.columns)
    if context.problem.same_bits:
        fill_slots(call, partial)
    else:
        with timeline.span("gemm", "gemm"):
            partial_tokens(call, 0, call.rows.num_tokens, partial)
    call.meanwhile()
    returned = _Returned(context._replace(num_chunks=1), call, partial)
    returned.send(0, returned.peers)
    out = sum_returned(call, returned.parts())
    returned.finish()
    return out


def grouped_matmul_combine(context: Context, call: GroupedMatmulCombine) -> Tensor:
    context, rank = chunked.with_chunks(context, call.layout), context.group.rank
    partial = workspace.shared.take((call.rows.num_tokens, call.columns), call.like)
    returned = _Returned(context, call, partial)
    if context.problem.same_bits:
        fill_slots(call, partial)

    def fill(start: int, stop: int, peer: int) -> None:
        if context.problem.same_bits:
            return  # it is there
        with timeline.span("gemm", "gemm", peer=peer):
            partial_tokens(call, start, stop, partial[start:stop])

    for chunk in range(context.num_chunks):
        for peer in returned.peers:
            fill(*returned.chunk(peer, chunk), peer)
            if returned.sends_one_by_one:
                returned.send(chunk, (peer,))
        if not returned.sends_one_by_one:
            returned.send(chunk, returned.peers)
    fill(*call.rows.sources[rank], rank)
    call.meanwhile()
    out = sum_returned(call, returned.parts())
    returned.finish()
    workspace.shared.give(partial)
    return out


for _op, _plain, _run in (
    ("dispatch_grouped_matmul", dispatch_grouped_matmul_unfused, dispatch_grouped_matmul),
    ("grouped_matmul_combine", grouped_matmul_combine_unfused, grouped_matmul_combine),
):
    _keeps = _op in KEEP_BITS
    dispatch.register(Implementation("unfused", _op, unfused.refuses, unfused.estimate, _plain, keeps_bits=_keeps))
    dispatch.register(
        Implementation(
            "chunked", _op, grouped.refuses_chunks, chunked.estimate, _run, describe=chunked.describe, keeps_bits=_keeps
        )
    )
