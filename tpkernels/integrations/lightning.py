"""Lightning: our plans as the ``parallelize_fn`` of its ``ModelParallelStrategy``, in Fabric and in its Trainer.

::

    strategy = ModelParallelStrategy(parallelize_fn=tpk_lightning.parallelize())                # Fabric

    def configure_model(self):                                                                  # Trainer
        tpk_lightning.parallelize()(self.model, self.device_mesh)

Lightning's mesh has the axes "data_parallel" and "tensor_parallel"; ``tpk.parallelize`` and ``tpk.data_parallel`` know
them by these names.

With ``empty_init`` the model has no values when it is cut, and Lightning would then call ``reset_parameters`` of each
module and leave everything else, such as the buffers of rotary positions, as it finds the memory.  A model like that is
therefore loaded from a checkpoint here, or refused.

Lightning's checkpoints have a model's weights by the names of the unsharded one, and ask torch for the state of its
optimizers, which torch names as the weights are held: a packed projection in its parts, which other numbers of ranks do
not have.  While Lightning writes or reads a checkpoint, the state of such an optimizer has the unsharded model's names,
too (:mod:`tpkernels.state.plain_optimizer`).  Lightning's single files (``save_distributed_checkpoint=False``) number
the weights that are held instead, and are refused for such a model when they are written.

All that this touches of Lightning is listed in :data:`METHODS`; the first that is not there is named.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed.checkpoint.state_dict as torch_states
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from tpkernels.nn.parameters import tp_mesh
from tpkernels.planning.alone.whole_layers import name_whole_layers
from tpkernels.planning.entries.plan import ShardingPlan
from tpkernels.planning.planner import make_plan
from tpkernels.sharding import apply
from tpkernels.sharding.data_parallel import DP_AXES, data_parallel
from tpkernels.state.checkpoint import load_pretrained
from tpkernels.state.originals import is_held_otherwise
from tpkernels.state.plain_optimizer import load_optimizer_state_dict, optimizer_state_dict

__all__ = ["first_missing", "parallelize"]

M = TypeVar("M", bound=nn.Module)

METHODS = {
    "lightning.fabric": ("save_checkpoint", "load_checkpoint"),
    "lightning_fabric": ("save_checkpoint", "load_checkpoint"),
    "lightning.pytorch": ("optimizer_state", "load_checkpoint"),
    "pytorch_lightning": ("optimizer_state", "load_checkpoint"),
}
"""Of a package's ``strategies.model_parallel.ModelParallelStrategy``: where it asks torch for the optimizers' state."""


def parallelize(
    *,
    plan: str | ShardingPlan | Mapping[str, object] = "auto",
    checkpoint: str | Path | None = None,
    shard: bool = False,
    units: Iterable[nn.Module] | None = None,
    strict: bool = False,
    verify: bool = False,
    example_inputs: object = None,
) -> Callable[[M, DeviceMesh], M]:
    """A function of a model and Lightning's mesh that makes the model parallel in place, and returns it.

    Args:
        plan, verify, example_inputs: as for :func:`tpkernels.parallelize`.
        checkpoint: a folder or file as for :func:`tpkernels.load_pretrained`, which each rank reads its part of once
            the model is cut; what ``empty_init`` needs.
        shard, units: with several replicas, as for :func:`tpkernels.data_parallel`: whether parameters are cut over
            them, and which travel together.  With ``units=()`` all do, and torch compiles the model as one graph.
        strict: with ``plan="auto"``, a linear layer or experts that would stay whole raise; otherwise one line names
            them, with the reason.

    Raises (the function):
        ValueError: a model on the meta device without ``checkpoint``; a Lightning with other names; with ``strict``, a
            layer that would stay whole; and whatever these functions refuse.
    """

    def apply_plan(model: M, mesh: DeviceMesh) -> M:
        _let_checkpoints_have_original_names()
        empty = [name for name, x in chain(model.named_parameters(), model.named_buffers()) if x.is_meta]
        if empty and checkpoint is None:
            raise ValueError(
                f"{empty[0]} has no values (empty_init=True), and Lightning would train on what the memory holds: say "
                "parallelize(checkpoint=...) with the folder of its weights, or make the model with empty_init=False"
            )
        chosen = plan
        if chosen == "auto":
            chosen = make_plan(model, tp_mesh(mesh, model), example_inputs=example_inputs)
            name_whole_layers(chosen, model, strict=strict)
        apply.parallelize(model, mesh, chosen, verify=verify, example_inputs=example_inputs)
        if checkpoint is not None:
            load_pretrained(model, checkpoint)
        axis = next((name for name in DP_AXES if name in (mesh.mesh_dim_names or ())), None)
        if mesh.ndim > 1 and axis is not None and mesh[axis].size() > 1:
            data_parallel(model, mesh, shard=shard, units=units)
        return model

    return apply_plan


def first_missing() -> str | None:
    """The first name that a Lightning which is in use does not have, as a sentence; None where it has all."""
    for package, names in METHODS.items():
        if package in sys.modules:
            try:
                strategy = _strategy(package)
            except (ImportError, AttributeError):
                return f"{package} has no strategies.model_parallel.ModelParallelStrategy"
            for name in names:
                if not hasattr(strategy, name):
                    return f"{package} has no strategies.model_parallel.ModelParallelStrategy.{name}"
    return None


def _strategy(package: str) -> type[Any]:
    found: type[Any] = importlib.import_module(f"{package}.strategies.model_parallel").ModelParallelStrategy
    return found


def _let_checkpoints_have_original_names() -> None:
    """Of models that hold other tensors than the unsharded one; once in a process for each Lightning in use."""
    missing = first_missing()
    if missing is not None:
        raise ValueError(f"{missing}: this integration was tested with Lightning 2.6 and 2.5")
    for package, names in METHODS.items():
        if package in sys.modules:
            strategy = _strategy(package)
            for name in names:
                theirs = getattr(strategy, name)
                if not hasattr(theirs, "_has_original_names"):
                    setattr(strategy, name, _in_original_names(theirs))


def _in_original_names(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        with _optimizers_speak_originals():
            return method(*args, **options)

    vars(call)["_has_original_names"] = True
    return call


@contextmanager
def _optimizers_speak_originals() -> Iterator[None]:
    """Within it, torch's two functions for the state of optimizers, which Lightning imports where it calls them, are
    ours for models that hold other tensors than the unsharded one."""
    get, load = torch_states.get_optimizer_state_dict, torch_states.set_optimizer_state_dict

    def get_ours(model: nn.Module, optimizers: Any, *, options: Any = None, **more: Any) -> Any:
        if not isinstance(optimizers, Optimizer) or not is_held_otherwise(model):
            return get(model, optimizers, options=options, **more)
        if options is not None and options.full_state_dict:
            raise ValueError(
                "a single file (save_distributed_checkpoint=False) numbers the weights as ranks hold them, and this "
                "model's have other names or shapes than the unsharded model's: leave save_distributed_checkpoint=True"
            )
        return optimizer_state_dict(model, optimizers)

    def load_ours(model: nn.Module, optimizers: Any, optim_state_dict: Any, *, options: Any = None) -> None:
        if not isinstance(optimizers, Optimizer) or not is_held_otherwise(model):
            load(model, optimizers, optim_state_dict, options=options)
        else:
            load_optimizer_state_dict(model, optimizers, optim_state_dict)

    torch_states.get_optimizer_state_dict, torch_states.set_optimizer_state_dict = get_ours, load_ours
    try:
        yield
    finally:
        torch_states.get_optimizer_state_dict, torch_states.set_optimizer_state_dict = get, load
