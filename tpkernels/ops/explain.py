"""``explain``: which implementation would run a problem on a group, and why."""

from __future__ import annotations

import torch

from tpkernels import dispatch
from tpkernels.comm import agreement
from tpkernels.comm.groups import GroupLike, resolve
from tpkernels.dispatch import Explanation
from tpkernels.ops import calling
from tpkernels.ops.checks import DTYPES

__all__ = ["explain"]


def explain(op: str, *, m: int, n: int, k: int, dtype: torch.dtype, group: GroupLike) -> Explanation:
    """Which implementation ``"auto"`` picks for a GEMM of m x n x k over the whole group, with every reason.

    Collective: the choice rests on costs that the ranks measure and agree on, so every rank must call it.
    ``print()`` the result for a table.

    Args:
        op: "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", or a collective's name.
        m, n, k: global sizes: each rank runs m x n/W x k when gathering and m x n x k/W when reducing.

    Raises:
        ValueError: unknown op, negative size or unsupported dtype.
    """
    state = resolve(group)
    try:
        _check(op, m, n, k, dtype)
    except ValueError as error:
        agreement.refuse(state, f"explain({op})", str(error))
        raise
    device = "cuda" if state.backend == "nccl" else "cpu"
    return calling.explain(op, m=m, n=n, k=k, dtype=dtype, group=state, device=device)


def _check(op: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    dispatch.implementations(op)
    for name, value in (("m", m), ("n", n), ("k", k)):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {[str(d) for d in DTYPES]}, got {dtype}")
