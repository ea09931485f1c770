"""Groups that share ranks, threads that share a group (R9): calls are serialised, none computes with another's data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from tests.reliability.calls import CALLS, SHARED, WrongOutput, make_all
from tests.reliability.crew import Link, group_of, together
from tests.reliability.outcome import Outcome

PAIRS = ((0, 1), (1, 2), (0, 2))
JOIN_S = 600.0


def threads_and_subgroups(count: int, implementation: str = SHARED) -> Outcome:
    """R9: `count` calls in all, a quarter each: two threads on one group; two groups at once; overlapping pairs, called
    one after the other and from a thread each."""
    outcome = Outcome(f"R9 {implementation}")
    share = max(1, count // 4)
    within = 60.0 + count * 0.05
    for size, body in ((2, _two_threads), (2, _two_groups), (3, _pairs_in_turn), (3, _pairs_in_threads)):
        per_rank = together(size, body, share, implementation, within=within, timeout=60.0)
        for rank, (made, problems) in enumerate(per_rank):
            for problem in problems:
                outcome.add(f"{body.__name__}: {problem.partition(':')[0]}", f"rank {rank}: {problem}")
            outcome.add(None, times=made - len(problems))
    return outcome


def _two_threads(link: Link, count: int, implementation: str) -> tuple[int, list[str]]:
    """Both threads of a rank make the same call with the same values: every pairing has the same right result."""
    group = dist.group.WORLD
    make_all(group, link.rank, link.size, 0, implementation)
    half = count // 2 + 1
    tasks = [lambda: _repeat(group, link.rank, link.size, half, implementation, lambda _: 5, ("all_reduce",))] * 2
    return _in_threads(tasks)


def _two_groups(link: Link, count: int, implementation: str) -> tuple[int, list[str]]:
    groups = [group_of(timeout=60.0) for _ in range(2)]
    for group in groups:
        make_all(group, link.rank, link.size, 0, implementation)
    half = count // 2 + 1
    return _in_threads(
        [
            lambda group=group, first=first: _repeat(
                group, link.rank, link.size, half, implementation, lambda n: first + n
            )
            for first, group in enumerate(groups)
        ]
    )


def _pairs(link: Link, implementation: str) -> list[tuple[int, Any, int]]:
    """The groups of pairs that this rank is in: number, group, its rank there."""
    groups = [(number, pair, group_of(pair, timeout=60.0)) for number, pair in enumerate(PAIRS)]
    mine = [(number, group, pair.index(link.rank)) for number, pair, group in groups if link.rank in pair]
    for number, group, rank in mine:
        make_all(group, rank, 2, number, implementation)
    return mine


def _pairs_in_turn(link: Link, count: int, implementation: str) -> tuple[int, list[str]]:
    mine, made, problems = _pairs(link, implementation), 0, []
    names = list(CALLS)
    for salt in range(count // 2):
        for number, group, rank in mine:
            made += 1
            problems += _one(names[salt % len(names)], group, rank, 2, salt + 11 * number, implementation)
        if salt % 100 == 0:  # and one that holds all of them
            made += 1
            problems += _one("all_gather", dist.group.WORLD, link.rank, link.size, salt, implementation)
    return made, problems


def _pairs_in_threads(link: Link, count: int, implementation: str) -> tuple[int, list[str]]:
    mine = _pairs(link, implementation)
    half = count // 2 + 1
    return _in_threads(
        [lambda i=i, g=g, r=r: _repeat(g, r, 2, half, implementation, lambda n: n + 11 * i) for i, g, r in mine]
    )


def _repeat(
    group: Any,
    rank: int,
    size: int,
    count: int,
    implementation: str,
    salt: Callable[[int], int],
    names: Sequence[str] = tuple(CALLS),
) -> tuple[int, list[str]]:
    problems: list[str] = []
    for n in range(count):
        problems += _one(names[n % len(names)], group, rank, size, salt(n), implementation)
    return count, problems


def _one(name: str, group: Any, rank: int, size: int, salt: int, implementation: str) -> list[str]:
    try:
        CALLS[name](group, rank, size, salt, implementation)
    except WrongOutput as error:
        return [f"wrong output: {error}"]
    return []


def _in_threads(tasks: Sequence[Callable[[], tuple[int, list[str]]]]) -> tuple[int, list[str]]:
    results: list[tuple[int, list[str]]] = []

    def work(task: Callable[[], tuple[int, list[str]]]) -> None:
        try:
            results.append(task())
        except Exception as error:  # noqa: BLE001 - carried to the trial, which fails with it
            results.append((1, [f"raised: {error!r}"]))

    threads = [threading.Thread(target=work, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    if any(thread.is_alive() for thread in threads):
        return 1, ["hang: a thread has not returned"]
    return sum(made for made, _ in results), [problem for _, problems in results for problem in problems]
