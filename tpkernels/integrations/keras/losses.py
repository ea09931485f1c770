"""Regularizers and constraints of variables that are cut: they mean the whole variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tpkernels.integrations.keras import backend
from tpkernels.integrations.keras.cuts import Cut
from tpkernels.integrations.keras.variables import Shards
from tpkernels.ops import all_gather, all_reduce

__all__ = ["sum_of_parts", "whole_constraint", "whole_regularizer"]


def whole_regularizer(regularizer: Callable[[Any], Any], cut: Cut, shards: Shards) -> Callable[[Any], Any]:
    """The loss of the whole variable: a sum over the ranks for L1 and L2, and of the gathered variable for others."""
    keras = backend.keras_module()
    adds_up = type(regularizer) in (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)

    def loss(variable: Any) -> Any:
        part: Tensor = keras.ops.convert_to_tensor(variable)
        if part.is_meta:
            return regularizer(part)
        if adds_up:
            return all_reduce(regularizer(part).reshape(1), shards.pg).reshape(())
        whole = all_gather(part.contiguous(), shards.pg, dim=cut.dim, shard_sizes=cut.sizes, replicated_grad=True)
        return regularizer(cut.joined(whole))

    return _as(keras.regularizers.Regularizer, loss)


def whole_constraint(constraint: Callable[[Any], Any], shards: Shards) -> Callable[[Any], Any]:
    """What the constraint makes of the whole variable, of which ``assign`` keeps the part."""
    base = backend.keras_module().constraints.Constraint
    return _as(base, lambda variable: constraint(shards.whole(variable)))


def _as(base: type, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function as an instance of ``base``, as Keras 3.13 asks for."""
    made: Callable[[Any], Any] = type(base.__name__, (base,), {"__call__": staticmethod(function)})()
    return made


def sum_of_parts(variable: Any, shards: Shards) -> None:
    """A whole variable that meets parts: its gradient is the sum of the ranks' gradients.

    A regularizer's gradient is whole on every rank, so each contributes its share.
    """
    value: Tensor = backend.raw_value(variable)
    if value.requires_grad:
        value.register_hook(lambda gradient: all_reduce(gradient.reshape(-1), shards.pg).reshape(gradient.shape))
    if variable.regularizer is not None:
        regularizer, count = variable.regularizer, shards.world_size

        def share(whole: Any) -> Any:
            x = backend.keras_module().ops.convert_to_tensor(whole)
            return regularizer(x.detach() + (x - x.detach()) / count)

        variable.regularizer = _as(backend.keras_module().regularizers.Regularizer, share)
