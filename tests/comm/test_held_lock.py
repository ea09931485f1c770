"""A thread keeps the interpreter's lock: its rank cannot raise meanwhile, but its waits end and its peers learn."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.reliability.crew import Crew, Link, Raised, caught, group_of
from tpkernels.backends.shared_memory.segments import SharedMemory
from tpkernels.comm import connections
from tpkernels.comm.groups import resolve

pytestmark = pytest.mark.gloo

SETTLE_S = 60.0
TIMEOUT_S = 5.0
HOLD_S = 6
"""Whole seconds, longer than the time-out."""
LIMIT_S = 3.0
"""Before gloo's own time-out, which ends a wait as well."""
HOLDER, DEAD, OTHER = 0, 1, 2


class Found(NamedTuple):
    error: Raised | None
    at: float
    freed_at: float
    """When the lock was given up."""
    ended_at: float
    """When the compiled core says that the wait, or what it stands on, ended."""


def _matmul(group: Any, implementation: str) -> torch.Tensor:
    return tpk.all_gather_matmul(torch.ones(4, 8), torch.ones(5, 8), group, implementation=implementation)


def _hold(freed: list[float]) -> None:
    """Compiled code that does not give the lock up."""
    ctypes.PyDLL(None).sleep(HOLD_S)
    freed.append(time.monotonic())


def _held(link: Link, implementation: str, comes: bool) -> None:
    group = group_of(timeout=TIMEOUT_S)
    _matmul(group, implementation)
    state = resolve(group)
    dist.barrier()
    link.say("ready")
    if link.rank == DEAD:
        time.sleep(0.8)  # the lock is held
        link.die()
    if link.rank == OTHER and not comes:
        link.hear(SETTLE_S)
        link.say("connections", sum(map(len, connections.received().values())))
        return
    freed: list[float] = []
    holder = threading.Timer(0.4, _hold, [freed])
    if link.rank == HOLDER:
        holder.start()
    error, at = caught(lambda: _matmul(group, implementation))
    if link.rank == HOLDER:
        holder.join()  # this thread can have the lock before that one has noted when it gave it up
    ended_at = 0.0
    if link.rank == HOLDER and implementation == "shared_memory":
        ended_at = state.resources[SharedMemory.name].segments.channel.failed_at
    elif link.rank == HOLDER:
        ended_at = state.watch.ended_at
    link.say("error", Found(error, at, freed[0] if freed else 0.0, ended_at), at)


FULL_ONLY = pytest.mark.full("the other two hold the harder half of each backend")


@pytest.mark.parametrize(
    ("implementation", "comes"),
    [
        pytest.param("chunked", False, id="chunked, a peer stays away"),
        pytest.param("chunked", True, id="chunked, a peer waits, too", marks=FULL_ONLY),
        pytest.param("shared_memory", False, id="shared memory, a peer stays away", marks=FULL_ONLY),
        pytest.param("shared_memory", True, id="shared memory, a peer waits, too"),
    ],
)
def test_waits_end_and_peers_learn_of_a_death_while_the_lock_is_held(implementation: str, comes: bool) -> None:
    with Crew(3, _held, implementation, comes, linger=True) as crew:
        crew.expect("ready", SETTLE_S)
        died = crew.expect("dies", SETTLE_S, [DEAD])[0].at
        if comes:
            other: Found = crew.expect("error", SETTLE_S, [OTHER])[0].value
            assert other.error is not None and (other.error.kind, other.error.ranks) == ("PeerLost", (DEAD,)), other
            assert other.at - died < LIMIT_S, other.at - died
        elif implementation == "chunked":
            time.sleep(max(0.0, died + LIMIT_S - time.monotonic()))
            crew.tell(OTHER, "look")
            left = crew.expect("connections", SETTLE_S, [OTHER])[0].value
            # To the ranks of the default group alone: those of the other one are shut.
            assert left == 1, left
        holder: Found = crew.expect("error", SETTLE_S, [HOLDER])[0].value
    assert holder.error is not None and (holder.error.kind, holder.error.ranks) == ("PeerLost", (DEAD,)), holder
    assert 0.0 < holder.ended_at - died < LIMIT_S, holder.ended_at - died
    assert holder.freed_at - died > TIMEOUT_S, "the lock was not held for long enough: nothing was tested"
    assert abs(holder.at - holder.freed_at) < 1.0, holder.at - holder.freed_at


def _late(link: Link) -> None:
    group = group_of(timeout=TIMEOUT_S)
    _matmul(group, "shared_memory")
    dist.barrier()
    if link.rank == 1:
        link.hear(SETTLE_S)
        return
    freed: list[float] = []
    holder = threading.Timer(0.4, _hold, [freed])
    holder.start()
    start = time.monotonic()
    error, at = caught(lambda: _matmul(group, "shared_memory"))
    holder.join()
    failed_at = resolve(group).resources[SharedMemory.name].segments.channel.failed_at
    link.say("error", (error, failed_at - start, at - freed[0]))


@pytest.mark.full("a wait beyond a time-out, of which the test above sees all but the clock")
def test_the_time_of_a_wait_is_up_while_the_lock_is_held() -> None:
    with Crew(2, _late, linger=True) as crew:
        error, waited, later = crew.expect("error", SETTLE_S, [0])[0].value
    assert error is not None and (error.kind, error.ranks) == ("CollectiveTimeout", (1,)), error
    assert waited < 1.1 * TIMEOUT_S and later < 1.0, (waited, later)
