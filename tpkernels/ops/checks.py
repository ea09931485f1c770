"""Argument checks that the ops share: ``ValueError`` with the argument's name, its value and what was expected."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels import dispatch
from tpkernels.comm import agreement
from tpkernels.comm.groups import GroupLike, resolve
from tpkernels.gemm import fp8
from tpkernels.ops.contract import ACTIVATIONS, GATED
from tpkernels.ops.main_grad import linear
from tpkernels.ops.plain_calls import PLAIN, is_dtensor
from tpkernels.ops.shapes import gather_layout, gathered_shape, scatter_layout
from tpkernels.partition import Layout

__all__ = [
    "DTYPES",
    "as_list",
    "check_bias_dtype",
    "check_common",
    "check_dim",
    "check_gate",
    "check_gather",
    "check_local",
    "check_out_dtype",
    "check_same",
    "check_scales",
    "check_scatter",
    "check_shard_sizes",
    "check_weights",
    "dtype_names",
    "plain_linear",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCALED_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_local(group: GroupLike | str | None, **arguments: Sequence[object]) -> None:
    """Ops work on local tensors: a DTensor would be sharded twice.  The ``group``, if any, is told of a refusal."""
    for name, tensors in arguments.items():
        for tensor in tensors:
            if tensor is None or type(tensor) in PLAIN:
                continue
            if is_dtensor(tensor):
                reason = f"{name} is a DTensor; the ops take local tensors: pass {name}.to_local()"
            elif not isinstance(tensor, Tensor):
                reason = f"{name} must be a tensor, got {type(tensor).__name__}"
            else:
                continue
            if group is not None:
                agreement.refuse(resolve(group), "a call", reason)
            raise ValueError(reason)


def check_common(
    op: str, x: Tensor, implementation: str, activation: str | None = None, *, scaled: bool = False
) -> None:
    """``scaled``: x is fp8, and has a scale."""
    if implementation == "auto" and activation is None and not scaled and x.dtype in DTYPES and x.dim() >= 2:
        return  # at once, because the checks below take as long as a small op
    if x.dim() < 2:
        raise ValueError(f"x must have at least 2 dimensions [rows, K], got shape {tuple(x.shape)}")
    if scaled and x.dtype != fp8.DTYPE:
        raise ValueError(f"scale_x, scale_weight and out_dtype go with x and weight of {fp8.DTYPE}, got x of {x.dtype}")
    if x.dtype == fp8.DTYPE and not scaled:
        raise ValueError(f"x of {x.dtype} needs scale_x and scale_weight; tpkernels.quantize_fp8 returns both")
    if x.dtype not in DTYPES and not scaled:
        raise ValueError(f"x must be one of {dtype_names(DTYPES)}, got {x.dtype}")
    if activation is not None and activation not in ACTIVATIONS and activation not in GATED:
        raise ValueError(f"activation must be None or one of {[*sorted(ACTIVATIONS), *GATED]}, got {activation!r}")
    dispatch.check_name(op, implementation)


def check_weights(
    x: Tensor,
    k: int,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    out_dtype: torch.dtype | None = None,
) -> None:
    """Weights ``[N, k]`` and biases ``[N]`` like ``x`` in dtype and device; biases in ``out_dtype`` if it is given."""
    if not weights:
        raise ValueError("weight must be a tensor or a non-empty sequence of tensors")
    if len(biases) != len(weights):
        raise ValueError(f"bias must have one entry per weight ({len(weights)}), got {len(biases)}")
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        name = f"weight[{i}]" if len(weights) > 1 else "weight"
        if weight.dim() != 2:
            raise ValueError(f"{name} must have 2 dimensions [N, K], got shape {tuple(weight.shape)}")
        if weight.shape[1] != k:
            raise ValueError(f"{name} must be [N, {k}] to match x, got shape {tuple(weight.shape)}")
        check_same(name, weight, x)
        if bias is not None:
            name = f"bias[{i}]" if len(weights) > 1 else "bias"
            if bias.shape != (weight.shape[0],):
                raise ValueError(f"{name} must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")
            check_bias_dtype(name, bias, out_dtype)
            check_same(name, bias, x, dtype=out_dtype)


def check_bias_dtype(name: str, bias: Tensor, out_dtype: torch.dtype | None) -> None:
    """``out_dtype``: of the result, if the operands are fp8."""
    if out_dtype is not None and bias.dtype != out_dtype:
        raise ValueError(f"{name} must have the dtype of the result (out_dtype={out_dtype}), got {bias.dtype}")


def check_gate(activation: str | None, weights: Sequence[Tensor]) -> None:
    """A gated activation takes two weights of one shape, gate and up."""
    if activation in GATED and (len(weights) != 2 or weights[0].shape != weights[1].shape):
        shapes = [tuple(weight.shape) for weight in weights]
        raise ValueError(f"activation {activation!r} takes two weights of one shape, (gate, up), got shapes {shapes}")


def check_scales(x: Tensor, weights: Sequence[Tensor], scale_x: Tensor, scale_weights: Sequence[Tensor]) -> None:
    """fp32 scales of fp8 operands: one element, or one per row of x and of each weight, or per expert of weights."""
    _check_scale("scale_x", scale_x, x, x)
    if len(scale_weights) != len(weights):
        raise ValueError(f"scale_weight must have one entry per weight ({len(weights)}), got {len(scale_weights)}")
    for i, (scale, weight) in enumerate(zip(scale_weights, weights, strict=True)):
        _check_scale(f"scale_weight[{i}]" if len(weights) > 1 else "scale_weight", scale, weight, x)


def _check_scale(name: str, scale: Tensor, of: Tensor, x: Tensor) -> None:
    per_row = (*of.shape[:-1], 1)
    per_expert = (of.shape[0], 1, 1) if of.dim() == 3 and of is not x else per_row
    if scale.shape not in (per_row, per_expert) and scale.numel() != 1:
        experts = "" if per_expert == per_row else f" or {per_expert} (per expert)"
        raise ValueError(
            f"{name} must have one element (per tensor) or shape {per_row} (per row){experts}, got {tuple(scale.shape)}"
        )
    check_same(name, scale, x, dtype=torch.float32)


def check_out_dtype(out_dtype: torch.dtype | None) -> None:
    if out_dtype not in SCALED_OUT_DTYPES:
        raise ValueError(f"out_dtype must be one of {dtype_names(SCALED_OUT_DTYPES)}, got {out_dtype}")


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` for a group of one rank, with our errors.

    The checks run only when torch refuses, would broadcast a bias, or would take a tensor on the meta device for one
    with values, because at this size they cost as much as a GEMM.
    """
    if (bias is not None and bias.shape != weight.shape[:1]) or weight.device != x.device:
        check_weights(x, x.shape[-1], [weight], [bias])
    try:
        return linear(x, weight, bias)
    except RuntimeError:
        check_weights(x, x.shape[-1], [weight], [bias])
        raise


