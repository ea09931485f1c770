"""A callback for transformers' Trainer: each checkpoint holds all that a run needs to go on, on any number of ranks.

Trainer would write the optimizer of rank 0 alone, which is a part of it.  :class:`Snapshots` writes a snapshot
(``tpk.save_snapshot``) into each checkpoint instead: model, optimizer, scheduler and random numbers, those of the first
rank, because the ranks of a replica share them and Trainer gives all replicas one seed.  The model is there as Trainer
writes it, too, in the unsharded model's names and shapes.

Refuses to go on from a checkpoint without a snapshot, on every rank.  A trainer that puts a forward of its own into the
model, and computes the loss from the head's weight without calling the head (trl's SFTTrainer), is named in its first
step.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tpkernels.integrations.transformers.prepared import speak_for_trainer
from tpkernels.nn.host_generators import HostStates, host_states
from tpkernels.packages import needed
from tpkernels.state.snapshots import load_snapshot, save_snapshot

__all__ = ["Snapshots", "callback_class"]

FOLDER = "tpkernels"
"""Of the snapshot within a checkpoint."""


class Snapshots:
    """``Trainer(..., callbacks=[Snapshots()])``; then ``trainer.train(resume_from_checkpoint=...)`` goes on.

    Args:
        resume_from: the checkpoint that the run goes on from, where it is not ``output_dir/checkpoint-STEP``: Trainer
            does not tell its callbacks.
        strict: a trainer that reads the weight of a head that is cut, which each step then gathers, raises in its first
            step, before any weight changes; otherwise one line says so.

    The arguments say ``save_only_model=True``: Trainer writes the model, and this the rest.

    Raises:
        ValueError: they do not; the checkpoint has no snapshot, or one of another model or optimizer; with ``strict``,
            the head runs no op of ours; on every rank.
    """

    def __init__(self, resume_from: str | Path | None = None, *, strict: bool = False) -> None:
        self.resume_from, self.strict = resume_from, strict
        self._head: _Head | None = None
        self._random: dict[str, Any] | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if not args.save_only_model:
            raise ValueError("with Snapshots() the arguments must say save_only_model=True: it writes the rest itself")
        speak_for_trainer(given["model"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._head = _Head.of(given["model"])
        if state.global_step == 0:
            return
        folder = self._checkpoint(args, state) / FOLDER
        extra = load_snapshot(given["model"], _plain(given["optimizer"]), folder)
        given["lr_scheduler"].load_state_dict(extra["scheduler"])
        self._random = extra["random"]

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._random is not None:  # not before: the batches that were seen already are skipped in between
            _set_random(self._random)
            self._random = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._head is not None:
            self._head.tell(self.strict)
            self._head = None

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}" / FOLDER
        extra = {"step": state.global_step, "scheduler": given["lr_scheduler"].state_dict(), "random": _get_random()}
        save_snapshot(given["model"], _plain(given["optimizer"]), folder, extra=extra)

    def _checkpoint(self, args: Any, state: Any) -> Path:
        named = self.resume_from or args.resume_from_checkpoint
        if isinstance(named, str | Path):
            return Path(named)
        return Path(args.output_dir) / f"checkpoint-{state.global_step}"


class _Head:
    """Whether a head that is cut is called by the forward that somebody has put into its model."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.called = name, False
        self._handle = module.register_forward_pre_hook(self._note)

    @classmethod
    def of(cls, model: Any) -> _Head | None:
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        head = inner.get_output_embeddings()
        weight = getattr(head, "weight", None)
        cut = isinstance(weight, DTensor) and any(placement.is_shard() for placement in weight.placements)
        if not cut or "forward" not in vars(inner):
            return None
        return cls(next(name for name, module in model.named_modules() if module is head), head)

    def _note(self, *_: Any) -> None:
        self.called = True

    def tell(self, strict: bool) -> None:
        self._handle.remove()
        if self.called:
            return
        why = f"{self.name} does not run an op of tpkernels: the trainer reads its weight, which each step gathers"
        if strict:
            raise ValueError(why)
        if not dist.is_initialized() or dist.get_rank() == 0:
            warnings.warn(why, stacklevel=2)


@lru_cache(maxsize=1)
def callback_class() -> type[Snapshots]:
    """:class:`Snapshots` with the base class of transformers' callbacks, which answers the events that it does not."""
    with needed("transformers", "Snapshots()"):
        from transformers import TrainerCallback
    members = {"__module__": __name__, "__doc__": Snapshots.__doc__}
    return cast("type[Snapshots]", type("Snapshots", (Snapshots, TrainerCallback), members))


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that accelerate wrapped."""
    found: torch.optim.Optimizer = optimizer
    if type(optimizer).__module__.startswith("accelerate"):
        found = optimizer.optimizer
    return found


def _get_random() -> dict[str, Any]:
    states: dict[str, Any] = {**host_states()._asdict(), "torch": torch.get_rng_state().tolist()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().tolist()
    return states


def _set_random(states: dict[str, Any]) -> None:
    HostStates(states["python"], states["numpy"]).set()
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8))
