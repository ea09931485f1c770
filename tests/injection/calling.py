"""A group is set up, or makes one call, while a system call or an allocation of a rank fails: what the ranks say."""

from __future__ import annotations

import errno
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.injection.hooks import Calls, failing
from tests.reliability.calls import WrongOutput, prepared
from tests.reliability.crew import Crew, Link, Raised, caught, group_of

__all__ = ["SETTLE_S", "TIMEOUT_S", "VICTIM", "Told", "trial"]

SETTLE_S = 30.0
TIMEOUT_S = 3.0
VICTIM = 1
ERRORS = {Calls.MEMORY: errno.ENOMEM, Calls.SOCKETS: errno.ECONNRESET, Calls.ALLOCATIONS: errno.ENOMEM}


class Told(NamedTuple):
    """failed: the call that did, if the n-th came. error: of the op; again: of the next one on the same group; anew: of
    one on a new group, where one was made."""

    failed: str
    error: Raised | None
    seconds: float
    again: Raised | None
    anew: Raised | None


def trial(hooks: str, name: str, implementation: str, is_known: bool, calls: Calls, n: int) -> list[Told]:
    """Two ranks; `is_known`: the call was made before, so that nothing is set up."""
    with Crew(2, _call, hooks, name, implementation, is_known, int(calls), n, linger=True) as crew:
        return [said.value for said in crew.expect("returned", SETTLE_S)]


def _call(link: Link, hooks: str, name: str, implementation: str, is_known: bool, calls: int, n: int) -> Told:
    made = [prepared(name, link.rank, link.size, salt, implementation) for salt in range(4)]
    results: list[torch.Tensor] = []

    def call(group: Any, salt: int) -> Raised | None:
        results.clear()
        return caught(lambda: results.append(made[salt][0](group)))[0]

    def checked(group: Any, salt: int) -> Raised | None:
        error = call(group, salt)
        if error is None and not torch.equal(results[0], made[salt][1]):
            raise WrongOutput(f"salt {salt}: {results[0].flatten()[:4].tolist()}")
        return error

    group = group_of(timeout=TIMEOUT_S)
    assert not is_known or checked(group, 0) is None
    assert checked(group_of(timeout=TIMEOUT_S), 0) is None  # what this process does once
    dist.barrier()
    start = time.monotonic()
    # Nothing but the call: what the test did after it would fail as well, and the ranks be a call apart.
    with failing(hooks, Calls(calls), n if link.rank == VICTIM else 0, ERRORS[Calls(calls)]) as told:
        error = call(group, 1)
    seconds = time.monotonic() - start
    if error is None and not torch.equal(results[0], made[1][1]):
        raise WrongOutput(f"{results[0].flatten()[:4].tolist()}")
    again = checked(group, 2)
    anew = None
    if Calls(calls) != Calls.SOCKETS:  # that may have been the connection to the store
        dist.barrier()
        anew = checked(group_of(timeout=TIMEOUT_S), 3)
    return Told(told.failed, error, seconds, again, anew)
