"""The fused ops on fp8 operands: e4m3 x and weights with fp32 scales, per tensor or per row; forward only.

On rank r of W, with x~ = x * scale_x and w~ = w * scale_weight::

    all_gather_scaled_matmul       y   = activation(concat(x~_0, ..., x~_{W-1}) @ w~_r^T + b_r)      or gated
    scaled_matmul_reduce_scatter   y_r = (p_0 + ... + p_{W-1})[r] + b,   p_r = x~_r @ w~_r^T
    scaled_matmul_all_reduce       y   =  p_0 + ... + p_{W-1} + b

Owns the schemas of these ops, to which the public functions of the other files hand calls with scales.  Products are
exact and summed over K in fp32, scales are applied to the sums; y is rounded once to ``out_dtype``, as are the partials
p_r where they travel.  A gather moves one byte per element, and each row's scale behind it in the same chunk
(:mod:`tpkernels.gemm.fp8`).  Ranks may differ in their kind of scale: per tensor is per row with equal scales.

Refuses gradients: rounding to fp8 has none of use.  To train, quantise inside of a ``torch.autograd.Function`` whose
backward calls the ops on the dtypes of its choice.

Names of arguments after ``torch._scaled_mm`` and ``torch.ops.symm_mem.fused_all_gather_scaled_matmul``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from tpkernels.comm import agreement
from tpkernels.comm.groups import Group, GroupLike, process_group, resolve
from tpkernels.comm.same_bits import same_bits_of
from tpkernels.gemm import fp8
from tpkernels.gemm.fp8 import Scaled
from tpkernels.ops import agreed_call, same_bits
from tpkernels.ops.agreed_call import Compared, Signature
from tpkernels.ops.checks import (
    check_common,
    check_gate,
    check_gather,
    check_local,
    check_out_dtype,
    check_scales,
    check_scatter,
    check_weights,
)
from tpkernels.ops.contract import GATED, AllGatherMatmul, MatmulAllReduce, MatmulReduceScatter
from tpkernels.ops.registration import call, define, wants_grad
from tpkernels.ops.shapes import flat, fresh, pack_biases, rows_layout, unpack_biases
from tpkernels.ops.signatures import ALIKE
from tpkernels.partition import Layout

__all__ = [
    "NO_GRADIENT",
    "ScaledGather",
    "ScaledReduce",
    "ScaledScatter",
    "admit",
    "all_gather_scaled_matmul",
    "scaled_reduction",
]

NO_GRADIENT = "a call with fp8 operands has no gradient"


class ScaledGather(NamedTuple):
    """What a call of ``all_gather_scaled_matmul`` says beside its tensors."""

    group_name: str
    out_dtype: torch.dtype
    activation: str | None
    gather_dim: int
    shard_sizes: list[int] | None
    keep_gathered: bool
    implementation: str


class ScaledScatter(NamedTuple):
    """What a call of ``scaled_matmul_reduce_scatter`` says beside its tensors."""

    group_name: str
    out_dtype: torch.dtype
    scatter_dim: int
    shard_sizes: list[int] | None
    implementation: str


class ScaledReduce(NamedTuple):
    """What a call of ``scaled_matmul_all_reduce`` says beside its tensors."""

    group_name: str
    out_dtype: torch.dtype
    implementation: str


def all_gather_scaled_matmul(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    scale_x: Tensor | None,
    scale_weight: Tensor | Sequence[Tensor] | None,
    options: ScaledGather,
) -> list[Tensor]:
    """One output per weight, or one of a gated pair; with ``keep_gathered`` the gathered x and its scales behind."""
    scales = [scale_weight] if isinstance(scale_weight, Tensor) else list(scale_weight or ())
    given_x, given_weights = admit(options.group_name, scale_x, scales, x, *weights, *biases)
    operands = _Several(x, weights, pack_biases(biases, x), given_x, given_weights)
    outputs: list[Tensor] = call("all_gather_scaled_matmul", operands, options)
    return outputs


def scaled_reduction(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale_x: Tensor | None,
    scale_weight: Tensor | None,
    options: ScaledScatter | ScaledReduce,
) -> Tensor:
    """``op``: that of the options."""
    given_x, given_weight = admit(options.group_name, scale_x, [scale_weight], x, weight, bias)
    y: Tensor = call(op, _Operands(x, weight, bias, given_x, *given_weight), options)
    return y


def admit(
    group: GroupLike | str | None,
    scale_x: Tensor | None,
    scale_weights: Sequence[Tensor | None],
    *operands: Tensor | None,
    differentiable: str = "x, weight, bias, scale_x and scale_weight",
) -> tuple[Tensor, list[Tensor]]:
    """The scales, all of which must be there, be local, and like the operands have no use for a gradient.

    The ``group``, if any, is told of a refusal.  ``differentiable``: what could have a gradient in other calls.
    """
    if group is not None:
        same_bits_of(group)  # raises where the call is compiled, or has several threads
    check_local(group, scale_x=[scale_x], scale_weight=scale_weights)
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
            f"{NO_GRADIENT}, but one of {differentiable} requires one: call it under torch.no_grad(), or quantise "
            "inside of a torch.autograd.Function of yours"
        )
    if reason is not None:
        if group is not None:
            agreement.refuse(resolve(group), "a call with fp8 operands", reason)
        raise ValueError(reason)
    return cast(Tensor, scale_x), [cast(Tensor, scale) for scale in scale_weights]


def _matrix(weight: Tensor, scale: Tensor) -> Scaled:
    return Scaled(weight.t(), fp8.scale_rows(scale, weight.shape[0]).t())


def _compared(group: Group, signature: Signature, *scales: Tensor) -> Compared | None:
    """Scales over a contraction that is cut: with ``same_bits`` those of one rank are those of all."""
    if group.size == 1 or not group.same_bits:
        return None
    return Compared.of(signature, ALIKE, scales)


# --- all-gather -------------------------------------------------------------------------------------------------------


class _Several(NamedTuple):
    """The tensors of a call with several weights."""

    x: Tensor
    weights: list[Tensor]
    biases: list[Tensor]
    scale_x: Tensor
    scale_weights: list[Tensor]

    def check(self, options: ScaledGather, rank: int, size: int) -> tuple[list[int], Layout]:
        """Shape and layout of the gathered x."""
        check_common("all_gather_matmul", self.x, options.implementation, options.activation, scaled=True)
        shape, layout = check_gather(self.x, options.gather_dim, options.shard_sizes, rank, size)
        check_gate(options.activation, self.weights)
        check_out_dtype(options.out_dtype)
        biases = unpack_biases(self.biases, self.weights)
        check_weights(self.x, shape[-1], self.weights, biases, out_dtype=options.out_dtype)
        check_scales(self.x, self.weights, self.scale_x, self.scale_weights)
        return shape, layout


def _gather_kernel(operands: _Several, options: ScaledGather) -> list[Tensor]:
    group = resolve(options.group_name)
    try:
        shape, layout = operands.check(options, group.rank, group.size)
    except ValueError as error:
        agreement.refuse(group, "all_gather_matmul", str(error))
        raise
    x, weights, biases, scale_x, scale_weights = operands
    same_bits.agree_on_blocks(group, "all_gather_matmul", [w.shape[0] for w in weights])
    x2d = flat(x)
    of_rows = fp8.scale_rows(scale_x, x2d.shape[0])
    packed = layout.sizes if layout.feature else (x2d.shape[1],)
    in_bytes = layout
    if layout.feature:
        in_bytes = Layout(layout.outer, tuple(map(fp8.packed_bytes, layout.sizes)), layout.inner, feature=True)
    arguments = AllGatherMatmul(
        fp8.pack(x2d, of_rows), in_bytes,
        [_matrix(weight, scale) for weight, scale in zip(weights, scale_weights, strict=True)],
        unpack_biases(biases, weights), options.activation, options.keep_gathered, out_dtype=options.out_dtype,
        packed=packed,
    )  # fmt: skip
    signature = Signature(
        "all_gather_matmul", x.dtype, x.device.type, layout, sum(packed), options.implementation,
        out_dtype=options.out_dtype, activation=options.activation,
    )  # fmt: skip
    same = _compared(group, signature, of_rows) if layout.feature else None
    result = agreed_call.run(group, signature, sum(w.shape[0] for w in weights), arguments, x.device, same)
    outputs = [fresh(out, (*shape[:-1], out.shape[1])) for out in result.outs]
    if options.keep_gathered:
        parts = fp8.split(result.whole, packed)
        numbers = torch.cat([part.numbers.view(torch.uint8) for part in parts], 1).view(fp8.DTYPE)
        scales = torch.cat([part.scale for part in parts], 1)
        outputs += [fresh(numbers, shape), fresh(scales, (*shape[:-1], len(parts)))]
    return outputs


def _gather_fake(operands: _Several, options: ScaledGather) -> list[Tensor]:
    x, weights, *_ = operands
    pg = process_group(options.group_name)
    shape, layout = operands.check(options, pg.rank(), pg.size())
    of = weights[:1] if options.activation in GATED else weights
    outputs = [x.new_empty(*shape[:-1], w.shape[0], dtype=options.out_dtype) for w in of]
    if options.keep_gathered:
        scales = len(layout.sizes) if layout.feature else 1
        outputs += [x.new_empty(shape), x.new_empty(*shape[:-1], scales, dtype=torch.float32)]
    return outputs


# --- reductions -------------------------------------------------------------------------------------------------------


class _Operands(NamedTuple):
    """The tensors of a call with one weight."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    scale_x: Tensor
    scale_weight: Tensor

    def check(self, op: str, options: ScaledScatter | ScaledReduce) -> None:
        check_common(op, self.x, options.implementation, scaled=True)
        check_out_dtype(options.out_dtype)
        check_weights(self.x, self.x.shape[-1], [self.weight], [self.bias], out_dtype=options.out_dtype)
        check_scales(self.x, [self.weight], self.scale_x, [self.scale_weight])

    def factors(self) -> tuple[Scaled, Scaled]:
        """What the GEMM takes: rows of x, and the transposed weight."""
        rows = flat(self.x)
        return Scaled(rows, fp8.scale_rows(self.scale_x, rows.shape[0])), _matrix(self.weight, self.scale_weight)

    def signature(self, op: str, layout: Layout, options: ScaledScatter | ScaledReduce) -> Signature:
        x, columns = self.x, self.weight.shape[0]
        return Signature(
            op, x.dtype, x.device.type, layout, columns, options.implementation, out_dtype=options.out_dtype,
            bias=self.bias is not None,
        )  # fmt: skip


