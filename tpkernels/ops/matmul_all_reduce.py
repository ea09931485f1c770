"""``matmul_all_reduce``: multiply this rank's slice of K and sum over the ranks; every rank gets the whole sum.

Forward, on rank r of W::

    y = p_0 + ... + p_{W-1} + b,  p_r = x_r @ w_r^T      equal bit for bit on all ranks

Backward.  Every rank continues with the same y, so dy is the same everywhere and nothing needs to be sent::

    dx_r = dy @ w_r,   dw_r = dy^T @ x_r,   db = sum over rows of dy
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels.comm import agreement, timeline
from tpkernels.comm.groups import Group, GroupLike, group_name, group_size, resolve
from tpkernels.ops import calling
from tpkernels.ops.calling import Signature
from tpkernels.ops.checks import check_common, check_local, check_weights, plain_linear
from tpkernels.ops.contract import MatmulAllReduce
from tpkernels.ops.library import call_backward, define, is_plain
from tpkernels.ops.main_grad import Sink, sink_of, weight_gradients
from tpkernels.ops.scaled_matmul import scaled_matmul_all_reduce
from tpkernels.ops.shapes import flat, fresh
from tpkernels.partition import Layout, array_split_sizes

__all__ = ["matmul_all_reduce", "rows_layout"]


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
) -> Tensor:
    """Multiply and sum over the group; chunks of the partial leave while the next are computed.

    Unfused equation::

        y = all_reduce(x @ weight^T) + bias

    =============  ======================  ==============================================
    argument       shape                   notes
    =============  ======================  ==============================================
    ``x``          ``[..., K_r]``          fp32, bf16, fp16, fp64, or fp8 (e4m3); any strides
    ``weight``     ``[N, K_r]``            this rank's columns; K_r may differ between ranks
    ``bias``       ``[N]`` or None         equal on all ranks; added once, after the sum
    ``scale_x``    ``[..., 1]`` or 1       fp32, for fp8: per row of x, or one for all
    ``scale_w...`` ``[N, 1]`` or 1         fp32, for fp8: per row of the weight, or one for all
    ``y``          ``[..., N]``            contiguous, equal on all ranks; dtype of x, for fp8 ``out_dtype``
    =============  ======================  ==============================================

    Scales and ``out_dtype`` as in :func:`tpkernels.matmul_reduce_scatter`.
    The gradient that arrives for y must be the same on every rank, as it is when all ranks compute the same loss.

    Raises:
        ValueError, UnsupportedProblem, GroupMismatch, PeerLost, CollectiveTimeout, GroupPoisoned: as
        :func:`tpkernels.all_gather_matmul`.
    """
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
        y = again(state, x, weight, bias, implementation)
        return _run(state, x, weight, bias, implementation) if y is None else y
    check_local("x", x, group=group)
    check_local("weight", weight, group=group)
    check_local("bias", bias, group=group)
    if size == 1:
        check_common("matmul_all_reduce", x, implementation)
        return plain_linear(x, weight, bias)
    return cast(Tensor, torch.ops.tpkernels.matmul_all_reduce(x, weight, bias, group_name(group), implementation))


def again(group: Group, x: Tensor, weight: Tensor, bias: Tensor | None, implementation: str) -> Tensor | None:
    """The op for plain arguments (:func:`is_plain`) like those of an earlier small call; None if there was none.

    Host work is what a decoding step has beside its GEMMs, and finds cold caches: this asks for no more than decides.
    The weight's dtype and device are left to ``F.linear``, unless the step multiplies itself; where that refuses, the
    long way says why.
    """
    repeated = group.repeated.get(_repetition(x, weight, bias, implementation))
    if repeated is None or timeline.active() or not (x.is_cpu and x.is_contiguous()):
        return None
    if bias is not None and not (bias.is_cpu and bias.is_contiguous()):
        return None
    if repeated.multiply is not None:
        if weight.dtype is not x.dtype or not weight.is_cpu or weight.stride(1) != 1:
            return None
        y = x.new_empty((*x.shape[:-1], weight.shape[0]))
        calling.sum_again(group, repeated, y, bias, (x, weight))
        return y
    try:
        y = F.linear(x, weight)
    except RuntimeError:
        return None
    calling.sum_again(group, repeated, y, bias)
    return y


def _repetition(x: Tensor, weight: Tensor, bias: Tensor | None, implementation: str) -> Hashable:
    facts = None if bias is None else (bias.shape, bias.dtype)
    return ("matmul_all_reduce", implementation, x.shape, weight.shape, x.dtype, facts)


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
        repeated = calling.repeatable(group, known, arguments)
        if repeated is not None:
            group.repeated[_repetition(x, weight, bias, implementation)] = repeated
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
