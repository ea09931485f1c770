"""Which tiles are fastest: those that `tpkernels.kernels.config` chooses against their neighbours, with flags preset.

The GEMMs are those of `gemm.py`: two of bf16 for each op, two of fp8. A variant differs by one number, by the loop,
or by how many row tiles share a column; those that a GPU cannot run are left out, those that do not compile are named.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu_steps.gemm import TP, departures_of
from gpu_steps.lab import Lab, LoneRank
from gpu_steps.outcome import Recorder, Row, times_of
from tpkernels import partition
from tpkernels.gemm import fp8
from tpkernels.kernels import all_gather_matmul as gather
from tpkernels.kernels import matmul_reduce_scatter as scatter
from tpkernels.kernels.config import GemmConfig, Tiles, candidates
from tpkernels.measure.cases import Shape

PROBLEMS = (
    ("all_gather_matmul", "8192x4096x14336", torch.bfloat16),
    ("all_gather_matmul", "8192x8192x29568", torch.bfloat16),
    ("matmul_reduce_scatter", "8192x11008x4096", torch.bfloat16),
    ("matmul_reduce_scatter", "8192x29568x8192", torch.bfloat16),
    ("all_gather_matmul", "8192x4096x14336", fp8.DTYPE),
    ("all_gather_matmul", "8192x8192x29568", fp8.DTYPE),
)
GROUPS = (1, 2, 4, 8, 16)
# Further from the usual ones than a step: block_m, block_n, block_k, num_warps, num_stages.
FURTHER = {
    fp8.DTYPE: ((128, 256, 64, 8, 4), (256, 128, 128, 8, 3), (128, 256, 128, 8, 3), (64, 256, 128, 4, 4)),
    torch.bfloat16: ((256, 128, 64, 8, 4), (128, 192, 64, 8, 4), (128, 128, 128, 8, 3)),
}
COMPILERS = 8
WHAT = "usual tiles / fastest"


def run(recorder: Recorder) -> None:
    lab = Lab.of_this_gpu()
    for op, text, dtype in PROBLEMS:
        if dtype != fp8.DTYPE or lab.capability >= 89:
            measure_tiles(lab, recorder, op, Shape.parse(text), dtype)


def measure_tiles(lab: Lab, recorder: Recorder, op: str, shape: Shape, dtype: torch.dtype) -> None:
    gathers = op == "all_gather_matmul"
    m, n, k = (shape.m, shape.n // TP, shape.k) if gathers else (shape.m, shape.n, shape.k // TP)
    problem = f"{op} {shape} TP {TP} {name_of(dtype)}"
    recorder.predict("-", problem, WHAT, 1.0)
    x, weight = lab.random(0, m, k).to(dtype), lab.random(1, n, k).to(dtype)
    rank = LoneRank(lab, TP)
    rank.next_call()
    rank.preset()
    launch = partial(_gather if gathers else _scatter, rank, x, weight)
    calls, unable = compiled(
        {name: partial(launch, config) for name, config in variants(lab, m, n, k, gathers, dtype).items()}
    )
    for call in calls.values():
        call()
    rank.raise_if_failed()
    found = lab.measure(calls)
    rank.raise_if_failed()
    rank.close()
    median = {name: one.median for name, one in found.items()}
    fastest = min(median, key=median.__getitem__)
    recorder.row(
        Row("-", problem, WHAT, median["usual"] / median[fastest], "flags preset", "", lab.repeats, times_of(found))
    )
    recorder.fact(f"{problem}, fastest", f"{fastest}; do not compile: {', '.join(unable) or 'none'}")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("float8_e4m3fn", "fp8")


def variants(lab: Lab, m: int, n: int, k: int, gathers: bool, dtype: torch.dtype) -> dict[str, GemmConfig]:
    """By what is different; the usual one first."""
    configure = partial(
        lab.configure, m, n, k, TP, moved_columns=k if gathers else n, reserved_sms=0, dtype=dtype
    )  # fmt: skip
    usual = configure()
    name = str(dtype).removeprefix("torch.")
    found = {"usual": usual}
    tiles = [*candidates(usual.tiles, capability=lab.capability, dtype=name)[1:]]
    for sizes in FURTHER.get(dtype, ()):
        try:
            tiles.append(Tiles(*sizes))
        except ValueError:
            continue
    for one in tiles:
        label = f"{one.block_m}x{one.block_n}x{one.block_k}, {one.num_warps} warps, {one.num_stages} stages, {one.loop}"
        found[label] = replace(usual, **vars(one))
    for group in GROUPS:
        if group != usual.group_m:
            found[f"groups of {group}"] = replace(usual, group_m=group)
    return found


def compiled(
    makers: dict[str, Callable[[], Callable[[], Any]]],
) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """What each makes, several at a time; and which cannot be made."""
    with ThreadPoolExecutor(COMPILERS) as pool:
        waiting = {name: pool.submit(make) for name, make in makers.items()}
    able, unable = {}, []
    for name, one in waiting.items():
        error = one.exception()
        if error is None:
            able[name] = one.result()
        elif name == "usual":
            raise error
        else:
            unable.append(f"{name} ({type(error).__name__})")
    return able, unable


def _gather(rank: LoneRank, x: Tensor, weight: Tensor, config: GemmConfig) -> Callable[[], Any]:
    order = rank.order("all_gather", partition.array_split_sizes(x.shape[0], TP), config)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
    scales: dict[str, Any] = {}
    if x.dtype == fp8.DTYPE:
        scales = {
            "scale_whole": torch.ones(x.shape[0], 1, device=x.device),
            "scale_weight": torch.ones(weight.shape[0], 1, device=x.device),
        }
    arrivals = gather.Arrivals(order, rank.flags, rank.table, 1)
    launch = partial(gather.all_gather_matmul, x, weight, out, arrivals, config, **scales)
    launch(rehearsal=True)
    return launch


def _scatter(rank: LoneRank, x: Tensor, weight: Tensor, config: GemmConfig) -> Callable[[], Any]:
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
    departures = departures_of(rank, out, partition.array_split_sizes(x.shape[0], TP), config)

    def launch(rehearsal: bool = False) -> Tensor:
        scatter.matmul_reduce_scatter(x, weight, departures, config, rehearsal=rehearsal)
        return out  # kept: the table of departures holds its address alone

    launch(rehearsal=True)
    return launch
