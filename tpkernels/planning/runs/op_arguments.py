"""Compare the arguments of an op between the run of the whole model and a run on parts of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tpkernels.planning.runs.events import Shape

__all__ = ["INDEXED", "has_masks", "memory_of", "numbers_in", "same_scalars", "shapes_in", "without_sizes"]

aten = torch.ops.aten
_SIZES: dict[Any, tuple[int, ...]] = {
    aten.view: (1,), aten.expand: (1,), aten.slice: (2, 3), aten.split: (1,), aten.split_with_sizes: (1,),
    aten.full: (0,), aten.new_full: (1,), aten.zeros: (0,), aten.ones: (0,), aten.empty: (0,),
    aten.new_zeros: (1,), aten.new_ones: (1,), aten.new_empty: (1,), aten.convolution: (8,), aten.as_strided: (1, 2, 3),
    aten.arange: (0,),
}  # fmt: skip
"""Arguments that say how large a result is, and may be others on one rank; all others must be the whole model's."""
_SIZE_NAMES = {"size", "start", "end", "split_size", "split_sizes", "output_size", "memory"}
INDEXED = {aten.index, aten.index_put, aten.index_put_}
"""Ops that are given indices as second argument."""


def shapes_in(value: Any) -> list[Shape]:
    """Shapes in the order of ``tree_leaves`` over the tensors that they stand for."""
    if isinstance(value, Shape):
        return [value]
    if isinstance(value, dict):
        return [shape for item in value.values() for shape in shapes_in(item)]
    if isinstance(value, list | tuple):
        return [shape for item in value for shape in shapes_in(item)]
    return []


def without_sizes(packet: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    sizes = _SIZES.get(packet, ())
    if packet is aten.repeat and isinstance(args[0], Shape):  # one row is copied as often as there are heads
        before = (1,) * (len(args[1]) - len(args[0]))
        args = [args[0], [None if size == 1 else n for size, n in zip((*before, *args[0]), args[1], strict=True)]]
    rest = [None if place in sizes else argument for place, argument in enumerate(args)]
    return rest, {key: value for key, value in kwargs.items() if key not in _SIZE_NAMES}


def same_scalars(whole: Any, local: Any) -> bool:
    """Whether the arguments are equal, apart from the shapes of tensors."""
    if isinstance(whole, Shape) or isinstance(local, Shape):
        return isinstance(whole, Shape) and isinstance(local, Shape)
    if isinstance(whole, list | tuple):
        return len(whole) == len(local) and all(same_scalars(a, b) for a, b in zip(whole, local, strict=True))
    if isinstance(whole, dict):
        return whole.keys() == local.keys() and all(same_scalars(whole[key], local[key]) for key in whole)
    return bool(whole == local)


def memory_of(packet: Any, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """For an op that takes elements by their places in memory: how its tensor lies there, as one argument more."""
    return {"memory": (tensors[0].stride(), tensors[0].storage_offset())} if packet is aten.as_strided else {}


def has_masks(indices: Any) -> bool:
    """Whether some of the indices say of each element whether it is meant; the numbers of others are meant."""
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


def numbers_in(indices: Any) -> list[int] | None:
    """The numbers in the only tensor of indices, where Python's code says them; None where a run would tell."""
    given = [index for index in indices if isinstance(index, Tensor)]
    known = given[0].constant if len(given) == 1 and isinstance(given[0], FakeTensor) else None
    if len(given) == 1 and not isinstance(given[0], FakeTensor):
        known = given[0]
    if known is None or known.dim() != 1 or known.dtype == torch.bool:
        return None
    with torch.utils._python_dispatch._disable_current_modes():
        numbers: list[int] = known.tolist()
    return numbers
