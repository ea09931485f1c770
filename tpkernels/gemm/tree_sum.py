"""The sums of ``same_bits``: neighbours first, ((0+1) + (2+3)) + ((4+5) + (6+7)), in fp32 (fp64 for fp64).

One pass over the parts by the compiled core; without it torch adds them, to the same bits, in a pass for each addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels.gemm.native import native, native_dtype

__all__ = ["of_products", "of_sums", "wide"]


def wide(dtype: torch.dtype) -> torch.dtype:
    """What products of ``dtype`` are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def of_products(parts: Sequence[Tensor], sums: Tensor, terms: int = 1) -> None:
    """``sums``, which is wide, = the tree over blocks; a block is the sum of ``terms`` consecutive parts, in order."""
    if _serves(*parts, sums):
        _core().tree_of_products(native_dtype(parts[0].dtype), _places(parts), terms, *_target(sums))
        return
    blocks = []
    for first in range(0, len(parts), terms):
        total = parts[first].to(sums.dtype)
        for part in parts[first + 1 : first + terms]:
            total = total + part
        blocks.append(total)
    sums.copy_(_tree(blocks))


def of_sums(parts: Sequence[Tensor], out: Tensor, bias: Tensor | None = None) -> None:
    """``out`` = the tree over parts, which are wide, plus ``bias`` of the dtype of ``out``; rounded once."""
    if _serves(*parts, out) and (bias is None or (bias.is_cpu and bias.dim() == 1 and bias.stride(0) == 1)):
        address = 0 if bias is None else bias.data_ptr()
        _core().tree_of_sums(native_dtype(out.dtype), _places(parts), address, *_target(out))
        return
    total = _tree(parts)
    out.copy_(total if bias is None else total + bias)


def _tree(parts: Sequence[Tensor]) -> Tensor:
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _serves(*matrices: Tensor) -> bool:
    return native() is not None and all(
        matrix.is_cpu and matrix.dim() == 2 and (matrix.stride(1) == 1 or matrix.shape[1] <= 1) for matrix in matrices
    )


def _core() -> Any:
    return native()


def _places(parts: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(part.data_ptr(), part.stride(0)) for part in parts]


def _target(out: Tensor) -> tuple[int, int, int, int]:
    return out.data_ptr(), out.stride(0), *out.shape
