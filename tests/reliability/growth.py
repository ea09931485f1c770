"""Workspaces that grow (R10) and a group that works for long (R14): nothing wrong, nothing kept."""

from __future__ import annotations

import gc
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.reliability.calls import SHARED
from tests.reliability.crew import Link, group_of, together
from tests.reliability.outcome import Outcome

CALLS_PER_GROUP = 50
LARGEST_ROWS = 6000  # of 512 bytes: growths of 2 MiB and 4 MiB and none
SOAK_WARM_UP = 5000
ALLOWED_RSS_KB = 1024


def random_sizes(count: int, size: int = 2, implementation: str = SHARED) -> Outcome:
    """R10: calls of random sizes, a new group every 50: exact results, and no mapping, descriptor or page is kept."""
    outcome = Outcome(f"R10 {implementation}")
    per_rank = together(size, _grow, count, implementation, within=60.0 + 0.1 * count)
    for made, problems, facts in per_rank:
        for problem in problems:
            outcome.add(problem.partition(":")[0], problem)
        outcome.add(None, times=made - len(problems))
        outcome.facts |= facts
    return outcome


def _grow(link: Link, count: int, implementation: str) -> tuple[int, list[str], dict[str, object]]:
    dice = random.Random(10)  # the same sizes on all ranks
    problems: list[str] = []
    made, before, high = 0, None, 0
    while made < count:
        group = group_of()
        for _ in range(min(CALLS_PER_GROUP, count - made)):
            rows = dice.choice((1, 7, dice.randrange(1, LARGEST_ROWS)))
            problems += _exact(link, group, rows, made, implementation, gather=dice.random() < 0.5)
            made += 1
        high = max(high, _mapped_kbytes())
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        if before is None:  # what the first group brought into the process stays: libraries, the monitor
            before = _held(segments=0)
    after = _held(segments=0)
    assert before is not None
    if after["segments"]:
        problems.append(f"segments are left: {after}")
    if after["descriptors"] > before["descriptors"] + 2:
        problems.append(f"descriptors are left: {before} -> {after}")
    return made, problems, {"held_after_one_group": before, "held_at_the_end": after, "largest_mapped_kbytes": high}


def _exact(link: Link, group: object, rows: int, salt: int, implementation: str, *, gather: bool) -> list[str]:
    value = [float(1 + 5 * rank + salt % 89) for rank in range(link.size)]
    x = torch.full((rows, 128), value[link.rank])
    x += torch.arange(rows, dtype=torch.float32)[:, None]
    everyone = [torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, 128) + v for v in value]
    if gather:
        wrong = not torch.equal(tpk.all_gather(x, group, implementation=implementation), torch.cat(everyone))
    else:
        wrong = not torch.equal(tpk.all_reduce(x, group, implementation=implementation), sum(everyone))
    return [f"wrong output: {rows} rows, call {salt}"] if wrong else []


def _held(*, segments: int | None = None) -> dict[str, int]:
    """What this process holds; waits a moment until no more `segments` are mapped: the monitor may still look on."""
    deadline = time.monotonic() + 3.0
    while segments is not None and _count_segments() > segments and time.monotonic() < deadline:
        time.sleep(0.05)
    return {
        "segments": _count_segments(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "rss_kbytes": _rss_kbytes(),
    }


def _count_segments() -> int:
    return sum("memfd:tpkernels" in line for line in Path("/proc/self/maps").read_text().splitlines())


def _mapped_kbytes() -> int:
    """Resident pages of our segments."""
    ours, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.partition(" ")[0]:
            ours = "memfd:tpkernels" in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def _rss_kbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


# ---------------------------------------------------------------- R14


def soak(count: int, size: int = 2, implementation: str = SHARED) -> Outcome:
    """R14: `count` short calls on one group: resident memory, descriptors and threads stay as they were."""
    outcome = Outcome(f"R14 {implementation}")
    per_rank = together(size, _work_for_long, count, implementation, within=60.0 + count * 0.005, timeout=60.0)
    for rank, (wrong, before, after, seconds) in enumerate(per_rank):
        figures = {"after_warm_up": before, "at_the_end": after, "us_per_call": 1e6 * seconds / count}
        outcome.facts[f"rank {rank}"] = figures
        if wrong:
            outcome.add("wrong output", f"rank {rank}", times=wrong)
        if after["rss_kbytes"] - before["rss_kbytes"] > ALLOWED_RSS_KB:
            outcome.add("resident memory grew", f"rank {rank}: {before} -> {after}")
        for name in ("descriptors", "threads", "segments"):
            if after[name] != before[name]:
                outcome.add(f"the number of {name} changed", f"rank {rank}: {before} -> {after}")
    outcome.add(None, times=count)
    return outcome


def _work_for_long(link: Link, count: int, implementation: str) -> tuple[int, dict[str, int], dict[str, int], float]:
    group = dist.group.WORLD
    x, expected = torch.empty(2, 64), torch.empty(2, 64)
    w = torch.ones(8, 64)
    wrong = 0
    collective = "unfused" if implementation == "chunked" else implementation  # nothing to overlap with

    def calls(number: int) -> int:
        bad = 0
        for n in range(number):
            x.fill_(float(link.rank + n % 64))
            if n % 4:
                total = sum(range(link.size)) + link.size * (n % 64)
                bad += not torch.equal(
                    tpk.all_reduce(x, group, implementation=collective), expected.fill_(float(total))
                )
            else:
                y = tpk.all_gather_matmul(x, w, group, implementation=implementation)
                bad += float(y[0, 0]) != 64.0 * (n % 64) or float(y[-1, -1]) != 64.0 * (link.size - 1 + n % 64)
        return bad

    for _ in range(2):  # twice: measuring leaves something in memory, once
        wrong += calls(min(SOAK_WARM_UP, count))
        gc.collect()
        dist.barrier()
        before = _held()
    before, start = _held(), time.monotonic()
    wrong += calls(count)
    seconds = time.monotonic() - start
    gc.collect()
    dist.barrier()
    return wrong, before, _held(), seconds
