"""What the tests of Trainer share: small arguments and data, and runs that are told apart from each other."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.integrations.curves import CLIP, STEPS, VOCABULARY, Curve, gradients_of, weights_of


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Numbers for words; the labels of some are left out, so that the batches' counts of them differ."""

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, VOCABULARY, (9,), generator=torch.Generator().manual_seed(100 + index))
        labels = ids.clone()
        labels[: index % 4] = -100
        return {"input_ids": ids, "labels": labels}


def options(folder: str | Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": 3e-3,
        "adam_epsilon": 1e-4,  # see tests.integrations.curves.adamw
        "weight_decay": 0.1,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
        "max_grad_norm": CLIP,
        "logging_steps": 1,
        "save_strategy": "no",
        "save_only_model": True,
        "report_to": [],
        "use_cpu": True,
        "seed": 7,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    } | changes


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """accelerate refuses a tensor-parallel size with gloo; this is all that is patched, and runs are told apart."""
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def forget() -> None:
        AcceleratorState._reset_state(True)
        PartialState._shared_state.clear()
        GradientState._reset_state()

    forget()
    with mock.patch.object(ParallelismConfig, "_validate_accelerator", lambda self, accelerator: None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    forget()


def recorder(curve: Curve) -> Any:
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            curve.gradients = curve.gradients or gradients_of(given["model"])

    return Recorder()


def train(
    model: nn.Module,
    folder: str | Path,
    *,
    callbacks: Sequence[Any] = (),
    resume: str | Path | None = None,
    data: Any = None,
    evaluation: Any = None,
    trained_by: Callable[..., Any] | None = None,
    **changes: Any,
) -> Curve:
    """A run of Trainer, or of what ``trained_by`` makes; its losses and norms are those that it logs."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    curve = Curve()
    with on_cpu():
        trainer = (trained_by or Trainer)(
            model=model,
            args=TrainingArguments(**options(folder, **changes)),
            train_dataset=data or Sentences(),
            eval_dataset=evaluation,
            callbacks=[recorder(curve), *callbacks],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    if resume is not None:
        steps = [entry for entry in steps if entry["step"] > int(Path(resume).name.partition("-")[2])]
    curve.losses = [float(entry["loss"]) for entry in steps]
    curve.norms = [float(entry["grad_norm"]) for entry in steps]
    curve.weights = weights_of(model)
    curve.evaluations = [float(entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]
    return curve
