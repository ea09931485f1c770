"""Short measurements from which "auto" chooses: this rank's GEMM rate, the group's link and its shared memory.

The GEMM is measured once per process, device and dtype, the link once per group, a few tens of milliseconds each.  The
caller agrees on the results with the other ranks; numbers of one rank alone must never decide anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from tpkernels import fp8
from tpkernels.comm import transport
from tpkernels.comm.groups import Group
from tpkernels.comm.shared_segments import SharedSegments
from tpkernels.fp8 import Scaled

__all__ = ["gemm_rates", "link_rates", "shared_rates"]

_SMALL_BYTES = 4 * 1024
_LARGE_BYTES = 1024 * 1024


@lru_cache(maxsize=32)
def gemm_rates(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """GEMM rate of this process in GFLOP/s, its fixed cost, and the rate at which a small GEMM streams its weight."""
    rows, columns, contraction = (256, 1024, 1024) if device.type == "cpu" else (4096, 4096, 4096)
    weight = torch.ones(columns, contraction, device=device).to(dtype)
    many = torch.ones(rows, contraction, device=device).to(dtype)
    # Weights of a model do not stay in the caches between two calls, nor do these: 16 MB of bf16 on a CPU.
    streamed = weight.repeat(8, 1) if device.type == "cpu" else weight
    few, tiny, corner = many[:2], many[:1, :16], weight[:16, :16]
    large_s = _time(_product(many, weight), device, repeats=3)
    few_s = _time(_product(few, streamed), device, repeats=3)
    tiny_s = _time(_product(tiny, corner), device, repeats=9)
    return {
        "gemm_gflops": 2e-9 * rows * columns * contraction / large_s,
        "gemm_overhead_us": tiny_s * 1e6,
        "weight_gbytes": 1e-9 * streamed.numel() * streamed.element_size() / few_s,
    }


def link_rates(group: Group, call: int, device: torch.device) -> dict[str, float]:
    """Rate, latency and processor use of the ring of neighbours, all sending at once.  Collective.

    Raises:
        TransportFailure: a neighbour did not answer.
    """
    tag, device = transport.call_tag(call), transport.wire_device(group.backend, device)
    small_s, _ = _ring(group, tag, device, _SMALL_BYTES, repeats=7)
    large_s, large_cpu_s = _ring(group, tag + 1, device, _LARGE_BYTES, repeats=4)
    transfer_s = max(large_s - small_s, 0.5 * large_s)  # a preempted small message must not make the link infinite
    return {
        "link_gbytes": 1e-9 * _LARGE_BYTES / transfer_s,
        "link_latency_us": small_s * 1e6,
        "link_cpu": min(1.0, large_cpu_s / large_s) if device.type == "cpu" else 0.0,
    }


def shared_rates(segments: SharedSegments) -> dict[str, float]:
    """Rate of a copy into this rank's segment, and the time of an exchange without payload.  Collective.

    Raises:
        TransportFailure: a peer did not answer.
    """
    one = torch.zeros(1)
    exchange_s = []
    for _ in range(9):
        start = time.perf_counter()
        segments.all_reduce(0, "calibration", one, torch.empty_like(one))
        exchange_s.append(time.perf_counter() - start)
    whole = torch.zeros(_LARGE_BYTES, dtype=torch.uint8)
    segments.reserve(_LARGE_BYTES)
    copy_s = _time(lambda: segments.stage(whole), whole.device, repeats=5)
    return {"copy_gbytes": 1e-9 * _LARGE_BYTES / copy_s, "signal_us": 1e6 * min(exchange_s)}


def _product(x: Tensor, weight: Tensor) -> Callable[[], object]:
    """The GEMM of the backends."""
    if x.dtype != fp8.DTYPE:
        return lambda: torch.mm(x, weight.t())
    rows, columns = (Scaled(t, torch.ones(t.shape[0], 1, device=t.device)) for t in (x, weight))
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
    matrix = Scaled(columns.numbers.t(), columns.scale.t())
    return lambda: fp8.multiply(rows, matrix, out)


def _ring(group: Group, tag: int, device: torch.device, num_bytes: int, repeats: int) -> tuple[float, float]:
    following, preceding = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    out = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    into = torch.empty_like(out)
    wall, cpu = [], []
    for _ in range(repeats):
        start, start_cpu = time.perf_counter(), time.process_time()
        sent, received = transport.exchange(group.pg, tag, 0, [(following, out)], [(preceding, into)])
        transport.wait_all((*received, *sent))
        _synchronize(device)
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    best = min(range(1, repeats), key=wall.__getitem__)  # other processes only ever add time
    return wall[best], cpu[best]


def _time(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    work()
    samples = []
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        samples.append(time.perf_counter() - start)
    return max(min(samples), 1e-9)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
