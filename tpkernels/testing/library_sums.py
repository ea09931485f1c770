"""What torch lets the GEMMs of its library do on a GPU, and results are judged without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["summed_in_fp32"]


@contextmanager
def summed_in_fp32() -> Iterator[None]:
    """Products of bf16 and fp16 are summed in fp32 along all of K, as the bound of a result assumes.

    By default torch lets the library of a GPU cut K and round the sum of each part (`torch.backends.cuda.matmul`,
    ``allow_bf16_reduced_precision_reduction`` and that of fp16): unsharded layers lose the same digits.
    """
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction, settings.allow_fp16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = settings.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        settings.allow_bf16_reduced_precision_reduction, settings.allow_fp16_reduced_precision_reduction = before