def _check_scatter(operands: _Operands, options: ScaledScatter, rank: int, size: int) -> tuple[list[int], Layout]:
    """Shape of this rank's part of the product, and the layout of the whole."""
    operands.check("matmul_reduce_scatter", options)
    return check_scatter(operands.x, operands.weight, options.scatter_dim, options.shard_sizes, rank, size)


def _scatter_kernel(operands: _Operands, options: ScaledScatter) -> Tensor:
    group = resolve(options.group_name)
    try:
        shape, layout = _check_scatter(operands, options, group.rank, group.size)
    except ValueError as error:
        agreement.refuse(group, "matmul_reduce_scatter", str(error))
        raise
    x, bias = operands.x, operands.bias
    same_bits.agree_on_blocks(group, "matmul_reduce_scatter", [x.shape[-1]])
    if bias is not None and layout.feature:
        low, high = layout.columns(group.rank)
        bias = bias[low:high]
    rows, matrix = operands.factors()
    arguments = MatmulReduceScatter([rows], [matrix], layout, bias, out_dtype=options.out_dtype)
    signature = operands.signature("matmul_reduce_scatter", layout, options)
    same = _compared(group, signature, rows.scale, matrix.scale)
    return fresh(agreed_call.run(group, signature, x.shape[-1], arguments, x.device, same), shape)


