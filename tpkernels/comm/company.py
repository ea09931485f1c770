"""Steps of c10d in which the ranks of a job wait for each other: they end in time, with Ctrl-C, and with a name.

gloo waits for a rank that is stopped as it connects, takes no signal meanwhile, and tries five times as long as it was
told to.  So another thread makes the step, and this one waits for it (:func:`together`).
"""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch.distributed as dist

from tpkernels.comm import presence
from tpkernels.comm.bounded_store import BoundedStore, NotEnded, StoreLost, interruptible
from tpkernels.comm.job_identity import JobIdentity
from tpkernels.comm.job_store import in_time, silent_store
from tpkernels.comm.liveness import Identity
from tpkernels.comm.store_sockets import port_of
from tpkernels.errors import PeerLost

__all__ = ["together"]

_T = TypeVar("_T")
_COMES = "tpkernels/comes"
# Of its own time-outs c10d has more to say; that of the store comes first, see job_store.
_LAST = 1.1
# Of a time-out, and seconds at least: for the question who was there, over a connection of its own.
_ASK, _ASK_S = 0.1, 0.5
# A step that takes longer than this part of its time-out, or so many seconds, is one in which ranks wait: they beat.
_EARLY, _EARLY_S = 0.2, 5.0
# Between two beats; whoever misses so many while this rank listens gives no sign of life. It is more than _EARLY.
_EVERY, _EVERY_S, _MISSED = 0.08, 5.0, 4


def together(
    work: Callable[[], _T],
    step: str,
    store: Any,
    rank: int,
    size: int,
    limit: datetime.timedelta,
    undo: Callable[[], object] = lambda: None,
) -> _T:
    """What ``work`` returns or raises, if it has ended a little after ``limit``; ``undo``: if it ends later.

    ``step`` names it in ``store``, that of the job, or None for a job of this process alone.

    Raises:
        PeerLost: the store did not answer, or a rank was stopped as it connected, or cut off; names it.
    """
    seconds, port = limit.total_seconds(), port_of(store)
    if port is None:
        return work()
    company: _Company | None = None
    try:
        with in_time(port, rank, limit):
            company = _Company(store, step, rank, size, seconds)
            with company.beating():
                return interruptible(work, _LAST * seconds, undo)
    except (NotEnded, StoreLost, dist.DistStoreError) as error:  # c10d's: a key that a rank was to leave has not come
        late, came = error, None if company is None else company.who_came()
    if company is None or came is None:
        raise silent_store(port, rank, limit) from late
    stopped = [other for other, who in came.items() if other != rank and who.is_stopped()]
    missing = [other for other in range(size) if other not in came]
    silent = [other for other in company.silent() if other not in missing]
    why = "every rank came, and none is known to be stopped: two of them may not reach each other"
    if stopped:
        why = f"rank(s) {stopped} are stopped"
    elif missing:
        why = f"rank(s) {missing} did not come"
    elif silent:
        why = f"no sign of life from rank(s) {silent}: they are stopped, or their host is cut off"
    raise PeerLost(
        f"rank {rank}: the ranks did not connect to each other within {seconds:g} s: {why}. {late}",
        ranks=stopped or missing or silent,
    ) from late


class _Company:
    """The ranks of a job in one step: who has come to it, who waits in it and lives, and who has left it.

    Of a process on another host only the store tells whether it lives: a rank whose step takes long counts there, over
    a connection of its own, and watches the others count.
    """

    def __init__(self, store: Any, step: str, rank: int, size: int, seconds: float) -> None:
        self._store, self._rank, self._size, self._seconds = store, rank, size, seconds
        self._every = min(_EVERY * seconds, _EVERY_S)
        self._over = threading.Event()
        self._missed = dict.fromkeys(range(size), 0)
        self._heard: dict[int, str] = {}
        self._records = _records(store, seconds)
        # A job may take a step again, with the same store: every rank does.
        self._place = f"{_COMES}/{step}/{self._records.add(f'{_COMES}/{step}/visits/{rank}', 1)}"
        self._records.set(self._key(rank), json.dumps(Identity.mine().to_json()))
        self._records.set(self._key(rank, "beat"), "0")

    def _key(self, rank: int, what: str = "who") -> str:
        return f"{self._place}/{what}/{rank}"

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Have another thread count in the store while this takes long, and then say that this rank has left."""
        threading.Thread(target=self._beat, name="tpkernels-step", daemon=True).start()
        try:
            yield
        finally:
            self._over.set()

    def _beat(self) -> None:
        with suppress(StoreLost, NotEnded, dist.DistError):  # then nobody is heard, and nobody called silent
            records, number = self._records, 0
            if not self._over.wait(min(_EARLY * self._seconds, _EARLY_S)):
                records = self._second_connection()
                while not self._over.wait(self._every):
                    number += 1
                    records.set(self._key(self._rank, "beat"), str(number))
                    self._listen(records)
            records.set(self._key(self._rank, "left"), "")

    def _second_connection(self) -> BoundedStore:
        """The step may hold the first one."""
        seconds = max(_ASK_S, _ASK * self._seconds)
        return _records(interruptible(self._store.clone, seconds), seconds)

    def _listen(self, records: BoundedStore) -> None:
        others = [rank for rank in range(self._size) if rank != self._rank]
        said = presence.existing(records, {rank: self._key(rank, "beat") for rank in others})
        for rank in others:
            counts = rank not in said or said[rank] != self._heard.get(rank)
            self._missed[rank] = 0 if counts else self._missed[rank] + 1
        self._heard = said

    def who_came(self) -> dict[int, Identity] | None:
        """The ranks that have come to the step; None if the store does not answer."""
        keys = {rank: self._key(rank) for rank in range(self._size)}
        try:
            asked = self._second_connection()
            for rank in presence.existing(asked, {rank: self._key(rank, "left") for rank in range(self._size)}):
                self._missed[rank] = 0
            return presence.understood(asked, keys, presence.existing(asked, keys), Identity.from_json)
        except (StoreLost, NotEnded, dist.DistError):
            return None

    def silent(self) -> list[int]:
        """Ranks that came and have not left, and did not count while this one listened."""
        return [rank for rank, beats in self._missed.items() if beats >= _MISSED]


def _records(store: Any, seconds: float) -> BoundedStore:
    return BoundedStore(store, seconds, JobIdentity.of_this_process().seal(""))
