"""Short measurements from which "auto" chooses: this rank's GEMM rate and the group's link.

The GEMM is measured once per process, device and dtype, the link once per group, a few tens of milliseconds each.  The
caller agrees on the results with the other ranks; numbers of one rank alone must never decide anything.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.comm import transport
from tpkernels.comm.groups import Group
from tpkernels.gemm import fp8, widened
from tpkernels.gemm.fp8 import Scaled

__all__ = ["gemm_rates", "link_rates"]

_SMALL_BYTES = 4 * 1024
_LARGE_BYTES = 1024 * 1024
# Between GPUs: at 300 GB/s a MiB takes 3 us, less than the host takes to ask for it, and a link has its rate only here.
_LARGE_BYTES_ON_DEVICE = 64 * 1024 * 1024


@lru_cache(maxsize=32)
def gemm_rates(device: torch.device, dtype: torch.dtype, widens: bool = False) -> dict[str, float]:
    """What GEMMs of this process cost, as :class:`tpkernels.dispatch.Costs` has it.

    A GEMM and one of twice its rows, taking turns: what the second takes longer is arithmetic alone, and what two of
    the first take longer than the second is what a cut costs.  ``widens``: of those that :mod:`tpkernels.gemm.widened`
    makes.
    """
    rows, columns, contraction = 128, 4096 // max(2, dtype.itemsize), 1024
    if device.type != "cpu":
        rows, columns, contraction = 2048, 4096, 4096
    weight = torch.ones(columns, contraction, device=device).to(dtype)
    many = torch.ones(2 * rows, contraction, device=device).to(dtype)
    # Weights of a model do not stay in the caches between two calls, nor do these: 16 MB on a CPU.
    streamed = weight.repeat(4, 1) if device.type == "cpu" else weight
    few, tiny, corner = many[:2], many[:1, :16], weight[:16, :16]
    half_s, whole_s = _times([_product(many[:rows], weight, widens), _product(many, weight, widens)], device, repeats=4)
    (few_s,) = _times([_product(few, streamed, widens)], device, repeats=3)
    (tiny_s,) = _times([_product(tiny, corner, widens)], device, repeats=9)
    # Noise must make neither of the two nothing: the other would be all of it.
    arithmetic_s = min(max(whole_s - half_s, 0.5 * half_s), half_s)
    cut_s = max(half_s - arithmetic_s, 0.01 * half_s)
    return {
        "gemm_gflops": 2e-9 * rows * columns * contraction / arithmetic_s,
        "gemm_overhead_us": tiny_s * 1e6,
        "weight_gbytes": 1e-9 * streamed.numel() * streamed.element_size() / few_s,
        "relay_gbytes": 1e-9 * weight.numel() * weight.element_size() / cut_s,
    }


def link_rates(group: Group, call: int, device: torch.device) -> dict[str, float]:
    """Rate, latency and processor use of the ring of neighbours, all sending at once.  Collective.

    Raises:
        TransportFailure: a neighbour did not answer.
    """
    tag, device = transport.call_tag(call), group.backends.wire_device(device)
    num_bytes = _LARGE_BYTES if device.type == "cpu" else _LARGE_BYTES_ON_DEVICE
    small = _ring(group, tag, device, _SMALL_BYTES, repeats=7)
    large = _ring(group, tag + 1, device, num_bytes, repeats=4)
    # A preempted small message must not make the link infinite.
    transfer_s = max(large.transfer_s - small.transfer_s, 0.5 * large.transfer_s)
    return {
        "link_gbytes": 1e-9 * num_bytes / transfer_s,
        "link_latency_us": small.wall_s * 1e6,
        "link_cpu": min(1.0, large.cpu_s / large.wall_s) if device.type == "cpu" else 0.0,
    }


def _product(x: Tensor, weight: Tensor, widens: bool) -> Callable[[], object]:
    """The GEMM of the backends."""
    if widens:
        product = x.new_empty(x.shape[0], weight.shape[0])
        return lambda: widened.multiply(x, weight.t(), product)
    if x.dtype != fp8.DTYPE:
        return lambda: torch.mm(x, weight.t())
    rows, columns = (Scaled(t, torch.ones(t.shape[0], 1, device=t.device)) for t in (x, weight))
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
    matrix = Scaled(columns.numbers.t(), columns.scale.t())
    return lambda: fp8.multiply(rows, matrix, out)


class _Took(NamedTuple):
    """Seconds: for the host until all was done, of its processor, and of the transfer on whatever carries it."""

    wall_s: float
    cpu_s: float
    transfer_s: float


def _ring(group: Group, tag: int, device: torch.device, num_bytes: int, repeats: int) -> _Took:
    """The shortest of so many; the first one warms up."""
    following, preceding = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    out = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    into = torch.empty_like(out)
    took = []
    for _ in range(repeats):
        start, start_cpu, on_device = time.perf_counter(), time.process_time(), _clock(device)
        sent, received = transport.exchange(group, tag, 0, [(following, out)], [(preceding, into)])
        transport.wait_all((*received, *sent))
        device_s = on_device()
        wall_s = time.perf_counter() - start
        took.append(_Took(wall_s, time.process_time() - start_cpu, wall_s if device_s is None else device_s))
    return min(took[1:], key=lambda one: one.transfer_s)  # other processes only ever add time


def _clock(device: torch.device) -> Callable[[], float | None]:
    """Starts now; what it returns waits for the device, and says what passed there. A CPU has no clock of its own."""
    if device.type != "cuda":
        return lambda: None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(torch.cuda.current_stream(device))

    def stop() -> float:
        end.record(torch.cuda.current_stream(device))
        end.synchronize()
        return 1e-3 * float(begin.elapsed_time(end))

    return stop


def _times(works: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each, the least of so many turns: other processes only ever add time."""
    best = [math.inf] * len(works)
    for turn in range(repeats + 1):
        for i, work in enumerate(works):
            _synchronize(device)
            start = time.perf_counter()
            work()
            _synchronize(device)
            if turn > 0:  # the first one warms up
                best[i] = min(best[i], time.perf_counter() - start)
    return [max(seconds, 1e-9) for seconds in best]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
