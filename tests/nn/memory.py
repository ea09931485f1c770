"""What the memory tests share: the bytes that torch's allocator has handed out at most while something ran."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes of CPU tensors alive at one time beyond those alive at the start, as the profiler saw them."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak
