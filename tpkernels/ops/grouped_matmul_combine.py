"""``grouped_matmul_combine``: multiply rows with their experts, sum each token's, send the sums back to its rank.

Forward, on rank r of W (h by its rows, those of this rank's experts; the routing is that of all T tokens)::

    u[i]    = h[i] @ w[e]^T + b[e]                                       [n, H]    e: the expert of row i
    p_r[t]  = sum over the rows of t here of weights[row] * u[row]       [R, H]    in fp32, by expert, rounded once
    y_r[t]  = sum over the ranks s that have an expert of t of p_s[t]    [T_r, H]  by rank, for this rank's tokens t

Backward, with g[i] = dy of the rank of the token of row i::

    v[i]       = g[i] @ w[e]                                 the dual: dispatch_grouped_matmul
    dh[i]      = weights[i] * v[i]
    dw[e]      = g[rows of e]^T @ (weights * h)[rows of e]
    db[e]      = sum over the rows of e of weights * g
    dweights   = v[i] . h[i] + g[i] . b[e]                   the full gradient on every rank; sent: an all-reduce of T*k
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tpkernels.comm import agreement
from tpkernels.comm.groups import Group, GroupLike, group_name, process_group, resolve
from tpkernels.comm.same_bits import same_bits_of
from tpkernels.gemm.dealt import DealtRows
from tpkernels.gemm.grouped import row_dots
from tpkernels.ops import agreed_call, expert_blocks
from tpkernels.ops.checks import check_common, check_local, check_shard_sizes
from tpkernels.ops.contract import DispatchGroupedMatmul, Gathered, GroupedMatmulCombine, accumulation_dtype
from tpkernels.ops.expert_scales import Scales, scales_of
from tpkernels.ops.expert_sizes import check_expert_sizes, dealt_signature, sizes_of_experts
from tpkernels.ops.grouped_reduction import backward_of, fake_gradients, setup_context
from tpkernels.ops.main_grad import Sink
from tpkernels.ops.registration import call, define
from tpkernels.ops.routing import (
    Routing,
    as_routing,
    check_expert_values,
    check_expert_weights,
    check_routing,
    compared_routing,
    row_weights,
)
from tpkernels.ops.shapes import flat, fresh
from tpkernels.partition import Layout, array_split_sizes

__all__ = ["grouped_matmul_combine"]

_OP = "grouped_matmul_combine"


class _Combine(NamedTuple):
    """What a call says beside its tensors."""

    group_name: str
    shard_sizes: list[int] | None
    expert_sizes: list[int] | None
    implementation: str


def grouped_matmul_combine(
    h: Tensor,
    weights: Tensor,
    routing: Routing,
    group: GroupLike,
    *,
    expert_sizes: Sequence[int] | None = None,
    bias: Tensor | None = None,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    shard_sizes: Sequence[int] | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Multiply rows with the weights of this rank's experts, sum each token's, and sum them where the token is from.

    The tokens of other ranks are computed first, and leave while the rest is computed: one row per token and rank that
    has one of its experts.  Unfused equation, with the rows of h as :func:`tpkernels.dispatch_grouped_matmul` makes
    them, of the slots (token t, its j-th expert) whose expert this rank has::

        u[slots[s]] = h[s] @ weights[e]^T + bias[e],             0 for the experts of other ranks
        p     = sum_j routing.weights[:, j] * u.view(T, k, H)[:, j]
        y     = reduce_scatter(p)

    =============  ============================  =====================================================================
    argument       shape                         notes
    =============  ============================  =====================================================================
    ``h``          ``[n, F]``                    fp32, bf16, fp16, fp64 or fp8 (e4m3); any strides
    ``weights``    ``[E_r, H, F]``               those of this rank's experts, of which there may be none
    ``routing``    of ``[T, k]``                 of all tokens, and equal on all ranks, which is compared
    ``bias``       ``[E_r, H]`` or None          those of this rank's experts
    ``scale_x``    ``[n, 1]`` or 1               fp32, for fp8: per row of h, or one for all
    ``scale_w...`` ``[E_r, H, 1]``, or fewer     fp32, for fp8: per row, per expert (``[E_r, 1, 1]``), or one for all
    ``y``          ``[shard_sizes[rank], H]``    this rank's tokens; dtype of h, for fp8 ``out_dtype``
    =============  ============================  =====================================================================

    Args:
        expert_sizes: number of experts of every rank; needed, on every rank, when they are not all equal.
        scale_x, scale_weight, out_dtype: of fp8 operands, as in :func:`tpkernels.all_gather_grouped_matmul`.  Products
            and partials have ``out_dtype``.
        shard_sizes: number of tokens of every rank; default ``numpy.array_split`` (10 tokens over 3 ranks: 4, 3, 3).
        implementation: "auto" or a name listed by :func:`tpkernels.explain`.

    Products are rounded to the dtype of h, weighted and summed in fp32 (fp64 for fp64) in the order of the experts, and
    rounded once before anything is sent; the sums of the ranks are summed in fp32 in the order of the ranks.  With
    ``same_bits`` each of a token's products is sent, and all are summed where the token is from.  The gradient of the
    routing's weights is the full one on every rank, which costs an all-reduce of ``T * k`` numbers.

    Examples:
        >>> x, up, down = torch.ones(4, 8), torch.ones(3, 5, 8), torch.ones(3, 6, 5)  # 3 of 6 experts on each rank
        >>> routing = tpk.Routing(torch.tensor([[0, 5]] * 4), torch.full((4, 2), 0.5))
        >>> h, whole = tpk.dispatch_grouped_matmul(x, up, routing, mesh["tp"])
        >>> tpk.grouped_matmul_combine(h, down, whole, mesh["tp"])[0]
        tensor([40., 40., 40., 40., 40., 40.])

    Raises:
        ValueError, UnsupportedProblem, GroupMismatch, PeerLost, CollectiveTimeout, GroupPoisoned: as
        :func:`tpkernels.all_gather_grouped_matmul`.
    """
    same_bits_of(group)  # refuses compiled code, and more than one thread
    routing = as_routing(routing, group)
    check_local(group, h=[h], weights=[weights], bias=[bias], routing=routing)
    scales = scales_of(group, scale_x, scale_weight, out_dtype, h, weights, bias, routing.weights)
    options = _Combine(
        group_name(group), None if shard_sizes is None else list(shard_sizes),
        None if expert_sizes is None else list(expert_sizes), implementation,
    )  # fmt: skip
    y: Tensor = call(_OP, h, weights, bias, routing, scales, options)
    return y


