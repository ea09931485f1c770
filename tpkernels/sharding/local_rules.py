"""How real tensors of one rank are cut after an op, where the rules of whole tensors would need the whole shape.

It owns :data:`OWN`, rules by overload packet that replace those in :mod:`tpkernels.planning.replays.rules`.  Each gives
every layout of the result that the local sizes allow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from tpkernels.planning.replays.picking_rules import rows_written
from tpkernels.planning.replays.rules import RULES, Call
from tpkernels.planning.splits import Split, Unproven, group_of, through_view

__all__ = ["OWN"]

aten = torch.ops.aten


def _view(call: Call) -> set[Split]:
    """All cuts of the result that are the same elements as the cut that goes in."""
    split, before, after = call.cut(), call.whole[0], call.outputs[0]
    if tuple(before) == tuple(after):
        return {split, *_merged_alike(split, before)}
    if split.copied:
        return {through_view(split, before, after, 1)}
    if before[split.dim] == 0:  # the end of a sequence, of which this rank has nothing: sizes tell no runs apart
        runs = {len(split.segments), len(split.segments) * prod(before[: split.dim])}
        return {Split(dim, (0,) * n) for dim, left in enumerate(after) if left == 0 for n in runs}
    count, size = len(split.segments), split.segments[0] if split.segments else 0
    if len(set(split.segments)) != 1 or not prod(before):
        return {through_view(split, before, after, 1)}
    runs, run = prod(before[: split.dim]) * count, size * prod(before[split.dim + 1 :])
    if before[split.dim] != 1:
        (low, _), (first, last) = group_of(split.dim, before, after)
        inner = prod(after[last:])
        while last < len(after) and after[last] == 1:  # of single heads, say
            last += 1
        found = _same_runs(runs // prod(before[:low]), run // inner, after, range(first, last), last)
        # Single elements of the ranks in turn are meant only where segments of features are seen as heads, one of each,
        # or nothing else is left.
        of_each = count if split.dim == len(before) - 1 else 1
        return {cut for cut in found if cut.segments[0] > 1 or len(cut.segments) in (1, of_each)} or found
    # One element: it lies between the same larger dimensions as before, or was merged into one of them.
    outside = prod(before[: split.dim])
    ones = [dim for dim in range(len(before)) if before[dim] == 1 and prod(before[:dim]) == outside]
    places = [dim for dim in range(len(after)) if after[dim] == 1 and prod(after[:dim]) == outside]
    if len(ones) == len(places):
        return {Split(places[ones.index(split.dim)], (1,))}
    merged = _same_runs(runs, run, after, range(len(after)), len(after)) if len(places) < len(ones) else set()
    return {Split(dim, (1,)) for dim in places} | {cut for cut in merged if not places or len(cut.segments) == 1}


def _merged_alike(split: Split, shape: Sequence[int]) -> set[Split]:
    """Of a view of the same sizes: each image's one head of this rank may be merged into the dimension behind, where
    the whole model turns ``[batch * heads, features, length]`` to ``[batch, heads * features, length]``."""
    single = set(split.segments) == {1} and split.dim == 0 and not split.copied and len(shape) > 1
    return {Split(1, (shape[1],))} if single else set()


def _same_runs(runs: int, run: int, after: Sequence[int], dims: range, last: int) -> set[Split]:
    """Dimensions of ``after`` that can be cut so that each rank has ``runs`` runs of ``run`` elements."""
    found = set()
    for dim in dims:
        inner = prod(after[dim + 1 : last])
        if not inner or run % inner or not run // inner or after[dim] % (run // inner):
            continue
        size = run // inner
        if prod(after[dims.start : dim]) * (after[dim] // size) == runs:
            found.add(Split(dim, (size,) * (after[dim] // size)))
    return found


def _squeeze(call: Call) -> set[Split]:
    """Refuse to squeeze a cut dimension, which has more than one element in the whole tensor, whatever it has here."""
    split, shape = call.cut(), call.whole[0]
    given = call.value(1, "dim", None)
    wanted = range(len(shape)) if given is None else [given] if isinstance(given, int) else given
    gone = [dim for dim in (dim % max(1, len(shape)) for dim in wanted) if shape[dim] == 1]
    if split.dim in gone:
        raise Unproven("a cut dimension is squeezed")
    return {split.at(split.dim - sum(dim < split.dim for dim in gone))}


def _cat(call: Call) -> set[Split]:
    """An empty vector may stand at the start of a list that grows."""
    pairs = zip(call.whole[0], call.splits[0], strict=True)
    kept = [(shape, split) for shape, split in pairs if split is not None or shape != (0,)]
    shapes, splits = [shape for shape, _ in kept], [split for _, split in kept]
    arguments = [shapes, *call.whole[1:]]
    moved = Call(arguments, arguments, call.kwargs, [splits], call.outputs, 1, 0, call.mix)
    answer = RULES[aten.cat](moved)
    return {answer} if isinstance(answer, Split) else set()


def _copy(call: Call) -> set[Split]:
    """``target.copy_(source)``: what is written says how the target is cut, or is the same for each head of a part."""
    target, source = call.whole[0], call.whole[1]
    if call.splits[1] is None:
        dim = call.cut().dim - len(target) + len(source)
        if dim >= 0 and source[dim] != 1:
            raise Unproven("something whole is written over a part")
        call.mix(1)
        return {call.cut()}
    split = call.cut(1).at(call.cut(1).dim + len(target) - len(source))
    if call.splits[0] not in (None, split):
        raise Unproven("a part is written in another layout")
    return {split}


def _index_put(call: Call) -> set[Split]:
    """``target[indices] = values``: parts that are written say how the target is cut."""
    values: Split | None = call.splits[2]
    if values is None:
        answer = RULES[aten.index_put](call)
        return {answer} if isinstance(answer, Split) else set()
    found = set()
    for dim in range(call.rank_of()):
        if call.whole[1][dim : dim + 1] in ([], [None]):
            shape, place = rows_written(call, dim)
            if place - len(shape) == values.dim - len(call.whole[2]) and shape[place] == call.whole[2][values.dim]:
                found.add(values.at(dim))
    if not found or call.splits[0] not in (None, *found):
        raise Unproven("a part is written in another layout")
    return found


def _index_copy(call: Call) -> set[Split]:
    """Allow rows that are written along another dimension than the cut one."""
    dim, source = call.whole[1] % len(call.whole[0]), call.splits[3]
    if not isinstance(source, Split) or source.dim == dim or call.splits[0] not in (None, source):
        raise Unproven("rows of another layout are written")
    return {source}


def _index_select(call: Call) -> set[Split]:
    if call.cut().dim == call.whole[1] % len(call.whole[0]):
        raise Unproven("elements of a cut dimension are selected")
    return {call.cut()}


def _convolution(call: Call) -> set[Split]:
    """Of each channel by itself, whose weights are this rank's."""
    split, channels = call.cut(), call.whole[0][1]
    if split.dim != 1 or call.value(6, "transposed", False) or not call.whole[8] == channels == call.whole[1][0]:
        raise Unproven("a convolution sums over channels that are cut")
    return {split}


def _bmm(call: Call) -> set[Split]:
    """A constant of this rank's sizes, such as a state that starts at zero, is a part like its partner."""
    for own, other in ((0, 1), (1, 0)):
        split = call.splits[own]
        if split is not None and split.dim == 0 and call.splits[other] is None and call.whole[other][0] == 1:
            if call.outputs[0][0] > 1:  # else it may be a whole tensor, too
                return {split}
    answer = RULES[aten.bmm](call)
    return {answer} if isinstance(answer, Split) else set()


OWN: dict[Any, Callable[[Call], set[Split]]] = {
    aten.view: _view, aten.squeeze: _squeeze, aten.cat: _cat, aten.copy_: _copy,
    aten.bmm: _bmm, aten.convolution: _convolution, aten.index_copy_: _index_copy, aten.index_copy: _index_copy,
    aten.index_select: _index_select, aten.index_put: _index_put, aten.index_put_: _index_put,
}  # fmt: skip
