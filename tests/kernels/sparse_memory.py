"""Matrices whose rows lie so far apart that offsets pass 2^31 elements, of which only the rows themselves are memory.

Below every matrix lie 2^31 elements that nobody may touch: an offset that was computed in 32 bits wraps to a negative
one, and finds them there, or numbers of another row, instead of ending the process.
"""

from __future__ import annotations

import mmap
import sys

import pytest
import torch
from torch import Tensor

_WRAPPED = 2**31
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # a name since Python 3.13
_NO_HUGE_PAGES = getattr(mmap, "MADV_NOHUGEPAGE", 15)


def sparse_matrix(rows: int, columns: int, stride: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """[rows, columns], `stride` elements between rows, NaN. On a GPU it is all memory, and skipped if there is less."""
    count = _WRAPPED + rows * stride + columns
    num_bytes = count * dtype.itemsize
    if device == "cpu":
        if sys.platform != "linux":
            pytest.skip("needs Linux: memory that is reserved and not there")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        pages = mmap.mmap(-1, num_bytes, flags=flags)
        pages.madvise(_NO_HUGE_PAGES)  # a row takes a page of 4 KiB, not of 2 MiB
        flat = torch.frombuffer(pages, dtype=dtype)
    else:
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        if free < num_bytes:
            pytest.skip(f"needs a CUDA device with {num_bytes >> 30} GiB of free memory, this has {free >> 30}")
        flat = torch.empty(count, dtype=dtype, device=device)
    matrix = torch.as_strided(flat, (rows, columns), (stride, 1), _WRAPPED)
    return matrix.copy_(torch.full((rows, columns), float("nan")).to(dtype))
