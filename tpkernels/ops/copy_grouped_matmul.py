"""``copy_grouped_matmul``: tokens that every rank holds, times this rank's slice of their experts' weights.

The dual of ``grouped_matmul_all_reduce``, as ``copy_matmul`` is that of ``matmul_all_reduce``.  Forward, on rank r of W
(w by its rows N of every expert); nothing is sent::

    slots   = argsort(experts, flat, stable)                       [T*k]
    h[i]    = activation(x[slots[i] // k] @ w_r[e]^T + b_r[e])     [T*k, N/W]   e: the expert of slots[i]

Backward, with dz = dh * activation'(z)::

    dx      = sum over ranks of sum_j dz[row of t, j] @ w[e]       grouped_matmul_all_reduce, equal on all ranks
    dw_r[e] = dz[rows of e]^T @ x[their tokens]                    computed while the partials of dx travel
    db_r[e] = sum over the rows of e of dz
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack, overload

import torch
from torch import Tensor

from tpkernels.comm.groups import GroupLike, group_name, resolve
from tpkernels.comm.same_bits import same_bits_of
from tpkernels.gemm.grouped import TokenRows
from tpkernels.ops import agreed_call, expert_blocks, same_bits
from tpkernels.ops.checks import as_list, check_common, check_gate, check_local
from tpkernels.ops.contract import GATED, GroupedMatmulAllReduce, activation_forward, gate_forward
from tpkernels.ops.expert_scales import Scales, behind_scales, scales_of
from tpkernels.ops.gradients import fake_of_linears, needs_of_linears, of_linears, of_products
from tpkernels.ops.main_grad import Sink
from tpkernels.ops.options import GatedName, GroupedCopyKeywords, Reduce
from tpkernels.ops.registration import call, call_backward, define
from tpkernels.ops.routing import (
    Routing,
    as_routing,
    check_expert_values,
    check_expert_weights,
    check_routing,
    grouped_signature,
)
from tpkernels.ops.shapes import flat, fresh, has_bias, pack_biases, rows_layout, unpack_biases
from tpkernels.ops.transforms import is_transformed

__all__ = ["copy_grouped_matmul"]

_DUAL = "grouped_matmul_all_reduce"


@overload
def copy_grouped_matmul(
    x: Tensor,
    weights: Tensor,
    routing: Routing,
    group: GroupLike,
    *,
    scale_x: Tensor | None = None,
    activation: str | None = None,
    **keywords: Unpack[GroupedCopyKeywords],
) -> Tensor: ...


@overload
def copy_grouped_matmul(  # type: ignore[overload-overlap]  # a str may be one of these two
    x: Tensor,
    weights: Sequence[Tensor],
    routing: Routing,
    group: GroupLike,
    *,
    scale_x: Tensor | None = None,
    activation: GatedName,
    **keywords: Unpack[GroupedCopyKeywords],
) -> Tensor: ...


@overload
def copy_grouped_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    routing: Routing,
    group: GroupLike,
    *,
    scale_x: Tensor | None = None,
    activation: str | None = None,
    **keywords: Unpack[GroupedCopyKeywords],
) -> list[Tensor]: ...


def copy_grouped_matmul(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    routing: Routing,
    group: GroupLike,
    *,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    implementation: str = "auto",
) -> Tensor | list[Tensor]:
    """Multiply replicated tokens with the weights of their experts; the gradient of x is summed over the group.

    Unfused equation, for one weight or each of several::

        slots   = argsort(routing.experts.flatten(), stable=True)
        h_i[s]  = activation(x[slots[s] // k] @ weight_i[e]^T + bias_i[e]),     e = routing.experts.flatten()[slots[s]]

    A gated activation makes one h of two weights, as in :func:`tpkernels.all_gather_matmul`.

    ``x`` is ``[T, K]`` and, like ``routing``, equal on all ranks; ``weight_i`` is ``[E, N_i, K]``, ``bias_i`` ``[E,
    N_i]``, ``h_i`` ``[T * k, N_i]``.  :func:`tpkernels.grouped_matmul_all_reduce` takes h, and has the gradient of the
    routing's weights.  Operands may be fp8, with ``scale_x``, ``scale_weight`` and ``out_dtype`` as in
    :func:`tpkernels.all_gather_grouped_matmul`; products are rounded to that before an activation, as they are to the
    dtype of other operands.

    Examples:
        >>> x, weights = torch.ones(2, 8), torch.ones(3, 5, 8)
        >>> routing = tpk.Routing(torch.tensor([[0, 2], [1, 2]]), torch.full((2, 2), 0.5))
        >>> tpk.copy_grouped_matmul(x, weights, routing, mesh["tp"]).shape
        torch.Size([4, 5])

    Raises:
        ValueError, UnsupportedProblem, GroupMismatch, PeerLost, CollectiveTimeout, GroupPoisoned: as
        :func:`tpkernels.all_gather_grouped_matmul`; those of the group only in the backward pass.
    """
    routing = as_routing(routing, None)
    single = isinstance(weights, Tensor)
    matrices = [weights] if isinstance(weights, Tensor) else list(weights)
    biases = as_list(bias, len(matrices))
    check_local(None, x=[x], weights=matrices, bias=biases, routing=routing)
    scales = scales_of(None, scale_x, scale_weight, out_dtype, x, *matrices, *biases)
    check_common(_DUAL, x, implementation, activation, scaled=scales.are_given)
    check_gate(activation, matrices)
    outs: list[Tensor] = call(
        "copy_grouped_matmul", x, matrices, pack_biases(biases, x), routing.experts, scales,
        Reduce(group_name(group), implementation),
    )  # fmt: skip
    if same_bits_of(group):
        outs = same_bits.activated(resolve(group), activation, outs)
    elif activation in GATED:
        gate, up = outs
        is_recorded = gate.requires_grad or up.requires_grad or is_transformed()
        outs = [gate_forward(activation, gate, up, out=None if is_recorded else gate)]
    else:
        outs = [activation_forward(activation, out) for out in outs]
    return outs[0] if single or activation in GATED else outs


def _check(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    experts: Tensor,
    scales: Scales,
    options: Reduce,
) -> None:
    check_common(_DUAL, x, options.implementation, scaled=scales.are_given)
    if x.dim() != 2:
        raise ValueError(f"x must be [tokens, K], got shape {tuple(x.shape)}")
    check_expert_weights(x, weights, biases, "x", out_dtype=scales.out_dtype)
    scales.check(x, weights)
    check_routing(Routing(experts, x.new_empty(experts.shape, dtype=scales.dtype(x))), x.shape[0], x.device)


def _kernel(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], experts: Tensor, scales: Scales, options: Reduce
) -> list[Tensor]:
    bias_list = unpack_biases(biases, weights)
    _check(x, weights, bias_list, experts, scales, options)
    check_expert_values(experts, weights[0].shape[0])
    group = resolve(options.group_name)
    same_bits.agree_on_blocks(group, "copy_grouped_matmul", [weight.shape[1] for weight in weights])
    rows, x2d = TokenRows(experts, weights[0].shape[0]), scales.rows(x)
    return expert_blocks.products(group, x2d, scales.matrices(weights), rows, bias_list, out_dtype=scales.out_dtype)


def _fake(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], experts: Tensor, scales: Scales, options: Reduce
) -> list[Tensor]:
    _check(x, weights, unpack_biases(biases, weights), experts, scales, options)
    return [x.new_empty(experts.numel(), weight.shape[1], dtype=scales.dtype(x)) for weight in weights]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, experts, *rest = inputs
    ctx.options = Reduce(*behind_scales(rest))
    ctx.save_for_backward(x, experts, *weights)
    ctx.has_bias = has_bias(biases)
    ctx.sinks = same_bits.sinks_of(ctx.options.group_name, weights)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x, experts, *weights = ctx.saved_tensors
    needs = needs_of_linears(ctx)
    results: list[Tensor | None] = []
    if any(needs):
        dzs = of_products(None, grads, weights, [], experts.numel())
        results = call_backward("copy_grouped_matmul_backward", ctx.sinks, dzs, x, weights, experts, ctx.options, needs)
    return of_linears(ctx, needs, results)


def _backward_kernel(
    dzs: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    experts: Tensor,
    options: Reduce,
    needs: list[bool],
    *,
    sinks: Sequence[Sink | None] | None = None,
) -> list[Tensor | None]:
    group = resolve(options.group_name)
    rows, flat_dzs, x2d = TokenRows(experts, weights[0].shape[0]), [flat(dz) for dz in dzs], flat(x)
    dws: list[Tensor | None] = []

    def meanwhile() -> None:
        if needs[1]:
            dws.extend(expert_blocks.weight_gradients(group, flat_dzs, x2d, rows, sinks))

    results: list[Tensor | None] = []
    if needs[0]:
        layout = rows_layout(x2d.shape[0], group.size)
        arguments = GroupedMatmulAllReduce(flat_dzs, weights, rows, None, meanwhile=meanwhile)
        signature = grouped_signature(
            _DUAL, x, layout, x2d.shape[1], options.implementation, (rows.num_experts, rows.top_k),
            detail="gradient of a copy",
        )  # fmt: skip
        local = sum([weight.shape[1] for weight in weights])
        results.append(fresh(agreed_call.run(group, signature, local, arguments, x.device), x.shape))
    else:
        meanwhile()
    results += dws
    if needs[2]:
        results += expert_blocks.bias_gradients(group, flat_dzs, rows)
    return results


def _backward_fake(
    dzs: list[Tensor], x: Tensor, weights: list[Tensor], experts: Tensor, options: Reduce, needs: list[bool]
) -> list[Tensor]:
    return fake_of_linears(x, x.shape, weights, needs)


define(
    "copy_grouped_matmul",
    kernel=_kernel,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
    autocast=3,
)
define("copy_grouped_matmul_backward", kernel=_backward_kernel, fake=_backward_fake)
