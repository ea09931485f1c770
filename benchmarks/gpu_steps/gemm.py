"""G1 and G2: the persistent kernels against cuBLAS, and what waits and signals cost, with every flag raised before.

The GEMMs are those of one rank of 8 on the standard shapes: the columns of an all-gather, the contraction of a
reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gpu_steps.lab import Lab, LoneRank, check_product
from gpu_steps.outcome import Recorder, Row, times_of
from tpkernels import fp8, partition
from tpkernels.kernels import all_gather_matmul as gather
from tpkernels.kernels import matmul_reduce_scatter as scatter
from tpkernels.kernels.config import GemmConfig
from tpkernels.measure.cases import Shape
from tpkernels.measure.suites import SUITES

TP = 8


def run(recorder: Recorder) -> None:
    lab = Lab.of_this_gpu()
    for op, of in (("all_gather_matmul", measure_gather), ("matmul_reduce_scatter", measure_scatter)):
        for text in SUITES["standard"][op]:
            of(lab, recorder, Shape.parse(text), TP)
    if lab.capability >= 90:  # of torch's GEMM with a scale per row; ours runs from 8.9 on
        for text in SUITES["standard"]["all_gather_matmul"]:
            measure_scaled_gather(lab, recorder, Shape.parse(text), TP)


def measure_gather(lab: Lab, recorder: Recorder, shape: Shape, tp: int) -> None:
    m, k, n = shape.m, shape.k, shape.n // tp
    whole, weight = lab.random(0, m, k), lab.random(1, n, k)
    rank = LoneRank(lab, tp)
    rank.next_call()
    rank.preset()
    config = lab.configure(m, n, k, tp, moved_columns=k, reserved_sms=0)
    shards = partition.array_split_sizes(m, tp)
    outs = {name: whole.new_empty(m, n) for name in ("cublas", "preset", "no waits")}

    def launch(name: str, waits: bool) -> Callable[[], None]:
        arrivals = gather.Arrivals(rank.order("all_gather", shards, config, waits), rank.flags, rank.table, 1)
        return partial(gather.all_gather_matmul, whole, weight, outs[name], arrivals, config)

    kernels = {"preset": launch("preset", True), "no waits": launch("no waits", False)}
    _compare(lab, recorder, f"all_gather_matmul {shape} TP {tp}", whole, weight, outs, kernels, rank)


def measure_scatter(lab: Lab, recorder: Recorder, shape: Shape, tp: int) -> None:
    """Without signals is the all-gather's kernel with the same tiles, which has neither counters nor announcements."""
    m, k, n = shape.m, shape.k // tp, shape.n
    x, weight = lab.random(0, m, k), lab.random(1, n, k)
    rank = LoneRank(lab, tp)
    rank.next_call()
    config = lab.configure(m, n, k, tp, moved_columns=n, reserved_sms=0)
    shards = partition.array_split_sizes(m, tp)
    outs = {name: x.new_empty(m, n) for name in ("cublas", "preset", "no waits")}
    departures = departures_of(rank, outs["preset"], shards, config)
    silent = gather.Arrivals(rank.order("reduce_scatter", shards, config, waits=False), rank.flags, rank.table, 1)
    kernels: dict[str, Callable[[], None]] = {
        "preset": partial(scatter.matmul_reduce_scatter, x, weight, departures, config),
        "no waits": partial(gather.all_gather_matmul, x, weight, outs["no waits"], silent, config),
    }
    _compare(lab, recorder, f"matmul_reduce_scatter {shape} TP {tp}", x, weight, outs, kernels, rank)


def measure_scaled_gather(lab: Lab, recorder: Recorder, shape: Shape, tp: int) -> None:
    """fp8 with a scale per row, behind the row as it is gathered; torch's GEMM has its operands side by side.

    Verified on sparse integers, which tensor cores sum exactly; timed on random numbers in the same memory.
    """
    m, k, n = shape.m, shape.k, shape.n // tp
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
    tflops = 2e-12 * m * n * k / median["preset"]
    ratio, what = median["cublas"] / median["preset"], f"torch._scaled_mm / ours ({tflops:.0f} TFLOP/s)"
    problem = f"all_gather_matmul {shape} TP {tp} fp8"
    recorder.row(Row("-", problem, what, ratio, "flags preset", "", lab.repeats, times_of(measured)))


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
    lab: Lab, recorder: Recorder, problem: str, a: Tensor, b: Tensor, outs: dict[str, Tensor],
    kernels: dict[str, Callable[[], None]], rank: LoneRank,
) -> None:  # fmt: skip
    candidates: dict[str, Callable[[], object]] = {"cublas": lambda: torch.mm(a, b.t(), out=outs["cublas"]), **kernels}
    for name, call in candidates.items():
        outs[name].fill_(float("nan"))
        call()
        rank.raise_if_failed()
        check_product(f"{problem} {name}", outs[name], a, b)
    measured = lab.measure(candidates)
    rank.raise_if_failed()
    rank.close()
    median = {name: one.median for name, one in measured.items()}
    times, n = times_of(measured), lab.repeats
    tflops = 2e-12 * a.shape[0] * b.shape[0] * b.shape[1] / median["preset"]
    recorder.row(Row("G1", problem, f"cuBLAS / ours ({tflops:.0f} TFLOP/s)", median["cublas"] / median["preset"],
                     "flags preset", ">= 0.92", n, times))  # fmt: skip
    recorder.row(Row("G2", problem, "with waits and signals / without", median["preset"] / median["no waits"],
                     "flags preset", "<= 1.02", n))  # fmt: skip
