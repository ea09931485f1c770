"""fp8 operands for cases of the ops with experts: numbers with scales of each kind, and what they stand for in fp64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpkernels.gemm.fp8 import DTYPE, quantize_fp8
from tpkernels.testing.numeric import FP8_SUM_LOSS, Bounded

__all__ = ["Fp8", "fp8_of"]


@dataclass(frozen=True)
class Fp8:
    """What an op is given: e4m3 numbers, and their scale."""

    numbers: Tensor
    scale: Tensor

    @property
    def exact(self) -> Tensor:
        """24 bits of a scale times 4 of a number fit into fp64."""
        return self.numbers.double() * self.scale.double()

    def bounded(self, device: torch.device | str) -> Bounded:
        """The exact value, with one rounding for each of the two scales that are applied to a product in fp32.

        On a GPU with what a tensor core may lose of a sum.
        """
        value, lost = self.exact, FP8_SUM_LOSS if torch.device(device).type == "cuda" else 0.0
        return Bounded(value, (torch.finfo(torch.float32).eps + lost) * value.abs())

    def to(self, device: torch.device | str) -> Fp8:
        return Fp8(self.numbers.to(device), self.scale.to(device))

    def narrow(self, part: slice) -> Fp8:
        """A part along the first dimension; a scale of one element serves all of them."""
        return Fp8(self.numbers[part], self.scale if self.scale.numel() == 1 else self.scale[part])


def fp8_of(x: Tensor, per: str, *, integers: bool = False) -> Fp8:
    """``per``: as of :func:`tpkernels.quantize_fp8`; integers stay what they are, with powers of two for scales."""
    if not integers:
        return Fp8(*quantize_fp8(x, per=per))
    shape = {"tensor": (1,), "row": (*x.shape[:-1], 1), "matrix": (*x.shape[:-2], 1, 1)}[per]
    places = torch.arange(torch.Size(shape).numel()).view(shape)
    return Fp8(x.to(DTYPE), 2.0 ** (places % 3 - 1).float())
