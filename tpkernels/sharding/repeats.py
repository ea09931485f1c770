"""Whole tensors that repeat along a dimension, followed op by op: constants, and masks that are made for each head.

It owns :class:`Repeats`.  A tensor of this rank's sizes may be what a part meets as what it is, a part of a larger one:
zeros, or a mask that is repeated once for each head of this rank.  Along each dimension it is known in runs of how many
elements such a tensor repeats: all of them, or, where the sequences of a batch and their heads are one dimension, as
many as there are heads.  A tensor is identified by its storage and its place in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from tpkernels.planning.runs.events import Shape
from tpkernels.planning.splits import Split

__all__ = ["MADE_OF_ONE", "Repeats", "place_of", "storage_of", "written_to"]

aten = torch.ops.aten
MADE_OF_ONE = {aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty}
"""Ops that take a tensor and none of its numbers."""
_UNIFORM = MADE_OF_ONE | {aten.zeros, aten.ones, aten.full}

Runs = Mapping[int, int]
"""By dimension: in runs of how many elements the tensor repeats."""


class Repeats:
    """Of one call; ``hold`` is told of each storage that is known of."""

    def __init__(self, hold: Callable[[Any], None]) -> None:
        self._hold = hold
        self._runs: dict[int, dict[Any, Runs]] = {}

    def __contains__(self, storage: Any) -> bool:
        return storage._cdata in self._runs

    def drop(self, storage: Any) -> None:
        self._runs.pop(storage._cdata, None)

    def of(self, tensor: Tensor) -> Runs:
        storage = storage_of(tensor)
        return {} if storage is None else self._runs.get(storage._cdata, {}).get(place_of(tensor, storage), {})

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether the tensor repeats one number."""
        runs = self.of(tensor)
        return tensor.dim() > 0 and all(runs.get(dim) == size for dim, size in enumerate(tensor.shape))

    def shape(self, tensor: Tensor, *, whole: bool, met: Collection[Split] = ()) -> Shape:
        """The shape, with 1 for the dimensions along which a tensor repeats, if it is ``whole``; also for those along
        which it does in runs, if each of these is for one piece of all parts that it has ``met``."""
        runs = dict(self.of(tensor))
        if whole and storage_of(tensor) is not None:
            runs |= {dim: tensor.shape[dim] for dim, step in enumerate(tensor.stride()) if step == 0}
        pieces = {size for split in met for size in split.segments}
        return Shape(
            1 if runs.get(dim) == size or (dim in runs and pieces == {runs[dim]}) else size
            for dim, size in enumerate(tensor.shape)
        )

    def note(self, func: Any, packet: Any, tensors: Sequence[Tensor], out: Any) -> None:
        """An op has run that took no part."""
        if not isinstance(out, Tensor) or isinstance(out, DTensor) or not out.dim():
            return
        runs: Runs = {}
        if packet in _UNIFORM or (self._runs and func.is_view and self.is_constant(tensors[0])):
            runs = dict(enumerate(out.shape))
        elif packet is aten.repeat:
            ones = (1,) * (out.dim() - tensors[0].dim()) + tuple(self.shape(tensors[0], whole=True))
            runs = {dim: out.shape[dim] for dim, size in enumerate(ones) if size == 1}  # of one, if a rank has one head
        elif packet is aten.view and (before := self.of(tensors[0])):
            runs = _joined(tensors[0].shape, before, out.shape)
        elif self._runs and torch.Tag.pointwise in func.tags and not func._schema.is_mutable:
            shapes = [self.shape(tensor, whole=True) for tensor in tensors]
            sizes = [[shape[dim] for shape in shapes if -dim <= len(shape)] for dim in range(-out.dim(), 0)]
            runs = {dim: out.shape[dim] for dim, these in enumerate(sizes) if set(these) <= {1} and out.shape[dim] > 1}
            if len(tensors) == 1 and tensors[0].shape == out.shape:
                runs = {**self.of(tensors[0]), **runs}
        storage = storage_of(out)
        if runs and storage is not None:
            self._hold(storage)
            self._runs.setdefault(storage._cdata, {})[place_of(out, storage)] = runs

    def forget(self, func: Any, args: Any, kwargs: Any) -> list[Any]:
        """Forget tensors that the op wrote to, before marks are set; the places of the constants around these."""
        places: list[Any] = []
        for written in written_to(func, args, kwargs) if self._runs else ():
            storage = storage_of(written)
            if storage is not None:
                known = self._runs.pop(storage._cdata, {}).items()
                places += [at for at, runs in known if all(runs.get(dim) == size for dim, size in enumerate(at[2]))]
        return places


def _joined(shape: Sequence[int], runs: Runs, seen: Sequence[int]) -> Runs:
    """The runs of a view of ``shape`` as ``seen``, in dimensions that are one or several of those before."""
    found: dict[int, int] = {}
    first = 0
    for dim, size in enumerate(seen):
        last = first
        while last < len(shape) and prod(shape[first:last]) < size:
            last += 1
        if prod(shape[first:last]) != size:
            break  # a dimension is seen as several
        while last < len(shape) and shape[last] == 1:
            last += 1
        for one in range(last - 1, first - 1, -1):
            if one not in runs and shape[one] == 1:
                continue
            if one not in runs:
                break
            found[dim] = found.get(dim, 1) * runs[one]
            if runs[one] != shape[one]:
                break
        first = last
    return found


def storage_of(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors and the like have none
        return None


def place_of(tensor: Tensor, storage: Any) -> Any:
    return storage._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def written_to(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The arguments that the op writes to."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
