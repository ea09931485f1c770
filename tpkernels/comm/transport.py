"""Point-to-point chunks over any c10d process group, with every wait bounded by the group's timeout.

A :class:`Transfer` owns its tensor until it is complete.  On gloo a wait blocks the host until the chunk is there; on
NCCL it makes the current stream wait for the group's own stream (an event, no host block), so the same loop pipelines
on both.  Messages carry a tag of (signature, call number, chunk): on gloo, ranks that disagree about a call never match
each other's messages, so they cannot compute with the wrong bytes (and gloo, which aborts the process when sizes
differ, never sees them); they stall, and the monitor stops them.  NCCL ignores tags: there the monitor compares the
order of calls (:mod:`tpkernels.comm.call_order`), after the fact.  Nor does a wait bound anything there: the monitor
looks after the operations themselves (:func:`watch`).
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tpkernels.comm import timeline
from tpkernels.errors import CommunicationError

if TYPE_CHECKING:
    from tpkernels.comm.groups import Group

__all__ = [
    "MAX_CHUNKS_PER_CALL",
    "MAX_SIGNATURES",
    "Patience",
    "Transfer",
    "TransportFailure",
    "abort",
    "call_tag",
    "exchange",
    "wait_all",
    "watch",
]

# Tags are 31-bit: bit 30 keeps away from the small numbers that programs use; 12 bits name the signature, 10 bits count
# calls, 8 bits chunks.
MAX_SIGNATURES = 1 << 12
MAX_CHUNKS_PER_CALL = 1 << 8
_CALLS = 1 << 10
_TAG_BASE = 1 << 30
_ABORT_TAG = _TAG_BASE - 1
# Shares of the timeout: below the one, waits for others need not shorten the next; the other is the least that a wait
# gets, because what a peer sent while this process stood still is not read yet.
_SHORT, _LEAST = 0.02, 0.1


class TransportFailure(RuntimeError):
    """A wait or a transfer failed; :mod:`tpkernels.comm.agreement` finds out which rank caused it.

    A transport that knows says so: ``verdict`` is then the error's class, and ``ranks`` those to blame.  ``lasted``:
    seconds of the wait.
    """

    def __init__(
        self,
        message: str,
        peer: int | None = None,
        verdict: type[CommunicationError] | None = None,
        ranks: Sequence[int] = (),
        lasted: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.peer, self.verdict, self.ranks, self.lasted = peer, verdict, tuple(ranks), lasted


class Patience:
    """How long to wait for each peer of one exchange: the timeout, less what waits took since it was last heard of.

    A peer is silent also while this rank waits for another one, so that two waits in a row do not add up to two
    timeouts.  Time that this rank computes does not count: its peers may have to compute as long.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._spent = 0.0
        self._heard: dict[int, float] = {}

    def left(self, peer: int) -> float | None:
        """Seconds; None for the whole timeout."""
        silent = self._spent - self._heard.get(peer, 0.0)
        if silent < _SHORT * self._timeout:
            return None
        return max(self._timeout - silent, _LEAST * self._timeout)

    def heard(self, peer: int, seconds: float) -> None:
        """A wait for ``peer`` has ended well after so long."""
        if seconds < self._timeout:  # else this process was stopped
            self._spent += seconds
        self._heard[peer] = self._spent


@dataclass
class Transfer:
    """A chunk on its way: ``kind`` is "send" or "recv", ``peer`` a group rank."""

    kind: timeline.Kind
    peer: int
    chunk: int
    tensor: torch.Tensor
    work: Any
    posted_ns: int
    done: bool = False
    target: torch.Tensor | None = None
    """Where a received chunk goes that came to host memory."""

    until: float | None = None
    """When a wait that blocks the host ends at the latest (``time.monotonic``), if that is before the timeout."""

    patience: Patience | None = None
    """Of the exchange, where waits block the host."""

    def wait(self) -> None:
        """Return when the chunk is usable (recv) or its memory reusable (send), in stream order on CUDA."""
        if self.done:
            return
        start = time.monotonic()
        limits = [] if self.until is None else [max(0.001, self.until - start)]
        if self.patience is not None and (left := self.patience.left(self.peer)) is not None:
            limits.append(left)
        limit = (datetime.timedelta(seconds=min(limits)),) if limits else ()
        try:
            with timeline.span(f"wait {self.kind}", "wait", chunk=self.chunk, peer=self.peer):
                self.work.wait(*limit)
        except RuntimeError as error:
            raise TransportFailure(
                f"{self.kind} of chunk {self.chunk}, peer rank {self.peer}: {error}",
                self.peer,
                lasted=time.monotonic() - start,
            ) from error
        if self.patience is not None:
            self.patience.heard(self.peer, time.monotonic() - start)
        if self.target is not None:
            self.target.copy_(self.tensor)
        self.done = True
        timeline.record(self.kind, self.kind, self.posted_ns, chunk=self.chunk, peer=self.peer)


def call_tag(call: int, signature_id: int = 0) -> int:
    """Tag of a call's chunk 0.  ``signature_id`` is equal on all ranks; 0 is what they exchange before they agree."""
    return _TAG_BASE | (signature_id % MAX_SIGNATURES) << 18 | (call % _CALLS) << 8


