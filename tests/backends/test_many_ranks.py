"""More ranks than the other tests start: every op over shared memory, up to the 64 ranks that one segment table holds.

The ranks share the cores of one machine, so this shows that results are right, not that they are fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from tests.backends.contract import BASE, judge_all
from tests.reliability.crew import Link, together
from tpkernels.backends.shared_memory import rendezvous
from tpkernels.gemm.native import native, why_not
from tpkernels.partition import array_split_sizes
from tpkernels.testing.cases import COLLECTIVES, GATHER, REDUCE, SCATTER, Case

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(native() is None, reason=why_not() or "the compiled core is there"),
]

WITHIN_S = 240.0
NUM_CASES = 31
ROWS = 2 * 64 + 5  # divides by no number of ranks here


def cases_of(op: str, world: int) -> list[Case]:
    """Exact integers and rounded values; shards that differ by a row, empty ones, and everything on two ranks."""
    base = BASE.but(op=op, implementation="shared_memory", shape=(ROWS, 2 * world))
    cases = [base, base.but(dtype=torch.bfloat16), base.but(shape=(world // 2, 2 * world))]
    if op not in (REDUCE, "all_reduce"):
        cases = [case.but(sizes=array_split_sizes(case.shape[0], world)) for case in cases]
        cases.append(base.but(sizes=(1, *[0] * (world - 2), ROWS - 1)))
    if op in (SCATTER, REDUCE):
        cases.append(base.but(k_sizes=(3, *[0] * (world - 2), 2 * world - 3)))
    if op == "all_reduce":
        cases.append(base.but(shape=(1024, 128)))  # 512 KiB: in two phases
    if op in COLLECTIVES:
        cases = [case.but(bias=False, ns=()) for case in cases]
    cases.append(cases[0].but(integers=False, dtype=torch.bfloat16))
    return [case.but(call=number) for number, case in enumerate(cases)]


def on_rank(link: Link) -> int:
    cases = [case for op in (GATHER, SCATTER, REDUCE, *COLLECTIVES) for case in cases_of(op, link.size)]
    return judge_all(cases, "values")


@pytest.mark.slow("2 s: eleven ranks")
def test_eight_ranks_and_more_get_right_results_from_every_op(full: bool) -> None:
    for world in (8, 16, 33, 64) if full else (8,):
        assert together(world, on_rank, within=WITHIN_S, timeout=WITHIN_S) == [NUM_CASES] * world


def test_who_is_gone_is_not_looked_for_at_each_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 asked the store 2,000 times while 63 ranks told it of their memory."""
    now, looks = 100.0, 0
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: now))

    def gone(ranks: Sequence[int]) -> list[int]:
        nonlocal looks
        looks += 1
        return []

    limits = rendezvous.Limits(now + 60.0, gone)
    for arrived in range(63):
        limits.check(range(1 + arrived, 64))
        now += 0.001
    assert looks == 4  # in 63 ms, one every 20 ms
