"""``grouped_matmul_reduce_scatter``: multiply rows with this rank's slice of their experts, sum, keep one shard.

Forward, on rank r of W (h by its features; w by its columns of every expert; the routing is that of all T tokens)::

    u_r[i] = h_r[i] @ w_r[e]^T                                       [T*k, H]  e: the expert of row i
    p_r[t] = sum over the rows of t of weights[row] * u_r[row]       [T, H]    in fp32, by expert, rounded once
    y_r    = (p_0 + ... + p_{W-1})[r] + (sum_j weights[t, j] * b[experts[t, j]])[r]

Backward, with g[i] = dy of all ranks[token of i]::

    v[i]       = g[i] @ w_r[e]                     the dual: all_gather_grouped_matmul
    dh_r[i]    = weights[i] * v[i]
    dw_r[e]    = g[rows of e]^T @ (weights * h_r)[rows of e]
    db[e]      = sum over the rows of e of weights * g               the full gradient on every rank
    dweights   = sum over ranks of v[i] . h_r[i], + g[i] . b[e]      the full gradient on every rank; sent: T*k
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from tpkernels.comm.groups import GroupLike, group_name, process_group, resolve
from tpkernels.comm.same_bits import same_bits_of
from tpkernels.gemm.grouped import TokenRows
from tpkernels.ops import agreed_call, same_bits
from tpkernels.ops.checks import check_local, check_shard_sizes
from tpkernels.ops.collectives import start_gather
from tpkernels.ops.contract import AllGatherGroupedMatmul, Gathered, GroupedMatmulReduceScatter
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
from tpkernels.ops.options import GroupedScatter
from tpkernels.ops.registration import call, define
from tpkernels.ops.routing import Routing, as_routing, compared_routing, grouped_signature
from tpkernels.ops.shapes import flat, fresh
from tpkernels.partition import Layout, array_split_sizes, offsets

__all__ = ["grouped_matmul_reduce_scatter"]

_OP = "grouped_matmul_reduce_scatter"


def grouped_matmul_reduce_scatter(
    h: Tensor,
    weights: Tensor,
    routing: Routing,
    group: GroupLike,
    *,
    bias: Tensor | None = None,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    shard_sizes: Sequence[int] | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Multiply rows with the weights of their experts, sum each token's, sum over the group, keep this rank's tokens.

    The tokens that other ranks own are computed first, and leave while the rest is computed.  Unfused equation, with
    the rows of h as :func:`tpkernels.all_gather_grouped_matmul` makes them::

        slots = argsort(routing.experts.flatten(), stable=True)
        u[slots[s]] = h[s] @ weights[e]^T,                       e = routing.experts.flatten()[slots[s]]
        p     = sum_j routing.weights[:, j] * u.view(T, k, H)[:, j]
        y     = reduce_scatter(p) + own tokens of (sum_j routing.weights[:, j] * bias[routing.experts[:, j]])

    =============  ============================  =====================================================================
    argument       shape                         notes
    =============  ============================  =====================================================================
    ``h``          ``[T * k, F_r]``              fp32, bf16, fp16, fp64 or fp8 (e4m3); any strides
    ``weights``    ``[E, H, F_r]``               this rank's columns of every expert; F_r may differ between ranks
    ``routing``    of ``[T, k]``                 of all tokens, and equal on all ranks, which is compared
    ``bias``       ``[E, H]`` or None            equal on all ranks; added once, after the sum over the ranks
    ``scale_x``    ``[T * k, 1]`` or 1           fp32, for fp8: per row of h, or one for all
    ``scale_w...`` ``[E, H, 1]``, ``[E, 1, 1]``  fp32, for fp8: per row of each expert's weight, per expert, or one (1)
    ``y``          ``[shard_sizes[rank], H]``    dtype of h, for fp8 ``out_dtype``
    =============  ============================  =====================================================================

    Args:
        scale_x, scale_weight, out_dtype: of fp8 operands, as in :func:`tpkernels.all_gather_grouped_matmul`; each rank
            has scales of its own slice of F, which are those of all of F with ``same_bits``.  Products and partials
            have ``out_dtype``.
        shard_sizes: number of tokens of every rank; default ``numpy.array_split`` (10 tokens over 3 ranks: 4, 3, 3).
        implementation: "auto" or a name listed by :func:`tpkernels.explain`.

    Products are rounded to the dtype of h, weighted and summed in fp32 (fp64 for fp64) in the order of the experts, and
    rounded once before anything is sent.  The gradients of ``bias`` and of the routing's weights are the full ones on
    every rank; the latter costs an all-reduce of ``T * k`` numbers.

    Examples:
        >>> h, weights = torch.ones(8, 5), torch.ones(3, 6, 5)  # 4 tokens, 2 experts each
        >>> routing = tpk.Routing(torch.tensor([[0, 2]] * 4), torch.full((4, 2), 0.5))
        >>> tpk.grouped_matmul_reduce_scatter(h, weights, routing, mesh["tp"])
        tensor([[10., 10., 10., 10., 10., 10.],
                [10., 10., 10., 10., 10., 10.]])

    Raises:
        ValueError, UnsupportedProblem, GroupMismatch, PeerLost, CollectiveTimeout, GroupPoisoned: as
        :func:`tpkernels.all_gather_grouped_matmul`.
    """
    same_bits_of(group)  # refuses compiled code, and more than one thread
    routing = as_routing(routing, group)
    check_local(group, h=[h], weights=[weights], bias=[bias], routing=routing)
    scales = scales_of(group, scale_x, scale_weight, out_dtype, h, weights, bias, routing.weights)
    sizes = None if shard_sizes is None else list(shard_sizes)
    y: Tensor = call(_OP, h, weights, bias, routing, scales, GroupedScatter(group_name(group), sizes, implementation))
    return y


