"""One daemon thread per process that keeps stuck calls from staying stuck.

Four times a second it looks at the calls of this process that have been running for a while.  It publishes what the
call is, reads what the peers say, and when they made another call, refused, failed or died it records the verdict and
aborts the transport, so that the waiting thread raises.  It also writes the heartbeat by which remote peers know us,
and compares the order of calls where the transport does not (:mod:`tpkernels.comm.call_order`).

The thread costs nothing on the path of a call: a call only stores what it is in ``Group.in_flight``, and one that takes
microseconds not even that, until it waits.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from typing import Any

from tpkernels.comm import agreement, transport
from tpkernels.comm.call_order import Comparison
from tpkernels.comm.groups import Group, InFlight, live_groups
from tpkernels.comm.symmetric_channels import SymmetricChannels
from tpkernels.comm.trail import Trail
from tpkernels.errors import GroupMismatch

__all__ = ["ensure_running"]

PERIOD = 0.25
SUSPICIOUS_AFTER = 0.5
HEARTBEAT_EVERY = 1.0

_log = logging.getLogger(__name__)
_stop = threading.Event()
_start_lock = threading.Lock()
_thread: threading.Thread | None = None


def ensure_running() -> None:
    """Start the thread if this process has none (a forked child has none either)."""
    global _thread
    if _thread is not None and _thread.is_alive():
        return
    with _start_lock:
        if _thread is None or not _thread.is_alive():
            _stop.clear()
            _thread = threading.Thread(target=_run, name="tpkernels-monitor", daemon=True)
            _thread.start()


@atexit.register
def _shut_down() -> None:
    _stop.set()
    if _thread is not None:
        _thread.join(timeout=2 * PERIOD)


class _Watch:
    """The monitor's view of one group; its own store connection, because a store client serves one caller at a time."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.store: Any = group.store.clone()
        self.beats = 0
        self.next_beat = 0.0
        self.had_lost = False
        self.order = Comparison()
        self.told_of_replays = False

    def tick(self) -> None:
        if self.group.symmetric is not None:  # first: the store may have died with the peer
            self._tell_of_replays(self.group.symmetric)
            self._end_waits_of_the_device(self.group.symmetric)
        now = time.monotonic()
        if now >= self.next_beat:
            self.next_beat = now + HEARTBEAT_EVERY
            self.beats += 1
            self.store.set(f"{self.group.key}/beat/{self.group.rank}", str(self.beats))
        if self.group.trail is not None and self.group.verdict is None:
            self._compare_order(self.group.trail)
        in_flight = self.group.in_flight
        if in_flight is None or now - in_flight.since <= SUSPICIOUS_AFTER:
            return
        verdict, hopeless = self._inspect(in_flight, now - in_flight.since)
        if hopeless and self.group.in_flight is in_flight:
            self.group.verdict = self.group.verdict or verdict
            if self.group.shared is not None:
                self.group.shared.channel.interrupt()
            transport.abort(self.group)

    def _compare_order(self, trail: Trail) -> None:
        verdict = self.order.look(self.group, trail, self.store)
        if verdict is not None:
            self.group.verdict = verdict  # the next call raises it, or the one in flight
            transport.abort(self.group)

    def _tell_of_replays(self, symmetric: SymmetricChannels) -> None:
        """A program that only replays CUDA graphs makes no call that would raise: it is told here, once."""
        said = None if self.told_of_replays else symmetric.lost_replays()
        if said is not None:
            self.told_of_replays = True
            _log.error(
                "tpkernels, group %r: %s. What CUDA graphs with calls on this group have returned since then is void; "
                "the next call on it that is not a replay raises",
                self.group.name, said,
            )  # fmt: skip

    def _end_waits_of_the_device(self, symmetric: SymmetricChannels) -> None:
        """Kernels wait for calls that have long returned: end them some time after a peer has failed or died.

        Not at once: a peer that came to its end in good order may leave while ours still wait for another one.
        """
        lost = any(peer.is_dead() for peer in self.group.peers) or bool(agreement.failures(self.group, self.store))
        if lost and self.had_lost:
            symmetric.abort()
        self.had_lost = lost

    def _inspect(self, in_flight: InFlight, age: float) -> tuple[GroupMismatch | None, bool]:
        """What the peers say of this call and of those it overlaps, and whether it cannot end well."""
        group, verdict = self.group, None
        for call, signature in {**group.started, in_flight.call: in_flight.signature}.items():
            agreement.announce(group, call, str(signature), self.store)
            texts = agreement.read(group, f"call/{call}", self.store)
            records = {rank: agreement.Record.from_json(text) for rank, text in texts.items()}
            # All sides of a disagreement are worth a moment's wait: the message then blames the right ranks.
            if len(records) == group.size or age > SUSPICIOUS_AFTER + agreement.AWAIT_OTHERS:
                verdict = verdict or agreement.mismatch(group, call, records)
        hopeless = (
            verdict is not None
            or any(peer.is_dead() for peer in group.peers)
            or bool(agreement.failures(group, self.store))
        )
        return verdict, hopeless


def _run() -> None:
    watches: dict[int, _Watch] = {}
    while not _stop.wait(PERIOD):
        _look_at_all(watches)


def _look_at_all(watches: dict[int, _Watch]) -> None:
    """One round; a function of its own, so that no variable keeps a group alive until the next."""
    groups = {id(group): group for group in live_groups() if group.poison is None}
    for key in watches.keys() - groups.keys():
        del watches[key]
    for key, group in groups.items():
        try:
            if key not in watches:
                watches[key] = _Watch(group)
            watches[key].tick()
        except RuntimeError as error:
            # The store is gone: its host died or the job is ending.  Calls in flight still end at their time-out.
            _log.debug("tpkernels monitor cannot reach the store of group %s: %s", group.name, error)
