"""Ranks that interpret are forks of a process that has loaded everything so; other ranks know nothing of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.backends.interpreted_ranks import ENVIRONMENT, InterpretedPools
from tests.kernels.interpreter import why_not
from tpkernels.testing.spawn import Pools

pytestmark = [pytest.mark.gloo, pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be interpreted")]


def how_kernels_run() -> tuple[bool, set[str], int]:
    """Whether they are interpreted, what is set of the environment that libraries were loaded with, and the parent."""
    from triton.runtime.interpreter import InterpretedFunction

    from tpkernels.kernels.matmul_reduce_scatter import matmul_reduce_scatter_kernel

    loaded_with = set(Path("/proc/self/environ").read_text().split("\0"))  # of the program that was started
    wanted = {f"{name}={value}" for name, value in ENVIRONMENT.items()}
    return isinstance(matmul_reduce_scatter_kernel, InterpretedFunction), wanted & loaded_with, os.getppid()


@pytest.mark.slow("5 s: a server for ranks that interpret")
def test_ranks_interpret_and_share_what_was_imported_and_other_ranks_do_neither(
    pools: InterpretedPools, ranks: Pools
) -> None:
    told = pools(2).run(how_kernels_run) + ranks(2).run(how_kernels_run)
    assert [interprets for interprets, _, _ in told] == [True, True, False, False]
    assert [len(variables) for _, variables, _ in told] == [len(ENVIRONMENT)] * 2 + [0, 0]
    ours, again, *theirs = [parent for _, _, parent in told]
    assert ours == again and len({ours, *theirs}) == 2