def check_dim(name: str, dim: int, ndim: int) -> int:
    """``dim`` as a non-negative number."""
    if not -ndim <= dim < ndim:
        raise ValueError(f"{name} ({dim}) is out of range for a tensor of {ndim} dimensions")
    return dim % ndim


def check_shard_sizes(
    sizes: Sequence[int] | None, world_size: int, *, own: tuple[int, int] | None = None, total: int | None = None
) -> None:
    """One non-negative size per rank; ``own`` is (rank, size of its shard), ``total`` what the sizes must sum to."""
    if sizes is None:
        return
    if len(sizes) != world_size:
        raise ValueError(f"shard_sizes must have one entry per rank ({world_size}), got {list(sizes)}")
    if any(size < 0 for size in sizes):
        raise ValueError(f"shard_sizes must not be negative, got {list(sizes)}")
    if own is not None and sizes[own[0]] != own[1]:
        raise ValueError(
            f"shard_sizes[{own[0]}] must be the size of this rank's shard ({own[1]}), got shard_sizes={list(sizes)}"
        )
    if total is not None and sum(sizes) != total:
        raise ValueError(
            f"shard_sizes {list(sizes)} sum to {sum(sizes)}, but the dimension to scatter has size {total}"
        )


def check_gather(
    x: Tensor, gather_dim: int, sizes: Sequence[int] | None, rank: int, world_size: int
) -> tuple[list[int], Layout]:
    """Shape and layout of the whole that ``x`` is this rank's shard of."""
    dim = check_dim("gather_dim", gather_dim, x.dim())
    check_shard_sizes(sizes, world_size, own=(rank, x.shape[dim]))
    layout = gather_layout(x, dim, sizes, world_size)
    return gathered_shape(x, dim, layout), layout


def check_scatter(
    x: Tensor, weight: Tensor, scatter_dim: int, sizes: Sequence[int] | None, rank: int, world_size: int
) -> tuple[list[int], Layout]:
    """Shape of this rank's part of the product, and the layout of the whole."""
    dim = check_dim("scatter_dim", scatter_dim, x.dim())
    shape = [*x.shape[:-1], weight.shape[0]]
    check_shard_sizes(sizes, world_size, total=shape[dim])
    layout = scatter_layout(shape, dim, sizes, world_size)
    shape[dim] = layout.sizes[rank]
    return shape, layout


def as_list(value: Tensor | Sequence[Tensor | None] | None, count: int) -> list[Tensor | None]:
    """A bias argument as a list: None, one tensor, or one entry per weight."""
    if value is None:
        return [None] * count
    if isinstance(value, Tensor):
        return [value]
    return list(value)


def check_same(name: str, tensor: Tensor, x: Tensor, *, dtype: torch.dtype | None = None) -> None:
    """``tensor`` has the device of ``x``, and its dtype or the one named."""
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
    if dtype is None and tensor.dtype != x.dtype:
        raise ValueError(f"{name} must have the dtype of x ({x.dtype}), got {tensor.dtype}")
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on the device of x ({x.device}), got {tensor.device}")


def dtype_names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
