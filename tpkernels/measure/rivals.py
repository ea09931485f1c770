"""What others offer for the fused ops, as ways of doing a benchmark's case.

Owns: how each is called, and the reason why it cannot run a case; a rival is never left out without one.
Assumes: every rank of the case's group asks in the same order. Setting one up and its first call may still raise or
never return: the caller agrees with the other ranks on who takes part, and has a deadline (:mod:`.bench`).
Refuses: tuning a rival's settings per shape. Each runs as its documentation's first example does.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["RIVALS", "Problem", "Rival"]

# Up to here torch's all-reduce pushes everything to everybody, beyond it reduces and gathers; its own recipe's size.
_ONE_SHOT_BYTES = 256 * 1024


class Problem(Protocol):
    """What a rival needs of a :class:`tpkernels.measure.cases.TimedCase`."""

    op: str
    shape: Any
    dtype: torch.dtype
    device: torch.device
    world_size: int
    group: dist.ProcessGroup

    @property
    def x(self) -> Tensor: ...

    @property
    def weight(self) -> Tensor: ...


@dataclass(frozen=True)
class Rival:
    """`refuses` gives the reason why a case cannot be run, `make` a callable that runs it once."""

    name: str
    refuses: Callable[[Problem], str | None]
    make: Callable[[Problem], Callable[[], Tensor]]


# --- torch.ops.symm_mem: what torch's own asynchronous tensor parallelism runs ----------------------------------------


def _symm_mem_refuses(case: Problem) -> str | None:
    if case.device.type != "cuda":
        return "torch.ops.symm_mem has no fused ops for CPU tensors"
    if case.op != "matmul_all_reduce" and case.shape.m % case.world_size:
        return f"M ({case.shape.m}) is not a multiple of the world size ({case.world_size})"
    return None


def _symm_mem_make(case: Problem) -> Callable[[], Tensor]:
    ops: Any = torch.ops.symm_mem
    name = case.group.group_name
    if case.op == "all_gather_matmul":
        matrices = [case.weight.t()]
        return lambda: ops.fused_all_gather_matmul(case.x, matrices, 0, name, return_A=False)[1][0]
    if case.op == "matmul_reduce_scatter":
        return lambda: ops.fused_matmul_reduce_scatter(case.x, case.weight.t(), "sum", 0, name)
    from torch.distributed import _symmetric_memory as symmetric_memory

    partial = symmetric_memory.empty(case.shape.m, case.shape.n, dtype=case.dtype, device=case.device)
    symmetric_memory.rendezvous(partial, case.group)
    one_shot = partial.numel() * partial.element_size() <= _ONE_SHOT_BYTES

    def run() -> Tensor:
        torch.mm(case.x, case.weight.t(), out=partial)
        all_reduce = ops.one_shot_all_reduce if one_shot else ops.two_shot_all_reduce_
        result: Tensor = all_reduce(partial, "sum", name)
        return result

    return run


# --- Transformer Engine: te.Linear with userbuffers -------------------------------------------------------------------

_TE = "transformer_engine"


def _transformer_engine_refuses(case: Problem) -> str | None:
    if importlib.util.find_spec(_TE) is None:
        return "Transformer Engine is not installed (pip install transformer-engine[pytorch])"
    if case.device.type != "cuda":
        return "Transformer Engine has no layers for CPU tensors"
    if case.op == "matmul_all_reduce":
        return "Transformer Engine overlaps no all-reduce"
    if case.world_size != dist.get_world_size():
        return "Transformer Engine sets its userbuffers up over all ranks of the job, not over some"
    if case.shape.m % case.world_size:
        return f"M ({case.shape.m}) is not a multiple of the world size ({case.world_size})"
    return None


def _transformer_engine_make(case: Problem) -> Callable[[], Tensor]:
    te: Any = importlib.import_module(f"{_TE}.pytorch")
    base: Any = importlib.import_module(f"{_TE}.pytorch.module.base")
    shape, gathers = case.shape, case.op == "all_gather_matmul"
    # One set of userbuffers exists at a time, [rows, columns of what travels]; a new case needs its own.
    base.destroy_ub()
    base.initialize_ub([shape.m, shape.k if gathers else shape.n], case.world_size, dtype=case.dtype)
    layer = te.Linear(
        shape.k, shape.n, bias=False, tp_group=case.group, tp_size=case.world_size, sequence_parallel=True,
        params_dtype=case.dtype, device=case.device, parallel_mode="column" if gathers else "row",
        ub_overlap_ag=gathers, ub_overlap_rs=not gathers, ub_name="fc1" if gathers else "fc2",
    )  # fmt: skip
    with torch.no_grad():
        layer.weight.copy_(case.weight)

    def run() -> Tensor:
        result: Tensor = layer(case.x)
        return result

    return run


RIVALS: Sequence[Rival] = (
    Rival("torch_symm_mem", _symm_mem_refuses, _symm_mem_make),
    Rival("transformer_engine", _transformer_engine_refuses, _transformer_engine_make),
)
