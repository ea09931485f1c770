"""Ranks that disagree (R6), and groups that have failed (R8)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.reliability.calls import CALLS, SHARED, make_all
from tests.reliability.crew import Link, Raised, caught, group_of, together
from tests.reliability.outcome import Outcome
from tpkernels.partition import array_split_sizes

Work = Callable[[Any, str], Any]
ODD = 1  # the rank that differs


def _x(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=dtype)


@dataclass(frozen=True)
class Dispute:
    """Two calls of which the odd rank makes the second, and words of the error that tell them apart.

    words: "rows 5" stands for how the group cuts five rows.
    slow: found by the monitor's comparison after a second, for the ranks wait in different places.
    """

    kind: str
    most: Work
    odd: Work
    words: tuple[str, str]
    slow: bool = False


def _collective(implementation: str) -> str:
    return "unfused" if implementation == "chunked" else implementation  # nothing to overlap with


DISPUTES = (
    Dispute(
        "rows",
        lambda g, i: tpk.all_reduce(_x(4, 8), g, implementation=_collective(i)),
        lambda g, i: tpk.all_reduce(_x(5, 8), g, implementation=_collective(i)),
        ("rows 4", "rows 5"),
    ),
    Dispute(
        "columns",
        lambda g, i: tpk.matmul_all_reduce(_x(4, 8), _x(6, 8), g, implementation=i),
        lambda g, i: tpk.matmul_all_reduce(_x(4, 8), _x(7, 8), g, implementation=i),
        ("columns=6", "columns=7"),
    ),
    Dispute(
        "dtype",
        lambda g, i: tpk.all_gather(_x(4, 8), g, implementation=_collective(i)),
        lambda g, i: tpk.all_gather(_x(4, 8, torch.bfloat16), g, implementation=_collective(i)),
        ("float32", "bfloat16"),
    ),
    Dispute(
        "op",
        lambda g, i: tpk.all_reduce(_x(12, 8), g, implementation=_collective(i)),
        lambda g, i: tpk.reduce_scatter(_x(12, 8), g, implementation=_collective(i)),
        ("all_reduce(", "reduce_scatter("),
    ),
    Dispute(
        "bytes alike",
        lambda g, i: tpk.all_reduce(_x(4, 8), g, implementation=_collective(i)),
        lambda g, i: tpk.all_reduce(_x(4, 16, torch.bfloat16), g, implementation=_collective(i)),
        ("float32", "bfloat16"),
    ),
    Dispute(
        "order",
        lambda g, i: (
            tpk.all_gather_matmul(_x(4, 8), _x(6, 8), g, implementation=i),
            tpk.matmul_all_reduce(_x(12, 8), _x(6, 8), g, implementation=i),
        ),
        lambda g, i: (
            tpk.matmul_all_reduce(_x(12, 8), _x(6, 8), g, implementation=i),
            tpk.all_gather_matmul(_x(4, 8), _x(6, 8), g, implementation=i),
        ),
        ("all_gather_matmul(", "matmul_all_reduce("),
    ),
    Dispute(
        "growth",  # the odd rank needs a larger workspace, which the others do not ask for
        lambda g, i: tpk.all_reduce(_x(4, 8), g, implementation=_collective(i)),
        lambda g, i: tpk.all_reduce(_x(2048, 1024), g, implementation=_collective(i)),
        ("rows 4", "rows 2048"),
    ),
    Dispute(
        "implementation",
        lambda g, _: tpk.all_gather_matmul(_x(4, 8), _x(6, 8), g, implementation="shared_memory"),
        lambda g, _: tpk.all_gather_matmul(_x(4, 8), _x(6, 8), g, implementation="chunked"),
        ("'shared_memory'", "'chunked'"),
        slow=True,
    ),
)


def disagreement(count: int, sizes: tuple[int, ...] = (2, 3), implementation: str = "auto") -> Outcome:
    """R6: calls that differ, new to the group (found by the agreement) and known to it (found by the header)."""
    outcome = Outcome(f"R6 {implementation}", max_s=5.0)
    for size in sizes:
        share = count // len(sizes) + (size == sizes[0]) * (count % len(sizes))
        per_rank = together(size, _disagree, share, implementation, within=60.0 + 3.0 * share)
        for trial in range(share):
            found = [results[trial] for results in per_rank]
            bad = next(((text, why) for text, _, why in found if why is not None), None)
            outcome.add(None if bad is None else bad[1], "" if bad is None else bad[0])
            outcome.latencies_s += [seconds for _, seconds, _ in found]
    return outcome


def _disagree(link: Link, count: int, implementation: str) -> list[tuple[str, float, str | None]]:
    results = []
    for trial in range(count):
        dispute = DISPUTES[trial % len(DISPUTES)]
        # Known in two of three; the slow kinds are only slow when known.
        known = trial // len(DISPUTES) % 3 != 0
        results.append(_one_dispute(link, dispute, known, implementation))
    return results


def _one_dispute(link: Link, dispute: Dispute, known: bool, implementation: str) -> tuple[str, float, str | None]:
    group = group_of(timeout=20.0)
    tpk.all_reduce(_x(3, 3), group)
    if known and dispute.kind != "growth":  # a workspace that has grown once needs no growth
        for work in (dispute.most, dispute.odd):
            work(group, implementation)
    if known and dispute.kind == "growth":
        dispute.most(group, implementation)
    dist.barrier()
    start = time.monotonic()
    error, at = caught(lambda: (dispute.odd if link.rank == ODD else dispute.most)(group, implementation))
    what = f"{dispute.kind}, {'known' if known else 'new'}, rank {link.rank}: {error}"
    dist.barrier()
    dist.destroy_process_group(group)
    return what, at - start, _not_both_sides(dispute, error, link.size)


def _not_both_sides(dispute: Dispute, error: Raised | None, size: int) -> str | None:
    if error is None:
        return f"{dispute.kind}: a rank got a result"
    if error.kind != "GroupMismatch":
        return f"{dispute.kind}: {error.kind} instead of GroupMismatch"
    missing = [word for word in dispute.words if _as_shown(word, size) not in error.text]
    return f"{dispute.kind}: the error does not show both sides" if missing else None


def _as_shown(word: str, size: int) -> str:
    rows = word.removeprefix("rows ")
    return word if rows == word else f"row shards={list(array_split_sizes(int(rows), size))}"


# ---------------------------------------------------------------- R8


def after_an_error(count: int, size: int = 2, implementation: str = SHARED) -> Outcome:
    """R8: each later call repeats the first failure at once; a new group works."""
    outcome = Outcome(f"R8 {implementation}", max_s=0.5)  # no wait of any kind; the rest is the machine's load
    per_rank = together(size, _fail_and_go_on, count, implementation, within=60.0 + 2.0 * count)
    for found in zip(*per_rank, strict=True):
        outcome.add(next((problem for problem, _ in found if problem is not None), None))
        outcome.latencies_s += [seconds for _, seconds in found]
    return outcome


def _fail_and_go_on(link: Link, count: int, implementation: str) -> list[tuple[str | None, float]]:
    results: list[tuple[str | None, float]] = []
    for trial in range(count):
        group = group_of()
        make_all(group, link.rank, link.size, trial, implementation)
        dist.barrier()
        first, _ = caught(lambda group=group: tpk.all_reduce(_x(4 + link.rank, 8), group))
        dist.barrier()
        problem, slowest = None, 0.0
        for name, call in CALLS.items():
            start = time.monotonic()
            later, at = caught(partial(call, group, link.rank, link.size, trial, "auto"))
            slowest = max(slowest, at - start)
            if first is None or later is None or later.kind != "GroupPoisoned" or first.text not in later.text:
                problem = f"{name} after {first}: {later}"
        fresh = group_of()
        make_all(fresh, link.rank, link.size, trial + 1, implementation)
        for old in (group, fresh):
            dist.destroy_process_group(old)
        results.append((problem, slowest))
    return results
