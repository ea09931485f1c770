"""The store that the ranks of a job meet at: rank 0 serves it when ``srun`` or ``mpirun`` started them.

Under ``torchrun`` it is that of c10d's ``env://``, which torchrun's agent serves, or rank 0 where there is no agent.
It keeps what earlier groups of the job have written, and c10d calls the next default group by the same name: gloo's
ranks may then connect to addresses that nobody listens at any more.  Each group therefore has a prefix of its own.

Owns: that the ranks which meet are those of one job.  Each rank takes a place of its own under the job's name, so that
a process of another job that comes to the same port raises, and does not compute with strangers.  Where no launcher has
named the job and it has no secret, two jobs of as many ranks look alike: who finds its place taken then raises, and the
ranks that have met hear of it (:func:`has_clashed`).  Waits are bounded by the group's timeout, five minutes by
default, as c10d's own.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from tpkernels import config
from tpkernels.comm import interrupts
from tpkernels.comm.bounded_store import BoundedStore, NotEnded, interruptible
from tpkernels.comm.job_identity import Foreign, JobIdentity
from tpkernels.comm.store_sockets import answering, port_of
from tpkernels.errors import PeerLost
from tpkernels.launchers import Job, Meeting

__all__ = ["has_clashed", "host_of", "in_time", "meet_as_torchrun", "meet_at", "silent_store"]

_JOB, _CLASH = "tpkernels/job", "tpkernels/job/clash"

_ADVICE = "export MASTER_PORT=<a free port> before the launch"
TIMEOUT = datetime.timedelta(minutes=5)
TORCHRUN_TIMEOUT = datetime.timedelta(minutes=30)
"""c10d's own for ``env://``."""
_LATER = 1.05
"""Of its own time-outs c10d has more to say."""
_LAST_S, _LAST = 5.0, 1.1
"""After this c10d's steps are given up; it pauses between its tries to connect, and ends by itself before."""
_met: dict[Meeting, tuple[Any, int]] = {}
"""Stores of this process, and how often a group was made with each: a job may leave its group and make another one."""


def meet_at(place: Meeting, job: Job, timeout: datetime.timedelta | None) -> Any:
    """The store of the job's ranks.

    Raises:
        ValueError: the port is taken, or serves another job.
        RuntimeError: rank 0 did not come within the timeout.
        PeerLost: it came, and its store did not answer.
    """
    store, times = _met.get(place, (None, 0))
    if store is None:
        store = _first_time(place, job, timeout or TIMEOUT)
    _met[place] = store, times + 1
    return dist.PrefixStore(f"tpkernels/group/{times}", store)  # type: ignore[attr-defined]


def meet_as_torchrun(place: Meeting, job: Job, timeout: datetime.timedelta | None) -> Any:
    """The store of ``env://``, kept for the next group of the job; the first group has c10d's own keys.

    Raises:
        ValueError: rank 0 at that port belongs to another job.
        RuntimeError: the store was not reached within the timeout.
        PeerLost: it was, and did not answer.
    """
    limit = timeout or TORCHRUN_TIMEOUT
    store, times = _met.get(place, (None, 0))
    if store is None:
        rendezvous: Any = dist.rendezvous  # type: ignore[attr-defined]
        with in_time(place.port, job.rank, limit):
            store, _, _ = interruptible(
                lambda: next(rendezvous("env://", job.rank, job.world_size, timeout=limit)), _last(limit)
            )
        store.set_timeout(limit)
        if not config.agent_serves_store():
            with in_time(place.port, job.rank, limit):
                _take_place(store, job, f"{place.host}:{place.port}", f"a job of {job.world_size} ranks", _ADVICE)
    store.set_timeout(limit)
    _met[place] = store, times + 1
    return store if times == 0 else dist.PrefixStore(f"tpkernels/group/{times}", store)  # type: ignore[attr-defined]


