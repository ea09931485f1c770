"""G5: `symmetric` against torch.ops.symm_mem's fused ops, both as W processes on one GPU over gloo groups.

The processes take turns on the GPU (unless MPS runs), which slows both down alike; only their ratio means something.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import tpkernels as tpk
from gpu_steps.environment import share_gpu
from gpu_steps.outcome import Recorder, Row, times_of
from tpkernels.comm.groups import resolve
from tpkernels.measure.cases import Case, Shape
from tpkernels.measure.rivals import RIVALS
from tpkernels.measure.timing import Measurement, measure

PROBLEMS = (
    ("all_gather_matmul", "4096x4096x7168"),
    ("matmul_reduce_scatter", "4096x7168x4096"),
    ("all_gather_matmul", "8192x8192x14336"),
    ("matmul_reduce_scatter", "8192x14336x8192"),
    ("matmul_all_reduce", "16x14336x4096"),
)
RIVAL = "torch_symm_mem"
REPEATS = 9
RANKS_S = 60.0


def run(recorder: Recorder) -> None:
    for world_size in (2, 4):
        for op, shape in PROBLEMS if world_size == 2 else PROBLEMS[:2]:
            measured = tpk.launch(on_rank, world_size, op, shape, "cuda", timeout=RANKS_S)[0]
            ratio = measured["symmetric"].median / measured[RIVAL].median
            problem = f"{op} {shape}, {world_size} processes"
            recorder.row(Row("G5", problem, f"ours / {RIVAL}", ratio, "contention stress", "<= 1.0", REPEATS,
                             times_of(measured)))  # fmt: skip


def on_rank(op: str, shape: str, device: str) -> dict[str, Measurement]:
    """Verify both, then let them take turns."""
    if device == "cuda":
        share_gpu()
    dist.init_process_group("gloo")
    group: Any = dist.group.WORLD
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    case = Case(op, Shape.parse(shape), torch.bfloat16, group, place)
    ours, rival = ("symmetric", RIVAL) if device == "cuda" else ("unfused", "torch")
    with torch.no_grad():
        theirs = next((one.make(case) for one in RIVALS if one.name == rival), case.torch_baseline)
        candidates: dict[str, Any] = {"gemm": case.gemm_only, "symmetric": case.ours(ours), RIVAL: theirs}
        for name, label in (("symmetric", ours), (RIVAL, rival)):
            case.verify(label, candidates[name]())
        measured = measure(candidates, repeats=REPEATS, warmup=3, group=group, device=place)
    channels = resolve(group).symmetric
    if channels is not None:
        channels.check()
    return measured
