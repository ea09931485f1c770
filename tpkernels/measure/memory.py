"""The bytes of tensors that something needs at most while it runs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from tpkernels import config

__all__ = ["peak_bytes"]


def peak_bytes(work: Callable[[], object], device: torch.device | None = None) -> int:
    """The most bytes of tensors alive at one time beyond those at the start; on the CPU as the profiler saw them."""
    gc.collect()
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    config.profiler_says_nothing()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak
