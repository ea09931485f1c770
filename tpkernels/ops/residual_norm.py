"""A row GEMM, its sum over the ranks, the residual and the RMS norm in one op: what stands between two blocks.

Forward, on rank r of W; rounded to the dtype of x after each line, so that the bits are those of the single ops::

    y      = p_0 + ... + p_{W-1} + b,  p_i = x_i @ w_i^T      everywhere, or this rank's rows of it
    sums   = y + residual                                     the new residual
    normed = sums / sqrt(mean(sums^2) + eps) * norm_weight

Backward, from the gradients dn of ``normed`` and dr of ``sums``, with g = sums / sqrt(...), h = dn * norm_weight::

    d            = dr + (h - g * mean(h * g)) / sqrt(...)     of y and of the residual alike
    dnorm_weight = sum over rows of dn * g                    of all rows: summed over the ranks where each has its own

and from d those of x, w and b as in :mod:`~tpkernels.ops.matmul_all_reduce` and
:mod:`~tpkernels.ops.matmul_reduce_scatter`, which hand calls with a residual to this file.

Backends do the last two lines on blocks of rows as soon as they are summed
(:class:`~tpkernels.ops.contract.ResidualNorm`).

Idea: the all-reduce fusions of FlashInfer, vLLM and TensorRT-LLM, which have it forward and on GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor

from tpkernels.comm import agreement
from tpkernels.comm.groups import GroupLike, group_name, process_group, resolve
from tpkernels.gemm import residual_norm
from tpkernels.ops import agreed_call, fast_path
from tpkernels.ops.agreed_call import Signature, facts_of
from tpkernels.ops.checks import check_common, check_local, check_scatter, check_weights
from tpkernels.ops.contract import AllReduce, MatmulAllReduce, MatmulReduceScatter, ResidualNorm
from tpkernels.ops.gradients import of_linear
from tpkernels.ops.main_grad import sink_of
from tpkernels.ops.options import Reduce, Scatter
from tpkernels.ops.registration import call, define
from tpkernels.ops.shapes import flat, fresh, rows_layout
from tpkernels.partition import Layout

__all__ = ["Norm", "add_norm", "matmul_all_reduce_norm", "wanted"]


class Norm(NamedTuple):
    """What follows the sum: arguments of the ops of this file."""

    residual: Tensor
    norm_weight: Tensor
    eps: float

    @classmethod
    def of(cls, residual: Tensor, norm_weight: Tensor, eps: float | None) -> Self:
        """Without ``eps`` that of the sums' dtype, as ``F.rms_norm`` has it; the residual has that dtype."""
        if eps is None and residual.is_floating_point():
            eps = torch.finfo(residual.dtype).eps
        return cls(residual, norm_weight, float(eps or 0.0))

    def check(self, shape: Sequence[int], like: Tensor) -> None:
        """``shape``: of the sum on this rank; ``like`` has its dtype and device."""
        if self.residual.shape != torch.Size(shape):
            raise ValueError(
                f"residual must have the shape of the result {tuple(shape)}, got {tuple(self.residual.shape)}"
            )
        if self.norm_weight.shape != torch.Size(shape[-1:]):
            raise ValueError(f"norm_weight must have shape ({shape[-1]},), got {tuple(self.norm_weight.shape)}")
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise ValueError(f"eps ({self.eps}) must be a finite number, at least 0")
        for name, tensor in (("residual", self.residual), ("norm_weight", self.norm_weight)):
            if tensor.dtype != like.dtype:
                raise ValueError(
                    f"{name} must have the dtype of the product ({like.dtype}; under autocast the autocast dtype), got "
                    f"{tensor.dtype}: cast it, or add and normalise the result of a call without residual yourself"
                )
            if tensor.device != like.device:
                raise ValueError(f"{name} must be on the device of x ({like.device}), got {tensor.device}")

    def tail(self) -> ResidualNorm:
        return ResidualNorm(flat(self.residual), self.norm_weight.contiguous(), self.eps)

    def detail(self) -> str:
        """What the ranks must have in common."""
        return f"then residual and RMS norm, eps={self.eps!r}, by {residual_norm.who(self.residual.device)}"


def wanted(
    group: GroupLike, residual: Tensor | None, norm_weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor] | None:
    """The residual and the weight of the norm, which go together; None for a call without."""
    if residual is None and norm_weight is None and eps is None:
        return None
    if residual is None or norm_weight is None:
        missing = "residual" if residual is None else "norm_weight"
        reason = f"residual and norm_weight go together (and eps, if given, with them), got no {missing}"
        agreement.refuse(resolve(group), "a call", reason)
        raise ValueError(reason)
    check_local(group, residual=[residual], norm_weight=[norm_weight])
    return residual, norm_weight


def add_norm(y: Tensor, residual: Tensor, norm_weight: Tensor, eps: float | None) -> tuple[Tensor, Tensor]:
    """(normed, sums) of a y that exists."""
    norm = Norm.of(residual, norm_weight, eps)
    norm.check(y.shape, y)
    normed, sums, _ = call("add_norm", y, norm)
    return normed, sums


def matmul_all_reduce_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, group: GroupLike, implementation: str
) -> tuple[Tensor, Tensor]:
    y = fast_path.repeat("matmul_all_reduce_norm", group, implementation, x, weight, bias, *norm)
    if y is not None:
        tail = norm.tail()
        tail.fill(flat(y), 0)
        return fresh(tail.normed, y.shape), y
    options = Reduce(group_name(group), implementation)
    normed, sums, _ = call("matmul_all_reduce_norm", x, weight, bias, norm, options)
    return normed, sums


# --- y exists ---------------------------------------------------------------------------------------------------------


