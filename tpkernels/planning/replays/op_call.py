"""One op as a rule sees it, whole and on one rank, and what holds for all that broadcast their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpkernels.planning.splits import CROSSED, NUMBERED, Split, Unproven

__all__ = ["NO_PARTS", "Answer", "Call", "is_pointwise", "no_part", "pointwise"]

aten = torch.ops.aten
_UNTAGGED = {aten.hardswish, aten.hardswish_, aten.mish_, aten.masked_fill, aten.masked_fill_}
"""Elementwise ops that lack the tag (torch 2.13), in some of their forms."""
_PICKING = {aten.index, aten.index_put, aten.index_put_}
_AS_ELEMENTS = {aten.view, aten._to_copy, aten._softmax}
"""What elementwise code around them may run on what is crossed."""

NO_PARTS = (CROSSED, NUMBERED)
Answer = Split | None | list[Split | None]


class Call:
    """One op, whole and local: arguments in order, tensors as shapes; ``splits`` says how each argument is cut."""

    def __init__(
        self,
        whole: Sequence[Any],
        local: Sequence[Any],
        kwargs: tuple[dict[str, Any], dict[str, Any]],
        splits: Sequence[Any],
        outputs: Sequence[tuple[int, ...]],
        world_size: int,
        rank: int,
        mix: Callable[[int], None],
    ) -> None:
        self.whole, self.local, self.kwargs = whole, local, kwargs
        self.splits, self.outputs, self.world_size, self.rank = splits, outputs, world_size, rank
        self.mix = mix
        """Tell that replicated argument i meets parts: its gradient is a sum over the ranks."""

    def cut(self, index: int = 0) -> Split:
        split = self.splits[index]
        if not isinstance(split, Split):
            raise Unproven(f"argument {index} is whole where its partner is cut")
        return split

    def value(self, index: int, name: str, default: Any, *, local: bool = False) -> Any:
        arguments, kwargs = (self.local, self.kwargs[1]) if local else (self.whole, self.kwargs[0])
        return arguments[index] if index < len(arguments) else kwargs.get(name, default)

    def same(self, *names: tuple[int, str]) -> None:
        """Check that the named arguments are the same in the whole and in the local call."""
        for index, name in names:
            if self.value(index, name, None) != self.value(index, name, None, local=True):
                raise Unproven(f"argument {name} depends on the number of features of one rank")

    def rank_of(self, index: int = 0) -> int:
        return len(self.whole[index])


def is_pointwise(func: Any) -> bool:
    """Whether an op takes each element by itself, or what is broadcast to it."""
    return torch.Tag.pointwise in getattr(func, "tags", ()) or getattr(func, "overloadpacket", None) in _UNTAGGED


def _crossed(func: Any, packet: Any, cuts: Sequence[Split | None]) -> bool:
    """Whether the result is :data:`~tpkernels.planning.splits.CROSSED`, for arguments that are cut so.

    The product of parts between all rows of one and all columns of the other is, and what elementwise code makes of it.
    No other op may take it: so no loss is made of it, which code could keep where the run does not look.
    """
    if packet is aten.bmm and [cut.dim for cut in cuts if cut is not None] == [1, 2]:
        return True
    if CROSSED in cuts and not is_pointwise(func) and packet not in _AS_ELEMENTS:
        raise Unproven(f"{packet} takes products between heads of different ranks")
    return CROSSED in cuts


def _numbered(packet: Any, cuts: Sequence[Split | None], outputs: Sequence[tuple[int, ...]]) -> bool:
    """Whether the result is :data:`~tpkernels.planning.splits.NUMBERED`: the same numbers with other dimensions of
    size 1.  Only ops that pick may take them beside that (:mod:`tpkernels.planning.replays.picking_rules`)."""
    if NUMBERED not in cuts or (packet in _PICKING and cuts[0] != NUMBERED):
        return False
    if packet not in (aten.view, aten.unsqueeze) or sum(size != 1 for size in outputs[0]) != 1:
        raise Unproven(f"{packet} takes numbers of one rank's own rows")
    return True


def no_part(func: Any, packet: Any, cuts: Sequence[Split | None], outputs: Sequence[tuple[int, ...]]) -> Split | None:
    """What the results are if they are no parts of the whole model's, though made of what is cut so."""
    if _crossed(func, packet, cuts):
        return CROSSED
    return NUMBERED if _numbered(packet, cuts, outputs) else None


def pointwise(shapes: Sequence[tuple[int, ...]], splits: Sequence[Split | None], mix: Callable[[int], None]) -> Split:
    """Broadcast arguments: the cut ones must agree, and the whole ones have size 1 where the others are cut."""
    ndim = max(len(shape) for shape in shapes)
    cuts = {s.at(ndim - len(shape) + s.dim) for shape, s in zip(shapes, splits, strict=True) if s is not None}
    if len(cuts) != 1:
        raise Unproven(f"arguments are cut in different ways: {', '.join(sorted(map(str, cuts)))}")
    cut = cuts.pop()
    for index, (shape, split) in enumerate(zip(shapes, splits, strict=True)):
        place = cut.dim - (ndim - len(shape))
        if split is not None:
            continue
        if place >= 0 and shape[place] != 1:
            error = Unproven(f"a whole tensor of shape {list(shape)} meets one that is cut in dimension {cut.dim}")
            error.met = cut.at(place)
            raise error
        mix(index)
    return cut