def _scatter_fake(operands: _Operands, options: ScaledScatter) -> Tensor:
    pg = process_group(options.group_name)
    shape, _ = _check_scatter(operands, options, pg.rank(), pg.size())
    return operands.x.new_empty(shape, dtype=options.out_dtype)


def _reduce_kernel(operands: _Operands, options: ScaledReduce) -> Tensor:
    group, x = resolve(options.group_name), operands.x
    try:
        operands.check("matmul_all_reduce", options)
    except ValueError as error:
        agreement.refuse(group, "matmul_all_reduce", str(error))
        raise
    same_bits.agree_on_blocks(group, "matmul_all_reduce", [x.shape[-1]])
    rows, matrix = operands.factors()
    arguments = MatmulAllReduce([rows], [matrix], operands.bias, out_dtype=options.out_dtype)
    signature = operands.signature("matmul_all_reduce", rows_layout(x.shape[:-1].numel(), group.size), options)
    same = _compared(group, signature, rows.scale, matrix.scale)
    y: Tensor = agreed_call.run(group, signature, x.shape[-1], arguments, x.device, same)
    return fresh(y, (*x.shape[:-1], operands.weight.shape[0]))


def _reduce_fake(operands: _Operands, options: ScaledReduce) -> Tensor:
    operands.check("matmul_all_reduce", options)
    return operands.x.new_empty(*operands.x.shape[:-1], operands.weight.shape[0], dtype=options.out_dtype)


def _no_gradient(ctx: Any, *grads: Any) -> NoReturn:
    raise RuntimeError(f"{NO_GRADIENT}: quantise inside of a torch.autograd.Function of yours")


for _name, _kernel, _fake in (
    ("all_gather_scaled_matmul", _gather_kernel, _gather_fake),
    ("scaled_matmul_reduce_scatter", _scatter_kernel, _scatter_fake),
    ("scaled_matmul_all_reduce", _reduce_kernel, _reduce_fake),
):
    define(_name, kernel=_kernel, fake=_fake, backward=_no_gradient)
