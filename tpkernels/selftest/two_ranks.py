"""What the two ranks of `tpkernels doctor` try: a small all-reduce, and each op in each implementation, judged.

Owns: the problems (small, uneven) and the answers in words.  A refusal is an answer with its reason; a wrong result or
an error is one, too, and the next implementation gets a process group of its own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

import tpkernels as tpk
from tpkernels import dispatch
from tpkernels.errors import UnsupportedProblem
from tpkernels.partition import array_split_sizes
from tpkernels.testing.cases import Case, call, operands
from tpkernels.testing.references import check_values

__all__ = ["WORKS", "Trial", "try_everything"]

WORKS = "works"
_REPEATS = 50


@dataclass
class Trial:
    """What one rank found; `answers[op][implementation]` is :data:`WORKS`, "no: REASON" or "fails: ERROR"."""

    device: str
    all_reduce_us: float
    answers: dict[str, dict[str, str]] = field(default_factory=dict)


def try_everything(device: str, timeout_s: float) -> Trial:
    """One rank's part; public because ranks import it."""
    tpk.init(device=device, timeout=timeout_s)
    try:
        trial = Trial(device, _all_reduce_us(device))
        for op in dispatch.OPS:
            trial.answers[op] = {one.name: _answer(op, one.name, device) for one in dispatch.implementations(op)}
        return trial
    finally:
        dist.destroy_process_group()


def _all_reduce_us(device: str) -> float:
    tensor = torch.ones(2, device=device)
    for _ in range(5):
        dist.all_reduce(tensor)
    started = time.perf_counter()
    for _ in range(_REPEATS):
        dist.all_reduce(tensor)
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / _REPEATS * 1e6


def _answer(op: str, implementation: str, device: str) -> str:
    rank, world = dist.get_rank(), dist.get_world_size()
    case = Case(op, (7, 10), ns=(9,), sizes=array_split_sizes(7, world), implementation=implementation)
    parts = operands(case, world)
    group = dist.new_group(list(range(world)))
    try:
        outs, gathered = call(case, parts.of(rank, device), group)
        check_values(case, parts, [out.cpu() for out in outs], None if gathered is None else gathered.cpu(), rank)
    except UnsupportedProblem as refusal:
        why = str(refusal).splitlines()[-1].strip()
        return f"no: {why.removeprefix(f'{implementation}: ')}"
    except (RuntimeError, ValueError, OSError, AssertionError) as error:  # torch's errors, ours, and the judge's
        return f"fails: {type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
    finally:
        dist.destroy_process_group(group)
    return WORKS