def _check(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing: Routing,
    scales: Scales,
    options: _Combine,
    rank: int,
    size: int,
) -> None:
    check_common(_OP, h, options.implementation, scaled=scales.are_given)
    if h.dim() != 2:
        raise ValueError(f"h must be [rows, F], got shape {tuple(h.shape)}")
    check_expert_weights(h, [weight], [bias], "h", at_least=0, out_dtype=scales.out_dtype)
    scales.check(h, [weight])
    check_routing(routing, None, h.device)
    check_shard_sizes(options.shard_sizes, size, total=routing.experts.shape[0])
    check_expert_sizes(options.expert_sizes, size, own=(rank, weight.shape[0]))


def _layout(routing: Routing, options: _Combine, size: int) -> Layout:
    sizes = options.shard_sizes
    return Layout(1, tuple(sizes if sizes is not None else array_split_sizes(routing.experts.shape[0], size)), 1)


def _rows(
    group: Group,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing: Routing,
    scales: Scales,
    options: _Combine,
) -> DealtRows:
    """Of checked arguments; if they are wrong the peers are told, and this rank raises."""
    try:
        _check(h, weight, bias, routing, scales, options, group.rank, group.size)
        experts = sizes_of_experts(options.expert_sizes, weight, group.size)
        check_expert_values(routing.experts, sum(experts))
        rows = DealtRows(routing.experts, experts, _layout(routing, options, group.size).sizes, group.rank)
        if h.shape[0] != rows.count:
            raise ValueError(
                f"h must have a row per token and expert of this rank ({rows.count}), got shape {tuple(h.shape)}; "
                "routing is that of all tokens, as dispatch_grouped_matmul returns it"
            )
    except ValueError as error:
        agreement.refuse(group, _OP, str(error))
        raise
    return rows


