"""Keras optimizers on cut variables: slots of shard shapes, and norms over all ranks.

It owns what :func:`prepare` changes of an optimizer, all of it attributes of the instance, so that its class, its
configuration and its files stay Keras's:

* a slot made for a cut variable is cut in the same way, and saved whole;
* ``clipnorm`` and ``global_clipnorm`` use the norms of whole gradients, and ``LossScaleOptimizer`` asks all ranks
  whether gradients are finite, so that scales never differ.

It refuses optimizers whose update of an element needs others of its variable (Lamb, Adafactor, Muon), and all that it
does not know.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.integrations.keras import backend
from tpkernels.integrations.keras.replicas import slice_replicas
from tpkernels.integrations.keras.variables import Shards, is_cut
from tpkernels.ops import all_reduce
from tpkernels.state.collective_errors import Ranks

__all__ = ["ELEMENTWISE", "agreed", "check_optimizer", "gather", "prepare"]

ELEMENTWISE = ("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Ftrl", "Lion", "Nadam")
"""Optimizers that update each element from that element's own gradient and slots."""


def inner_of(optimizer: Any) -> Any:
    """The optimizer itself, or the one inside of a LossScaleOptimizer."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def check_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer that would compute something else on parts, or that has state already.

    Raises:
        ValueError: it names the optimizer.
    """
    keras = backend.keras_module()
    inner = inner_of(optimizer)
    kind = type(inner)
    known = kind.__module__.startswith("keras.") and kind.__name__ in ELEMENTWISE
    if not known or not isinstance(inner, getattr(keras.optimizers, kind.__name__)):
        raise ValueError(
            f"{kind.__name__} updates elements of a variable together, or is not known not to, and each rank has a "
            f"part of it only; use one of {', '.join(ELEMENTWISE)}"
        )
    if inner.built:
        raise ValueError(
            f"the optimizer {inner.name!r} has state already, for whole variables: call TensorParallel first, compile "
            "with a new optimizer, and load its state from a file with load_weights"
        )


def agreed(optimizer: Any, pg: dist.ProcessGroup) -> Any:
    """The optimizer that ``compile`` was given, by its name or as an object, once it is known to fit on every rank.

    Raises:
        ValueError: on every rank, if it fits on some of them only, or is configured in different ways.
    """

    def look() -> tuple[Any, dict[str, Any]]:
        if optimizer is None or (isinstance(optimizer, str) and optimizer == "auto"):
            return optimizer, {"same": str(optimizer)}
        found = backend.keras_module().optimizers.get(optimizer)
        check_optimizer(found)
        return found, {"same": f"{type(found).__name__} {_settings(found)}"}

    found, said = Ranks([pg]).together("compile", look)
    for rank, one in enumerate(said):
        if one != said[0]:
            raise ValueError(f"compile: rank 0 has the optimizer {said[0]['same']}, rank {rank} {one['same']}")
    return found


def _settings(optimizer: Any) -> str:
    """What it is set to, as far as that is numbers: schedules and other objects of the user's are not asked."""
    inner = inner_of(optimizer)
    said = {name: value for name, value in vars(inner).items() if isinstance(value, bool | int | float)}
    numbers = {name: value for name, value in sorted(said.items()) if not name.startswith("_")}
    rates = {v.name: float(v.numpy()) for v in inner.variables if v.name == "learning_rate"}
    return str(rates | numbers)


def prepare(optimizer: Any, shards: Shards, *, slice_slots: bool) -> None:
    """Make an optimizer without state ready for cut variables; ``slice_slots``: cut the slots of whole ones as well."""
    inner = inner_of(optimizer)
    if inner is not optimizer:
        _finite_everywhere(optimizer, shards)
    _slots_like_variables(inner, shards)
    _whole_norms(inner, shards)
    if slice_slots:
        slice_replicas(inner, shards)


def gather(optimizer: Any) -> None:
    """Bring what was assigned to slices of whole variables to all ranks."""
    slices = getattr(inner_of(optimizer), "tensor_parallel_slices", None)
    if slices is not None:
        slices.gather()


def _slots_like_variables(optimizer: Any, shards: Shards) -> None:
    add = optimizer.add_variable_from_reference

    def add_variable_from_reference(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        slot = add(reference_variable, *args, **kwargs)
        if is_cut(reference_variable):
            shards.adopt(slot, reference_variable.tensor_parallel_cut)
        return slot

    backend.bare(optimizer, "add_variable_from_reference", add_variable_from_reference)


def _whole_norms(optimizer: Any, shards: Shards) -> None:
    apply, clip = backend.updates_of(optimizer)
    updated: list[Any] = []
    ops = backend.keras_module().ops

    def backend_apply_gradients(grads: Any, trainable_variables: Any) -> Any:
        updated[:] = trainable_variables
        return apply(grads, trainable_variables)

    def clip_gradients(grads: Any) -> Any:
        if optimizer.clipnorm and optimizer.clipnorm > 0:
            most = optimizer.clipnorm
            norms = _squares(grads, updated, shards).sqrt()
            return [g * most / ops.maximum(norm, most).to(g.dtype) for g, norm in zip(grads, norms, strict=True)]
        if optimizer.global_clipnorm and optimizer.global_clipnorm > 0:
            most = optimizer.global_clipnorm
            norm = _squares(grads, updated, shards).sum().sqrt()
            # An infinite norm makes the scale NaN, as in Keras.
            scale = most * ops.minimum(1.0 / norm, 1.0 / most) + (norm - norm)
            return [g * scale.to(g.dtype) for g in grads]
        return clip(grads)

    backend.set_updates(optimizer, backend_apply_gradients, clip_gradients)


def _squares(grads: list[Tensor], variables: list[Any], shards: Shards) -> Tensor:
    """The sum of squares of each whole gradient, equal on all ranks bit for bit."""
    precise = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
    sums = torch.stack([g.detach().to(precise).square().sum() for g in grads])
    cut = torch.tensor([is_cut(variable) for variable in variables], device=sums.device)
    return torch.where(cut, all_reduce(torch.where(cut, sums, 0), shards.pg), sums)


def _finite_everywhere(optimizer: Any, shards: Shards) -> None:
    check = optimizer.check_finite

    def check_finite(grads: Any) -> Any:
        here = check(grads)
        broken = all_reduce((~here).to(torch.float32).reshape(1), shards.pg)
        return broken[0] == 0

    backend.bare(optimizer, "check_finite", check_finite)
