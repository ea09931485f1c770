"""Timing several ways of doing one thing so that the comparison means something.

Owns: interleaving, warm-up, the barrier before each call, and the statistics.
Assumes: every rank of `group` calls `measure` with the same names in the same order.
Refuses: comparing times from two runs. Candidates take turns within one run, so that a machine that slows down, or a
neighbour that wakes up, hits all of them; each repeat counts as its slowest rank. Every candidate follows each of the
others, for what ran before decides what the caches hold: in an order that only rotates, one of them would always pay
for the weights that the same other one has left there.

On CUDA a sample is the time between two events. Before the first of them the stream is given work that keeps it busy
while the host enqueues the candidate (so launch gaps that a model would not see are not counted), that evicts the
second-level cache (weights of a model do not stay there between layers), and on NCCL groups an all-reduce of one
number, from which all ranks start together.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tpkernels.comm.device_backends import DeviceBackends


@dataclass(frozen=True)
class Measurement:
    """Seconds per repeat, each the maximum across ranks, in the order in which they were taken."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def worst(self) -> float:
        return max(self.seconds)

    @property
    def interquartile_range(self) -> float:
        if len(self.seconds) < 2:
            return 0.0
        lower, _, upper = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return upper - lower

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.median * 1e3:.3f} ms "
            f"({self.best * 1e3:.3f}..{self.worst * 1e3:.3f}, n={len(self.seconds)})"
        )


LEAST_REPEATS = 3


def measure(
    candidates: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 7,
    warmup: int = 2,
    calls_per_sample: int = 1,
    verify: Callable[[str, object], None] | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    budget_s: float = math.inf,
) -> dict[str, Measurement]:
    """Time every candidate `repeats` times, taking turns; see the module docstring for what is guarded against.

    calls_per_sample: above 1, a sample is the mean over so many calls in a row (for calls of microseconds).
    verify: called with each candidate's name and result before anything is timed; it raises on a wrong result.
    budget_s: seconds of all repeats; there are fewer where the first says that they would take longer, but at least
    LEAST_REPEATS of those that were asked for.
    On a CUDA `device` the time is that of the current stream (see the module docstring), host work included only where
    the device waits for it.
    Raises: ValueError for no candidates or fewer than one repeat.
    """
    if not candidates:
        raise ValueError("candidates must hold at least one callable to time")
    if repeats < 1 or warmup < 0 or calls_per_sample < 1:
        raise ValueError(
            f"repeats ({repeats}) and calls_per_sample ({calls_per_sample}) must be at least 1, "
            f"warmup ({warmup}) at least 0"
        )
    clock = DeviceClock(device, group) if torch.device(device).type == "cuda" else _host_seconds
    if verify is not None:
        for name, candidate in candidates.items():
            verify(name, candidate())
    names = list(candidates)
    for _ in range(warmup):
        for name in names:
            candidates[name]()
    mine: dict[str, list[float]] = {name: [] for name in names}
    repeat = 0
    while repeat < repeats:
        for name in _turns(names, repeat):
            _barrier(group)
            mine[name].append(clock(candidates[name], calls_per_sample))
        repeat += 1
        if repeat == 1 and budget_s < math.inf:
            (first,) = _maximum_over_ranks([[calls_per_sample * sum(row[0] for row in mine.values())]], group, device)
            repeats = min(repeats, max(LEAST_REPEATS, int(budget_s / first[0])))
    slowest = _maximum_over_ranks([mine[name] for name in names], group, device)
    return {name: Measurement(name, tuple(row)) for name, row in zip(names, slowest, strict=True)}


def _turns(names: list[str], repeat: int) -> list[str]:
    """All names, in an order such that over the repeats each follows each of the others (Williams' square)."""
    count = len(names)
    steps = [(step + 1) // 2 * (1 if step % 2 else -1) for step in range(count)]  # 0, 1, -1, 2, -2, ...
    turns = [names[(repeat + step) % count] for step in steps]
    return turns[::-1] if repeat // count % 2 else turns


def _host_seconds(candidate: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        candidate()
    return (time.perf_counter() - start) / calls


# About 1.7 ms at 1.8 GHz: time for the host to enqueue a call of ours in 8 chunks from 7 peers, some 120 driver calls.
_HEAD_START_CYCLES = 3_000_000


class DeviceClock:
    """Seconds of `candidate` on the current stream of a CUDA device; see the module docstring."""

    def __init__(self, device: torch.device | str, group: dist.ProcessGroup | None = None) -> None:
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._evicted = torch.empty(2 * cache_bytes, dtype=torch.uint8, device=device)
        self._group = group
        on_device = dist.is_initialized() and _backends(group).serving("cuda") == "nccl"
        self._together = torch.zeros(1, device=device) if on_device else None

    def __call__(self, candidate: Callable[[], object], calls: int = 1) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(_HEAD_START_CYCLES)
        self._evicted.zero_()
        if self._together is not None:
            dist.all_reduce(self._together, group=self._group)
        start.record()
        for _ in range(calls):
            candidate()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / calls


def _backends(group: dist.ProcessGroup | None) -> DeviceBackends:
    return DeviceBackends.of(group or dist.distributed_c10d._get_default_group())


def _barrier(group: dist.ProcessGroup | None) -> None:
    if dist.is_initialized():
        dist.barrier(group)


def _maximum_over_ranks(
    rows: list[list[float]], group: dist.ProcessGroup | None, device: torch.device | str
) -> list[list[float]]:
    if not dist.is_initialized():
        return rows
    table = torch.tensor(rows, dtype=torch.float64, device=_backends(group).wire_device(torch.device(device)))
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
    return [[float(value) for value in row] for row in table.tolist()]
