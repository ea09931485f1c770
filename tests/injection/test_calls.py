"""Every system call and every allocation of a set-up, and of one call of each op, fails once on one rank.

Each rank then has the right bits, or an error in time. A peer's names the victim; where a connection is broken, who is
at its other end looks as guilty, and where the store's is, nobody but the store. The group goes on or is poisoned, and
a new one works.
"""

from __future__ import annotations

import pytest

from tests.injection.calling import TIMEOUT_S, VICTIM, Told, trial
from tests.injection.hooks import Calls, library
from tests.reliability.calls import CALLS
from tpkernels.gemm.native import native, why_not

pytestmark = pytest.mark.gloo

MOST = 200
SLACK_S = 2.0  # a set-up has several steps, each with its own time; and tests run beside this one
NEEDS_CORE = pytest.mark.skipif(native() is None, reason=why_not() or "the compiled core is there")
IMPLEMENTATIONS = [pytest.param("shared_memory", marks=NEEDS_CORE), "chunked", "unfused"]


def _problem(told: list[Told], calls: Calls) -> str | None:
    victim, peer = told[VICTIM], told[1 - VICTIM]
    refused = [one.error is not None and one.error.kind == "UnsupportedProblem" for one in told]
    if any(refused):
        return None if all(refused) and not any(one.anew for one in told) else "some ranks alone refuse"
    if peer.error is not None and peer.error.kind not in ("PeerLost", "CollectiveTimeout"):
        return "the peer says what it may not"
    if peer.error is not None and VICTIM not in peer.error.ranks:
        if calls != Calls.SOCKETS or not (peer.error.ranks or "store" in peer.error.text):
            return "the peer does not blame the victim"
    if any(one.seconds > 1.1 * TIMEOUT_S + SLACK_S for one in told):
        return "late"
    failed = victim.error is not None or peer.error is not None
    poisoned = [one.again is not None and one.again.kind != "WrongOutput" for one in told]
    if failed != all(poisoned) or failed != any(poisoned):
        return "the group is neither well nor poisoned"
    return "a new group does not work" if any(one.anew for one in told) else None


def _fail_each(name: str, implementation: str, is_known: bool, calls: Calls) -> int:
    """How many of these calls there are; each has failed once."""
    for n in range(1, MOST):
        told = trial(str(library()), name, implementation, is_known, calls, n)
        problem = _problem(told, calls)
        assert problem is None, f"{problem}, {n}. of {calls.name}: {told}"
        if not told[VICTIM].failed:
            assert all(one.error is None and one.again is None for one in told), told
            return n - 1
    raise AssertionError("it never ended")


@pytest.mark.full("two seconds for each call that fails; R18 has those that a machine refuses first")
@pytest.mark.parametrize("calls", [Calls.MEMORY, Calls.SOCKETS, Calls.ALLOCATIONS], ids=lambda one: one.name)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_set_up_of_which_any_call_fails(implementation: str, calls: Calls) -> None:
    count = _fail_each("all_gather_matmul", implementation, False, calls)
    assert count > 0 or (calls, implementation) in [(Calls.MEMORY, "chunked"), (Calls.MEMORY, "unfused")], count


@pytest.mark.full("as above")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_call_of_which_any_allocation_fails(implementation: str, name: str) -> None:
    assert _fail_each(name, implementation, True, Calls.ALLOCATIONS) > 0
