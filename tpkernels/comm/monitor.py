"""One daemon thread per process that keeps stuck calls from staying stuck.

Four times a second it looks at the calls of this process that have been running for a while.  It publishes what the
call is, reads what the peers say, and when they made another call, refused, failed or died it records the verdict and
aborts the transport, so that the waiting thread raises.  It also writes the heartbeat by which remote peers know us,
and compares the order of calls where the transport does not (:mod:`tpkernels.comm.call_order`).

On NCCL a call has long returned when its operation is stuck on the device, and whoever waits for the device waits in
the driver.  There the monitor looks at the operations themselves (:mod:`tpkernels.comm.works`): when one has failed, is
late, or stands still while a peer is gone, it records the verdict and aborts the communicator.  The kernels then end,
the driver's waits return, and the next call on the group raises, or the one in flight.

The thread costs nothing on the path of a call: a call only stores what it is in ``Group.in_flight``, and one that takes
microseconds not even that, until it waits.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time

from tpkernels.comm import agreement, blame, heartbeats, interrupts, presence, resources, transport
from tpkernels.comm.call_order import Comparison
from tpkernels.comm.groups import Group, InFlight, all_groups, live_groups
from tpkernels.comm.job_store import has_clashed
from tpkernels.comm.meeting import TWO_JOBS
from tpkernels.comm.trail import Trail
from tpkernels.comm.works import Watched, Works
from tpkernels.errors import CommunicationError, GroupMismatch, PeerLost

__all__ = ["ensure_running"]

PERIOD = 0.25
SUSPICIOUS_AFTER = 0.5
# What a rank that has come to its end in good order has sent arrives within this time of its leaving, or never.
STANDS_STILL = 1.0
# One request to the store takes no longer; the monitor has other groups to look after.
STORE_PATIENCE = 1.0
# So long the end of the process waits for calls of daemon threads to end.
AWAIT_DAEMONS = 2.0

_log = logging.getLogger(__name__)
_stop = threading.Event()
_start_lock = threading.Lock()
_thread: threading.Thread | None = None


def ensure_running() -> None:
    """Start the thread if this process has none (a forked child has none either)."""
    global _thread
    interrupts.listen()
    if _thread is not None and _thread.is_alive():
        return
    with _start_lock:
        if _thread is None or not _thread.is_alive():
            _stop.clear()
            _thread = threading.Thread(target=_run, name="tpkernels-monitor", daemon=True)
            _thread.start()


@atexit.register
def _shut_down() -> None:
    _end_calls_of_daemons()
    _stop.set()
    if _thread is not None:
        _thread.join(timeout=2 * PERIOD)


def _end_calls_of_daemons() -> None:
    """End the calls that daemon threads are in: Python ends such a thread when it comes back from compiled code after
    the interpreter has gone, and C++ then ends the process by ``terminate``."""
    busy = [group for group in all_groups() if not _is_free(group, 0.0)]
    for group in busy:
        group.verdict = group.verdict or PeerLost(f"rank {group.rank}: its process ends", ranks=(group.rank,))
        for resource in resources.held(group):
            resource.abort()
        try:
            transport.abort(group)
        except RuntimeError as error:
            _log.warning("tpkernels: a call on group %r could not be ended at exit: %s", group.name, error)
    deadline = time.monotonic() + AWAIT_DAEMONS
    for group in busy:
        _is_free(group, max(0.0, deadline - time.monotonic()))


def _is_free(group: Group, wait: float) -> bool:
    """Whether no other thread is in a call, now or within so many seconds."""
    free = group.lock.acquire(timeout=wait) if wait else group.lock.acquire(blocking=False)
    if free:
        group.lock.release()
    return free


class _Watch:
    """The monitor's view of one group; its own store connection, because c10d's client serves one caller at a time."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.store = group.control.second(limit=STORE_PATIENCE)
        self.beats = 0
        self.next_beat = 0.0
        self.order = Comparison()
        self.oldest: Watched | None = None
        self.oldest_since = 0.0

    def tick(self) -> None:
        if self.group.poison is not None:
            self._end_what_is_left(self.group.works)
            return
        if self.group.key is None:  # its ranks have not met, and some may wait for this one where they have
            self._beat()
            return
        now = time.monotonic()
        # What the device waits for comes first: the store may have died with the peer.
        if self.group.works is not None and self.group.verdict is None:
            self._look_at_works(self.group.works, now)
        for resource in resources.held(self.group):
            resource.tick(self.group, self._knows_of_a_loss)
        in_flight = self.group.in_flight
        is_suspicious = in_flight is not None and now - in_flight.since > SUSPICIOUS_AFTER
        if in_flight is not None and is_suspicious and self._sees_a_death():  # the store may have died with that peer
            self._end_call(in_flight, None, now)
            return
        if self._beat() and self.group.verdict is None and has_clashed(self.store, self.group.job):
            self._end(GroupMismatch(f"rank {self.group.rank}, group {self.group.name!r}: {TWO_JOBS}"))
        if self.group.trail is not None and self.group.verdict is None:
            self._compare_order(self.group.trail)
        if in_flight is not None and is_suspicious:
            if not self.group.co_located:
                self._listen()
                self._beat()
            verdict, hopeless = self._inspect(in_flight, now - in_flight.since)
            if not hopeless and self.group.is_overdue() and agreement.unanswering(self.group):
                verdict, hopeless = self._blame(in_flight, "its time is up", self.group.timeout), True
            if hopeless:
                self._end_call(in_flight, verdict, now)

    def _beat(self) -> bool:
        """Give a sign of life if it is time, as between requests that a store far away answers slowly."""
        now = time.monotonic()
        if now < self.next_beat:
            return False
        self.next_beat = now + heartbeats.every(self.group)
        self.beats += 1
        if self.group.key is None:
            presence.beat(self.group, self.beats, self.store)
        else:
            self.store.set(f"{self.group.key}/beat/{self.group.rank}", heartbeats.beat(self.group, self.beats))
        return True

    def _listen(self) -> dict[int, str]:
        """The beats of all ranks; a round of slow requests hears them twice, or the gaps between would be too long."""
        said = agreement.beats(self.group, self.store)
        if not self.group.co_located:
            heartbeats.listen(self.group, said, time.monotonic())
        return said

    def _end_call(self, in_flight: InFlight, verdict: CommunicationError | None, now: float) -> None:
        if self.group.in_flight is not in_flight:
            return
        if self.group.works is not None:  # an abort that ends a wait for the device makes no error of it
            verdict = verdict or self._blame(in_flight, "the call did not return", now - in_flight.since)
        self.group.verdict = self.group.verdict or verdict
        for resource in resources.held(self.group):
            resource.abort()
        transport.abort(self.group)

    def _compare_order(self, trail: Trail) -> None:
        verdict = self.order.look(self.group, trail, self.store)
        if verdict is not None:
            self._end(verdict)

    def _look_at_works(self, works: Works, now: float) -> None:
        oldest, stands_still = self._oldest(works, now)
        if oldest is None:
            return
        failure, age = oldest.failure(), now - oldest.since
        # A little before torch's watchdog, which may end the process when the time is up.
        is_late = oldest.has_timed_out() or age > self.group.timeout - _margin(self.group)
        if failure is None and not is_late and not (stands_still and self._has_lost_a_peer()):
            return
        symptom = failure or f"its operation on the device had not ended after {age:.1f} s"
        self._end(self._blame(oldest, symptom, age, broken=failure is not None))

    def _oldest(self, works: Works, now: float) -> tuple[Watched | None, bool]:
        """The first operation that has not ended, and whether it has been the first for long."""
        oldest = works.oldest()
        if oldest is not self.oldest:
            self.oldest, self.oldest_since = oldest, now
        return oldest, now - self.oldest_since > STANDS_STILL

    def _end_what_is_left(self, works: Works | None) -> None:
        """The group has failed on the host; peers that have heard of it do not come to what waits on the device."""
        if works is not None and all(self._oldest(works, time.monotonic())):
            self._abort()

    def _knows_of_a_loss(self) -> bool:
        """Whether a peer has died or failed."""
        return self._sees_a_death() or bool(presence.failures(self.group, self.store))

    def _sees_a_death(self) -> bool:
        return any(peer.is_dead() for peer in self.group.peers)

    def _has_lost_a_peer(self) -> bool:
        try:
            return self._knows_of_a_loss()
        except RuntimeError:  # the store died, perhaps with the peer: then the time-out tells
            return False

    def _blame(self, call: InFlight | Watched, symptom: str, waited: float, broken: bool = False) -> CommunicationError:
        return agreement.blame(
            self.group, call.call, str(call.signature), symptom, waited, store=self.store, broken=broken
        )

    def _end(self, verdict: CommunicationError) -> None:
        """Stop a group whose calls may have returned: the next one raises ``verdict``, or the one in flight."""
        self.group.verdict = verdict  # before the abort: a thread that it wakes looks here
        self._abort()
        presence.tell(self.group, verdict, self.store)
        _log.error(
            "tpkernels: %s. What calls on group %r have returned since then is void; the next call on it raises this",
            verdict, self.group.name,
        )  # fmt: skip

    def _abort(self) -> None:
        try:
            transport.abort(self.group)
        except RuntimeError as error:
            _log.error(
                "tpkernels: the communicator of group %r could not be aborted, what waits for this device may wait for "
                "ever: %s",
                self.group.name, error,
            )  # fmt: skip

    def _inspect(self, in_flight: InFlight, age: float) -> tuple[CommunicationError | None, bool]:
        """What the peers say of this call and of those it overlaps, and whether it cannot end well."""
        group = self.group
        verdict: CommunicationError | None = None
        for call, signature in {**group.started, in_flight.call: in_flight.signature}.items():
            agreement.announce(group, call, str(signature), self.store)
            records = agreement.recorded(group, f"call/{call}", self.store)
            self._beat()
            # All sides of a disagreement are worth a moment's wait: the message then blames the right ranks.
            if len(records) == group.size or age > SUSPICIOUS_AFTER + agreement.AWAIT_OTHERS:
                verdict = verdict or agreement.mismatch(group, call, records)
        # Of the last one, which waits. Ranks that have what they need of it go on, and say so with their beats.
        came = heartbeats.calls(self._listen())
        group.missed = call, tuple(one for one in range(group.size) if one not in records and came.get(one, -1) < call)
        return verdict, verdict is not None or self._knows_of_a_loss()


