"""What ops do to a cut tensor that pick some of its elements by numbers."""

from __future__ import annotations

from tpkernels.planning.replays.op_call import Answer, Call
from tpkernels.planning.splits import Split, Unproven

__all__ = ["gather", "indexed", "rows"]


def indexed(call: Call) -> Answer:
    """Rows picked by whole tensors of indices, along dimensions that follow each other and are not cut."""
    split, indices = call.cut(), call.whole[1]
    if any(isinstance(each, Split) for each in call.splits[1]):
        raise Unproven("indices are cut")
    picked = [dim for dim, each in enumerate(indices) if each is not None]
    if picked != list(range(picked[0], picked[-1] + 1)):
        raise Unproven("indices are of dimensions that do not follow each other")
    if split.dim in picked:
        return _picked(call, split, picked)
    made = len(call.outputs[0]) - (call.rank_of() - len(picked))
    return split if split.dim < picked[0] else split.at(split.dim - len(picked) + made)


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
