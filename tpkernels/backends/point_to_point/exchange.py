"""The two traffic patterns of tensor parallelism over point-to-point chunks.

:class:`ShardExchange` sends this rank's shard to everybody and receives theirs (all-gather); everything is posted at
once.  :class:`PartialExchange` sends to each owner the rows it will sum and receives what the others computed for us
(reduce-scatter); a chunk leaves when it has been computed.  Chunk ``c`` of a shard is the c-th of ``num_chunks`` even
row ranges, so both sides know all sizes, and a chunk of zero rows is never sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from tpkernels.backends.point_to_point import workspace
from tpkernels.comm.transport import Patience, Transfer, exchange, wait_all
from tpkernels.ops.contract import Context
from tpkernels.partition import Layout, chunk_ranges, peers_after

__all__ = ["PartialExchange", "ShardExchange"]


class ShardExchange:
    """All-gather of ``x``: posts everything, then yields the peers' chunks in a fixed order as they arrive.

    With ``whole`` (row layouts whose shards are one segment each) the chunks land in their final place.
    """

    def __init__(self, context: Context, x: Tensor, layout: Layout, whole: Tensor | None = None) -> None:
        group = context.group
        peers = peers_after(group.rank, group.size)
        in_place = whole is not None and layout.outer == 1 and not layout.feature
        self._taken: list[Tensor] = []
        self._sent: list[Transfer] = []
        self._arrivals: list[tuple[Transfer | None, int, int, Tensor]] = []
        inbox = {}
        for peer in peers:
            rows = layout.shard_rows(peer)
            if in_place:
                assert whole is not None
                start = sum(layout.sizes[:peer]) * layout.inner
                inbox[peer] = whole[start : start + rows]
            else:
                columns = layout.sizes[peer] if layout.feature else x.shape[1]
                inbox[peer] = workspace.shared.take((rows, columns), x)
                self._taken.append(inbox[peer])
        ranges = {rank: chunk_ranges(layout.shard_rows(rank), context.num_chunks) for rank in range(group.size)}
        patience = Patience(group.timeout)
        for chunk in range(context.num_chunks):
            low, high = ranges[group.rank][chunk]
            # Predecessors send to us first, so we look at them first.
            incoming = [(peer, *ranges[peer][chunk]) for peer in reversed(peers)]
            sent, received = exchange(
                group,
                context.tag,
                chunk,
                [(peer, x[low:high]) for peer in peers],
                [(peer, inbox[peer][start:stop]) for peer, start, stop in incoming],
                patience,
            )
            self._sent += sent
            transfers = {transfer.peer: transfer for transfer in received}
            for peer, start, stop in incoming:
                self._arrivals.append((transfers.get(peer), peer, start, inbox[peer][start:stop]))

    def arrivals(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (peer, first row within its shard, rows), chunk by chunk; each is waited for when its turn comes."""
        for transfer, peer, start, rows in self._arrivals:
            if transfer is not None:
                transfer.wait()
            yield peer, start, rows

    def finish(self) -> None:
        """Wait until this rank's shard may be written again; the chunks that were yielded are gone afterwards."""
        wait_all(self._sent)
        for buffer in self._taken:
            workspace.shared.give(buffer)


class PartialExchange:
    """Reduce-scatter traffic of one call: outgoing partial chunks per owner, incoming partials for this rank."""

    def __init__(
        self, context: Context, layout: Layout, columns: int, like: Tensor, *, everything: bool = False
    ) -> None:
        """``everything``: each rank owns all rows (one-shot all-reduce), and outgoing chunks are the same for all."""
        self.context, self.layout, self.columns = context, layout, columns
        self.group = context.group
        self.peers = peers_after(self.group.rank, self.group.size)
        self._everything = everything
        self._patience = Patience(self.group.timeout)
        self._sent: list[Transfer] = []
        self._received: dict[tuple[int, int], Transfer] = {}
        self._out: dict[int, Tensor] = {}
        self._like = like
        mine = self.group.rank
        shape = (self._rows(mine), self._columns(mine))
        self._in = {peer: workspace.shared.take(shape, like) for peer in self.peers}
        # A posted receive lets a gloo peer send at once; NCCL wants sends and receives of a chunk in one group.
        device = like.device.type
        self._receive_early = device != "cuda" and not self.group.backends.waits_in_streams(device)
        if self._receive_early:
            for chunk in range(context.num_chunks):
                _, received = exchange(
                    self.group, context.tag, chunk, [], self._incoming_buffers(chunk), self._patience
                )
                self._note(chunk, received)

    def rows(self, owner: int, chunk: int) -> tuple[int, int]:
        """Rows of the shard of ``owner`` that are its chunk ``chunk``."""
        return chunk_ranges(self._rows(owner), self.context.num_chunks)[chunk]

    def send(self, chunk: int, fill: Callable[[int, int, int, Tensor], None]) -> None:
        """Compute and send one chunk for every peer: ``fill(owner, start, stop, out)`` writes partial rows."""
        if self._everything:
            low, high = self.rows(self.group.rank, chunk)
            out = self._outbox(self.group.rank)[low:high]
            fill(self.group.rank, low, high, out)
            self.post(chunk, [(peer, out) for peer in self.peers])
            return
        pending = []
        for peer in self.peers:
            low, high = self.rows(peer, chunk)
            out = self._outbox(peer)[low:high]
            fill(peer, low, high, out)
            if self._receive_early:
                self.post(chunk, [(peer, out)])
            else:
                pending.append((peer, out))
        if not self._receive_early:
            self.post(chunk, pending)

    def parts(self, chunk: int, own: Tensor | None = None) -> list[Tensor]:
        """Wait for chunk ``chunk`` of this rank's rows; all ranks' partials in rank order, ours from ``own``."""
        mine = self.group.rank
        low, high = self.rows(mine, chunk)
        parts = []
        for rank in range(self.group.size):
            if rank == mine:
                parts.append((self._outbox(mine) if own is None else own)[low:high])
                continue
            transfer = self._received.get((chunk, rank))
            if transfer is not None:
                transfer.wait()
            parts.append(self._in[rank][low:high])
        return parts

    def finish(self) -> None:
        """Wait until the outgoing chunks have left; the parts are gone afterwards."""
        wait_all(self._sent)
        for buffer in (*self._out.values(), *self._in.values()):
            workspace.shared.give(buffer)

    def post(self, chunk: int, sends: list[tuple[int, Tensor]]) -> None:
        """Send partial rows that exist already: (owner, contiguous rows) for each peer."""
        recvs = [] if self._receive_early else self._incoming_buffers(chunk)
        sent, received = exchange(self.group, self.context.tag, chunk, sends, recvs, self._patience)
        self._sent += sent
        self._note(chunk, received)

    def _incoming_buffers(self, chunk: int) -> list[tuple[int, Tensor]]:
        low, high = self.rows(self.group.rank, chunk)
        return [(peer, self._in[peer][low:high]) for peer in reversed(self.peers)]

    def _note(self, chunk: int, received: list[Transfer]) -> None:
        for transfer in received:
            self._received[chunk, transfer.peer] = transfer

    def _outbox(self, owner: int) -> Tensor:
        if owner not in self._out:
            self._out[owner] = workspace.shared.take((self._rows(owner), self._columns(owner)), self._like)
        return self._out[owner]

    def _rows(self, owner: int) -> int:
        return self.layout.total_rows if self._everything else self.layout.shard_rows(owner)

    def _columns(self, owner: int) -> int:
        return self.layout.sizes[owner] if self.layout.feature else self.columns
