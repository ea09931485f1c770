"""How a tensor that is cut over the ranks lies in the whole one, and how reshapes move the cut: pure arithmetic.

It owns :class:`Split`, and what ``view`` does to it.  It knows nothing of models, ops or process groups.

A dimension may consist of several runs (*segments*, such as the query, key and value parts of a packed projection),
each of which is cut into one contiguous part per rank as ``torch.chunk`` cuts.  Merging dimensions makes segments, too:
heads ``(B, H)`` cut in H, viewed as one dimension of ``B * H``, are B segments of H.

Where heads do not divide over the ranks, a segment is cut in *pieces* that stay whole: 10 heads of 4 features over 4
ranks are 12, 12, 12 and 4 features.  However the segment is viewed, it consists of the same pieces.

Some segments that follow each other may be *copied*: every rank has all of them, beside its parts of the others.  So
are the one key and the one value that all queries of a packed projection share, and what all heads of a state space
read (Mamba 2).  Ranks have shares of their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import accumulate, combinations
from math import prod

from tpkernels.partition import array_split_sizes, chunk_sizes, halves, held_sizes, unit_sizes

__all__ = [
    "CROSSED", "NUMBERED", "HandedOn", "Split", "Unproven", "as_array_split", "degrees", "divisor", "for_degrees",
    "group_of", "has_places", "held", "how", "part_of_constant", "parts_of_runs", "pieces_of", "raised", "share",
    "shared_runs", "through_view",
]  # fmt: skip

_even: ContextVar[bool] = ContextVar("as_array_split", default=False)
_largest: ContextVar[int] = ContextVar("for_degrees", default=0)


@contextmanager
def as_array_split() -> Iterator[None]:
    """Inside, parts are those of ``numpy.array_split`` (4 over 3: 2, 1, 1), not of ``torch.chunk`` (2, 2, 0)."""
    before = _even.set(True)
    try:
        yield
    finally:
        _even.reset(before)


@contextmanager
def for_degrees(largest: int) -> Iterator[None]:
    """Inside, a plan for any number of ranks that divides ``largest`` cuts what that for ``largest`` cuts, in the same
    places: parts are those of :func:`tpkernels.partition.halves`.  0: no such number."""
    before = _largest.set(largest)
    try:
        yield
    finally:
        _largest.reset(before)


def degrees() -> int:
    """The largest number of ranks of :func:`for_degrees`; 0 outside."""
    return _largest.get()


def divisor(world_size: int) -> int:
    """What has to divide a size that is cut evenly: the number of ranks, or the largest one."""
    return _largest.get() or world_size


def pieces_of(total: int, unit: int, world_size: int) -> int:
    """Of how many pieces a cut in multiples of ``unit`` is, where it is another one than by features."""
    ranks = divisor(world_size)
    by_features = unit <= 1 or total % unit or share(total, ranks, total // unit) == share(total, ranks)
    return 0 if by_features else total // unit


def has_places(size: int) -> bool:
    """Whether a parameter that is cut in this dimension keeps it in blocks of places (:mod:`tpkernels.nn.blocks`)."""
    return bool(_largest.get()) and size % _largest.get() != 0


class Unproven(Exception):
    """What follows from the data flow does not show that a cut computes the same.

    ``count``: how many heads, or other indivisible pieces, stood against the number of ranks.  ``parameters``: of which
    whole tensors among the arguments of the op are made that met parts; ``layers``: what whole activations came from;
    ``states``: modules, and arguments that they write to, of which these are views, with their shapes;
    ``met``: how the whole tensor that met a part would have to be cut; ``segmented``: whether the segments alone are to
    blame, whatever numbers a rank's code reads; ``taken``: a convolution or a linear layer, and the segments that it
    would have to take parts of.
    """

    def __init__(self, reason: str, *, count: int = 0) -> None:
        super().__init__(reason)
        self.reason, self.count = reason, count
        self.parameters: frozenset[str] = frozenset()
        self.layers: frozenset[str] = frozenset()
        self.states: dict[tuple[str, str], tuple[int, ...]] = {}
        self.met: Split | None = None
        self.segmented = False
        self.taken: tuple[str, tuple[int, ...]] | None = None

    @classmethod
    def of_input(cls, name: str, split: Split | None, dim: int, cut: str) -> Unproven:
        """A layer takes what is not ``cut`` as its weight is; in segments of that dimension its weight could be."""
        error = cls(f"the input of {name} is {how(split)}, not cut by {cut}")
        if split is not None and split == Split(dim, split.segments):
            error.taken = name, split.segments
        return error


def raised(error: Exception) -> Unproven:
    """What it means that a model's code raises with one rank's sizes."""
    text = str(error).splitlines()[0] if str(error) else ""
    return Unproven(f"with one rank's sizes the model raises {type(error).__name__}: {text[:160]}")


class HandedOn(Unproven):
    """An ``argument`` of a module, of which a proof within it takes a part, is one already: another block gives it."""

    def __init__(self, module: str, argument: str) -> None:
        super().__init__(f"{argument} of {module} is a part already")
        self.argument = module, argument


@dataclass(frozen=True)
class Split:
    """Dimension ``dim`` of the whole tensor is ``segments`` one after another, and each rank has its part of each."""

    dim: int
    segments: tuple[int, ...]
    pieces: int = 0
    """Of which each segment is made, and which are not cut; 0: the elements."""
    copied: int = 0
    """How many segments every rank has whole: the last ones,"""
    behind: int = 0
    """but for so many."""

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all of it."""
        return 0 < self.copied == len(self.segments)

    @property
    def cut_segments(self) -> tuple[int, ...]:
        """The segments of which each rank has its part."""
        return tuple(size for size, copied in zip(self.segments, self.are_copied, strict=True) if not copied)

    @property
    def are_copied(self) -> tuple[bool, ...]:
        """For each segment: whether every rank has it whole."""
        first = len(self.segments) - self.behind - self.copied
        return tuple(first <= place < first + self.copied for place in range(len(self.segments)))

    def local_segments(self, world_size: int, rank: int) -> tuple[int, ...]:
        return tuple(
            size if copied else share(size, world_size, self.pieces)[rank]
            for size, copied in zip(self.segments, self.are_copied, strict=True)
        )

    def local_shape(self, shape: Sequence[int], world_size: int, rank: int) -> tuple[int, ...]:
        cut = sum(self.local_segments(world_size, rank))
        return (*shape[: self.dim], cut, *shape[self.dim + 1 :])

    def at(self, dim: int) -> Split:
        return replace(self, dim=dim)

    def whole_pieces(self, world_size: int) -> bool:
        """Whether every multiple of the segments is cut where they are."""
        return bool(self.pieces) or all(size % divisor(world_size) == 0 for size in self.cut_segments)

    def part(self, start: int, stop: int, world_size: int, rank: int) -> tuple[Split, int, int]:
        """The segments that make up ``[start, stop)`` of the whole, and the range of the local tensor that they are.

        Raises:
            Unproven: the range does not begin and end where segments do.
        """
        ends = (0, *accumulate(self.segments))
        local = (0, *accumulate(self.local_segments(world_size, rank)))
        if self.copied:
            first = self.are_copied.index(True)
            if ends[first] <= start < stop <= ends[first + self.copied]:
                low = start - ends[first] + local[first]
                return Split(self.dim, (stop - start,), self.pieces, 1), low, low + stop - start
        if start not in ends or stop not in ends or start >= stop:
            error = Unproven(f"[{start}:{stop}] of a dimension cut as {list(self.segments)} is not a number of parts")
            error.segmented = True
            raise error
        first, last = ends.index(start), ends.index(stop)
        copied = self.are_copied[first:last]
        behind = copied[::-1].index(True) if any(copied) else 0
        part = Split(self.dim, self.segments[first:last], self.pieces, sum(copied), behind)
        return part, local[first], local[last]


