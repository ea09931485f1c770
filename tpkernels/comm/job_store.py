"""The store that the ranks of a job meet at when ``srun`` or ``mpirun`` started them: rank 0 serves it.

Owns: that the ranks which meet are those of one job.  Each rank takes a place of its own under the job's name, so that
a process of another job that comes to the same port raises, and does not compute with strangers.  Waits are bounded by
the group's timeout, five minutes by default, as c10d's own.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

from tpkernels.launchers import Job, Meeting

__all__ = ["meet_at"]

TIMEOUT = datetime.timedelta(minutes=5)
_met: dict[Meeting, tuple[Any, int]] = {}
"""Stores of this process, and how often a group was made with each: a job may leave its group and make another one."""


def meet_at(place: Meeting, job: Job, timeout: datetime.timedelta | None) -> Any:
    """The store of the job's ranks.

    Raises:
        ValueError: the port is taken, or serves another job.
        RuntimeError: rank 0 did not come within the timeout.
    """
    store, times = _met.get(place, (None, 0))
    if store is None:
        store = _first_time(place, job, timeout or TIMEOUT)
    _met[place] = store, times + 1
    return dist.PrefixStore(f"tpkernels/group/{times}", store)  # type: ignore[attr-defined]


def _first_time(place: Meeting, job: Job, limit: datetime.timedelta) -> Any:
    where = f"{place.host}:{place.port}"
    advice = "export MASTER_PORT=<a free port> before the launch"
    if place.derived_from is not None:
        advice = f"the port was derived from {place.derived_from}; {advice}"
    first = job.rank == 0
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            place.host, place.port, job.world_size, is_master=first, wait_for_workers=False, timeout=limit
        )
    except RuntimeError as error:
        if first:
            raise ValueError(f"rank 0 cannot serve the ranks at {where} ({error}): {advice}") from error
        raise RuntimeError(
            f"rank {job.rank} of {job.world_size} did not reach rank 0 at {where} within {limit.total_seconds():g} s: "
            f"{error}; {advice}"
        ) from error
    name = f"{place.derived_from or f'{job.launcher}, {job.name}'}, {job.world_size} ranks"
    if first:
        store.set("tpkernels/job", name)
    served = store.get("tpkernels/job").decode()
    if served != name or store.add(f"tpkernels/job/{job.rank}", 1) != 1:
        raise ValueError(f"rank {job.rank} of the job {name!r} met another job at {where}, {served!r}: {advice}")
    return store
