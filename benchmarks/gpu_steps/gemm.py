"""G1 and G2: the persistent kernels against cuBLAS, and what waits and signals cost, with every flag raised before.

The GEMMs are those of one rank of 8 on the standard shapes: the columns of an all-gather, the contraction of a
reduce-scatter. The flat loop, the nested one (`tpkernels.kernels.config.LOOPS`) and cuBLAS take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu_steps.lab import Lab, LoneRank, check_product
from gpu_steps.outcome import Recorder, Row, times_of
from gpu_steps.roofline import waiting_share
from tpkernels import partition
from tpkernels.gemm import fp8
from tpkernels.kernels import all_gather_matmul as gather
from tpkernels.kernels import matmul_reduce_scatter as scatter
from tpkernels.kernels.config import LOOPS as ALL_LOOPS
from tpkernels.kernels.config import GemmConfig
from tpkernels.measure.cases import Shape
from tpkernels.measure.suites import SUITES

TP = 8
OPS = ("all_gather_matmul", "matmul_reduce_scatter")
SHAPES = {op: [Shape.parse(text) for text in SUITES["standard"][op]] for op in OPS}
# What each loop changes in the configuration of a GEMM; a new one is compared with the old by a line here.
LOOPS: dict[str, dict[str, Any]] = {loop: {"loop": loop} for loop in ALL_LOOPS}


def run(recorder: Recorder) -> None:
    lab = Lab.of_this_gpu()
    for op, of in (("all_gather_matmul", measure_gather), ("matmul_reduce_scatter", measure_scatter)):
        for shape in SHAPES[op]:
            of(lab, recorder, shape, TP)
    if lab.capability >= 90:  # of torch's GEMM with a scale per row; ours runs from 8.9 on
        for shape in SHAPES["all_gather_matmul"]:
            measure_scaled_gather(lab, recorder, shape, TP)


def measure_gather(lab: Lab, recorder: Recorder, shape: Shape, tp: int) -> None:
    m, k, n = shape.m, shape.k, shape.n // tp
    problem = f"all_gather_matmul {shape} TP {tp}"
    configs = configurations(lab, m, n, k, tp, moved_columns=k)
    predict(lab, recorder, problem, m, n, k, configs)
    whole, weight = lab.random(0, m, k), lab.random(1, n, k)
    rank = LoneRank(lab, tp)
    rank.next_call()
    rank.preset()
    shards = partition.array_split_sizes(m, tp)

    def launch(config: GemmConfig, out: Tensor, waits: bool) -> Callable[[], object]:
        arrivals = gather.Arrivals(rank.order("all_gather", shards, config, waits), rank.flags, rank.table, 1)
        return partial(gather.all_gather_matmul, whole, weight, out, arrivals, config)

    out = whole.new_empty(m, n)
    ways = {loop: (launch(config, out, True), launch(config, out, False)) for loop, config in configs.items()}
    _compare(lab, recorder, problem, whole, weight, out, ways, rank)


def measure_scatter(lab: Lab, recorder: Recorder, shape: Shape, tp: int) -> None:
    """Without signals is the all-gather's kernel with the same tiles, which has neither counters nor announcements."""
    m, k, n = shape.m, shape.k // tp, shape.n
    problem = f"matmul_reduce_scatter {shape} TP {tp}"
    configs = configurations(lab, m, n, k, tp, moved_columns=n)
    predict(lab, recorder, problem, m, n, k, configs)
    x, weight = lab.random(0, m, k), lab.random(1, n, k)
    rank = LoneRank(lab, tp)
    rank.next_call()
    shards = partition.array_split_sizes(m, tp)
    out = x.new_empty(m, n)

    def launches(config: GemmConfig) -> tuple[Callable[[], object], Callable[[], object]]:
        departures = departures_of(rank, out, shards, config)
        silent = gather.Arrivals(rank.order("reduce_scatter", shards, config, waits=False), rank.flags, rank.table, 1)
        return (
            partial(scatter.matmul_reduce_scatter, x, weight, departures, config),
            partial(gather.all_gather_matmul, x, weight, out, silent, config),
        )

    _compare(lab, recorder, problem, x, weight, out, {loop: launches(one) for loop, one in configs.items()}, rank)


def configurations(lab: Lab, m: int, n: int, k: int, tp: int, moved_columns: int) -> dict[str, GemmConfig]:
    """Of every loop."""
    config = lab.configure(m, n, k, tp, moved_columns=moved_columns, reserved_sms=0)
    return {loop: replace(config, **changes) for loop, changes in LOOPS.items()}


def figures(loop: str) -> tuple[str, str, str]:
    """What is measured of a loop."""
    figures = ("cuBLAS / ours", "TFLOP/s of ours", "with waits and signals / without")
    share, rate, waits = (f"{figure}, {loop} loop" for figure in figures)
    return share, rate, waits


def predict(
    lab: Lab, recorder: Recorder, problem: str, m: int, n: int, k: int, configs: Mapping[str, GemmConfig]
) -> None:
    for loop, config in configs.items():
        ours = lab.card.our_gemm_s(m, n, k, drains=config.loop == "nested")
        share, rate, waits = figures(loop)
        recorder.predict("G1", problem, share, lab.card.library_gemm_s(m, n, k) / ours)
        recorder.predict("-", problem, rate, 2e-12 * m * n * k / ours)
        waiting = waiting_share(m, n, config.block_m, config.block_n, config.num_programs, ours)
        recorder.predict("G2", problem, waits, waiting)