CROSSED = Split(-1, ())
"""Of the product between each two of all heads: a rank has that between its own, which is no part along one dimension.

Elementwise code may go on with it, and nothing else may take it (SAM 2 computes such a product and drops it).
"""


NUMBERED = Split(-2, ())
"""Of the numbers 0, 1, ... of the rows that there are, which are those of one rank's own: no part of all numbers.

They may pick rows of a part in the dimension that is cut, each once, and do nothing else.
"""


def share(size: int, world_size: int, pieces: int = 0) -> tuple[int, ...]:
    """What each rank has of ``size`` elements that are made of ``pieces``."""
    unit = size // pieces if pieces else 1
    if _largest.get():
        return tuple(unit * count for count in halves(size // unit, world_size))
    if _even.get():
        return tuple(unit * count for count in array_split_sizes(size // unit, world_size))
    return tuple(unit * count for count in unit_sizes(pieces, world_size)) if pieces else chunk_sizes(size, world_size)


def held(size: int, world_size: int, unit: int = 1) -> tuple[int, ...]:
    """What each rank has memory for, of a parameter's ``size`` elements that are cut in multiples of ``unit``."""
    blocks = _largest.get()
    if not blocks or size // unit % blocks == 0:
        return held_sizes(size, world_size, unit)
    return (halves(size // unit, blocks)[0] * unit * (blocks // world_size),) * world_size


def through_view(split: Split, before: Sequence[int], after: Sequence[int], world_size: int) -> Split:
    """Where the cut lies after the whole tensor of shape ``before`` is viewed as ``after``.

    Raises:
        Unproven: parts of the ranks would interleave, or pieces do not divide over the ranks.
    """
    (low, high), (first, last) = group_of(split.dim, before, after)
    outer, inner = prod(before[low : split.dim]), prod(before[split.dim + 1 : high])
    sizes = after[first:last]
    if outer == 1 and inner == 1:
        wide = [dim for dim in range(first, last) if after[dim] != 1]
        if len(wide) <= 1:  # the dimension itself, with or without dimensions of size 1 around it
            return split.at(wide[0] if wide else first)
    if (outer > 1 or inner > 1) and not split.whole_pieces(world_size):
        raise Unproven(f"{list(split.segments)} do not divide over {world_size} ranks", count=min(split.segments))
    flat = tuple(size * inner for size in split.segments) * outer
    if outer > 1 and split.copied:
        raise Unproven("parts of every rank's own and copies that all have would interleave")
    if len([size for size in sizes if size != 1]) <= 1:
        return replace(split, dim=next((d for d in range(first, last) if after[d] != 1), first), segments=flat)
    if len(set(flat)) != 1 or split.copied:
        return _first_of(replace(split, dim=first, segments=flat), sizes, world_size)
    return _unflatten(flat[0], split.pieces, first, sizes, world_size)


def _first_of(split: Split, sizes: Sequence[int], world_size: int) -> Split:
    """Runs of different sizes, viewed as dimensions ``sizes``: heads of queries, then those of keys and values."""
    at = next(index for index, size in enumerate(sizes) if size != 1)
    inner = prod(sizes[at + 1 :])
    if any(size % inner for size in split.segments):
        raise Unproven(f"runs of different sizes {list(split.segments)} are viewed as {list(sizes)}")
    counts = tuple(size // inner for size in split.segments)
    found = replace(split, dim=split.dim + at, segments=counts)
    for count in found.cut_segments:
        if count % (split.pieces or divisor(world_size)):
            raise Unproven(f"{count} heads do not divide over {world_size} ranks", count=count)
    return found


def _unflatten(run: int, pieces: int, first: int, sizes: Sequence[int], world_size: int) -> Split:
    """Runs of ``run`` elements, each cut over the ranks, viewed as dimensions ``sizes`` starting at ``first``."""
    for index, size in enumerate(sizes):
        inner = prod(sizes[index + 1 :])
        count = run // inner
        if run % inner or size == 1 or (size * inner) % run or count < 2:
            continue
        if pieces and count % pieces:
            raise Unproven(f"{count} heads are cut where {pieces} pieces are", count=count)
        if not pieces and count % divisor(world_size):
            raise Unproven(f"{count} heads do not divide over {world_size} ranks", count=count)
        return Split(first + index, (count,) * (size * inner // run), pieces)
    raise Unproven(f"runs of {run} viewed as {list(sizes)} are not whole along one dimension")


def group_of(dim: int, before: Sequence[int], after: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The smallest ranges of dimensions of ``before`` (with ``dim``) and ``after`` that are views of each other.

    Raises:
        Unproven: there are no elements, and sizes do not tell.
    """
    if 0 in before:
        raise Unproven(f"{list(before)} without elements is viewed as {list(after)}")
    i = j = 0
    while i < len(before) or j < len(after):
        low, first = i, j
        left, right = before[i] if i < len(before) else 1, after[j] if j < len(after) else 1
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while left != right:
            if left < right:
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        if low <= dim < i:
            return (low, i), (first, j)
    raise AssertionError(f"dimension {dim} of {before} viewed as {after}")


def shared_runs(segments: Sequence[int]) -> tuple[int, int]:
    """Of a packed projection: how many segments all heads may share, and how many are behind these.

    Keys and values behind the queries, which are wider; or two alike among others (B and C of Mamba 2).
    """
    first, *rest = segments
    if rest and max(rest) < first:
        return len(rest), 0
    pairs = (place for place in range(1, len(rest)) if segments[place] == segments[place + 1] < first)
    place = next(pairs, 0)
    return (2, len(segments) - place - 2) if place else (0, 0)


def parts_of_runs(packed: Split, world_size: int) -> dict[int, tuple[int, ...]]:
    """For the size of each run of segments: what the ranks have of it."""
    local = [packed.local_segments(world_size, rank) for rank in range(world_size)]
    return {
        sum(packed.segments[start:stop]): tuple(sum(sizes[start:stop]) for sizes in local)
        for start, stop in combinations(range(len(packed.segments) + 1), 2)
    }


def how(split: Split | None) -> str:
    """For a message."""
    if split == CROSSED:
        return "of products between heads of different ranks"
    if split == NUMBERED:
        return "of numbers of one rank's own rows"
    return "whole" if split is None else f"cut in dimension {split.dim} as {list(split.segments)}"


def part_of_constant(
    local: Sequence[int],
    whole: Sequence[int],
    pieces: Sequence[int],
    packed: Sequence[Split],
    world_size: int,
    rank: int,
) -> Split | None:
    """How a tensor of one value is cut, of which a rank has ``local``: evenly, by ``pieces``, or as several segments of
    a ``packed`` projection with copied ones among them."""
    if tuple(local) == tuple(whole):
        return None
    differ = [dim for dim in range(len(whole)) if len(local) != len(whole) or local[dim] != whole[dim]]
    dim = differ[0]
    for count in (0, *pieces) if len(differ) == 1 else ():
        if (
            whole[dim] % (count or divisor(world_size)) == 0
            and share(whole[dim], world_size, count)[rank] == local[dim]
        ):
            return Split(dim, (whole[dim],), count)
    for split in packed if len(differ) == 1 else ():
        for start, stop in combinations((0, *accumulate(split.segments)), 2):
            part, low, high = split.at(dim).part(start, stop, world_size, rank)
            if (stop - start, high - low) == (whole[dim], local[dim]):
                return part
    raise Unproven(f"a constant of {list(local)} is no part of one of {list(whole)}")
