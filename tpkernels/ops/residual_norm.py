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
from typing import Any, cast

import torch
from torch import Tensor

from tpkernels.comm import agreement, residual_norm
from tpkernels.comm.groups import Group, GroupLike, group_name, process_group, resolve
from tpkernels.ops import calling
from tpkernels.ops.calling import Signature
from tpkernels.ops.checks import check_common, check_dim, check_local, check_shard_sizes, check_weights
from tpkernels.ops.contract import AllReduce, MatmulAllReduce, MatmulReduceScatter, ResidualNorm
from tpkernels.ops.main_grad import sink_of
from tpkernels.ops.registration import call, call_backward, define, is_plain
from tpkernels.ops.repeated import again, remember
from tpkernels.ops.shapes import flat, fresh
from tpkernels.partition import Layout, array_split_sizes

__all__ = ["add_norm", "matmul_all_reduce_norm", "matmul_reduce_scatter_norm", "wanted"]


def wanted(group: GroupLike, residual: Tensor | None, norm_weight: Tensor | None, eps: float | None) -> bool:
    """Whether a call is one of these; a residual and the weight of the norm go together."""
    if residual is None and norm_weight is None and eps is None:
        return False
    if residual is None or norm_weight is None:
        missing = "residual" if residual is None else "norm_weight"
        reason = f"residual and norm_weight go together (and eps, if given, with them), got no {missing}"
        agreement.refuse(resolve(group), "a call", reason)
        raise ValueError(reason)
    check_local("residual", residual, group=group)
    check_local("norm_weight", norm_weight, group=group)
    return True


def add_norm(y: Tensor, residual: Tensor, norm_weight: Tensor, eps: float | None) -> tuple[Tensor, Tensor]:
    """(normed, sums) of a y that exists."""
    _check_norm(y.shape, y, residual, norm_weight, eps)
    normed, sums, _ = call("add_norm", y, residual, norm_weight, _eps(eps, y.dtype))
    return normed, sums


def matmul_all_reduce_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float | None,
    group: GroupLike,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    check_local("x", x, group=group)
    check_local("weight", weight, group=group)
    check_local("bias", bias, group=group)
    if is_plain(x, weight, weight if bias is None else bias, residual, norm_weight):
        found = _again(resolve(group), x, weight, bias, residual, norm_weight, _eps(eps, x.dtype), implementation)
        if found is not None:
            return found
    normed, sums, _ = call(
        "matmul_all_reduce_norm", x, weight, bias, residual, norm_weight, _eps(eps, x.dtype), group_name(group),
        implementation,
    )  # fmt: skip
    return normed, sums


def _again(
    group: Group,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    implementation: str,
) -> tuple[Tensor, Tensor] | None:
    """The op like an earlier small call (:mod:`tpkernels.ops.repeated`); None where this is none."""
    for given in (residual, norm_weight):
        if given.dtype is not x.dtype or not given.is_cpu or not given.is_contiguous():
            return None
    if norm_weight.shape != weight.shape[:1] or residual.shape != (*x.shape[:-1], weight.shape[0]):
        return None
    sums = again(group, x, weight, bias, implementation, eps)
    if sums is None:
        return None
    tail = ResidualNorm(flat(residual), norm_weight, eps)
    tail.fill(flat(sums), 0)
    return fresh(tail.normed, sums.shape), sums


def matmul_reduce_scatter_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float | None,
    group: GroupLike,
    scatter_dim: int,
    shard_sizes: Sequence[int] | None,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    normed, sums, _ = call(
        "matmul_reduce_scatter_norm", x, weight, bias, residual, norm_weight, _eps(eps, x.dtype), group_name(group),
        scatter_dim, None if shard_sizes is None else list(shard_sizes), implementation,
    )  # fmt: skip
    return normed, sums


def _eps(eps: float | None, dtype: torch.dtype) -> float:
    """As ``F.rms_norm`` does without one."""
    return torch.finfo(dtype).eps if eps is None and dtype.is_floating_point else float(eps or 0.0)


def _check_norm(shape: Sequence[int], like: Tensor, residual: Tensor, norm_weight: Tensor, eps: float | None) -> None:
    """``shape``: of the sum on this rank; ``like`` has its dtype and device."""
    if residual.shape != torch.Size(shape):
        raise ValueError(f"residual must have the shape of the result {tuple(shape)}, got {tuple(residual.shape)}")
    if norm_weight.shape != torch.Size(shape[-1:]):
        raise ValueError(f"norm_weight must have shape ({shape[-1]},), got {tuple(norm_weight.shape)}")
    if eps is not None and not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps ({eps}) must be a finite number, at least 0")
    for name, tensor in (("residual", residual), ("norm_weight", norm_weight)):
        if tensor.dtype != like.dtype:
            raise ValueError(
                f"{name} must have the dtype of the product ({like.dtype}; under autocast the autocast dtype), got "
                f"{tensor.dtype}: cast it, or add and normalise the result of a call without residual yourself"
            )
        if tensor.device != like.device:
            raise ValueError(f"{name} must be on the device of x ({like.device}), got {tensor.device}")


