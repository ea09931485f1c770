"""Where a part that flows between the modules of a parallel model lies in the whole.

Only layers know this: a column layer of its output, and a row layer of its input.  The place of any other part is
unknown, and it is not compared.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tpkernels.partition import copied_places, offsets
from tpkernels.planning.splits import share
from tpkernels.planning.styles import Column, CopiedHeads, Features, Row, Style
from tpkernels.state.originals import box_of, local_of

__all__ = ["part_at"]

Place = tuple[slice, ...] | Tensor | None


def part_at(
    actual: Tensor, whole: Tensor, style: Style | None, *, leaves: bool, rank: int, world_size: int
) -> tuple[Tensor, Place] | None:
    """This rank's tensor and where it lies in ``whole``; None where that is not known.

    Args:
        style: of the module that was left (``leaves``) with ``actual``, or entered.
    """
    if isinstance(actual, DTensor):
        if actual.shape != whole.shape or not all(p.is_shard() or p.is_replicate() for p in actual.placements):
            return None
        return local_of(actual), box_of(actual).slices
    if actual.shape == whole.shape:
        return actual, None
    if actual.dim() != whole.dim() or actual.shape[:-1] != whole.shape[:-1]:
        return None
    of = _columns if leaves else _rows
    columns = of(style, whole.shape[-1], rank, world_size)
    if columns is None or len(columns) != actual.shape[-1]:
        return None
    return actual, torch.tensor(columns, dtype=torch.long, device=whole.device)


def _columns(style: Style | None, features: int, rank: int, world_size: int) -> list[int] | None:
    """This rank's part of the ``features`` that the unsharded layer gives."""
    if isinstance(style, Column):
        sizes = style.segments or (features,)
        units = style.units or (style.unit,) * len(sizes)
        starts, copied = offsets(sizes), copied_places(len(sizes), style.copied, style.behind)
        return [
            start + column
            for index, (start, size, unit) in enumerate(zip(starts, sizes, units, strict=False))
            for column in (
                _chunk(size, unit, rank, world_size) if not copied[index]
                else _of_copies(size, style.copied_heads, style.copies, rank, world_size) if style.copies
                else range(size)
            )
        ]  # fmt: skip
    if isinstance(style, Features):
        return _chunk(features, 1, rank, world_size)
    if isinstance(style, Row) and style.scatter_unit:
        return _chunk(features, style.scatter_unit, rank, world_size)
    if isinstance(style, CopiedHeads):
        return _of_copies(features, style.heads, style.copies, rank, world_size)
    return None


def _rows(style: Style | None, features: int, rank: int, world_size: int) -> list[int] | None:
    """This rank's part of the ``features`` that the unsharded layer takes."""
    if isinstance(style, Row) and not style.split_input:
        sizes = style.segments or (features,)
        parts = zip(offsets(sizes), sizes, strict=True)
        return [start + column for start, size in parts for column in _chunk(size, style.unit, rank, world_size)]
    if isinstance(style, Column) and style.gather_input:
        return _chunk(features, 1, rank, world_size)
    return None


def _of_copies(features: int, heads: int, copies: int, rank: int, world_size: int) -> list[int]:
    """The features that a rank's part of ``copies`` of so many heads are copies of."""
    width, counts = features // heads, share(copies, world_size, copies)
    first = offsets(counts)[rank]
    mine = [copy * heads // copies for copy in range(first, first + counts[rank])]
    return [head * width + column for head in mine for column in range(width)]


def _chunk(size: int, unit: int, rank: int, world_size: int) -> list[int]:
    sizes = share(size, world_size, size // unit if unit > 1 else 0)
    start = offsets(sizes)[rank]
    return list(range(start, start + sizes[rank]))
