"""Memory that a thread uses again for what a call makes and nobody keeps: fresh pages cost as much as a small product.

A place has one tensor of each dtype, of its largest size so far and at most :data:`LARGEST` bytes; above that a tensor
is made anew.  What is in a place is lost at the next request for it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

__all__ = ["LARGEST", "room"]

LARGEST = 8 * 1024 * 1024


class _Kept(threading.local):
    def __init__(self) -> None:
        self.by_place: dict[tuple[str, torch.dtype], Tensor] = {}


_kept = _Kept()


def room(place: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A dense tensor on the CPU, aligned to a cache line, whose contents are whatever was there.

    ``place``: what it is for; callers have a fixed number of them.
    """
    count = prod(shape)
    if count * dtype.itemsize > LARGEST:
        return torch.empty(*shape, dtype=dtype)
    found = _kept.by_place.get((place, dtype))
    if found is None or found.numel() < count:
        with torch.inference_mode(False):  # in later calls it is written to outside of inference mode, too
            found = _kept.by_place[place, dtype] = torch.empty(count, dtype=dtype)
    return found[:count].view(*shape)
