"""Optimizer slots of variables that are whole on every rank, cut as well: each rank updates a slice of them.

It owns ``shard_optimizer_states=True``.  The optimizer is given, in the place of each such variable, a slice of it
along its first dimension: a variable of the same name whose value is a view of the whole one's memory.  Its slots have
the slice's shape, and after each update the slices are gathered, with one collective for each dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels.integrations.keras import backend
from tpkernels.integrations.keras.cuts import even_cut
from tpkernels.integrations.keras.losses import whole_constraint
from tpkernels.integrations.keras.variables import Shards, is_cut, slice_of
from tpkernels.ops import all_gather

__all__ = ["slice_replicas"]


def slice_replicas(optimizer: Any, shards: Shards) -> None:
    """Let an optimizer without state hold slots for slices of whole variables."""
    slices = _Slices(shards)
    build, apply, finalize = optimizer.build, optimizer.apply, optimizer.finalize_variable_values

    def build_on_slices(variables: Sequence[Any]) -> None:
        build(slices.of(variables))

    def apply_to_slices(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        variables = list(trainable_variables) if trainable_variables is not None else slices.known
        parts = [slices.part(grad, variable) for grad, variable in zip(grads, variables, strict=True)]
        apply(parts, slices.of(variables))
        slices.gather()

    def finalize_slices(var_list: Sequence[Any]) -> None:
        finalize(slices.of(var_list))
        slices.gather()

    backend.bare(optimizer, "build", build_on_slices)
    backend.bare(optimizer, "apply", apply_to_slices)
    backend.bare(optimizer, "finalize_variable_values", finalize_slices)
    backend.bare(optimizer, "tensor_parallel_slices", slices)
    backend.rename_variables(optimizer, slices.whole_of)


class _Slices:
    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.known: list[Any] = []
        """The variables that the optimizer was built on."""
        self._slices: dict[int, Any] = {}
        self._wholes: dict[int, Any] = {}

    def of(self, variables: Sequence[Any]) -> list[Any]:
        """Each variable's slice, or the variable where it has none."""
        if not self.known:
            self.known = list(variables)
        return [self._slice(variable) for variable in variables]

    def whole_of(self, variable: Any) -> Any:
        return self._wholes.get(id(variable), variable)

    def part(self, grad: Any, variable: Any) -> Any:
        found = self._slice(variable)
        if grad is None or found is variable:
            return grad
        return found.tensor_parallel_cut.part(grad, self.shards.rank)

    def _slice(self, variable: Any) -> Any:
        if id(variable) in self._slices:
            return self._slices[id(variable)]
        shape = backend.plain_shape(variable)
        if is_cut(variable) or not shape or shape[0] < self.shards.world_size:
            return variable
        found = slice_of(variable, even_cut(shape, 0, self.shards.world_size), self.shards)
        if variable.constraint is not None:
            found.constraint = whole_constraint(variable.constraint, self.shards)
        self._slices[id(variable)], self._wholes[id(found)] = found, variable
        return found

    def gather(self) -> None:
        """Bring every rank's slices into the whole variables."""
        by_dtype: dict[torch.dtype, list[Any]] = {}
        for found in self._wholes:
            whole = self._wholes[found]
            by_dtype.setdefault(backend.raw_value(whole).dtype, []).append(whole)
        for wholes in by_dtype.values():
            self._gather(wholes)

    def _gather(self, wholes: list[Any]) -> None:
        pairs = [(backend.raw_value(whole).detach(), self._slices[id(whole)].tensor_parallel_cut) for whole in wholes]
        mine = [cut.part(value, self.shards.rank).reshape(-1) for value, cut in pairs]
        ranks = range(self.shards.world_size)
        sizes = [sum(torch.Size(cut.shape_on(rank)).numel() for _, cut in pairs) for rank in ranks]
        gathered: Tensor = all_gather(torch.cat(mine), self.shards.pg, shard_sizes=sizes)
        for rank, flat in enumerate(gathered.split(sizes)):
            parts = flat.split([torch.Size(cut.shape_on(rank)).numel() for _, cut in pairs])
            for (value, cut), part in zip(pairs, parts, strict=True):
                cut.part(value, rank).copy_(part.view(cut.shape_on(rank)))