def exchange(
    group: Group,
    tag: int,
    chunk: int,
    sends: Sequence[tuple[int, torch.Tensor]],
    recvs: Sequence[tuple[int, torch.Tensor]],
    patience: Patience | None = None,
) -> tuple[list[Transfer], list[Transfer]]:
    """Post the sends and receives of one chunk of call ``tag``: (peer, contiguous tensor) each.

    Empty tensors are not sent: both sides skip them, so the caller must know the peer's sizes.  On NCCL the whole chunk
    is one grouped operation, which every rank must post in the same order.  Chunks that do not wait for each other's
    arrival anywhere share their ``patience``.

    Returns:
        The transfers of ``sends`` and of ``recvs``.
    """
    assert 0 <= chunk < MAX_CHUNKS_PER_CALL, chunk
    sends = [(peer, tensor) for peer, tensor in sends if tensor.numel()]
    recvs = [(peer, tensor) for peer, tensor in recvs if tensor.numel()]
    if not sends and not recvs:
        return [], []
    pg, device = group.pg, (sends or recvs)[0][1].device
    blocks = device.type != "cuda" and not group.backends.waits_in_streams(device.type)
    waits = (patience or Patience(group.timeout)) if blocks else None
    posted = timeline.now()

    def post(kind: timeline.Kind, start: Callable[..., Any], peer: int, tensor: torch.Tensor) -> Transfer:
        try:
            work = start([tensor], peer, tag + chunk)
        except RuntimeError as error:
            raise TransportFailure(f"posting the {kind} of chunk {chunk}, peer rank {peer}: {error}", peer) from error
        return Transfer(kind, peer, chunk, tensor, work, posted, patience=waits)

    try:
        if blocks:
            # Receives first: gloo starts writing inside send() and then keeps a receive that is posted behind it
            # waiting for the connection's lock. Two hosts at 400 Mbit/s, 8 MiB each way: up to 317 ms, this way 174.
            received = [post("recv", pg.recv, peer, tensor) for peer, tensor in recvs]
            return [post("send", pg.send, peer, tensor) for peer, tensor in sends], received
        if group.backends.wire_device(device) != device:
            return _through_host_memory(group, tag, chunk, sends, recvs, patience)
        pg._start_coalescing(device)
        sent = [post("send", pg.send, peer, tensor) for peer, tensor in sends]
        received = [post("recv", pg.recv, peer, tensor) for peer, tensor in recvs]
        grouped = _Once(watch(group, device, pg._end_coalescing(device)))
    except TransportFailure:
        raise
    except RuntimeError as error:
        raise TransportFailure(f"posting chunk {chunk}: {error}") from error
    for transfer in (*sent, *received):
        transfer.work = grouped
    return sent, received


def _through_host_memory(
    group: Group,
    tag: int,
    chunk: int,
    sends: Sequence[tuple[int, torch.Tensor]],
    recvs: Sequence[tuple[int, torch.Tensor]],
    patience: Patience | None,
) -> tuple[list[Transfer], list[Transfer]]:
    """CUDA tensors over gloo, which sends host memory only: right everywhere, and as slow as it sounds."""
    received_here = [torch.empty(tensor.shape, dtype=tensor.dtype) for _, tensor in recvs]
    sent, received = exchange(
        group,
        tag,
        chunk,
        [(peer, tensor.cpu()) for peer, tensor in sends],
        [(peer, host) for (peer, _), host in zip(recvs, received_here, strict=True)],
        patience,
    )
    for transfer, (_, tensor) in zip(received, recvs, strict=True):
        transfer.target = tensor
    return sent, received


class _Once:
    """The one NCCL operation that all transfers of a chunk are: waiting for it once orders the current stream.

    All waits of a call are made on the stream of the call. A wait costs the host several microseconds, and with 8 ranks
    and 8 chunks there are 112 transfers.
    """

    def __init__(self, work: Any) -> None:
        self._work: Any = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None  # what it holds may be freed, in stream order, from here on


def watch(group: Group, device: torch.device, work: Any) -> Any:
    """Have the monitor look after ``work``, which this rank's call has started on ``device``; returns it.

    Where waits block the host they bound themselves.  What is captured in a CUDA graph does not run now, and torch does
    not follow what its replays do.
    """
    if group.works is not None and group.backends.waits_in_streams(device.type) and not _capturing(device):
        call = group.in_flight
        if call is None:
            group.works.add(group.calls - 1, "the first meeting of the ranks", work)
        else:
            group.works.add(call.call, call.signature, work)
    return work


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def wait_all(transfers: Sequence[Transfer], *, until: float | None = None) -> None:
    """Wait for each; ``until``: where waits block the host, all of them end then at the latest."""
    for transfer in transfers:
        transfer.until = until
        transfer.wait()


def abort(group: Group) -> None:
    """Make every pending wait of the group fail now; callable from another thread.  The group is unusable afterwards.

    On NCCL the kernels end, and with them the waits for the device: what these then find there is void.
    gloo's ``abort`` does not wake a waiting receive (torch 2.13); a receive that times out closes all connections of
    its context, and that does.  It must be a receive on an open connection, hence one from each of the peers.
    """
    if group.backends.serving("cpu") == "gloo":
        _time_out_receives(group)
    if set(group.backends.by_device.values()) != {"gloo"} and not group.aborted:
        group.aborted = True
        group.pg.abort()


def _time_out_receives(group: Group) -> None:
    pg = group.pg
    for peer in range(group.size):
        if peer == group.rank:
            continue
        try:
            pg.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(datetime.timedelta(milliseconds=1))
        except RuntimeError:
            continue  # the time-out is the purpose; a connection that is closed already is as good
        raise RuntimeError("the abort message of a poisoned group was answered; no peer sends it")