def _detail(x: Tensor, eps: float) -> str:
    return f"then residual and RMS norm, eps={eps!r}, by {residual_norm.who(x.device)}"


# --- y exists ---------------------------------------------------------------------------------------------------------


def _add_norm_kernel(y: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    sums = flat(y.clone(memory_format=torch.contiguous_format))
    tail = ResidualNorm(flat(residual), norm_weight.contiguous(), eps)
    tail.fill(sums, 0)
    return _results(tail, sums, y.shape)


def _add_norm_fake(y: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_results(y, y.shape)


def _results(tail: ResidualNorm, sums: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    return fresh(tail.normed, shape), fresh(sums, shape), tail.scales


def _fake_results(like: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    rows = math.prod(shape[:-1])
    scales = like.new_empty(rows, dtype=residual_norm.of_scales(like.dtype))
    return like.new_empty(list(shape)), like.new_empty(list(shape)), scales


def _setup_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, sums, scales = output
    ctx.save_for_backward(sums, scales, inputs[2])
    ctx.mark_non_differentiable(scales)
    ctx.set_materialize_grads(False)


def _add_norm_backward(ctx: Any, dn: Tensor | None, dr: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if dn is None and dr is None:
        return None, None, None, None
    d, dweight = torch.ops.tpkernels.add_norm_backward(dn, dr, *ctx.saved_tensors, None)
    return d, d, dweight, None


def _norm_backward_kernel(
    dn: Tensor | None, dr: Tensor | None, sums: Tensor, scales: Tensor, norm_weight: Tensor, name: str | None
) -> tuple[Tensor, Tensor]:
    """``name``: of the group over which the weight's gradient is summed."""
    d, dweight = residual_norm.backward(
        None if dn is None else flat(dn), None if dr is None else flat(dr), flat(sums), scales,
        norm_weight.contiguous(),
    )  # fmt: skip
    if name is not None:
        group, whole = resolve(name), dweight.view(1, -1)
        layout = Layout(1, array_split_sizes(1, group.size), 1)
        signature = Signature(
            "all_reduce", whole.dtype, whole.device.type, layout, whole.shape[1], "auto", "gradient of a norm's weight"
        )
        dweight = cast(Tensor, calling.run(group, signature, 0, AllReduce(whole), whole.device)).view(-1)
    return fresh(d, sums.shape), fresh(dweight.to(norm_weight.dtype), norm_weight.shape)


def _norm_backward_fake(
    dn: Tensor | None, dr: Tensor | None, sums: Tensor, scales: Tensor, norm_weight: Tensor, name: str | None
) -> tuple[Tensor, Tensor]:
    return sums.new_empty(sums.shape), norm_weight.new_empty(norm_weight.shape)


# --- the sum is everywhere --------------------------------------------------------------------------------------------


def _reduce_kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    name: str,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    group = resolve(name)
    facts = (
        calling.facts_of("matmul_all_reduce_norm", implementation, x, weight, bias, residual, norm_weight), eps
    )  # fmt: skip
    known = group.checked.get(facts)
    if known is None:
        try:
            shape = _check_reduce(x, weight, bias, residual, norm_weight, eps, implementation)
        except ValueError as error:
            agreement.refuse(group, "matmul_all_reduce", str(error))
            raise
        layout = Layout(1, array_split_sizes(shape[:-1].numel(), group.size), 1)
        known = group.checked[facts] = calling.Known(
            Signature(
                "matmul_all_reduce", x.dtype, x.device.type, layout, weight.shape[0], implementation, _detail(x, eps)
            )
        )
    tail = ResidualNorm(flat(residual), norm_weight.contiguous(), eps)
    arguments = MatmulAllReduce([flat(x)], [weight.t()], bias, tail=tail)
    first = known.plan is None
    sums: Tensor = calling.run_known(group, known, x.shape[-1], arguments, x.device)
    if first:
        remember(group, known, arguments, x, weight, implementation, eps)
    return _results(tail, sums, residual.shape)


def _check_reduce(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    implementation: str,
) -> torch.Size:
    """The shape of the result."""
    check_common("matmul_all_reduce", x, implementation)
    check_weights(x, x.shape[-1], [weight], [bias])
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    _check_norm(shape, x, residual, norm_weight, eps)
    return shape


def _reduce_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    name: str,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_results(x, _check_reduce(x, weight, bias, residual, norm_weight, eps, implementation))


def _setup_reduce(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, _, norm_weight = inputs[:5]
    _, sums, scales = output
    ctx.save_for_backward(x, weight, sums, scales, norm_weight)
    ctx.mark_non_differentiable(scales)
    ctx.set_materialize_grads(False)
    ctx.sinks = [sink_of(weight)]


def _reduce_backward(ctx: Any, dn: Tensor | None, dr: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if dn is None and dr is None:
        return (None,) * 8
    x, weight, *saved = ctx.saved_tensors
    d, dweight = torch.ops.tpkernels.add_norm_backward(dn, dr, *saved, None)
    needs = list(ctx.needs_input_grad[:3])
    results = list(call_backward("linear_backward", ctx.sinks, d, x, weight, needs)) if any(needs) else []
    grads = [results.pop(0) if need else None for need in needs]
    return (*grads, d, dweight, None, None, None)


# --- the sum is scattered ---------------------------------------------------------------------------------------------


def _scatter_kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    name: str,
    scatter_dim: int,
    shard_sizes: list[int] | None,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    group = resolve(name)
    try:
        _, layout = _check_scatter(
            (group.rank, group.size), x, weight, bias, residual, norm_weight, eps, scatter_dim, shard_sizes,
            implementation,
        )  # fmt: skip
    except ValueError as error:
        agreement.refuse(group, "matmul_reduce_scatter", str(error))
        raise
    tail = ResidualNorm(flat(residual), norm_weight.contiguous(), eps)
    arguments = MatmulReduceScatter([flat(x)], [weight.t()], layout, bias, tail=tail)
    signature = Signature(
        "matmul_reduce_scatter", x.dtype, x.device.type, layout, weight.shape[0], implementation, _detail(x, eps)
    )
    sums: Tensor = calling.run(group, signature, x.shape[-1], arguments, x.device)
    return _results(tail, sums, residual.shape)


def _check_scatter(
    place: tuple[int, int],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    scatter_dim: int,
    shard_sizes: Sequence[int] | None,
    implementation: str,
) -> tuple[list[int], Layout]:
    """The shape of this rank's result, and the layout of the whole; ``place``: the rank, and how many there are."""
    check_common("matmul_reduce_scatter", x, implementation)
    dim = check_dim("scatter_dim", scatter_dim, x.dim())
    if dim == x.dim() - 1:
        raise ValueError(f"scatter_dim ({scatter_dim}) must not be the features: a norm needs whole rows")
    check_weights(x, x.shape[-1], [weight], [bias])
    rank, size = place
    check_shard_sizes(shard_sizes, size, total=x.shape[dim])
    shape = [*x.shape[:-1], weight.shape[0]]
    layout = Layout.of(shape, dim, shard_sizes if shard_sizes is not None else array_split_sizes(shape[dim], size))
    shape[dim] = layout.sizes[rank]
    _check_norm(shape, x, residual, norm_weight, eps)
    return shape, layout


def _scatter_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    name: str,
    scatter_dim: int,
    shard_sizes: list[int] | None,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    pg = process_group(name)
    shape, _ = _check_scatter(
        (pg.rank(), pg.size()), x, weight, bias, residual, norm_weight, eps, scatter_dim, shard_sizes, implementation
    )
    return _fake_results(x, shape)


def _setup_scatter(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _setup_reduce(ctx, inputs, output)
    x, _, _, _, _, _, name, scatter_dim, shard_sizes, implementation = inputs
    dim = scatter_dim % x.dim()
    sizes = shard_sizes if shard_sizes is not None else array_split_sizes(x.shape[dim], process_group(name).size())
    ctx.settings = (name, dim, list(sizes), implementation)


def _scatter_backward(ctx: Any, dn: Tensor | None, dr: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    x, weight, sums, scales, norm_weight = ctx.saved_tensors
    # A rank whose rows nobody needs takes part all the same: the others gather its gradient.
    dn = torch.zeros_like(sums) if dn is None and dr is None else dn
    name = ctx.settings[0] if ctx.needs_input_grad[4] else None
    d, dweight = torch.ops.tpkernels.add_norm_backward(dn, dr, sums, scales, norm_weight, name)
    needs = list(ctx.needs_input_grad[:3])
    results: list[Tensor] = []
    if any(needs):
        arguments = (d, x, weight, *ctx.settings, needs)
        results = list(call_backward("matmul_reduce_scatter_backward", ctx.sinks, *arguments))
    grads = [results.pop(0) if need else None for need in needs]
    return (*grads, d, dweight, None, None, None, None, None)


_OPERANDS = "Tensor x, Tensor weight, Tensor? bias, Tensor residual, Tensor norm_weight, float eps, str group_name,"
define(
    "add_norm",
    "(Tensor y, Tensor residual, Tensor norm_weight, float eps) -> (Tensor, Tensor, Tensor)",
    kernel=_add_norm_kernel,
    fake=_add_norm_fake,
    backward=_add_norm_backward,
    setup_context=_setup_add_norm,
)
define(
    "add_norm_backward",
    "(Tensor? dn, Tensor? dr, Tensor sums, Tensor scales, Tensor norm_weight, str? group_name) -> (Tensor, Tensor)",
    kernel=_norm_backward_kernel,
    fake=_norm_backward_fake,
)
define(
    "matmul_all_reduce_norm",
    f"({_OPERANDS} str implementation) -> (Tensor, Tensor, Tensor)",
    kernel=_reduce_kernel,
    fake=_reduce_fake,
    backward=_reduce_backward,
    setup_context=_setup_reduce,
    autocast=3,
)
define(
    "matmul_reduce_scatter_norm",
    f"({_OPERANDS} int scatter_dim, SymInt[]? shard_sizes, str implementation) -> (Tensor, Tensor, Tensor)",
    kernel=_scatter_kernel,
    fake=_scatter_fake,
    backward=_scatter_backward,
    setup_context=_setup_scatter,
    autocast=3,
)