def _last(limit: datetime.timedelta) -> float:
    return _LAST * limit.total_seconds() + _LAST_S


def _first_time(place: Meeting, job: Job, limit: datetime.timedelta) -> Any:
    where = f"{place.host}:{place.port}"
    advice = _ADVICE
    if place.derived_from is not None:
        advice = f"the port was derived from {place.derived_from}; {advice}"
    first = job.rank == 0
    try:
        with in_time(place.port, job.rank, limit):
            options: dict[str, Any] = {"is_master": first, "wait_for_workers": False, "timeout": limit}
            store = interruptible(
                lambda: dist.TCPStore(place.host, place.port, job.world_size, **options),  # type: ignore[attr-defined]
                _last(limit),
            )
    except PeerLost:
        raise
    except (RuntimeError, NotEnded) as error:
        if first:
            raise ValueError(f"rank 0 cannot serve the ranks at {where} ({error}): {advice}") from error
        raise RuntimeError(
            f"rank {job.rank} of {job.world_size} did not reach rank 0 at {where} within {limit.total_seconds():g} s: "
            f"{error}; {advice}"
        ) from error
    name = f"{place.derived_from or f'{job.launcher}, {job.name}'}, {job.world_size} ranks"
    with in_time(place.port, job.rank, limit):
        _take_place(store, job, where, name, advice)
    return store


@contextmanager
def in_time(port: int | None, rank: int, limit: datetime.timedelta) -> Iterator[None]:
    """Have what c10d asks the job's store for end a little after c10d's own time-outs, which need its answers.

    It ends at once where SIGINT comes meanwhile.

    Raises:
        PeerLost: the store did not answer; names rank 0, where that serves it.
    """

    with (
        answering(port, _LATER * limit.total_seconds(), lambda: silent_store(port, rank, limit)) as end,
        interrupts.ending(end),
    ):
        yield


def silent_store(port: int | None, rank: int, limit: datetime.timedelta) -> PeerLost:
    """What this rank raises whose store did not answer while the ranks met."""
    agent = config.agent_serves_store()
    whose = "torchrun's agent, or the ranks' parent, serves" if agent else "rank 0 serves"
    return PeerLost(
        f"rank {rank}: the job's store at port {port}, which {whose}, did not answer within "
        f"{limit.total_seconds():g} s while the ranks met: its process is stopped, or its host cut off",
        ranks=() if agent else (0,),
    )


def _take_place(store: Any, job: Job, where: str, name: str, advice: str) -> None:
    """Take this rank's place in the job that the store belongs to.

    Raises:
        ValueError: it belongs to another job, or another process has this rank's place.
    """
    identity = JobIdentity.of_this_process()
    seal = identity.seal("")
    name = f"{name}, {identity}"
    if job.rank == 0:
        store.set(_JOB, seal.close(_JOB, name))
    try:
        served = seal.open(_JOB, store.get(_JOB))
    except Foreign as error:
        served = f"one that this one cannot know, for {error}"
    head = f"rank {job.rank} of the job {name!r} met another job at {where}"
    if served != name:
        raise ValueError(f"{head}, {served!r}: {advice}")
    if store.add(f"{_JOB}/{job.rank}", 1) != 1:
        store.set(_CLASH, "")
        raise ValueError(f"{head}, {served!r}, whose rank {job.rank} has come already: {advice}")


def host_of(store: Any) -> int | None:
    """The rank of the job that serves this store, if the job has met at it; None if a process that is no rank does, or
    nobody knows."""
    port = port_of(store)
    met = any(place.port == port for place in _met)
    return 0 if met and not config.agent_serves_store() else None


def has_clashed(store: BoundedStore, job: JobIdentity) -> bool:
    """Whether a rank has come to the job's store twice, so that ranks of two jobs may have met.

    A job that has a secret hears of nobody who has not: those who have another one do not get that far.
    """
    return job.secret is None and store.check_in_root([_CLASH])
