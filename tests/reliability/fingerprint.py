"""What the header of a call costs (R7): the whole of `begin` and `end`, its text included, and the difference it makes
in the shortest call."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.reliability.calls import SHARED
from tests.reliability.crew import Link, together
from tests.reliability.outcome import Outcome
from tpkernels.backends.shared_memory.segments import SharedMemory
from tpkernels.comm.groups import resolve
from tpkernels.gemm.native import native

GATE_US = 1.0
GATE_SHARE = 0.02
SAMPLE = 2000
TEXT = (
    "all_gather_matmul(dtype=bfloat16, device=cpu, row shards=[1024, 1024], outer=1, inner=1, columns=4096, "
    "implementation='auto', weights=[4096], bias=True, activation=gelu)"
)


def cost(count: int) -> Outcome:
    """R7, `count` samples. `begin` and `end` with a text of ordinary length, minus an empty call into the core, is more
    than what the fingerprint adds; the check at the peer shows in a whole all-reduce, with and without a text."""
    outcome = Outcome("R7")
    alone = statistics.median(_begin_and_end_us(count))
    with_text, without_text = (statistics.median(found) for found in together(2, _all_reduces, count, within=120.0)[0])
    outcome.facts = {
        "begin_and_end_us": alone,
        "all_reduce_2x64_us": with_text,
        "all_reduce_2x64_without_text_us": without_text,
        "gate": f"{GATE_US} us or {GATE_SHARE:.0%}",
    }
    passed = alone <= GATE_US or with_text - without_text <= max(GATE_US, GATE_SHARE * without_text)
    outcome.add(None, times=count)
    if not passed:
        outcome.over_gates.append(f"the header costs more than its gate: {outcome.facts}")
    return outcome


def _begin_and_end_us(count: int) -> list[float]:
    """On a channel of one rank: nobody to wait for, the header is written all the same."""
    module: Any = native()
    control, data = module.make_control(1), module.make_data()
    try:
        channel = module.Channel(0, 1, control, [data], 1.0, 0.0)
    finally:
        os.close(control)
        os.close(data)
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        for _ in range(SAMPLE):
            channel.begin(0x0123456789ABCDEF, TEXT)
            channel.end()
        middle = time.perf_counter()
        for _ in range(SAMPLE):  # two calls into the core that do nothing
            channel.end()
            channel.end()
        end = time.perf_counter()
        samples.append(1e6 * ((middle - start) - (end - middle)) / SAMPLE)
    return samples


def _all_reduces(link: Link, count: int) -> tuple[list[float], list[float]]:
    """Microseconds of the native all-reduce with a text and without, in turns."""
    group = dist.group.WORLD
    x, out = torch.ones(2, 64), torch.empty(2, 64)
    tpk.all_reduce(x, group, implementation=SHARED)
    shared = resolve(group).resources[SharedMemory.name].segments
    assert shared is not None
    channel, dtype = shared.channel, native().Dtype.float32  # type: ignore[union-attr]
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(count):
        for found, text in zip(samples, (TEXT, ""), strict=True):
            start = time.perf_counter()
            for _ in range(SAMPLE // 10):
                channel.all_reduce(1, text, dtype, x.data_ptr(), out.data_ptr(), x.numel())
            found.append(1e7 * (time.perf_counter() - start) / SAMPLE)
    return samples
