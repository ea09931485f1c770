"""``explain``: which implementation would run a problem on a group, and why."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from tpkernels import dispatch
from tpkernels.comm import agreement
from tpkernels.comm.groups import GroupLike, resolve
from tpkernels.dispatch import Explanation
from tpkernels.gemm import fp8
from tpkernels.ops import agreed_call
from tpkernels.ops.checks import DTYPES, check_out_dtype

__all__ = ["explain"]


def explain(
    op: str,
    *,
    m: int,
    k: int,
    n: int,
    dtype: torch.dtype,
    group: GroupLike,
    out_dtype: torch.dtype | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    device: str | None = None,
) -> Explanation:
    """Which implementation ``"auto"`` picks for a GEMM of m x k x n over the whole group, with every reason.

    Collective: the choice rests on costs that the ranks measure and agree on, so every rank must call it.
    ``print()`` the result for a table.

    Args:
        op: "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", one of the same with ``grouped_matmul``
            in the place of ``matmul``, "dispatch_grouped_matmul", "grouped_matmul_combine", or a collective's name.
        dtype: of the operands; float8_e4m3fn for the ops with a GEMM, which then return ``out_dtype`` (default bf16).
        m, k, n: global sizes: each rank runs m x k x n/W when gathering and m x k/W x n when reducing.  Where experts
            are dealt out, it runs k x n of its own experts, on m * top_k / W rows if they are chosen alike.
        experts, top_k: of a grouped op, whose ``m`` tokens each go to ``top_k`` of so many experts.
        device: where the tensors are, "cpu" or "cuda"; default: the mesh's device, or that of the group's own backend
            (CUDA if it has one for both).

    Examples:
        >>> why = tpk.explain("all_gather_matmul", m=512, k=256, n=256, dtype=torch.float32, group=mesh["tp"])
        >>> why.chosen in [candidate.name for candidate in why.candidates]
        True

    Raises:
        ValueError: unknown op, negative size or unsupported dtypes; the group has no backend for the device.
    """
    state = resolve(group)
    try:
        _check(op, m, n, k, dtype, out_dtype, device)
        _check_experts(op, experts, top_k)
    except ValueError as error:
        agreement.refuse(state, f"explain({op})", str(error))
        raise
    if device is None:
        device = group.device_type if isinstance(group, DeviceMesh) else state.backends.own_device
    if dtype == fp8.DTYPE:
        out_dtype = out_dtype or torch.bfloat16
    return agreed_call.explain(
        op, m=m, n=n, k=k, dtype=dtype, out_dtype=out_dtype, group=state, device=device, experts=experts or 1,
        top_k=top_k or 1,
    )  # fmt: skip


def _check(
    op: str, m: int, n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype | None, device: str | None
) -> None:
    dispatch.implementations(op)
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")
    for name, value in (("m", m), ("n", n), ("k", k)):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    if dtype == fp8.DTYPE and "matmul" in op:
        check_out_dtype(torch.bfloat16 if out_dtype is None else out_dtype)
        return
    if out_dtype is not None:
        raise ValueError(f"out_dtype is for GEMMs of float8_e4m3fn, got op={op!r}, dtype={dtype}, {out_dtype=}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {[str(d) for d in DTYPES]}, got {dtype}")


def _check_experts(op: str, experts: int | None, top_k: int | None) -> None:
    if op not in dispatch.GROUPED:
        if experts is not None or top_k is not None:
            raise ValueError(f"experts and top_k are for {', '.join(dispatch.GROUPED)}, got op={op!r}")
        return
    for name, value in (("experts", experts), ("top_k", top_k)):
        if value is None or value < 1:
            raise ValueError(f"{name} of {op} must be at least 1, got {value}")
