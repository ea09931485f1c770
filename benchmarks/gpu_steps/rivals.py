"""G5: `symmetric` against torch.ops.symm_mem's fused ops, both as W processes on one GPU over gloo groups.

The processes take turns on the GPU (unless MPS runs), which slows both down alike; only their ratio means something.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import tpkernels as tpk
from gpu_steps.outcome import Recorder, Row, times_of
from gpu_steps.roofline import loop_share
from gpu_steps.sharing import share_gpu
from tpkernels.backends.symmetric.resource import SymmetricMemory
from tpkernels.comm.groups import resolve
from tpkernels.measure.cases import Shape, TimedCase
from tpkernels.measure.rivals import RIVALS
from tpkernels.measure.timing import Measurement, measure

# One shape, a rank's part of 8 of LLaMA-3-8B's up-projection, gathered and scattered, by one start of two processes.
PROBLEMS = (("all_gather_matmul", "4096x4096x7168"), ("matmul_reduce_scatter", "4096x7168x4096"))
WORLD_SIZE = 2
DEVICE = "cuda"
RIVAL = "torch_symm_mem"
REPEATS = 9
RANKS_S = 75.0


def run(recorder: Recorder) -> None:
    what, names = f"ours / {RIVAL}", {}
    for op, text in PROBLEMS:
        names[op] = f"{op} {text}, {WORLD_SIZE} processes"
        shape = Shape.parse(text)
        of_rank = shape.k // WORLD_SIZE if op == "matmul_reduce_scatter" else shape.k
        # The same bytes are moved by the same engines, and torch's GEMM is the library's.
        recorder.predict("G5", names[op], what, 1 / loop_share(of_rank))
    for op, measured in tpk.launch(on_rank, WORLD_SIZE, PROBLEMS, DEVICE, timeout=RANKS_S)[0].items():
        ratio = measured["symmetric"].median / measured[RIVAL].median
        recorder.row(Row("G5", names[op], what, ratio, "contention stress", "<= 1.0", REPEATS, times_of(measured)))


def on_rank(problems: Sequence[tuple[str, str]], device: str) -> dict[str, dict[str, Measurement]]:
    """By op."""
    if device == "cuda":
        share_gpu()
    dist.init_process_group("gloo")
    return {op: _compare(op, shape, device) for op, shape in problems}


def _compare(op: str, shape: str, device: str) -> dict[str, Measurement]:
    """Verify both, then let them take turns."""
    group: Any = dist.group.WORLD
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    case = TimedCase(op, Shape.parse(shape), torch.bfloat16, group, place)
    ours, rival = ("symmetric", RIVAL) if device == "cuda" else ("unfused", "torch")
    with torch.no_grad():
        theirs = next((one.make(case) for one in RIVALS if one.name == rival), case.torch_baseline)
        candidates: dict[str, Any] = {"gemm": case.gemm_only, "symmetric": case.ours(ours), RIVAL: theirs}
        for name, label in (("symmetric", ours), (RIVAL, rival)):
            case.verify(label, candidates[name]())
        measured = measure(candidates, repeats=REPEATS, warmup=3, group=group, device=place)
    channels = resolve(group).resources[SymmetricMemory.name].channels
    if channels is not None:
        channels.check()
    return measured