def _add_norm_kernel(y: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    sums, tail = flat(y.clone(memory_format=torch.contiguous_format)), norm.tail()
    tail.fill(sums, 0)
    return _results(tail, sums, y.shape)


def _add_norm_fake(y: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_results(y, y.shape)


def _results(tail: ResidualNorm, sums: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    return fresh(tail.normed, shape), fresh(sums, shape), tail.scales


def _fake_results(like: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    rows = math.prod(shape[:-1])
    scales = like.new_empty(rows, dtype=residual_norm.of_scales(like.dtype))
    return like.new_empty(list(shape)), like.new_empty(list(shape)), scales


def _setup_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (_, _, norm_weight, _), (_, sums, scales) = inputs, output
    ctx.save_for_backward(sums, scales, norm_weight)
    ctx.mark_non_differentiable(scales)
    ctx.set_materialize_grads(False)


def _add_norm_backward(ctx: Any, dn: Tensor | None, dr: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if dn is None and dr is None:
        return ()
    d, dweight = torch.ops.tpkernels.add_norm_backward(dn, dr, *ctx.saved_tensors, None)
    return d, d, dweight


def _norm_backward_kernel(
    dn: Tensor | None, dr: Tensor | None, sums: Tensor, scales: Tensor, norm_weight: Tensor, group_name: str | None
) -> tuple[Tensor, Tensor]:
    """``group_name``: of the group over which the weight's gradient is summed."""
    d, dweight = residual_norm.backward(
        None if dn is None else flat(dn), None if dr is None else flat(dr), flat(sums), scales,
        norm_weight.contiguous(),
    )  # fmt: skip
    if group_name is not None:
        group, whole = resolve(group_name), dweight.view(1, -1)
        signature = Signature(
            "all_reduce", whole.dtype, whole.device.type, rows_layout(1, group.size), whole.shape[1], "auto",
            "gradient of a norm's weight",
        )  # fmt: skip
        dweight = cast(Tensor, agreed_call.run(group, signature, 0, AllReduce(whole), whole.device)).view(-1)
    return fresh(d, sums.shape), fresh(dweight.to(norm_weight.dtype), norm_weight.shape)


def _norm_backward_fake(
    dn: Tensor | None, dr: Tensor | None, sums: Tensor, scales: Tensor, norm_weight: Tensor, group_name: str | None
) -> tuple[Tensor, Tensor]:
    return sums.new_empty(sums.shape), norm_weight.new_empty(norm_weight.shape)


# --- the sum is everywhere --------------------------------------------------------------------------------------------


def _reduce_kernel(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, options: Reduce
) -> tuple[Tensor, Tensor, Tensor]:
    group = resolve(options.group_name)

    def check() -> Signature:
        layout = rows_layout(_check_reduce(x, weight, bias, norm, options)[:-1].numel(), group.size)
        return Signature(
            "matmul_all_reduce", x.dtype, x.device.type, layout, weight.shape[0], options.implementation,
            norm.detail(), bias=bias is not None,
        )  # fmt: skip

    facts = facts_of("matmul_all_reduce_norm", options.implementation, x, weight, bias, *norm)
    checked = agreed_call.checked_call(group, facts, "matmul_all_reduce", check)
    tail = norm.tail()
    arguments = MatmulAllReduce([flat(x)], [weight.t()], bias, tail=tail)
    sums: Tensor = agreed_call.run_checked(group, checked, x.shape[-1], arguments, x.device)
    return _results(tail, sums, norm.residual.shape)


def _check_reduce(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, options: Reduce) -> torch.Size:
    """The shape of the result."""
    check_common("matmul_all_reduce", x, options.implementation)
    check_weights(x, x.shape[-1], [weight], [bias])
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    norm.check(shape, x)
    return shape


def _reduce_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, options: Reduce
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_results(x, _check_reduce(x, weight, bias, norm, options))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (x, weight, _, _, norm_weight, _, *ctx.options), (_, sums, scales) = inputs, output
    ctx.save_for_backward(x, weight, sums, scales, norm_weight)
    ctx.mark_non_differentiable(scales)
    ctx.set_materialize_grads(False)
    ctx.sinks = [sink_of(weight)]


def _reduce_backward(ctx: Any, dn: Tensor | None, dr: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if dn is None and dr is None:
        return ()
    x, weight, *saved = ctx.saved_tensors
    d, dweight = torch.ops.tpkernels.add_norm_backward(dn, dr, *saved, None)
    return *of_linear(ctx, "linear_backward", d, x, weight), d, dweight


# --- the sum is scattered ---------------------------------------------------------------------------------------------


def _scatter_kernel(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, options: Scatter
) -> tuple[Tensor, Tensor, Tensor]:
    group = resolve(options.group_name)
    try:
        _, layout = _check_scatter(x, weight, bias, norm, options, group.rank, group.size)
    except ValueError as error:
        agreement.refuse(group, "matmul_reduce_scatter", str(error))
        raise
    tail = norm.tail()
    arguments = MatmulReduceScatter([flat(x)], [weight.t()], layout, bias, tail=tail)
    signature = Signature(
        "matmul_reduce_scatter", x.dtype, x.device.type, layout, weight.shape[0], options.implementation, norm.detail(),
        bias=bias is not None,
    )  # fmt: skip
    sums: Tensor = agreed_call.run(group, signature, x.shape[-1], arguments, x.device)
    return _results(tail, sums, norm.residual.shape)


def _check_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, options: Scatter, rank: int, size: int
) -> tuple[list[int], Layout]:
    """The shape of this rank's result, and the layout of the whole."""
    check_common("matmul_reduce_scatter", x, options.implementation)
    check_weights(x, x.shape[-1], [weight], [bias])
    shape, layout = check_scatter(x, weight, options.scatter_dim, options.shard_sizes, rank, size)
    if layout.feature:
        raise ValueError(f"scatter_dim ({options.scatter_dim}) must not be the features: a norm needs whole rows")
    norm.check(shape, x)
    return shape, layout


def _scatter_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, options: Scatter
) -> tuple[Tensor, Tensor, Tensor]:
    pg = process_group(options.group_name)
    return _fake_results(x, _check_scatter(x, weight, bias, norm, options, pg.rank(), pg.size())[0])


def _scatter_backward(ctx: Any, dn: Tensor | None, dr: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    x, weight, sums, scales, norm_weight = ctx.saved_tensors
    options = Scatter(*ctx.options)
    # A rank whose rows nobody needs takes part all the same: the others gather its gradient.
    dn = torch.zeros_like(sums) if dn is None and dr is None else dn
    name = options.group_name if ctx.needs_input_grad[4] else None
    d, dweight = torch.ops.tpkernels.add_norm_backward(dn, dr, sums, scales, norm_weight, name)
    return *of_linear(ctx, "matmul_reduce_scatter_backward", d, x, weight, options), d, dweight


define(
    "add_norm",
    kernel=_add_norm_kernel,
    fake=_add_norm_fake,
    backward=_add_norm_backward,
    setup_context=_setup_add_norm,
)
define("add_norm_backward", kernel=_norm_backward_kernel, fake=_norm_backward_fake)
define(
    "matmul_all_reduce_norm",
    kernel=_reduce_kernel,
    fake=_reduce_fake,
    backward=_reduce_backward,
    setup_context=_setup_context,
    autocast=3,
)
define(
    "matmul_reduce_scatter_norm",
    kernel=_scatter_kernel,
    fake=_scatter_fake,
    backward=_scatter_backward,
    setup_context=_setup_context,
    autocast=3,
)
