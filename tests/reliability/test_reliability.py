"""Each row of the reliability table in a slice; with `--full` in its full count (then better alone on the machine, as
`python benchmarks/reliability.py`, which files the figures)."""

from __future__ import annotations

import os

import pytest

from tests.reliability.rows import ROWS, Row

pytestmark = pytest.mark.gloo


FULL_ONLY = pytest.mark.full(
    "a row on one more backend or number of ranks; the same row on shared memory or three ranks always runs"
)
SLOW = {
    "R14": pytest.mark.slow("3 s"),
    "R18-EMFILE": pytest.mark.slow("2 s"),
    "R20-caches": pytest.mark.slow("5 s: a process for each damaged file"),
    "R20-corrupt": pytest.mark.slow("3 s, and 20 of waiting"),
}
CASES = [pytest.param(row, id=row.name, marks=SLOW.get(row.name, ()) if row.slice else FULL_ONLY) for row in ROWS]


@pytest.mark.parametrize("row", CASES)
def test_every_trial_of_the_row_ends_as_promised(row: Row, full: bool) -> None:
    if row.needs_root and os.geteuid() != 0:
        pytest.skip("needs root: a rank changes its user")
    outcome = row.run(row.full if full else row.slice)
    problems = outcome.problems(judge_times=full)
    assert not problems, f"{row.name} ({row.what}):\n" + "\n".join(problems)
