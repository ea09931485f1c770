"""One rank's part of `tpkernels profile`: a small decoder trained in three ways from one seed, step by step in turns.

    no TP          rank 0 alone, in plain torch; the other ranks wait
    TP             sequence parallel, every op with implementation="unfused"
    TP + overlap   the same with implementation="auto"

Both keep the gathered input of a column layer for the backward pass, as torch's autograd would.

Owns: the step, its clock, the peak of memory, the recorded timelines, and the verdict on the curves.

Refuses: times of a training that is not the same.  Losses and global gradient norms of the three must agree, up to what
rounding does (`curves.py`), for which rank 0 trains once more.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpkernels.comm import timeline
from tpkernels.comm.groups import resolve
from tpkernels.measure.curves import Curve, shifted
from tpkernels.measure.gpt import GPT, ParallelGPT, Sizes
from tpkernels.measure.memory import peak_bytes
from tpkernels.measure.progress import remaining
from tpkernels.measure.timing import LEAST_REPEATS
from tpkernels.measure.trace import RankTrace
from tpkernels.ops.agreed_call import exchange

__all__ = ["METHODS", "RankResult", "Training", "affordable_steps", "train_in_turns"]

NO_TP, TP, OVERLAP = METHODS = ("no TP", "TP", "TP + overlap")
LEARNING_RATE = 1e-3
RECORDED = 3


@dataclass(frozen=True)
class Training:
    """What every rank trains; crosses process boundaries.

    dtype: None until the ranks have found out which is faster.
    """

    sizes: Sizes
    steps: int = 10
    warmup: int = 2
    dtype: torch.dtype | None = torch.float32
    device: str = "cpu"
    seed: int = 0


@dataclass
class RankResult:
    """`curves` has "shifted", too, on rank 0, for the bound. dtype: of the model that was trained."""

    curves: dict[str, Curve]
    traces: list[RankTrace]
    dtype: torch.dtype | None = None


class _Trainee:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)

    def step(self, tokens: Tensor, labels: Tensor) -> tuple[float, float]:
        loss = self.model(tokens, labels)
        loss.backward()
        gradients = [p.grad.float() for p in self.model.parameters() if p.grad is not None]
        norm: Any = nn.utils.get_total_norm(gradients)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def held_bytes(self) -> int:
        state = (value for state in self.optimizer.state.values() for value in state.values())
        tensors = [*self.model.parameters(), *(value for value in state if isinstance(value, Tensor))]
        return sum(one.numel() * one.element_size() for one in map(_local, tensors))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def train_in_turns(
    training: Training, mesh: DeviceMesh, control: dist.ProcessGroup, budget_s: float = math.inf
) -> RankResult:
    """Train the three in turns; a collective call.  On `control` the ranks wait for each other before every step.

    There are fewer steps than asked for, and rank 0 says so, where the first one tells that all would take longer than
    `budget_s`.
    """
    rank, device = mesh.get_local_rank(), torch.device(training.device)
    torch.manual_seed(training.seed)
    plain = GPT(training.sizes).to(device, training.dtype)
    trainees = {
        TP: _Trainee(ParallelGPT.from_plain(plain, mesh, save_gathered=True, implementation="unfused")),
        OVERLAP: _Trainee(ParallelGPT.from_plain(plain, mesh, save_gathered=True)),
    }
    moved = _Trainee(shifted(copy.deepcopy(plain), training.seed)) if rank == 0 else None
    if rank == 0:
        trainees[NO_TP] = _Trainee(plain)
    curves, count = {name: Curve() for name in METHODS}, training.warmup + training.steps
    start, work = time.monotonic(), count * len(METHODS) + count  # steps of each, and those of the shifted weights
    number = 0
    while number < count:
        if rank == 0:
            left = remaining(number * len(METHODS), work, time.monotonic() - start)
            print(f"[{number + 1}/{count}] a step of each{left}", file=sys.stderr, flush=True)
        data = [one.to(device) for one in _batch(training, number)]
        first = number % len(METHODS)
        for name in METHODS[first:] + METHODS[:first]:
            dist.barrier(control)
            _timed(curves[name], trainees.get(name), data)
        number += 1
        if number == 1 and budget_s < math.inf:
            count = _agreed_steps(training, time.monotonic() - start, budget_s, control)
            work = count * len(METHODS) + count
    if moved is not None:
        print("the steps of one process with shifted weights: the bound", file=sys.stderr, flush=True)
        curves["shifted"] = Curve()
        for number in range(count):
            _timed(curves["shifted"], moved, [one.to(device) for one in _batch(training, number)])
    data = [one.to(device) for one in _batch(training, count)]
    works = {name: functools.partial(trainee.step, *data) for name, trainee in trainees.items()}
    for name in METHODS:
        dist.barrier(control)
        if name in works:
            curves[name].peak_bytes = trainees[name].held_bytes() + peak_bytes(works[name], device)
    traces = []
    for number, name in itertools.product(range(RECORDED), METHODS):
        dist.barrier(control)
        if name in works:
            traces.append(_recorded(f"{name}, step {number}", rank, works[name], device))
    return RankResult(curves, traces, training.dtype)


def _agreed_steps(training: Training, first_s: float, budget_s: float, control: dist.ProcessGroup) -> int:
    """As many as end in time after the first has taken rank 0 so long; rank 0 tells of fewer than were asked for."""
    mine = affordable_steps(training, first_s, budget_s)
    count = int(exchange(resolve(control), "profile: steps", {"count": mine})[0]["count"])
    if count < training.warmup + training.steps and dist.get_rank() == 0:
        print(
            f"{count - training.warmup} steps instead of {training.steps}: a step of each takes {first_s:.1f} s, and "
            f"half of --timeout {2 * budget_s:g} is taken at most",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    return count


def affordable_steps(training: Training, first_s: float, budget_s: float) -> int:
    """Of those that were asked for, with warm-up, as many as end in time where a step of each takes so long."""
    asked, fewest = training.warmup + training.steps, training.warmup + min(training.steps, LEAST_REPEATS)
    behind = RECORDED + 1  # steps of each that are recorded, and one whose memory is watched
    once_more = 1 / len(METHODS)  # one process repeats all of them from shifted weights
    return max(fewest, min(asked, int((budget_s / first_s - behind) / (1 + once_more))))


def _timed(curve: Curve, trainee: _Trainee | None, data: list[Tensor]) -> None:
    if trainee is None:
        return
    start = time.perf_counter()
    loss, norm = trainee.step(*data)  # both are read, so the device has finished all but the optimizer
    if data[0].device.type == "cuda":
        torch.cuda.synchronize()
    curve.seconds.append(time.perf_counter() - start)
    curve.losses.append(loss)
    curve.norms.append(norm)


def _batch(training: Training, number: int) -> tuple[Tensor, Tensor]:
    """Tokens of which each determines the next, with noise: something to learn, equal on all ranks."""
    sizes, generator = training.sizes, torch.Generator().manual_seed(training.seed * 1_000_003 + number)
    shape = sizes.batch, sizes.length + 1
    noise = torch.randint(sizes.vocabulary, shape, generator=generator)
    tokens = torch.arange(shape[1]) * 7 + torch.randint(sizes.vocabulary, (shape[0], 1), generator=generator)
    mixed = torch.where(torch.rand(shape, generator=generator) < 0.1, noise, tokens % sizes.vocabulary)
    return mixed[:, :-1], mixed[:, 1:].contiguous()


def _recorded(label: str, rank: int, work: Callable[[], object], device: torch.device) -> RankTrace:
    start = timeline.now()
    with timeline.recording() as recorded:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return RankTrace(rank, label, start, timeline.now(), recorded.events)
