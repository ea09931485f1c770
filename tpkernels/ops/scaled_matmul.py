"""The fused ops on fp8 operands: e4m3 x and weights with fp32 scales, per tensor or per row; forward only.

On rank r of W, with x~ = x * scale_x and w~ = w * scale_weight::

    all_gather_scaled_matmul       y   = activation(concat(x~_0, ..., x~_{W-1}) @ w~_r^T + b_r)      or gated
    scaled_matmul_reduce_scatter   y_r = (p_0 + ... + p_{W-1})[r] + b,   p_r = x~_r @ w~_r^T
    scaled_matmul_all_reduce       y   =  p_0 + ... + p_{W-1} + b

Owns the schemas of these ops, to which the public functions of the other files hand calls with scales.  Products are
exact and summed over K in fp32, scales are applied to the sums; y is rounded once to ``out_dtype``, as are the partials
p_r where they travel.  A gather moves one byte per element, and each row's scale behind it in the same chunk
(:mod:`tpkernels.fp8`).  Ranks may differ in their kind of scale: per tensor is per row with equal scales.

Refuses gradients: rounding to fp8 has none of use.  To train, quantise inside of a ``torch.autograd.Function`` whose
backward calls the ops on the dtypes of its choice.

Names of arguments after ``torch._scaled_mm`` and ``torch.ops.symm_mem.fused_all_gather_scaled_matmul``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from tpkernels import fp8
from tpkernels.comm import agreement
from tpkernels.comm.groups import GroupLike, group_name, process_group, resolve
from tpkernels.fp8 import Scaled
from tpkernels.ops import calling
from tpkernels.ops.calling import Signature
from tpkernels.ops.checks import (
    check_common,
    check_dim,
    check_gate,
    check_local,
    check_out_dtype,
    check_scales,
    check_shard_sizes,
    check_weights,
)
from tpkernels.ops.contract import GATED, AllGatherMatmul, MatmulAllReduce, MatmulReduceScatter
from tpkernels.ops.registration import call, define, wants_grad
from tpkernels.ops.shapes import flat, fresh, gather_layout, gathered_shape, pack_biases, unpack_biases
from tpkernels.partition import Layout, array_split_sizes

__all__ = ["all_gather_scaled_matmul", "scaled_matmul_all_reduce", "scaled_matmul_reduce_scatter"]

_NO_GRADIENT = "a call with fp8 operands has no gradient"


def all_gather_scaled_matmul(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    group: GroupLike,
    *,
    scale_x: Tensor | None,
    scale_weight: Tensor | Sequence[Tensor] | None,
    out_dtype: torch.dtype | None,
    activation: str | None,
    gather_dim: int,
    shard_sizes: Sequence[int] | None,
    return_gathered: bool,
    implementation: str,
) -> list[Tensor]:
    """One output per weight, or one of a gated pair; with ``return_gathered`` the gathered x and its scales behind."""
    scales = [scale_weight] if isinstance(scale_weight, Tensor) else list(scale_weight or ())
    given_x, given_weights = _admit(group, scale_x, scales, x, *weights, *biases)
    outputs: list[Tensor] = call(
        "all_gather_scaled_matmul", x, weights, pack_biases(biases, x), given_x, given_weights,
        group_name(process_group(group)), out_dtype or torch.bfloat16, activation, gather_dim,
        None if shard_sizes is None else list(shard_sizes), return_gathered, implementation,
    )  # fmt: skip
    return outputs


def scaled_matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: GroupLike,
    *,
    scale_x: Tensor | None,
    scale_weight: Tensor | None,
    out_dtype: torch.dtype | None,
    scatter_dim: int,
    shard_sizes: Sequence[int] | None,
    implementation: str,
) -> Tensor:
    given_x, given_weight = _admit(group, scale_x, [scale_weight], x, weight, bias)
    sizes = None if shard_sizes is None else list(shard_sizes)
    y: Tensor = call(
        "scaled_matmul_reduce_scatter", x, weight, bias, given_x, *given_weight, group_name(process_group(group)),
        out_dtype or torch.bfloat16, scatter_dim, sizes, implementation,
    )  # fmt: skip
    return y


def scaled_matmul_all_reduce(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: GroupLike,
    *,
    scale_x: Tensor | None,
    scale_weight: Tensor | None,
    out_dtype: torch.dtype | None,
    implementation: str,
) -> Tensor:
    given_x, given_weight = _admit(group, scale_x, [scale_weight], x, weight, bias)
    y: Tensor = call(
        "scaled_matmul_all_reduce", x, weight, bias, given_x, *given_weight, group_name(process_group(group)),
        out_dtype or torch.bfloat16, implementation,
    )  # fmt: skip
    return y


def _admit(
    group: GroupLike, scale_x: Tensor | None, scale_weights: Sequence[Tensor | None], *operands: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """The scales, all of which must be there, be local, and like the operands have no use for a gradient."""
    check_local("scale_x", scale_x, group=group)
    check_local("scale_weight", *scale_weights, group=group)
    missing = [
        name
        for name, scales in (("scale_x", [scale_x]), ("scale_weight", scale_weights))
        if not scales or any(scale is None for scale in scales)
    ]
    reason = None
    if missing:
        reason = f"fp8 operands need scale_x and scale_weight, got no {' and no '.join(missing)}"
    elif wants_grad(scale_x, *scale_weights, *operands):
        reason = (
            f"{_NO_GRADIENT}, but one of x, weight, bias, scale_x and scale_weight requires "
            "one: call it under torch.no_grad(), or quantise inside of a torch.autograd.Function of yours"
        )
    if reason is not None:
        agreement.refuse(resolve(group), "a call with fp8 operands", reason)
        raise ValueError(reason)
    return cast(Tensor, scale_x), [cast(Tensor, scale) for scale in scale_weights]


def _check(
    op: str,
    x: Tensor,
    k: int | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scale_x: Tensor,
    scale_weights: Sequence[Tensor],
    out_dtype: torch.dtype,
    implementation: str,
    activation: str | None = None,
) -> None:
    check_common(op, x, implementation, activation, scaled=True)
    check_out_dtype(out_dtype)
    check_weights(x, x.shape[-1] if k is None else k, weights, biases, out_dtype=out_dtype)
    check_scales(x, weights, scale_x, scale_weights)


def _matrix(weight: Tensor, scale: Tensor) -> Scaled:
    return Scaled(weight.t(), fp8.scale_rows(scale, weight.shape[0]).t())


# --- all-gather -------------------------------------------------------------------------------------------------------


def _gather_layout(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scale_x: Tensor,
    scale_weights: Sequence[Tensor],
    rank: int,
    size: int,
    out_dtype: torch.dtype,
    activation: str | None,
    dim: int,
    sizes: Sequence[int] | None,
    implementation: str,
) -> tuple[int, Layout]:
    check_common("all_gather_matmul", x, implementation, activation, scaled=True)
    dim = check_dim("gather_dim", dim, x.dim())
    check_shard_sizes(sizes, size, own=(rank, x.shape[dim]))
    layout = gather_layout(x, dim, sizes, size)
    check_gate(activation, weights)
    k = sum(layout.sizes) if layout.feature else x.shape[-1]
    _check("all_gather_matmul", x, k, weights, biases, scale_x, scale_weights, out_dtype, implementation, activation)
    return dim, layout


def _gather_kernel(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    scale_x: Tensor,
    scale_weights: list[Tensor],
    name: str,
    out_dtype: torch.dtype,
    activation: str | None,
    gather_dim: int,
    shard_sizes: list[int] | None,
    keep_gathered: bool,
    implementation: str,
) -> list[Tensor]:
    group = resolve(name)
    bias_list = unpack_biases(biases, weights)
    try:
        dim, layout = _gather_layout(
            x, weights, bias_list, scale_x, scale_weights, group.rank, group.size, out_dtype, activation, gather_dim,
            shard_sizes, implementation,
        )  # fmt: skip
    except ValueError as error:
        agreement.refuse(group, "all_gather_matmul", str(error))
        raise
    x2d = flat(x)
    packed = layout.sizes if layout.feature else (x2d.shape[1],)
    in_bytes = layout
    if layout.feature:
        in_bytes = Layout(layout.outer, tuple(map(fp8.packed_bytes, layout.sizes)), layout.inner, feature=True)
    arguments = AllGatherMatmul(
        fp8.pack(x2d, fp8.scale_rows(scale_x, x2d.shape[0])), in_bytes,
        [_matrix(weight, scale) for weight, scale in zip(weights, scale_weights, strict=True)], bias_list, activation,
        keep_gathered, out_dtype=out_dtype, packed=packed,
    )  # fmt: skip
    signature = Signature(
        "all_gather_matmul", x.dtype, x.device.type, layout, sum(packed), implementation, out_dtype=out_dtype,
        activation=activation,
    )  # fmt: skip
    result = calling.run(group, signature, sum(w.shape[0] for w in weights), arguments, x.device)
    shape = gathered_shape(x, dim, layout)
    outputs = [fresh(out, (*shape[:-1], out.shape[1])) for out in result.outs]
    if keep_gathered:
        parts = fp8.split(result.whole, packed)
        numbers = torch.cat([part.numbers.view(torch.uint8) for part in parts], 1).view(fp8.DTYPE)
        scales = torch.cat([part.scale for part in parts], 1)
        outputs += [fresh(numbers, shape), fresh(scales, (*shape[:-1], len(parts)))]
    return outputs


def _gather_fake(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    scale_x: Tensor,
    scale_weights: list[Tensor],
    name: str,
    out_dtype: torch.dtype,
    activation: str | None,
    gather_dim: int,
    shard_sizes: list[int] | None,
    keep_gathered: bool,
    implementation: str,
) -> list[Tensor]:
    pg = process_group(name)
    dim, layout = _gather_layout(
        x, weights, unpack_biases(biases, weights), scale_x, scale_weights, pg.rank(), pg.size(), out_dtype, activation,
        gather_dim, shard_sizes, implementation,
    )  # fmt: skip
    shape = gathered_shape(x, dim, layout)
    of = weights[:1] if activation in GATED else weights
    outputs = [x.new_empty(*shape[:-1], w.shape[0], dtype=out_dtype) for w in of]
    if keep_gathered:
        scales = len(layout.sizes) if layout.feature else 1
        outputs += [x.new_empty(shape), x.new_empty(*shape[:-1], scales, dtype=torch.float32)]
    return outputs


# --- reductions -------------------------------------------------------------------------------------------------------


def _scatter_layout(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale_x: Tensor,
    scale_weight: Tensor,
    size: int,
    out_dtype: torch.dtype,
    dim: int,
    sizes: Sequence[int] | None,
    implementation: str,
) -> tuple[int, list[int], Layout]:
    """(dim, shape of the product, its layout)"""
    check_common("matmul_reduce_scatter", x, implementation, scaled=True)
    dim = check_dim("scatter_dim", dim, x.dim())
    _check("matmul_reduce_scatter", x, None, [weight], [bias], scale_x, [scale_weight], out_dtype, implementation)
    product = [*x.shape[:-1], weight.shape[0]]
    check_shard_sizes(sizes, size, total=product[dim])
    return dim, product, Layout.of(product, dim, sizes if sizes is not None else array_split_sizes(product[dim], size))


def _scatter_kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale_x: Tensor,
    scale_weight: Tensor,
    name: str,
    out_dtype: torch.dtype,
    scatter_dim: int,
    shard_sizes: list[int] | None,
    implementation: str,
) -> Tensor:
    group = resolve(name)
    try:
        dim, shape, layout = _scatter_layout(
            x, weight, bias, scale_x, scale_weight, group.size, out_dtype, scatter_dim, shard_sizes, implementation
        )
    except ValueError as error:
        agreement.refuse(group, "matmul_reduce_scatter", str(error))
        raise
    if bias is not None and layout.feature:
        low, high = layout.columns(group.rank)
        bias = bias[low:high]
    x2d = flat(x)
    rows = Scaled(x2d, fp8.scale_rows(scale_x, x2d.shape[0]))
    arguments = MatmulReduceScatter([rows], [_matrix(weight, scale_weight)], layout, bias, out_dtype=out_dtype)
    signature = Signature(
        "matmul_reduce_scatter", x.dtype, x.device.type, layout, weight.shape[0], implementation, out_dtype=out_dtype
    )
    y: Tensor = calling.run(group, signature, x.shape[-1], arguments, x.device)
    shape[dim] = layout.sizes[group.rank]
    return fresh(y, shape)


def _scatter_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale_x: Tensor,
    scale_weight: Tensor,
    name: str,
    out_dtype: torch.dtype,
    scatter_dim: int,
    shard_sizes: list[int] | None,
    implementation: str,
) -> Tensor:
    pg = process_group(name)
    dim, shape, layout = _scatter_layout(
        x, weight, bias, scale_x, scale_weight, pg.size(), out_dtype, scatter_dim, shard_sizes, implementation
    )
    shape[dim] = layout.sizes[pg.rank()]
    return x.new_empty(shape, dtype=out_dtype)


def _reduce_kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale_x: Tensor,
    scale_weight: Tensor,
    name: str,
    out_dtype: torch.dtype,
    implementation: str,
) -> Tensor:
    group = resolve(name)
    try:
        _check("matmul_all_reduce", x, None, [weight], [bias], scale_x, [scale_weight], out_dtype, implementation)
    except ValueError as error:
        agreement.refuse(group, "matmul_all_reduce", str(error))
        raise
    x2d = flat(x)
    rows = Scaled(x2d, fp8.scale_rows(scale_x, x2d.shape[0]))
    layout = Layout(1, array_split_sizes(x2d.shape[0], group.size), 1)
    signature = Signature(
        "matmul_all_reduce", x.dtype, x.device.type, layout, weight.shape[0], implementation, out_dtype=out_dtype
    )
    arguments = MatmulAllReduce([rows], [_matrix(weight, scale_weight)], bias, out_dtype=out_dtype)
    y: Tensor = calling.run(group, signature, x.shape[-1], arguments, x.device)
    return fresh(y, (*x.shape[:-1], weight.shape[0]))


def _reduce_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale_x: Tensor,
    scale_weight: Tensor,
    name: str,
    out_dtype: torch.dtype,
    implementation: str,
) -> Tensor:
    _check("matmul_all_reduce", x, None, [weight], [bias], scale_x, [scale_weight], out_dtype, implementation)
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=out_dtype)


def _no_gradient(ctx: Any, *grads: Any) -> NoReturn:
    raise RuntimeError(f"{_NO_GRADIENT}: quantise inside of a torch.autograd.Function of yours")


_SCALED = "Tensor scale_x, {} str group_name, ScalarType out_dtype,"
for _name, _schema, _kernel, _fake in (
    (
        "all_gather_scaled_matmul",
        f"(Tensor x, Tensor[] weights, Tensor[] biases, {_SCALED.format('Tensor[] scale_weights,')} str? activation, "
        "int gather_dim, SymInt[]? shard_sizes, bool keep_gathered, str implementation) -> Tensor[]",
        _gather_kernel,
        _gather_fake,
    ),
    (
        "scaled_matmul_reduce_scatter",
        f"(Tensor x, Tensor weight, Tensor? bias, {_SCALED.format('Tensor scale_weight,')} int scatter_dim, "
        "SymInt[]? shard_sizes, str implementation) -> Tensor",
        _scatter_kernel,
        _scatter_fake,
    ),
    (
        "scaled_matmul_all_reduce",
        f"(Tensor x, Tensor weight, Tensor? bias, {_SCALED.format('Tensor scale_weight,')} str implementation) "
        "-> Tensor",
        _reduce_kernel,
        _reduce_fake,
    ),
):
    define(_name, _schema, kernel=_kernel, fake=_fake, backward=_no_gradient)