def _kernel(
    h: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, scales: Scales, options: _Combine
) -> Tensor:
    group = resolve(options.group_name)
    rows = _rows(group, h, weight, bias, routing, scales, options)
    layout = _layout(routing, options, group.size)
    arguments = expert_blocks.by_slot(group, GroupedMatmulCombine(
        [scales.rows(h)], scales.matrices([weight]), rows, row_weights(routing, rows, h.dtype), expert_biases=bias,
        out_dtype=scales.out_dtype, layout=layout,
    ))  # fmt: skip
    experts = sizes_of_experts(options.expert_sizes, weight, group.size)
    signature = dealt_signature(
        _OP, h, arguments.layout, weight.shape[1], options.implementation, experts, arguments.rows.top_k,
        out_dtype=scales.out_dtype,
    )  # fmt: skip
    same = compared_routing(group, signature, routing)
    y = agreed_call.run(group, signature, h.shape[1], arguments, h.device, same)
    y = expert_blocks.sums_of_slots(group, y, routing.experts, routing.weights.detach(), layout)
    return fresh(y, (layout.sizes[group.rank], weight.shape[1]))


def _fake(
    h: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, scales: Scales, options: _Combine
) -> Tensor:
    pg = process_group(options.group_name)
    _check(h, weight, bias, routing, scales, options, pg.rank(), pg.size())
    return h.new_empty(_layout(routing, options, pg.size()).sizes[pg.rank()], weight.shape[1], dtype=scales.dtype(h))


def _backward_kernel(
    dy: Tensor,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing: Routing,
    options: _Combine,
    needs: list[bool],
    *,
    sinks: Sequence[Sink | None] | None = None,
) -> list[Tensor | None]:
    group = resolve(options.group_name)
    layout, experts = _layout(routing, options, group.size), sizes_of_experts(options.expert_sizes, weight, group.size)
    rows = DealtRows(routing.experts, experts, layout.sizes, group.rank)
    _, needs_w, needs_b, needs_r = needs
    needs_dy = needs_w or needs_b or (needs_r and bias is not None)
    arguments = DispatchGroupedMatmul(flat(dy), layout, lambda: rows, [weight], [None], None, needs_dy)
    signature = dealt_signature(
        "dispatch_grouped_matmul", h, layout, weight.shape[1], options.implementation, experts, rows.top_k,
        detail="gradient of a combination",
    )  # fmt: skip
    gathered = cast(Gathered, agreed_call.run(group, signature, weight.shape[2], arguments, h.device))
    return _gradients(group, gathered.whole, gathered.outs[0], flat(h), bias, routing, rows, needs, sinks)


def _gradients(
    group: Group,
    dy: Tensor | None,
    products: Tensor,
    h: Tensor,
    bias: Tensor | None,
    routing: Routing,
    rows: DealtRows,
    needs: Sequence[bool],
    sinks: Sequence[Sink | None] | None,
) -> list[Tensor | None]:
    """The needed gradients of h, weight, bias and the routing's weights; ``dy``: of the received tokens."""
    needs_h, needs_w, needs_b, needs_r = needs
    wide, weights = accumulation_dtype(h.dtype), row_weights(routing, rows, h.dtype)
    found: list[Tensor | None] = []
    if needs_h:
        found.append((products * weights[:, None]).to(h.dtype))
    if needs_w:
        assert dy is not None
        found.append(expert_blocks.reduced_weight_gradient(group, dy, h, weights, rows, sinks))
    if needs_b:
        assert dy is not None
        found.append(expert_blocks.reduced_bias_gradient(group, dy, weights, rows))
    if needs_r:
        dots = row_dots(products, h, rows, wide)
        if bias is not None:
            assert dy is not None
            dots = dots + rows.to_slots(expert_blocks.bias_dots(group, dy, bias, rows, wide))
        found.append(expert_blocks.dealt_routing_gradient(group, dots).to(routing.weights.dtype))
    return found


def _backward_fake(
    dy: Tensor,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing: Routing,
    options: _Combine,
    needs: list[bool],
) -> list[Tensor]:
    return fake_gradients(h, weight, routing, needs)


_backward: Callable[[Any, Tensor], tuple[Any, ...]] = backward_of(_OP, _Combine)
define(_OP, kernel=_kernel, fake=_fake, backward=_backward, setup_context=setup_context, autocast=3)
define(f"{_OP}_backward", kernel=_backward_kernel, fake=_backward_fake)
