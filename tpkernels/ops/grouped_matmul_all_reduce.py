"""``grouped_matmul_all_reduce``: multiply rows with this rank's slice of their experts; every rank gets all sums.

Forward, on rank r of W, with p_r as in :mod:`tpkernels.ops.grouped_matmul_reduce_scatter`::

    y = p_0 + ... + p_{W-1} + sum_j weights[:, j] * b[experts[:, j]]      equal bit for bit on all ranks

Backward.  dy is the same on every rank, as with :mod:`tpkernels.ops.matmul_all_reduce`, so that only the gradient of
the routing's weights needs the other ranks: the equations are those of the op that scatters, with g[i] = dy[token of
i].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.comm.groups import GroupLike, group_name, resolve
from tpkernels.comm.same_bits import same_bits_of
from tpkernels.gemm.grouped import TokenRows
from tpkernels.ops import agreed_call, expert_blocks, same_bits
from tpkernels.ops.checks import check_local
from tpkernels.ops.contract import GroupedMatmulAllReduce
from tpkernels.ops.expert_scales import Scales, scales_of
from tpkernels.ops.grouped_reduction import (
    backward_of,
    check_reduction,
    fake_gradients,
    fields,
    gradients,
    refuse_reduction,
    setup_context,
)
from tpkernels.ops.main_grad import Sink
from tpkernels.ops.options import Reduce
from tpkernels.ops.registration import call, define
from tpkernels.ops.routing import Routing, as_routing, compared_routing, grouped_signature
from tpkernels.ops.shapes import flat, fresh, rows_layout

__all__ = ["grouped_matmul_all_reduce"]

_OP = "grouped_matmul_all_reduce"


def grouped_matmul_all_reduce(
    h: Tensor,
    weights: Tensor,
    routing: Routing,
    group: GroupLike,
    *,
    bias: Tensor | None = None,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Multiply rows with the weights of their experts, sum each token's and sum over the group; for whole residuals.

    Unfused equation, with the rows of h as :func:`tpkernels.copy_grouped_matmul` makes them::

        slots = argsort(routing.experts.flatten(), stable=True)
        u[slots[s]] = h[s] @ weights[e]^T,                       e = routing.experts.flatten()[slots[s]]
        p     = sum_j routing.weights[:, j] * u.view(T, k, H)[:, j]
        y     = all_reduce(p) + sum_j routing.weights[:, j] * bias[routing.experts[:, j]]

    =============  ==================  ================================================================
    argument       shape               notes
    =============  ==================  ================================================================
    ``h``          ``[T * k, F_r]``    fp32, bf16, fp16, fp64 or fp8 (e4m3); any strides
    ``weights``    ``[E, H, F_r]``     this rank's columns of every expert; F_r may differ between ranks
    ``routing``    of ``[T, k]``       equal on all ranks, which is compared
    ``bias``       ``[E, H]`` or None  equal on all ranks; added once, after the sum over the ranks
    ``y``          ``[T, H]``          equal on all ranks; dtype of h
    =============  ==================  ================================================================

    Operands may be fp8, with ``scale_x`` (of h), ``scale_weight`` and ``out_dtype`` as in
    :func:`tpkernels.grouped_matmul_reduce_scatter`, whose roundings, and gradients of ``bias`` and the routing's
    weights, this op has.  The gradient that arrives for y must be the same on every rank.

    Examples:
        >>> h, weights = torch.ones(2, 5), torch.ones(3, 6, 5)  # one token, 2 experts
        >>> routing = tpk.Routing(torch.tensor([[0, 2]]), torch.full((1, 2), 0.5))
        >>> tpk.grouped_matmul_all_reduce(h, weights, routing, mesh["tp"])
        tensor([[10., 10., 10., 10., 10., 10.]])

    Raises:
        ValueError, UnsupportedProblem, GroupMismatch, PeerLost, CollectiveTimeout, GroupPoisoned: as
        :func:`tpkernels.all_gather_grouped_matmul`.
    """
    same_bits_of(group)  # refuses compiled code, and more than one thread
    routing = as_routing(routing, group)
    check_local(group, h=[h], weights=[weights], bias=[bias], routing=routing)
    scales = scales_of(group, scale_x, scale_weight, out_dtype, h, weights, bias, routing.weights)
    y: Tensor = call(_OP, h, weights, bias, routing, scales, Reduce(group_name(group), implementation))
    return y


def _kernel(
    h: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, scales: Scales, options: Reduce
) -> Tensor:
    group = resolve(options.group_name)
    refuse_reduction(
        group, _OP, weight, routing,
        lambda: check_reduction(_OP, h, weight, bias, routing, scales, options.implementation),
    )  # fmt: skip
    same_bits.agree_on_blocks(group, _OP, [h.shape[1]])
    tokens, top_k = routing.experts.shape
    arguments = GroupedMatmulAllReduce(**fields(h, weight, bias, routing, scales, slice(None)))
    layout, experts = rows_layout(tokens, group.size), (weight.shape[0], top_k)
    has_bias, columns = bias is not None, weight.shape[1]
    signature = grouped_signature(
        _OP, h, layout, columns, options.implementation, experts, bias=has_bias, out_dtype=scales.out_dtype
    )
    same = compared_routing(group, signature, routing, scales.compared(group, h, weight))
    y = agreed_call.run(group, signature, h.shape[1], arguments, h.device, same)
    return fresh(y, (tokens, weight.shape[1]))


def _fake(h: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, scales: Scales, options: Reduce) -> Tensor:
    check_reduction(_OP, h, weight, bias, routing, scales, options.implementation)
    return h.new_empty(routing.experts.shape[0], weight.shape[1], dtype=scales.dtype(h))


def _backward_kernel(
    dy: Tensor,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing: Routing,
    options: Reduce,
    needs: list[bool],
    *,
    sinks: Sequence[Sink | None] | None = None,
) -> list[Tensor | None]:
    rows, dy2d = TokenRows(routing.experts, weight.shape[0]), flat(dy)
    group = resolve(options.group_name)
    of_rows = expert_blocks.products(group, dy2d, [weight], rows)[0] if needs[0] or needs[3] else None
    return gradients(group, dy2d, of_rows, flat(h), bias, routing, rows, needs, sinks)


def _backward_fake(
    dy: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, options: Reduce, needs: list[bool]
) -> list[Tensor]:
    return fake_gradients(h, weight, routing, needs)


define(_OP, kernel=_kernel, fake=_fake, backward=backward_of(_OP, Reduce), setup_context=setup_context, autocast=3)
define(f"{_OP}_backward", kernel=_backward_kernel, fake=_backward_fake)
