"""The training loop of both demos; nothing in it knows how the model is cut.

One step: the batch, equal on all ranks, is dealt over the replicas and there into micro-batches, as evenly as it
divides; each loss counts by its share of the batch, so that the gradient is that of the whole batch's mean loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

import tpkernels as tpk
from tpkernels.demo.text import Batches
from tpkernels.partition import array_split

__all__ = ["Recipe", "Step", "Trainer"]


@dataclass(frozen=True)
class Recipe:
    """What is trained how."""

    learning_rate: float = 2e-3
    warmup_steps: int = 8
    max_norm: float = 1.0
    accumulate: int = 1
    """Micro-batches of a step."""

    def adamw(self, parameters: object) -> Optimizer:
        return torch.optim.AdamW(
            parameters,  # type: ignore[arg-type]
            self.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True,
        )


@dataclass(frozen=True)
class Step:
    """What one step found, equal on all ranks but for the time."""

    loss: float
    norm: float
    """Of the gradient before it was clipped."""
    seconds: float


class Trainer:
    """A model in training: ``step(n)`` trains on batch n.

    replicas: the data-parallel axis, where ``tpk.data_parallel`` made the model one of several.
    make: the optimizer, from the parameters; default: AdamW.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        recipe: Recipe,
        *,
        replicas: DeviceMesh | None = None,
        make: Callable[[object], Optimizer] | None = None,
    ) -> None:
        count = replicas.size() if replicas is not None else 1
        if batches.batch < count * recipe.accumulate:
            raise ValueError(
                f"a batch of {batches.batch} sequences is too small for {count} replica(s) with {recipe.accumulate} "
                f"micro-batch(es) each: it must have at least {count * recipe.accumulate}"
            )
        self.model, self.batches, self.recipe, self.replicas = model, batches, recipe, replicas
        self.optimizer = (make or recipe.adamw)(model.parameters())
        warmup = recipe.warmup_steps
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / warmup))

    def step(self, number: int) -> Step:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self._backward(*self.batches[number])
        norm = tpk.clip_grad_norm_(self.model.parameters(), self.recipe.max_norm)
        self.optimizer.step()
        self.schedule.step()
        return Step(float(loss), float(norm), time.perf_counter() - start)

    def _backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Leaves the gradient of the whole batch's mean loss, and returns that loss."""
        count, index = 1, 0
        if self.replicas is not None:
            count, index = self.replicas.size(), self.replicas.get_local_rank()
        inputs, labels = (array_split(array_split(x, count)[index], self.recipe.accumulate) for x in (tokens, targets))
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        for number, (x, y) in enumerate(zip(inputs, labels, strict=True)):
            if self.replicas is not None:  # gradients travel once, with the last micro-batch
                self.model.set_requires_gradient_sync(number == len(inputs) - 1)  # type: ignore[operator]
            loss = self.model(x, y) * (len(y) / len(targets))
            (loss * count).backward()  # the gradients' mean over the replicas undoes the factor
            total += loss.detach()
        if self.replicas is not None:
            dist.all_reduce(total, group=self.replicas.get_group())
        return total
