"""``matmul_all_reduce``: multiply this rank's slice of K and sum over the ranks; every rank gets the whole sum.

Forward, on rank r of W::

    y = p_0 + ... + p_{W-1} + b,  p_r = x_r @ w_r^T      equal bit for bit on all ranks

Backward.  Every rank continues with the same y, so dy is the same everywhere and nothing needs to be sent::

    dx_r = dy @ w_r,   dw_r = dy^T @ x_r,   db = sum over rows of dy
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast, overload

import torch
from torch import Tensor

from tpkernels.comm import agreement
from tpkernels.comm.groups import Group, GroupLike, group_name, group_size, resolve
from tpkernels.ops import calling
from tpkernels.ops.calling import Signature
from tpkernels.ops.checks import check_common, check_local, check_weights, plain_linear
from tpkernels.ops.contract import MatmulAllReduce
from tpkernels.ops.main_grad import Sink, sink_of, weight_gradients
from tpkernels.ops.registration import call_backward, define, is_plain
from tpkernels.ops.repeated import again, remember
from tpkernels.ops.residual_norm import add_norm, matmul_all_reduce_norm, wanted
from tpkernels.ops.scaled_matmul import scaled_matmul_all_reduce
from tpkernels.ops.shapes import flat, fresh
from tpkernels.partition import Layout, array_split_sizes

__all__ = ["matmul_all_reduce", "rows_layout"]


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

    Raises:
        ValueError, UnsupportedProblem, GroupMismatch, PeerLost, CollectiveTimeout, GroupPoisoned: as
        :func:`tpkernels.all_gather_matmul`.
    """
    if wanted(group, residual, norm_weight, eps):
        assert residual is not None and norm_weight is not None
        if scale_x is None and scale_weight is None and out_dtype is None and group_size(group) > 1:
            return matmul_all_reduce_norm(x, weight, bias, residual, norm_weight, eps, group, implementation)
        y = matmul_all_reduce(
            x, weight, group, bias=bias, scale_x=scale_x, scale_weight=scale_weight, out_dtype=out_dtype,
            implementation=implementation,
        )  # fmt: skip
        return add_norm(y, residual, norm_weight, eps)
    if scale_x is not None or scale_weight is not None or out_dtype is not None:
        check_local("x", x, group=group)
        check_local("weight", weight, group=group)
        check_local("bias", bias, group=group)
        return scaled_matmul_all_reduce(
            x, weight, bias, group, scale_x=scale_x, scale_weight=scale_weight, out_dtype=out_dtype,
            implementation=implementation,
        )  # fmt: skip
    size = group_size(group)
    if size > 1 and is_plain(x, weight, weight if bias is None else bias):
        state = resolve(group)
        repeated = again(state, x, weight, bias, implementation)
        return _run(state, x, weight, bias, implementation) if repeated is None else repeated
    check_local("x", x, group=group)
    check_local("weight", weight, group=group)
    check_local("bias", bias, group=group)
    if size == 1:
        check_common("matmul_all_reduce", x, implementation)
        return plain_linear(x, weight, bias)
    return cast(Tensor, torch.ops.tpkernels.matmul_all_reduce(x, weight, bias, group_name(group), implementation))


@lru_cache(maxsize=256)
def rows_layout(rows: int, group_size: int) -> Layout:
    """Which rows each rank sums when all ranks need the whole."""
    return Layout(1, array_split_sizes(rows, group_size), 1)


def _kernel(x: Tensor, weight: Tensor, bias: Tensor | None, name: str, implementation: str) -> Tensor:
    return _run(resolve(name), x, weight, bias, implementation)


def _run(group: Group, x: Tensor, weight: Tensor, bias: Tensor | None, implementation: str) -> Tensor:
    facts = (
        "matmul_all_reduce", implementation, x.shape, x.dtype, x.device, weight.shape, weight.dtype, weight.device,
        None if bias is None else (bias.shape, bias.dtype, bias.device),
    )  # fmt: skip
    known = group.checked.get(facts)
    if known is None:
        try:
            check_common("matmul_all_reduce", x, implementation)
            check_weights(x, x.shape[-1], [weight], [bias])
        except ValueError as error:
            agreement.refuse(group, "matmul_all_reduce", str(error))
            raise
        layout = rows_layout(x.shape[:-1].numel(), group.size)
        known = calling.Known(
            Signature("matmul_all_reduce", x.dtype, x.device.type, layout, weight.shape[0], implementation)
        )
        group.checked[facts] = known
    arguments = MatmulAllReduce([x if x.dim() == 2 and x.is_contiguous() else flat(x)], [weight.t()], bias)
    first = known.plan is None
    y: Tensor = calling.run_known(group, known, x.shape[-1], arguments, x.device)
    if first:
        remember(group, known, arguments, x, weight, implementation)
    return fresh(y, (*x.shape[:-1], weight.shape[0]))


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, name: str, implementation: str) -> Tensor:
    check_common("matmul_all_reduce", x, implementation)
    check_weights(x, x.shape[-1], [weight], [bias])
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.sinks = [sink_of(inputs[1])]


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[:3])
    results = list(call_backward("linear_backward", ctx.sinks, dy, *ctx.saved_tensors, needs))
    grads = [results.pop(0) if need else None for need in needs]
    return (*grads, None, None)


def _linear_backward(
    dy: Tensor, x: Tensor, weight: Tensor, needs: list[bool], *, sinks: Sequence[Sink | None] | None = None
) -> list[Tensor | None]:
    dy2d = flat(dy)
    results: list[Tensor | None] = []
    if needs[0]:
        results.append(torch.mm(dy2d, weight).view(x.shape))
    if needs[1]:
        results += weight_gradients([dy2d], flat(x), sinks)
    if needs[2]:
        results.append(dy2d.sum(0))
    return results


def _linear_backward_fake(dy: Tensor, x: Tensor, weight: Tensor, needs: list[bool]) -> list[Tensor]:
    results = [x.new_empty(x.shape), weight.new_empty(weight.shape), x.new_empty(weight.shape[0])]
    return [result for result, need in zip(results, needs, strict=True) if need]


define(
    "matmul_all_reduce",
    "(Tensor x, Tensor weight, Tensor? bias, str group_name, str implementation) -> Tensor",
    kernel=_kernel,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
    autocast=True,
)
define(
    "linear_backward",
    "(Tensor dy, Tensor x, Tensor weight, bool[] needs) -> Tensor[]",
    kernel=_linear_backward,
    fake=_linear_backward_fake,
)
