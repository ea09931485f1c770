"""accelerate by itself: ``save_state`` and ``load_state`` of a parallel model, on any number of ranks.

::

    import tpkernels.integrations.accelerate as tpk_accelerate

    accelerator = Accelerator(...)
    tpk_accelerate.save_whole(accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)

Without it accelerate asks each DTensor where its memory is before it writes safetensors, and raises "Attempted to
access the data pointer on an invalid python storage"; with ``safe_serialization=False`` it writes the first rank's
parts and says nothing.  With it the folder is that of one process: ``model.safetensors`` and ``optimizer.bin`` are
whole.

Replicas of :func:`tpkernels.data_parallel` take part in gathering, and accelerate's first process writes.  Refuses a
model that some of the ranks do not share.  Of accelerate's private names it uses one, ``Accelerator._optimizers``.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tpkernels.state.checkpoint import full_state_dict, load_full_state_dict, load_pretrained
from tpkernels.state.plain_optimizer import (
    check_optimizer_state_dict,
    load_optimizer_state_dict,
    optimizer_state_dict,
)

__all__ = ["save_whole"]


def save_whole(accelerator: Any) -> None:
    """Let ``accelerator.save_state`` write a parallel model and its optimizers whole, and ``load_state`` cut them.

    Call it before ``accelerator.prepare``: a launcher's only rank on a CPU is then taken for the process alone that it
    is.  accelerate would put its model into ``DistributedDataParallel``, which takes no DTensors.

    All ranks call both, as they do without tensor parallelism.  ``save_state`` gathers model and optimizers on each
    rank: where that is too much memory, ``tpk.save_snapshot`` writes parts.

    Raises:
        ValueError: this accelerate has other private names; in ``save_state`` and ``load_state``, before anything is
            written or loaded: several models, a model that is not parallel or not over all ranks, an optimizer of
            other parameters, a folder without the state of each optimizer.
    """
    if not isinstance(getattr(accelerator, "_optimizers", None), list):
        raise ValueError("this accelerate has no Accelerator._optimizers: save_whole() was tested with 1.15 and 1.14")
    if accelerator.num_processes == 1 and accelerator.distributed_type == "MULTI_CPU":
        accelerator.state.distributed_type = type(accelerator.distributed_type).NO
    states = _States(accelerator)
    accelerator.register_save_state_pre_hook(states.before_save)
    accelerator.register_load_state_pre_hook(states.before_load)


class _States:
    """What accelerate calls before it writes and before it loads."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self._handles: list[Any] = []

    def before_save(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        model = self._only(models)
        states = [(one, optimizer_state_dict(model, one, full=True)) for one in self._optimizers()]
        weights[:] = [OrderedDict(full_state_dict(model))]
        for optimizer, state in states:
            self._once(optimizer.register_state_dict_post_hook, lambda _, held, state=state: state)

    def before_load(self, models: list[nn.Module], folder: str) -> None:
        model, path = self._only(models), Path(folder)
        for number, one in enumerate(self._optimizers()):  # before the model is loaded
            file = path / (f"optimizer_{number}.bin" if number else "optimizer.bin")
            check_optimizer_state_dict(model, one, partial(torch.load, file, "cpu", weights_only=True, mmap=True))
        if (path / "model.safetensors").is_file():
            load_pretrained(model, path / "model.safetensors")
        else:
            load_full_state_dict(model, torch.load(path / "pytorch_model.bin", map_location="cpu", weights_only=True))
        models.clear()  # accelerate loads those that are left

        def load(one: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            load_optimizer_state_dict(model, one, given)
            return one.state_dict()

        for optimizer in self._optimizers():
            self._once(optimizer.register_load_state_dict_pre_hook, load)
        numbers = path / f"random_states_{self.accelerator.process_index}.pkl"
        if not numbers.is_file():
            warnings.warn(f"{numbers.name} is missing: this rank's random numbers stay what they are", stacklevel=2)

    def _once(self, register: Any, hook: Any) -> None:
        """A hook for one call; it is removed before the next save or load, because a hook must not remove itself."""
        used = False

        def call(*given: Any) -> Any:
            nonlocal used
            if used:
                return None
            used = True
            return hook(*given)

        self._handles.append(register(call))

    def _only(self, models: list[nn.Module]) -> nn.Module:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if len(models) != 1:
            raise ValueError(f"save_whole() serves an accelerator with one model, and this one has {len(models)}")
        model: nn.Module = self.accelerator.unwrap_model(models[0])
        meshes = {one.device_mesh for one in model.parameters() if isinstance(one, DTensor)}
        if not meshes:
            raise ValueError(f"the {type(model).__name__} is not parallel: save_whole() is for models that are")
        if any(mesh.size() != dist.get_world_size() for mesh in meshes):
            raise ValueError(
                f"save_whole() serves a model that all {dist.get_world_size()} ranks share; the meshes of the "
                f"{type(model).__name__} are {sorted(map(str, meshes))}: tpk.data_parallel joins replicas"
            )
        return model

    def _optimizers(self) -> list[Optimizer]:
        return [getattr(one, "optimizer", one) for one in self.accelerator._optimizers]