def _check(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing: Routing,
    scales: Scales,
    options: GroupedScatter,
    size: int,
) -> Layout:
    """The layout of all tokens."""
    check_reduction(_OP, h, weight, bias, routing, scales, options.implementation)
    check_shard_sizes(options.shard_sizes, size, total=routing.experts.shape[0])
    return _layout(routing, options, size)


def _layout(routing: Routing, options: GroupedScatter, size: int) -> Layout:
    sizes = options.shard_sizes
    return Layout(1, tuple(sizes if sizes is not None else array_split_sizes(routing.experts.shape[0], size)), 1)


def _kernel(
    h: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, scales: Scales, options: GroupedScatter
) -> Tensor:
    group = resolve(options.group_name)
    layout: Layout = refuse_reduction(
        group, _OP, weight, routing, lambda: _check(h, weight, bias, routing, scales, options, group.size)
    )
    same_bits.agree_on_blocks(group, _OP, [h.shape[1]])
    first = offsets(layout.sizes)[group.rank]
    own = slice(first, first + layout.sizes[group.rank])
    arguments = GroupedMatmulReduceScatter(**fields(h, weight, bias, routing, scales, own), layout=layout)
    experts = weight.shape[0], routing.experts.shape[1]
    has_bias, columns = bias is not None, weight.shape[1]
    signature = grouped_signature(
        _OP, h, layout, columns, options.implementation, experts, bias=has_bias, out_dtype=scales.out_dtype
    )
    same = compared_routing(group, signature, routing, scales.compared(group, h, weight))
    y = agreed_call.run(group, signature, h.shape[1], arguments, h.device, same)
    return fresh(y, (layout.sizes[group.rank], weight.shape[1]))


def _fake(
    h: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, scales: Scales, options: GroupedScatter
) -> Tensor:
    pg = process_group(options.group_name)
    layout = _check(h, weight, bias, routing, scales, options, pg.size())
    return h.new_empty(layout.sizes[pg.rank()], weight.shape[1], dtype=scales.dtype(h))


def _backward_kernel(
    dy: Tensor,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing: Routing,
    options: GroupedScatter,
    needs: list[bool],
    *,
    sinks: Sequence[Sink | None] | None = None,
) -> list[Tensor | None]:
    group = resolve(options.group_name)
    layout, rows = _layout(routing, options, group.size), TokenRows(routing.experts, weight.shape[0])
    needs_h, needs_w, needs_b, needs_r = needs
    needs_dy = needs_w or needs_b or (needs_r and bias is not None)
    dy2d, products = flat(dy), None
    if needs_h or needs_r:
        arguments = AllGatherGroupedMatmul(dy2d, layout, lambda: rows, [weight], [None], None, needs_dy)
        signature = grouped_signature(
            "all_gather_grouped_matmul", h, layout, weight.shape[1], options.implementation,
            (rows.num_experts, rows.top_k), detail="gradient of a scatter",
        )  # fmt: skip
        gathered = cast(Gathered, agreed_call.run(group, signature, weight.shape[2], arguments, h.device))
        (products,), whole = gathered.outs, gathered.whole
    else:
        whole = start_gather(group, dy2d, layout, "auto", at_once=True)() if group.size > 1 else dy2d
    return gradients(group, whole, products, flat(h), bias, routing, rows, needs, sinks)


def _backward_fake(
    dy: Tensor,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing: Routing,
    options: GroupedScatter,
    needs: list[bool],
) -> list[Tensor]:
    return fake_gradients(h, weight, routing, needs)


define(
    _OP, kernel=_kernel, fake=_fake, backward=backward_of(_OP, GroupedScatter), setup_context=setup_context, autocast=3
)
define(f"{_OP}_backward", kernel=_backward_kernel, fake=_backward_fake)