def _has_works(group: Group) -> bool:
    return group.works is not None and not group.aborted and group.works.oldest() is not None


def _margin(group: Group) -> float:
    """Seconds that it takes to find whom to blame, and to abort."""
    patience = 0.0 if group.co_located else blame.HEARTBEAT_PATIENCE
    return min(0.1 * group.timeout, 1.0 + patience)


def _run() -> None:
    watches: dict[int, _Watch] = {}
    while not _stop.wait(PERIOD):
        _look_at_all(watches)


def _look_at_all(watches: dict[int, _Watch]) -> None:
    """One round; a function of its own, so that no variable keeps a group alive until the next."""
    groups = {id(group): group for group in live_groups() if group.poison is None or _has_works(group)}
    for key in watches.keys() - groups.keys():
        del watches[key]
    for key, group in groups.items():
        try:
            if key not in watches:
                watches[key] = _Watch(group)
            watches[key].tick()
        except RuntimeError as error:
            # Usually the store: its host died or the job is ending.  Calls in flight still end at their time-out.
            _log.debug("tpkernels monitor, group %s: %s: %s", group.name, type(error).__name__, error, exc_info=error)
        except Exception as error:  # noqa: BLE001 - whatever it stumbles over, the other groups have no other monitor
            _log.warning("tpkernels monitor, group %s: %r; it goes on", group.name, error, exc_info=error)
