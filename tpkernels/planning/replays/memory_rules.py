"""What ``as_strided`` does to a cut tensor: it takes elements by where they lie in memory, whatever its dimensions are.

Windows that overlap are made so (Longformer).  Nothing in the op's arguments says which elements of its input it reads;
that follows from how the input lies in memory, of the whole model and of one rank (:func:`memory_of`).  So the elements
are numbered, and each element of the result is looked up.  It assumes that tensors lie in a run on real tensors as they
do in one on fake tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tpkernels.planning.replays.op_call import Call
from tpkernels.planning.splits import Split, Unproven

__all__ = ["MOST_ELEMENTS", "as_strided"]

MOST_ELEMENTS = 1 << 24
"""Of the input's memory, and of a result; a larger one is not looked through."""


def as_strided(call: Call) -> Split:
    """The cut stays where one dimension of the result counts along the cut one, and all ranks read the same of each."""
    split = call.cut()
    with _disable_current_modes(), torch.device("cpu"):
        whole, local = _places(call, local=False), _places(call, local=True)
        mine = torch.tensor(_of_rank(split, call.world_size, call.rank))
        for dim in sorted(range(whole.along.dim()), key=lambda dim: dim != split.dim):
            if not (whole.counts(dim) and local.counts(dim)):
                continue
            if torch.equal(whole.rest.index_select(dim, mine), local.rest):
                return split.at(dim)
    raise Unproven("elements of different parts are taken by their places in memory")


class _Places:
    """Of each element of a result: its place ``along`` the cut dimension of the input, and in the ``rest`` of it."""

    def __init__(self, along: Tensor, rest: Tensor, size: int) -> None:
        self.along, self.rest, self._size = along, rest, size

    def counts(self, dim: int) -> bool:
        """Whether what stands at place i of dimension ``dim`` is all read at place i of the cut one."""
        if self.along.shape[dim] != self._size:
            return False
        shape = [self._size if other == dim else 1 for other in range(self.along.dim())]
        return bool((self.along == torch.arange(self._size).view(shape)).all())


def _places(call: Call, *, local: bool) -> _Places:
    shape: Sequence[int] = (call.local if local else call.whole)[0]
    memory = call.kwargs[local].get("memory")
    if memory is None:
        raise Unproven("how the tensor lies in memory is not known")
    steps, offset = memory
    size, stride = call.value(1, "size", (), local=local), call.value(2, "stride", (), local=local)
    start = call.value(3, "storage_offset", None, local=local)
    start = offset if start is None else start
    length = 1 + max(_last(shape, steps, offset), _last(size, stride, start))
    if max(length, prod(size), prod(shape)) > MOST_ELEMENTS or not prod(shape) or not prod(size):
        raise Unproven(f"places in memory are looked up for 1 to {MOST_ELEMENTS} elements")
    numbers, held = torch.arange(prod(shape)).view(tuple(shape)), torch.full((length,), -1)
    held.as_strided(tuple(shape), steps, offset).copy_(numbers)
    if not torch.equal(held.as_strided(tuple(shape), steps, offset), numbers):
        raise Unproven("elements lie at one place in memory")
    read = held.as_strided(tuple(size), tuple(stride), start)
    if bool((read < 0).any()):
        raise Unproven("what lies beside the tensor in memory is read")
    inner, count = prod(shape[call.cut().dim + 1 :]), shape[call.cut().dim]
    return _Places(read // inner % count, read // (inner * count) * inner + read % inner, count)


def _last(shape: Sequence[int], stride: Sequence[int], offset: int) -> int:
    return offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _of_rank(split: Split, world_size: int, rank: int) -> list[int]:
    """The places of the cut dimension that a rank has, in order."""
    found: list[int] = []
    start = 0
    every: list[Any] = [split.local_segments(world_size, one) for one in range(rank + 1)]
    for place, (size, copied) in enumerate(zip(split.segments, split.are_copied, strict=True)):
        first = start if copied else start + sum(sizes[place] for sizes in every[:rank])
        found += range(first, first + every[rank][place])
        start += size
    return found
