"""The traffic of ``chunked`` as one collective per chunk, which NCCL can hand to copy engines.

:class:`CollectiveGather` and :class:`CollectivePartials` are what ``ShardExchange`` and ``PartialExchange`` of
:mod:`tpkernels.backends.point_to_point.exchange` are, for equal shards of consecutive rows: a collective moves equal
parts.  Which of the two is used is decided by facts that are equal on all ranks (:func:`fits`).  They cost a copy of
the shard, and memory for one gathered tensor in each direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from tpkernels.backends.point_to_point import copy_engines
from tpkernels.comm import timeline
from tpkernels.comm.groups import Group
from tpkernels.comm.transport import Transfer, TransportFailure, wait_all, watch
from tpkernels.ops.contract import Context
from tpkernels.partition import Layout, chunk_ranges, peers_after

__all__ = ["CollectiveGather", "CollectivePartials", "fits"]


def fits(context: Context, layout: Layout) -> bool:
    """Whether the chunks of this call are to be collectives; the same on every rank."""
    even = layout.outer == 1 and not layout.feature and len(set(layout.sizes)) == 1 and layout.sizes[0] > 0
    return even and copy_engines.wanted(context.group, context.problem.device)


class CollectiveGather:
    """All-gather of ``x``, posted at once: chunk c of all shards is one collective."""

    def __init__(self, context: Context, x: Tensor, layout: Layout) -> None:
        group = context.group
        self._peers = peers_after(group.rank, group.size)
        rows, columns = x.shape
        memory = copy_engines.buffers(group, x.device)
        outgoing, incoming = memory.take((group.size * rows, columns), x.dtype)
        staged = outgoing[:rows]
        staged.copy_(x)
        self._chunks: list[tuple[Transfer, int, int, Tensor]] = []
        for chunk, (start, stop) in enumerate(chunk_ranges(rows, context.num_chunks)):
            if start == stop:
                continue
            whole = incoming[group.size * start : group.size * stop]
            transfer = _post(group, chunk, whole, partial(group.pg._allgather_base, whole, staged[start:stop]))
            self._chunks.append((transfer, start, stop, whole))

    def arrivals(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (peer, first row within its shard, rows), chunk by chunk."""
        for transfer, start, stop, whole in self._chunks:
            transfer.wait()
            for peer in reversed(self._peers):
                yield peer, start, whole[peer * (stop - start) : (peer + 1) * (stop - start)]

    def finish(self) -> None:
        """Wait until the buffers may be used again; the chunks that were yielded are gone afterwards."""
        wait_all([transfer for transfer, *_ in self._chunks])


class CollectivePartials:
    """Reduce-scatter traffic of one call: chunk c of every owner's rows leaves as one all-to-all."""

    def __init__(self, context: Context, layout: Layout, columns: int, like: Tensor) -> None:
        self.group, self._rows, self._num_chunks = context.group, layout.shard_rows(0), context.num_chunks
        self.peers = peers_after(self.group.rank, self.group.size)
        memory = copy_engines.buffers(self.group, like.device)
        self._out, self._in = memory.take((self.group.size * self._rows, columns), like.dtype)
        self._posted: dict[int, Transfer] = {}

    def rows(self, owner: int, chunk: int) -> tuple[int, int]:
        """Rows of the shard of ``owner`` that are its chunk ``chunk``."""
        return chunk_ranges(self._rows, self._num_chunks)[chunk]

    def send(self, chunk: int, fill: Callable[[int, int, int, Tensor], None]) -> None:
        """Compute and send one chunk for every peer: ``fill(owner, start, stop, out)`` writes partial rows."""
        start, stop = self.rows(self.group.rank, chunk)
        if start == stop:
            return
        for peer in self.peers:
            fill(peer, start, stop, self._part(self._out, peer, start, stop))
        outgoing, incoming = (
            whole[self.group.size * start : self.group.size * stop] for whole in (self._out, self._in)
        )
        self._posted[chunk] = _post(
            self.group, chunk, incoming, lambda: self.group.pg.alltoall_base(incoming, outgoing, [], [])
        )

    def parts(self, chunk: int, own: Tensor) -> list[Tensor]:
        """Wait for chunk ``chunk`` of this rank's rows; all ranks' partials in rank order, ours from ``own``."""
        start, stop = self.rows(self.group.rank, chunk)
        if chunk in self._posted:
            self._posted[chunk].wait()
        return [
            own[start:stop] if rank == self.group.rank else self._part(self._in, rank, start, stop)
            for rank in range(self.group.size)
        ]

    def finish(self) -> None:
        """Wait until the buffers may be used again; the parts are gone afterwards."""
        wait_all(list(self._posted.values()))

    def _part(self, whole: Tensor, rank: int, start: int, stop: int) -> Tensor:
        """Of a chunk in which the ranks' parts follow each other."""
        first = self.group.size * start + rank * (stop - start)
        return whole[first : first + stop - start]


def _post(group: Group, chunk: int, tensor: Tensor, start: Callable[[], Any]) -> Transfer:
    posted = timeline.now()
    try:
        work = watch(group, tensor.device, start())
    except RuntimeError as error:
        raise TransportFailure(f"posting chunk {chunk}: {error}") from error
    return Transfer("recv", -1, chunk, tensor, work, posted)
