"""Layers with experts on `symmetric`, in both layouts, as two processes that share one GPU.

Beside them stand `F.grouped_mm` and torch's permutations between an all-gather and a reduce-scatter of `symmetric`, for
which the routing of all tokens is there: the same transport, nothing beside the GEMM. The processes take turns on the
GPU (unless MPS runs); only ratios mean something. Results are within the fp64 bound before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import experts
import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels as tpk
from gpu_steps.outcome import Recorder, Row, times_of
from gpu_steps.sharing import share_gpu
from tpkernels.backends.symmetric.resource import SymmetricMemory
from tpkernels.comm.groups import resolve
from tpkernels.measure.timing import Measurement, measure

PROBLEMS = {name: experts.LAYERS[name] for name in ("mixtral-8x7b", "qwen3-30b-a3b")}
DEVICE = "cuda"
REPEATS = 9
RANKS_S = 90.0


def run(recorder: Recorder) -> None:
    said = {layout: f"torch between symmetric collectives / ours, {layout}" for layout in experts.CUT_TOKENS}
    for name in PROBLEMS:
        for what in said.values():  # three passes over the rows, and half of what travels
            recorder.predict("-", name, what, 1.2)
    for name, measured in tpk.launch(on_rank, experts.WORLD, PROBLEMS, DEVICE, timeout=RANKS_S)[0].items():
        for layout, what in said.items():
            ratio = measured["features torch"].median / measured[f"{layout} symmetric"].median
            times = times_of(measured) if layout == experts.CUT_TOKENS[0] else {}
            recorder.row(Row("-", name, what, ratio, "contention stress", "", REPEATS, times))


def on_rank(problems: dict[str, experts.Layer], device: str) -> dict[str, dict[str, Measurement]]:
    """By layer."""
    if device == "cuda":
        share_gpu()
    dist.init_process_group("gloo")
    return {name: _compare(layer, device) for name, layer in problems.items()}


def _compare(layer: experts.Layer, device: str) -> dict[str, Measurement]:
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    ways, name = experts.Ways(layer, torch.bfloat16, place), "symmetric" if device == "cuda" else "unfused"
    candidates: dict[str, Callable[[], object]] = {
        f"{layout} symmetric": ways.forward(layout, name) for layout in experts.CUT_TOKENS
    }  # fmt: skip
    candidates["features torch"] = between_collectives(ways, name)
    with torch.no_grad():
        measured = measure(
            candidates, repeats=REPEATS, warmup=2, group=ways.group, device=place, verify=ways.verify
        )  # fmt: skip
    channels = resolve(ways.group).resources[SymmetricMemory.name].channels
    if channels is not None:
        channels.check()
    return measured


def between_collectives(ways: experts.Ways, name: str) -> Callable[[], Tensor]:
    group: Any = ways.group
    held, (numbers, weights) = ways.held["features"], (one.to(ways.device) for one in (ways.experts, ways.weights))

    def run() -> Tensor:
        x = tpk.all_gather(ways.own_x, group, implementation=name)
        slots = numbers.flatten().argsort(stable=True)
        tokens, counts = slots // ways.layer.top_k, numbers.flatten().bincount(minlength=ways.layer.experts)
        y = ways.block(x[tokens], counts, held) * weights.flatten()[slots, None]
        partial = torch.zeros(x.shape, dtype=y.dtype, device=x.device).index_add_(0, tokens, y).to(x.dtype)
        return tpk.reduce_scatter(partial, group, implementation=name)

    return run
