"""What backends share where experts are dealt out: the sum of what the ranks send back for this rank's tokens."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tpkernels.backends.row_gemms import accumulation_dtype
from tpkernels.comm import timeline
from tpkernels.ops.contract import GroupedMatmulCombine

__all__ = ["sum_returned"]


def sum_returned(call: GroupedMatmulCombine, parts: Iterable[Tensor]) -> Tensor:
    """This rank's tokens from the ``parts`` of all ranks, in rank order: a row for each token that went to the rank.

    Summed in the accumulation dtype in this order, and rounded once.  A part is asked for when its turn comes.
    """
    like, shape = call.like, (call.rows.num_own_tokens, call.columns)
    if len(call.rows.picks) == 1:
        (part,) = parts  # every token, in order
        return part
    total = torch.zeros(shape, dtype=accumulation_dtype(like.dtype), device=like.device)
    for places, part in zip(call.rows.picks, parts, strict=True):
        with timeline.span("reduce", "reduce"):
            total.index_add_(0, places, part.to(total.dtype))  # each place once: the order cannot matter
    return total.to(like.dtype)
