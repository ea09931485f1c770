"""Second part of the demo: the same training run in one process and on all ranks, from one seed.

The bound on how far the two loss curves may differ is that of `tpkernels.measure.curves`: the one process trains a
second time from weights moved by one unit in their last place.  After ten steps on two ranks one norm whose gradient is
not summed is 7 times over the bound, and one rank whose queries stand one position further on 100 times.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpkernels.demo.loop import Recipe, Trainer
from tpkernels.demo.text import VOCABULARY, Batches, corpus
from tpkernels.measure.curves import Curve, bound, shifted
from tpkernels.measure.gathered import from_all_ranks
from tpkernels.measure.gpt import GPT, ParallelGPT, Sizes

__all__ = ["SIZES", "TrainingReport", "run_training"]

SIZES = Sizes(layers=2, width=288, heads=12, d_ff=773, vocabulary=VOCABULARY, length=127, batch=12)
"""Chosen so that they do not divide evenly: 127 positions, 773 hidden features, 257 tokens."""

OnStep = Callable[[int, float], None]


@dataclass(frozen=True)
class TrainingReport:
    """What the second part found, equal on all ranks."""

    world_size: int
    sizes: Sizes
    num_parameters: int
    rank_parameters: tuple[int, ...]
    corpus_bytes: int
    reference: Curve
    shifted: Curve
    parallel: Curve

    @property
    def sensitivity(self) -> float:
        return self.reference.difference(self.shifted)

    @property
    def difference(self) -> float:
        return self.reference.difference(self.parallel)

    @property
    def bound(self) -> float:
        return bound(self.reference, self.shifted)

    @property
    def holds(self) -> bool:
        return self.difference <= self.bound

    @property
    def has_learnt(self) -> bool:
        """The mean of the last quarter is below the first loss by a tenth of it."""
        tail = self.parallel.losses[-max(1, len(self.parallel.losses) // 4) :]
        return sum(tail) / len(tail) < 0.9 * self.parallel.losses[0]

    def tokens_per_second(self, curve: Curve) -> float:
        return self.sizes.tokens / statistics.median(curve.seconds)


@dataclass(frozen=True)
class _Part:
    """What one rank has to say; ``num_parameters`` of the whole model, which the first rank alone has."""

    num_parameters: int
    held: int
    curves: dict[str, Curve]


def run_training(
    mesh: DeviceMesh, steps: int, seed: int, progress: Callable[[str], OnStep], sizes: Sizes = SIZES
) -> TrainingReport:
    """Train three times; a collective call that gives every rank the same report.

    ``progress(name)`` is called before each run that this rank takes part in and gets told each step and loss.  The
    second one-process run goes to the last rank, at the same time as the first one on rank 0.
    """
    text = corpus()
    batches = Batches(text, sizes.batch, sizes.length, seed)
    rank, last = mesh.get_local_rank(), mesh.size() - 1
    num_parameters, found = 0, dict[str, Curve]()
    if rank == 0:
        model = _plain(sizes, seed)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        found["reference"] = train(model, batches, steps, progress("one process"))
    if rank == last:
        found["shifted"] = train(
            shifted(_plain(sizes, seed), seed), batches, steps, progress("one process, weights shifted")
        )
    parallel = ParallelGPT.from_plain(_plain(sizes, seed), mesh)
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parallel.parameters())
    dist.barrier(mesh.get_group())  # the clock starts when all are here
    ranks = f"{mesh.size()} rank{'s' if mesh.size() > 1 else ''}"
    found["parallel"] = train(parallel, batches, steps, progress(ranks))
    shared = from_all_ranks(_Part(num_parameters, held, found), group=mesh.get_group())
    return TrainingReport(
        world_size=mesh.size(),
        sizes=sizes,
        num_parameters=shared[0].num_parameters,
        rank_parameters=tuple(part.held for part in shared),
        corpus_bytes=len(text),
        reference=shared[0].curves["reference"],
        shifted=shared[last].curves["shifted"],
        parallel=shared[0].curves["parallel"],
    )


def train(model: nn.Module, batches: Batches, steps: int, on_step: OnStep) -> Curve:
    """Nothing here knows whether the model is parallel."""
    trainer = Trainer(model, batches, Recipe())
    found = []
    for number in range(steps):
        found.append(trainer.step(number))
        on_step(number, found[-1].loss)
    return Curve([s.loss for s in found], [s.norm for s in found], [s.seconds for s in found])


def _plain(sizes: Sizes, seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(sizes)
