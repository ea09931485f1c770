"""Rehearse the sets of `benchmarks/one_gpu.py` on an emulated GPU: its library under g++, its kernels interpreted.

    TRITON_INTERPRET=1 TPKERNELS_CUDA_LIBRARY=FILE python -m tests.measure.one_gpu_on_cpu FOLDER SET...
    ... FOLDER --faults         smoke, once for each of its checks, with a fault that the check is there for
    ... FOLDER --sanitized      what compute-sanitizer looks at, whose tensors are larger

Every step runs as it does on a GPU (`one_gpu.run_step`), with small sizes in place of its own, and files in FOLDER.
Steps verify their results before they time them, so wrong arguments, addresses, flags and chunk lists fail here.
Programs of others are stood for: pytest has one small test to run, compute-sanitizer says that it has found nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import one_gpu
from gpu_steps import (  # fmt: skip
    environment,
    experts,
    experts_ranks,
    faults,
    gemm,
    link,
    programs,
    reducer,
    rivals,
    sanitized,
    sharing,
    smoke,
    tiles,
)
from gpu_steps.lab import Lab
from gpu_steps.outcome import Outcome, Recorder
from gpu_steps.roofline import card_of
from gpu_steps.sets import STEPS

from tests.measure import fake_cuda
from tpkernels.backends.symmetric import cuda_native
from tpkernels.backends.symmetric.cuda_group import Group
from tpkernels.kernels import all_gather_matmul as gather
from tpkernels.kernels import matmul_reduce_scatter as scatter
from tpkernels.measure.cases import Shape

SANITIZER = "#!/bin/sh\necho '========= ERROR SUMMARY: 0 errors'\n"


def scaled_by_row(x: Tensor, y: Tensor, of_x: Tensor, of_y: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
    return out.copy_((x.float() @ y.float() * of_x * of_y).to(out_dtype))


def lab(capability: int = 80) -> Lab:
    card = card_of("NVIDIA H100 80GB HBM3", 90, 132)
    return Lab(torch.device("cpu"), cuda_native.load(), capability, 4, card, polls_per_second=5000, repeats=1)


def make_small(folder: Path) -> None:
    """For the rest of this process."""
    fake_cuda.install()
    Lab.of_this_gpu = staticmethod(lab)  # type: ignore[method-assign]
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):  # torch 2.11's takes one scale per tensor on CPUs
        torch._scaled_mm = scaled_by_row  # type: ignore[assignment]
    smoke.SHAPE, smoke.TP = (40, 32, 24), 2
    gemm.TP = 2
    gemm.SHAPES = {"all_gather_matmul": [Shape(40, 32, 64)], "matmul_reduce_scatter": [Shape(40, 48, 40)]}
    smoke.EXPERTS = experts.Layer(experts=3, top_k=2, d_model=40, d_ff=24, tokens=19)
    experts.RANKS, experts.COMPILERS = 3, 1
    experts.LAYERS = {"small": smoke.EXPERTS, "clamped": replace(smoke.EXPERTS, activation="clamped_swiglu", tokens=5)}
    of_ranks = {name: replace(one, tokens=24, d_model=64, d_ff=64) for name, one in experts_ranks.PROBLEMS.items()}
    experts_ranks.DEVICE, experts_ranks.PROBLEMS = "cpu", of_ranks
    reducer.WORLD_SIZES, reducer.ROWS, reducer.COLUMNS = (3,), 5, 24
    faults.TIMEOUT_S, faults.OVER_S, faults.TRIALS, faults.REPLAYS = 0.05, 60.0, 1, 5
    link.TP, link.M, link.K, link.RATIOS, link.CHUNKS, link.CLOCKED = 3, 40, 24, (0.4,), (3,), ((40, 24),)
    link.RATE_BYTES, link.RATE_SIZE, link.LANES = 1 << 16, 64, (2,)
    tiles.TP, tiles.COMPILERS, tiles.GROUPS, tiles.FURTHER = 2, 1, (2,), {}
    tiles.candidates = lambda usual, **of: (usual, replace(usual, loop="nested"))
    tiles.PROBLEMS = tuple((op, "40x32x64", dtype) for op, _, dtype in tiles.PROBLEMS[1::2])
    link.Rates.free_dim = lambda self, ratio, rate: 40  # type: ignore[method-assign]
    environment.NUM_BYTES = 1 << 16
    sharing.WAYS = {"NCCL": sharing.WAYS["NCCL"]}
    rivals.DEVICE, rivals.PROBLEMS = "cpu", tuple((op, "24x16x8") for op, _ in rivals.PROBLEMS)
    programs.TESTS, programs.TEST_FILES = folder / "tests", ("test_right",)
    programs.TESTS.mkdir()
    programs.TESTS.joinpath("test_right.py").write_text("def test_right():\n    assert True\n")
    tool = folder / "compute-sanitizer"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"


# --- a fault for each check of smoke, in its order --------------------------------------------------------------------


def no_kernels(call: Callable[..., None], *arguments: Any) -> None:
    if arguments[1] == "tpk_load_kernels":
        raise cuda_native.CudaError("tpk_load_kernels: CUDA error 209 (no kernel image is available)", 209)
    call(*arguments)


def a_part_twice(reduce: Callable[..., None], *arguments: Any, parts: list[int], **named: Any) -> None:
    reduce(*arguments, parts=[*parts[:-1], parts[0]], **named)


def another_call(all_reduce: Callable[..., None], group: Group, call: Any, **named: Any) -> None:
    all_reduce(group, call._replace(fingerprint=group.rank), **named)


def one_element(
    multiply: Callable[..., None], whole: Tensor, weight: Tensor, out: Tensor, *rest: Any, **how: Any
) -> None:
    multiply(whole, weight, out, *rest, **how)
    out[-1, -1] += 1


def no_announcement(
    multiply: Callable[..., None], x: Tensor, weight: Tensor, departures: Any, *rest: Any, **how: Any
) -> None:
    departures.counters.fill_(100)  # it counts tiles, and never gets to the number of a chunk
    multiply(x, weight, departures, *rest, **how)


def all_elements(multiply: Callable[..., None], x: Tensor, weight: Tensor, out: Tensor, *rest: Any, **how: Any) -> None:
    multiply(x, weight, out, *rest, **how)
    out += 1


def the_flag_comes(multiply: Callable[..., None], *operands: Any, **named: Any) -> None:
    if operands[3].op == 3:  # that of the missing flag
        operands[3].signals.fill_(1)
    multiply(*operands, **named)


FAULTS: tuple[tuple[Any, str, Callable[..., None]], ...] = (
    (cuda_native.Library, "call", no_kernels),
    (Group, "reduce", a_part_twice),
    (Group, "all_reduce", another_call),
    (gather, "all_gather_matmul", one_element),
    (scatter, "matmul_reduce_scatter", no_announcement),
    (experts, "grouped_matmul", all_elements),
    (gather, "all_gather_matmul", the_flag_comes),
)


def smoke_with_faults(folder: Path) -> None:
    for number, (owner, name, fault) in enumerate(FAULTS):
        right = getattr(owner, name)

        def wrong(*arguments: Any, right: Any = right, fault: Any = fault, **named: Any) -> None:
            fault(right, *arguments, **named)

        with mock.patch.object(owner, name, wrong):
            one_gpu.run_step(STEPS["smoke"], folder / str(number))


def main(folder: Path, sets: list[str]) -> None:
    torch.set_num_threads(1)
    make_small(folder)
    if sets == ["--faults"]:
        smoke_with_faults(folder)
        return
    if sets == ["--sanitized"]:
        for way in sanitized.WAYS.values():
            way(lab(), Recorder(Outcome("sanitized", "running")))
        return
    for one in one_gpu.chosen(sets, None):
        for step in one.steps:
            if step.name == "gemm":  # and once more as a GPU that has fp8
                Lab.of_this_gpu = staticmethod(lambda: lab(90))  # type: ignore[method-assign]
            with mock.patch.dict(os.environ, step.environment):
                one_gpu.run_step(step, folder)
            Lab.of_this_gpu = staticmethod(lab)  # type: ignore[method-assign]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
