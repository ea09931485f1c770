"""How experts are dealt out over the ranks: what the two ops for that share.

Rank r has ``expert_sizes[r]`` whole experts, those that come after the experts of the ranks before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.ops.routing import grouped_signature
from tpkernels.ops.signatures import Signature
from tpkernels.partition import Layout

__all__ = ["check_expert_sizes", "dealt_signature", "sizes_of_experts"]


def sizes_of_experts(sizes: Sequence[int] | None, weight: Tensor, world_size: int) -> list[int]:
    """Without sizes, every rank has as many experts as this one."""
    return list(sizes) if sizes is not None else [weight.shape[0]] * world_size


def check_expert_sizes(sizes: Sequence[int] | None, world_size: int, *, own: tuple[int, int]) -> None:
    """One non-negative size per rank, and an expert somewhere; ``own``: (rank, number of its experts)."""
    rank, count = own
    if sizes is None:
        if count < 1:
            raise ValueError(f"expert_sizes must be given where a rank has no experts, got None and {count} of them")
        return
    if len(sizes) != world_size:
        raise ValueError(f"expert_sizes must have one entry per rank ({world_size}), got {list(sizes)}")
    if any(size < 0 for size in sizes) or not sum(sizes):
        raise ValueError(f"expert_sizes must not be negative, and not all 0, got {list(sizes)}")
    if sizes[rank] != count:
        raise ValueError(
            f"expert_sizes[{rank}] must be the number of this rank's experts ({count}), got expert_sizes={list(sizes)}"
        )


def dealt_signature(
    op: str,
    x: Tensor,
    layout: Layout,
    columns: int,
    implementation: str,
    expert_sizes: Sequence[int],
    top_k: int,
    *,
    detail: str = "",
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Signature:
    """``layout``: of the tokens of all ranks."""
    dealt = f"dealt out as {list(expert_sizes)}"
    return grouped_signature(
        op, x, layout, columns, implementation, (sum(expert_sizes), top_k),
        detail=f"{dealt}, {detail}" if detail else dealt, activation=activation, out_dtype=out_dtype,
    )  # fmt: skip
