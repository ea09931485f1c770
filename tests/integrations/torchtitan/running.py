"""torchtitan's Trainer on CPUs, and its own loop: what it logs, its first gradients and its last weights.

It asks for CUDA by names that each of its modules imports, and for packages that nothing here uses (``stand_ins``).
That is all that is patched, beside what computes in fp32 where the exact run needs fp64.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import distribute_tensor

from tests.integrations.curves import CLIP, STEPS, Curve, gradients_of, weights_of
from tests.integrations.torchtitan.models import LENGTH, MODEL, OUTSIDE, build, small
from tests.integrations.torchtitan.stand_ins import exactly, on_cpu, without_unused

ROWS = 4
"""Of each step, over all replicas."""
HELD_OUT = 2
"""Batches, behind those of the steps."""
Options = dict[str, Any]


with without_unused():
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.components.validate import Validator
    from torchtitan.config import CompileConfig, OverrideConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import utils as distributed
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer


class Batches(BaseDataLoader):  # type: ignore[misc]
    """A replica's rows of the same batches, whatever the number of replicas."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        vocabulary: int
        micro: int
        first: int = 0
        infinite: bool = True
        """What torchtitan's validator asks for."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **_: Any) -> None:
        self.vocabulary, self.replicas, self.replica = config.vocabulary, dp_world_size, dp_rank
        self.step = config.first
        self.micro = config.micro

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(self.step)
            ids = torch.randint(self.vocabulary, (ROWS, LENGTH + 1), generator=generator)
            labels = ids[:, 1:].clone()
            labels[0, : self.step] = -100  # replicas have different numbers of tokens
            self.step += 1
            batches = (self.mine(whole).chunk(self.micro) for whole in (ids, labels))
            for rows, of_rows in zip(*batches, strict=True):
                yield {"input": rows[:, :-1]}, of_rows

    def mine(self, rows: Tensor) -> Tensor:
        return rows.chunk(self.replicas)[self.replica]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    """The rows are numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    encode = decode = get_vocab_size = None


@dataclass(frozen=True)
class Way:
    """How torchtitan's trainer is told to run."""

    replicas: int = 1
    """Over which parameters are cut, too."""
    copies: int = 1
    """How many times all of that is repeated."""
    backend: str = "partial_dtensor"
    ours: bool = True
    dtype: str = "float32"
    computes_in: str | None = None
    """Where it is not ``dtype``: what FSDP casts parameters to."""
    eps: float = 1e-4
    """See :func:`tests.integrations.curves.adamw`."""
    compiled: bool = False
    micro: int = 1
    """Batches of each step."""
    checkpoints: bool = False
    """Whether blocks are computed once more in the backward pass."""
    evaluated_every: int = 0
    """So many steps, and in torchtitan behind the first one."""
    saved_at: int = 0
    """The step whose checkpoint is kept; from one that is there the run goes on."""


def configuration(folder: str, options: Options, way: Way) -> Any:
    spec = replace(model_registry("debugmodel"), model=small(**options))
    batches = way.replicas * way.copies
    return Trainer.Config(
        model_spec=spec,
        dump_folder=folder,
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        optimizer=replace(default_adamw(lr=3e-3, eps=way.eps), implementation="for-loop"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        tokenizer=NoTokenizer.Config(),
        dataloader=Batches.Config(vocabulary=spec.model.vocab_size, micro=way.micro),
        metrics=MetricsProcessor.Config(log_freq=1),
        validator=Validator.Config(
            enable=bool(way.evaluated_every),
            freq=way.evaluated_every or STEPS,
            steps=HELD_OUT,
            dataloader=Batches.Config(vocabulary=spec.model.vocab_size, micro=1, first=STEPS),
        ),
        checkpoint=CheckpointManager.Config(
            enable=bool(way.saved_at), interval=way.saved_at or STEPS, last_save_model_only=False
        ),
        activation_checkpoint=FullAC.Config() if way.checkpoints else None,
        compile=CompileConfig(enable=way.compiled, components=["model"], backend="aot_eager"),
        parallelism=ParallelismConfig(
            tensor_parallel_degree=dist.get_world_size() // batches,
            data_parallel_shard_degree=way.replicas,
            data_parallel_replicate_degree=way.copies,
            spmd_backend=way.backend,
        ),
        training=TrainingConfig(
            local_batch_size=ROWS // batches // way.micro,
            global_batch_size=ROWS,
            seq_len=LENGTH,
            max_norm=CLIP,
            steps=STEPS,
            disable_cuda_graphs=True,
            dtype=way.dtype,
            mixed_precision_param=way.computes_in or way.dtype,
            mixed_precision_reduce=way.dtype,
        ),
        override=OverrideConfig(imports=[(MODEL, {"strict": True, "leave": OUTSIDE})] if way.ours else []),
    )


def run(folder: str, options: Options, way: Way) -> Curve:
    """torchtitan's own loop on all ranks, from the weights of one seed or from the checkpoint in ``folder``."""
    curve = Curve()

    def log(self: Any, step: int, loss: float, maximum: float, norm: float, **_: Any) -> None:
        curve.losses.append(loss)
        curve.norms.append(norm)

    def log_evaluation(self: Any, loss: float, step: int, **_: Any) -> None:
        assert not model.training
        curve.evaluations.append(loss)

    clip = distributed.clip_grad_norm_

    def clipped(parameters: Any, *given: Any, **named: Any) -> Any:
        curve.gradients = curve.gradients or gradients_of(trainer.model_parts[0])
        return clip(parameters, *given, **named)

    with contextlib.ExitStack() as stack:
        stack.enter_context(on_cpu(distributed, "torchtitan.distributed.fsdp.disable_fsdp_gradient_division"))
        stack.enter_context(exactly(way.dtype == "float64"))
        trainer = Trainer(configuration(folder, options, way))
        (model,) = trainer.model_parts
        fill(model, build(small(**options)))
        stack.enter_context(mock.patch.object(MetricsProcessor, "log", log))
        stack.enter_context(mock.patch.object(MetricsProcessor, "log_validation", log_evaluation))
        stack.enter_context(mock.patch.object(distributed, "clip_grad_norm_", clipped))
        trainer.train()
        trainer.close()
    curve.weights = weights_of(model)
    return curve


def fill(model: Any, plain: Any) -> None:
    with torch.no_grad():
        for held, given in zip(model.parameters(), plain.parameters(), strict=True):
            held.copy_(distribute_tensor(given.to(held.dtype), held.device_mesh, held.placements, src_data_rank=None))
