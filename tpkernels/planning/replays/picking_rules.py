"""What ops do to a cut tensor that pick some of its elements by numbers, or write to these."""

from __future__ import annotations

import torch

from tpkernels.planning.replays.op_call import Answer, Call, pointwise
from tpkernels.planning.splits import Split, Unproven

__all__ = ["gather", "indexed", "put", "rows", "rows_written"]


def indexed(call: Call) -> Answer:
    """Rows picked by whole tensors of indices, along dimensions that are not cut."""
    split, picked = call.cut(), _picked_dims(call)
    if call.kwargs[0].get("masks") and not _adjoin(picked):
        raise Unproven("a mask and other indices pick in dimensions that do not follow each other")
    if split.dim in picked:
        return _picked(call, split, picked)
    made = len(call.outputs[0]) - (call.rank_of() - len(picked))
    return split.at(_kept_at(split.dim, picked, made))


def put(call: Call) -> Answer:
    """Values written to rows that whole tensors of indices pick, along dimensions that are not cut."""
    split, (shape, place) = call.cut(), rows_written(call, call.cut().dim)
    pointwise((shape, call.whole[2]), (split.at(place), call.splits[2]), lambda index: call.mix(2))
    return split


def rows_written(call: Call, dim: int) -> tuple[tuple[int, ...], int]:
    """The shape of the rows that are written to, and where dimension ``dim`` of the tensor is in it."""
    picked = _picked_dims(call)
    if call.kwargs[0].get("masks", True):
        raise Unproven("values are written where a mask says")
    if dim in picked:
        raise Unproven("values are written along the dimension that is cut")
    made = torch.broadcast_shapes(*(tuple(call.whole[1][each]) for each in picked))
    kept, first = [each for each in range(call.rank_of()) if each not in picked], _first(picked)
    sizes = [call.whole[0][each] for each in kept]
    return (*sizes[:first], *made, *sizes[first:]), _kept_at(dim, picked, len(made))


def _picked_dims(call: Call) -> list[int]:
    if any(isinstance(each, Split) for each in call.splits[1]):
        raise Unproven("indices are cut")
    return [dim for dim, each in enumerate(call.whole[1]) if each is not None]


def _adjoin(picked: list[int]) -> bool:
    return picked == list(range(picked[0], picked[-1] + 1))


def _first(picked: list[int]) -> int:
    """Where in a result the dimensions stand that are made of indices: first of all, if those do not adjoin."""
    return picked[0] if _adjoin(picked) else 0


def _kept_at(dim: int, picked: list[int], made: int) -> int:
    """Where a dimension that is not picked is in a result, in which ``made`` dimensions stand for those that are."""
    before = dim - sum(each < dim for each in picked)
    return before if before < _first(picked) else before + made


def _picked(call: Call, split: Split, picked: list[int]) -> Answer:
    """Elements of the cut dimension by number, one after the other: ``x[..., [-2], :]``, the key behind all queries."""
    numbers = call.kwargs[0].get("indices")
    if picked != [split.dim] or numbers is None or len(numbers) != call.outputs[0][split.dim]:
        raise Unproven("the dimension that is cut is indexed")
    whole, local = (
        [number % size for number in numbers] for size in (call.whole[0][split.dim], call.local[0][split.dim])
    )
    part, low, high = split.part(whole[0], whole[-1] + 1, call.world_size, call.rank)
    if whole != list(range(whole[0], whole[-1] + 1)) or local != list(range(low, high)):
        raise Unproven("the dimension that is cut is indexed")
    return part


def rows(call: Call) -> Answer:
    """Rows of a table whose columns are cut."""
    table: Split | None = call.splits[0]
    if table is None or table.dim != 1 or call.splits[1] is not None:
        raise Unproven("rows of a table are cut")
    return table.at(len(call.outputs[0]) - 1)


def gather(call: Call) -> Answer:
    """Elements along a dimension that is not cut: of each head by numbers of its own, or by the same for all heads."""
    split, numbers = call.cut(), call.splits[2]
    call.same((1, "dim"))
    if call.value(1, "dim", -1) % call.rank_of() == split.dim:
        raise Unproven("the op works along the dimension that is cut")
    if numbers != split and split.dim not in call.kwargs[0]["index is alike along"]:
        raise Unproven("what picks is not cut as what is picked")
    if any(shapes[0][split.dim] != shapes[2][split.dim] for shapes in (call.whole, call.local)):
        raise Unproven("elements are picked of some of the heads")
    return split
