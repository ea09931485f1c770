"""What ``symmetric`` is estimated to take, for "auto": what the group has measured where it has, else a model."""

from __future__ import annotations

import torch

from tpkernels.dispatch import Costs, Problem
from tpkernels.gemm import fp8

__all__ = ["of_copies", "of_one_kernel"]

# Modelled, in microseconds, where no group has measured it ("symmetric_call_us", "symmetric_kernel_us"): what a call
# costs whose data is small.  One of copies asks the driver for some 23 things at 1.5 each (tests/cuda/
# test_driver_calls.py counts them at world 8), beside 50 of Python, Triton's launcher among it.
CALL_US, KERNEL_US = 100.0, 10.0
# The rate of the fused GEMM against the library's: medians of six shapes each on an H200 (the set `core` of
# benchmarks/one_gpu.py; fp16 is taken for bf16).  fp32 runs without tensor cores, and is modelled.
KERNEL_RATE = {torch.float32: 0.5, torch.bfloat16: 0.97, torch.float16: 0.97, fp8.DTYPE: 0.66}


def of_one_kernel(problem: Problem, costs: Costs, *, steps: int) -> float:
    """A sum over ranks in one kernel, behind a library GEMM if there is one; in one step all goes to everybody."""
    whole, peers = problem.m * problem.row_bytes, problem.world_size - 1
    moved = whole * peers if steps == 1 else 2 * whole * peers // problem.world_size
    return _gemm_us(problem, costs) + (costs.own_cost("symmetric_kernel_us") or KERNEL_US) + costs.link_us(moved, 0)


def of_copies(problem: Problem, costs: Costs, *, calls: int, fused: bool) -> float:
    """Calls whose data the copy engines move, beside a GEMM of ours or after (before) one of the library."""
    gemm_us, link_us = _gemm_us(problem, costs), costs.link_us(problem.wire_bytes, 0)
    calls_us = calls * (costs.own_cost("symmetric_call_us") or CALL_US)
    if not fused:
        return gemm_us + link_us + calls_us
    # The gather behind an all-reduce's sums hides behind nothing; of the rest, one chunk.
    hidden = link_us / calls
    exposed = hidden / (problem.num_chunks * (problem.world_size - 1))
    return max(gemm_us / KERNEL_RATE[problem.dtype], hidden) + exposed + (link_us - hidden) + calls_us


def _gemm_us(problem: Problem, costs: Costs) -> float:
    return costs.gemm_us(problem) if problem.flops else 0.0
