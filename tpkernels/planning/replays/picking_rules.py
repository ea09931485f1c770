"""What ops do to a cut tensor that pick some of its elements by numbers, or write to these."""

from __future__ import annotations

import math

import torch

from tpkernels.planning.replays.op_call import Answer, Call, pointwise
from tpkernels.planning.splits import NUMBERED, Split, Unproven

__all__ = ["gather", "indexed", "put", "rows", "rows_written"]


def indexed(call: Call) -> Answer:
    """Rows picked by whole tensors of indices, along dimensions that are not cut."""
    split = call.cut()
    if NUMBERED in call.splits[1]:
        return split.at(_rows_by_number(call)[1])
    picked = _picked_dims(call)
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
    if NUMBERED in call.splits[1]:
        shape, place = _rows_by_number(call)
        if dim != call.cut().dim:
            raise Unproven("values are written to a part by numbers of its rows, and another dimension is meant")
        return shape, place
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


def _rows_by_number(call: Call) -> tuple[tuple[int, ...], int]:
    """Of each row that a rank has what indices of its own say: the shape of what they pick, and the place of the rows.

    ``x[arange(rows)[:, None], best]``: the first index picks each row of a part once, in order, and the others are cut
    as the rows are, or are the same for all rows.
    """
    split = call.cut()
    picked = [dim for dim, each in enumerate(call.whole[1]) if each is not None]
    numbers = [dim for dim in picked if call.splits[1][dim] == NUMBERED]
    if numbers != [split.dim] or not _adjoin(picked) or call.kwargs[0].get("masks", True):
        raise Unproven("numbers of one rank's own rows pick something else than these rows")
    for shapes in (call.whole, call.local):
        if math.prod(shapes[1][split.dim]) != shapes[0][split.dim]:
            raise Unproven("numbers of one rank's own rows pick some of these rows")
    first = call.whole[1][split.dim]
    made = torch.broadcast_shapes(*(tuple(call.whole[1][dim]) for dim in picked))
    at = next(place for place, size in enumerate(first) if size != 1) + len(made) - len(first)
    for dim in picked:
        place, own = at - (len(made) - len(call.whole[1][dim])), call.splits[1][dim]
        if own is None and place >= 0 and call.whole[1][dim][place] != 1:
            raise Unproven("whole indices of all rows pick from the rows of one rank")
        if own not in (None, NUMBERED, split.at(place)):
            raise Unproven("what picks is not cut as what is picked")
    kept = [dim for dim in range(call.rank_of()) if dim not in picked]
    sizes = [call.whole[0][dim] for dim in kept]
    return (*sizes[: picked[0]], *made, *sizes[picked[0] :]), picked[0] + at


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
