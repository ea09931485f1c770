"""Operands with gaps between their rows, where the library gives the bits of dense ones: no copies for ``same_bits``.

A block of a matrix has rows that are the further apart, the more blocks the rank has.  The rules of
:mod:`tpkernels.gemm.canonical` ask for equal strides and alignment at every degree, and so for dense copies: of P3's
MLP block they took a tenth of the time in bf16.  Here the library is asked instead, once for each form of operands and
result: it multiplies the same random numbers in this form and in the dense one, and where all bits are equal, later
calls of this form save the copies.  Ranks and degrees may find different answers, because both ways give the same bits.

Assumes what the rules assume, that equal calls give equal bits, and that the order of a call's sums does not depend on
the numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "Form", "keeps_bits"]

ALIGNMENT = 64
"""Bytes of a cache line."""
FORMS = 4096
"""Whose answers are kept: a model has a few for each layer of other sizes."""


class Form(NamedTuple):
    """How a matrix lies in memory."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    place: int
    """Bytes behind the beginning of a cache line."""

    @property
    def is_transposed(self) -> bool:
        """Whether columns and not rows are consecutive."""
        return self.strides[0] == 1

    @property
    def dense(self) -> Form:
        """The same without gaps, at the beginning of a cache line."""
        rows, columns = self.sizes
        return Form(self.sizes, (1, rows) if self.is_transposed else (columns, 1), 0)

    def filled(self, values: Tensor) -> Tensor:
        """A matrix of this form, with NaNs in its gaps."""
        behind = self.place // values.itemsize
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        memory = values.new_full((behind + extent,), float("nan"))
        assert memory.data_ptr() % ALIGNMENT == 0, "memory of torch begins at a cache line"
        return memory.as_strided(self.sizes, self.strides, behind).copy_(values)


def keeps_bits(x: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None) -> bool:
    """Whether ``out = x @ matrix + bias`` has the bits that dense operands and a dense result have.

    ``bias`` is dense.  Not asked for matrices with a single row or column, whose strides say nothing: no.
    """
    if min(x.shape) <= 1 or matrix.shape[1] <= 1:
        return False
    return _keeps_bits(
        x.dtype, bias is not None,
        x.shape, x.stride(), x.data_ptr() % ALIGNMENT,
        matrix.shape, matrix.stride(), matrix.data_ptr() % ALIGNMENT,
        out.shape, out.stride(), out.data_ptr() % ALIGNMENT,
    )  # fmt: skip


@lru_cache(maxsize=FORMS)
def _keeps_bits(dtype: torch.dtype, has_bias: bool, *forms: Any) -> bool:
    given = [Form(*forms[place : place + 3]) for place in range(0, len(forms), 3)]
    x, matrix, out = given
    dense = [form.dense for form in given]
    if given == dense:
        return True
    if any(1 not in form.strides or form.place % dtype.itemsize for form in given):
        return False
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        values = [torch.randn(form.sizes, generator=generator).to(dtype) for form in (x, matrix)]
        bias = torch.randn(out.sizes[1], generator=generator).to(dtype) if has_bias else None
        results = []
        for left, right, target in (given, dense):
            found = target.filled(values[0].new_zeros(out.sizes))
            call(left.filled(values[0]), right.filled(values[1]), found, bias)
            results.append(found.contiguous().view(torch.uint8))
    return torch.equal(*results)


def call(x: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None) -> None:
    """``out = x @ matrix + bias``, one call of the library."""
    if bias is None:
        torch.mm(x, matrix, out=out)
    else:
        torch.addmm(bias, x, matrix, out=out)
