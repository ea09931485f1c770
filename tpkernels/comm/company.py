"""Steps of c10d in which the ranks of a job wait for each other: they end in time, with Ctrl-C, and with a name.

gloo waits for a rank that is stopped as it connects, takes no signal meanwhile, and tries five times as long as it was
told to.  So another thread makes the step, and this one waits for it (:func:`together`).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
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
        PeerLost: the store did not answer, or a rank was stopped as it connected; names it where it is on this host.
    """
    seconds, port = limit.total_seconds(), port_of(store)
    if port is None:
        return work()
    try:
        with in_time(port, rank, limit):
            _records(store, seconds).set(f"{_COMES}/{step}/{rank}", json.dumps(Identity.mine().to_json()))
            return interruptible(work, _LAST * seconds, undo)
    except (NotEnded, dist.DistStoreError) as error:  # c10d's: a key that a rank was to leave has not come
        late, came = error, _who_came(store, step, size, max(_ASK_S, _ASK * seconds))
    if came is None:
        raise silent_store(port, rank, limit) from late
    stopped = [other for other, who in came.items() if other != rank and who.is_stopped()]
    missing = [other for other in range(size) if other not in came]
    why = "no rank of this host is stopped, so one of another host is, or its host is cut off"
    if stopped or missing:
        why = f"rank(s) {stopped} are stopped" if stopped else f"rank(s) {missing} did not come"
    raise PeerLost(
        f"rank {rank}: the ranks did not connect to each other within {seconds:g} s: {why}. {late}",
        ranks=stopped or missing,
    ) from late


def _records(store: Any, seconds: float) -> BoundedStore:
    return BoundedStore(store, seconds, JobIdentity.of_this_process().seal(""))


def _who_came(store: Any, step: str, size: int, seconds: float) -> dict[int, Identity] | None:
    """The ranks that have come to the step; None if the store does not answer now either."""
    keys = {rank: f"{_COMES}/{step}/{rank}" for rank in range(size)}
    try:
        asked = _records(interruptible(store.clone, seconds), seconds)  # the step may still use the old connection
        return presence.understood(asked, keys, presence.existing(asked, keys), Identity.from_json)
    except (StoreLost, NotEnded, dist.DistError):
        return None