def measure_scaled_gather(lab: Lab, recorder: Recorder, shape: Shape, tp: int) -> None:
    """fp8 with a scale per row, behind the row as it is gathered; torch's GEMM has its operands side by side.

    Verified on sparse integers, which tensor cores sum exactly; timed on random numbers in the same memory.
    """
    m, k, n = shape.m, shape.k, shape.n // tp
    problem = f"all_gather_matmul {shape} TP {tp} fp8"
    share, rate = "torch._scaled_mm / ours", "TFLOP/s of ours"
    ours = lab.card.our_gemm_s(m, n, k, itemsize=1)
    recorder.predict("-", problem, share, lab.card.library_gemm_s(m, n, k, itemsize=1) / ours)
    recorder.predict("-", problem, rate, 2e-12 * m * n * k / ours)
    packed = torch.zeros(m, fp8.packed_bytes(k), dtype=torch.uint8, device=lab.device)
    rows = fp8.unpack(packed, (k,))
    weight, scale_weight = torch.zeros(n, k, device=lab.device).to(fp8.DTYPE), torch.ones(n, 1, device=lab.device)
    x, scale_x = torch.zeros(m, k, device=lab.device).to(fp8.DTYPE), torch.ones(m, 1, device=lab.device)
    rank = LoneRank(lab, tp)
    rank.next_call()
    rank.preset()
    config = lab.configure(m, n, k, tp, moved_columns=k, reserved_sms=0, dtype=fp8.DTYPE)
    order = rank.order("all_gather", partition.array_split_sizes(m, tp), config)
    outs = {name: torch.empty(m, n, dtype=torch.bfloat16, device=lab.device) for name in ("cublas", "preset")}
    candidates: dict[str, Callable[[], object]] = {
        "cublas": lambda: torch._scaled_mm(
            x, weight.t(), scale_x, scale_weight.t(), out_dtype=torch.bfloat16, out=outs["cublas"]
        ),
        "preset": partial(
            gather.all_gather_matmul, rows.numbers, weight, outs["preset"],
            gather.Arrivals(order, rank.flags, rank.table, 1), config, scale_whole=rows.scale,
            scale_weight=scale_weight,
        ),
    }  # fmt: skip

    def fill(values: Tensor, of_weight: Tensor) -> None:
        x.copy_(values.to(fp8.DTYPE))
        weight.copy_(of_weight.to(fp8.DTYPE))
        packed.copy_(fp8.pack(x, scale_x))

    sparse = torch.arange(m * k, device=lab.device).reshape(m, k)
    fill((sparse % 131 == 0) * ((sparse % 3) - 1.0), lab.random(0, n, k).sign())
    scale_x[::2] = 2.0
    packed.copy_(fp8.pack(x, scale_x))
    for name, call in candidates.items():
        outs[name].fill_(float("nan"))
        call()
        rank.raise_if_failed()
        check_product(f"fp8 {shape} {name}", outs[name], x.float() * scale_x, weight.float())
    fill(lab.random(1, m, k), lab.random(2, n, k))
    measured = lab.measure(candidates)
    rank.raise_if_failed()
    rank.close()
    median = {name: one.median for name, one in measured.items()}
    ratio = median["cublas"] / median["preset"]
    recorder.row(Row("-", problem, share, ratio, "flags preset", "", lab.repeats, times_of(measured)))
    tflops = 2e-12 * m * n * k / median["preset"]
    recorder.row(Row("-", problem, rate, tflops, "flags preset", "", lab.repeats))


def departures_of(rank: LoneRank, out: Tensor, shards: tuple[int, ...], config: GemmConfig) -> scatter.Departures:
    """Rows of owner r stay in `out`, [M, N] by owner; flag r * chunks + c says that its chunk c is there."""
    starts = partition.offsets(shards)
    staging = [out.data_ptr() + start * out.shape[1] * out.element_size() for start in starts]
    flags = [rank.flags.data_ptr() + 4 * owner * config.num_chunks for owner in range(len(shards))]
    device = rank.lab.device
    return scatter.Departures(
        order=rank.order("reduce_scatter", shards, config), staging=torch.tensor(staging, device=device),
        signals=torch.tensor(flags, device=device), counters=rank.counters, group=rank.table,
        staging_dtype=out.dtype, staging_stride=out.shape[1],
    )  # fmt: skip


def _compare(
    lab: Lab, recorder: Recorder, problem: str, a: Tensor, b: Tensor, out: Tensor,
    ways: Mapping[str, tuple[Callable[[], object], Callable[[], object]]], rank: LoneRank,
) -> None:  # fmt: skip
    """ways: of each loop the kernel, and the one without waits; all write to `out`."""
    candidates: dict[str, Callable[[], object]] = {"cublas": lambda: torch.mm(a, b.t(), out=out)}
    for loop, (waiting, silent) in ways.items():
        candidates |= {loop: waiting, f"{loop}, no waits": silent}
    for name, call in candidates.items():
        out.fill_(float("nan"))
        call()
        rank.raise_if_failed()
        check_product(f"{problem} {name}", out, a, b)
    measured = lab.measure(candidates)
    rank.raise_if_failed()
    rank.close()
    median = {name: one.median for name, one in measured.items()}
    times, n = times_of(measured), lab.repeats
    for loop in ways:
        share, rate, waits = figures(loop)
        tflops = 2e-12 * a.shape[0] * b.shape[0] * b.shape[1] / median[loop]
        cost = median[loop] / median[f"{loop}, no waits"]
        recorder.row(Row("G1", problem, share, median["cublas"] / median[loop], "flags preset", ">= 0.92", n, times))
        recorder.row(Row("-", problem, rate, tflops, "flags preset", "", n))
        recorder.row(Row("G2", problem, waits, cost, "flags preset", "<= 1.02", n))
