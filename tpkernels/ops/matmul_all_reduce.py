"""``matmul_all_reduce``: multiply this rank's slice of K and sum over the ranks; every rank gets the whole sum.

Forward, on rank r of W::

    y = p_0 + ... + p_{W-1} + b,  p_r = x_r @ w_r^T      equal bit for bit on all ranks

Backward.  Every rank continues with the same y, so dy is the same everywhere and nothing needs to be sent::

    dx_r = dy @ w_r,   dw_r = dy^T @ x_r,   db = sum over rows of dy
"""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from tpkernels.comm.groups import GroupLike, group_name, group_size, resolve
from tpkernels.comm.same_bits import same_bits_of
from tpkernels.ops import agreed_call, fast_path, same_bits
from tpkernels.ops.agreed_call import Signature, facts_of
from tpkernels.ops.checks import check_common, check_local, check_weights, plain_linear
from tpkernels.ops.contract import MatmulAllReduce
from tpkernels.ops.gradients import of_linear
from tpkernels.ops.options import Reduce
from tpkernels.ops.registration import call, define
from tpkernels.ops.residual_norm import Norm, add_norm, matmul_all_reduce_norm, wanted
from tpkernels.ops.scaled_matmul import ScaledReduce, scaled_reduction
from tpkernels.ops.shapes import flat, fresh, rows_layout

__all__ = ["matmul_all_reduce"]


@overload
def matmul_all_reduce(
    x: Tensor,
    weight: Tensor,
    group: GroupLike,
    *,
    bias: Tensor | None = None,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    implementation: str = "auto",
) -> Tensor: ...


@overload
def matmul_all_reduce(
    x: Tensor,
    weight: Tensor,
    group: GroupLike,
    *,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float | None = None,
    bias: Tensor | None = None,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]: ...


def matmul_all_reduce(
    x: Tensor,
    weight: Tensor,
    group: GroupLike,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Multiply and sum over the group; chunks of the partial leave while the next are computed.

    Unfused equation::

        y = all_reduce(x @ weight^T) + bias

    and with ``residual`` and ``norm_weight``, which are given together, ``(normed, sums)``::

        sums   = y + residual
        normed = rms_norm(sums, norm_weight, eps)

    =============  ======================  ==============================================
    argument       shape                   notes
    =============  ======================  ==============================================
    ``x``          ``[..., K_r]``          fp32, bf16, fp16, fp64, or fp8 (e4m3); any strides
    ``weight``     ``[N, K_r]``            this rank's columns; K_r may differ between ranks
    ``bias``       ``[N]`` or None         equal on all ranks; added once, after the sum
    ``residual``   ``[..., N]`` or None    equal on all ranks, like y
    ``norm_w...``  ``[N]`` or None         equal on all ranks; ``eps``: as that of ``F.rms_norm``
    ``scale_x``    ``[..., 1]`` or 1       fp32, for fp8: per row of x, or one for all
    ``scale_w...`` ``[N, 1]`` or 1         fp32, for fp8: per row of the weight, or one for all
    ``y``          ``[..., N]``            contiguous, equal on all ranks; dtype of x, for fp8 ``out_dtype``
    =============  ======================  ==============================================

    Scales and ``out_dtype`` as in :func:`tpkernels.matmul_reduce_scatter`.
    The gradient that arrives for y (or for both results) must be the same on every rank, as it is when all ranks
    compute the same loss; those of ``residual`` and ``norm_weight`` are then complete on every rank.  Results with a
    residual are rounded where the single ops round: y, the sums and the normed rows.

    Examples:
        >>> x, weight = torch.ones(1, 8), torch.ones(3, 8)
        >>> tpk.matmul_all_reduce(x, weight, mesh["tp"])
        tensor([[16., 16., 16.]])

    Raises:
        ValueError, UnsupportedProblem, GroupMismatch, PeerLost, CollectiveTimeout, GroupPoisoned: as
        :func:`tpkernels.all_gather_matmul`.
    """
    size = group_size(group)
    scaled = scale_x is not None or scale_weight is not None or out_dtype is not None
    normed = residual is not None or norm_weight is not None or eps is not None
    if size > 1 and not scaled and not normed:
        repeated = fast_path.repeat("matmul_all_reduce", group, implementation, x, weight, bias)
        if repeated is not None:
            return repeated
    pair = wanted(group, residual, norm_weight, eps) if normed else None
    check_local(group, x=[x], weight=[weight], bias=[bias])
    y: Tensor
    if scaled:
        options = ScaledReduce(group_name(group), out_dtype or torch.bfloat16, implementation)
        y = scaled_reduction("scaled_matmul_all_reduce", x, weight, bias, scale_x, scale_weight, options)
    elif size == 1 and not same_bits_of(group):
        check_common("matmul_all_reduce", x, implementation)
        y = plain_linear(x, weight, bias)
    elif pair is not None and not same_bits_of(group):
        return matmul_all_reduce_norm(x, weight, bias, Norm.of(*pair, eps), group, implementation)
    else:
        y = call("matmul_all_reduce", x, weight, bias, Reduce(group_name(group), implementation))
    return y if pair is None else add_norm(y, *pair, eps)


def _kernel(x: Tensor, weight: Tensor, bias: Tensor | None, options: Reduce) -> Tensor:
    group = resolve(options.group_name)

    def check() -> Signature:
        _check(x, weight, bias, options)
        layout = rows_layout(x.shape[:-1].numel(), group.size)
        return Signature(
            "matmul_all_reduce", x.dtype, x.device.type, layout, weight.shape[0], options.implementation,
            bias=bias is not None,
        )  # fmt: skip

    if group.same_bits:
        _check(x, weight, bias, options)
        same_bits.agree_on_blocks(group, "matmul_all_reduce", [x.shape[-1]])
    facts = facts_of("matmul_all_reduce", options.implementation, x, weight, bias)
    checked = agreed_call.checked_call(group, facts, "matmul_all_reduce", check)
    arguments = MatmulAllReduce([flat(x)], [weight.t()], bias)
    y = agreed_call.run_checked(group, checked, x.shape[-1], arguments, x.device)
    return fresh(y, (*x.shape[:-1], weight.shape[0]))


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, options: Reduce) -> Tensor:
    _check(x, weight, bias, options)
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, options: Reduce) -> None:
    check_common("matmul_all_reduce", x, options.implementation)
    check_weights(x, x.shape[-1], [weight], [bias])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.group_name = inputs[3]
    ctx.sinks = same_bits.sinks_of(ctx.group_name, [inputs[1]])


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    if same_bits_of(ctx.group_name):
        return tuple(of_linear(ctx, "linear_backward_by_blocks", dy, *ctx.saved_tensors, ctx.group_name))
    return tuple(of_linear(ctx, "linear_backward", dy, *ctx.saved_tensors))


define(
    "matmul_all_reduce",
    kernel=_kernel,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
    autocast=True,
)
