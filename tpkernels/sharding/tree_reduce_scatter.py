"""What ``same_bits`` puts in the place of FSDP2's reduce-scatter: the sum over replicas in one fixed tree.

A library adds the replicas of an element in an order that may depend on where in its message the element stands, which
tensor parallelism changes.  Here each rank gets every replica's part and adds neighbours first, ((0+1) + (2+3)), with a
rounding to the gradients' dtype each time, as micro-batches are added.  It sends what a ring sends, and needs memory
for what it gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["TreeReduceScatter"]


class TreeReduceScatter:
    """For ``FSDPModule.set_custom_reduce_scatter``; torch does not publish the class that it describes it by."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"same_bits adds gradients of replicas or takes their mean, and FSDP2 asks for {op}")
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.add(*_halves(list(received.view(group.size(), -1))), out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


def _halves(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """The sums of the first and of the second half of a power of two of parts."""
    while len(parts) > 2:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts
