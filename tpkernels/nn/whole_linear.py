"""A linear layer that every rank holds whole, beside one that is cut: half of an adapter.

Its weight reads as a DTensor, as that of the other half does, so that code which multiplies the two (PEFT, when it
merges) gets a DTensor that is cut as the layer below.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from tpkernels.nn.parameters import local_parts

__all__ = ["WholeLinear"]


class WholeLinear(nn.Linear):
    """An ``nn.Linear`` whose parameters are replicated DTensors, also for those who read ``weight`` and ``bias``."""

    @staticmethod
    def check(name: str, module: nn.Module, sequence_parallel: bool) -> None:
        """Refuse a module that cannot become one in place."""
        if type(module) is not nn.Linear or sequence_parallel:
            raise ValueError(
                f"module {name!r} is a {type(module).__name__}; Replicate(distributed=True) is for an nn.Linear that "
                "works on the whole sequence"
            )

    def forward(self, input: Tensor) -> Tensor:
        _, weight, bias = local_parts(self.weight, self.bias)
        return F.linear(input, weight, bias)
