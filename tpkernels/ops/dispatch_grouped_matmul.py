"""``dispatch_grouped_matmul``: send each token to the ranks that have its experts, and multiply it with their weights.

Forward, on rank r of W (x by its rows; the experts by their numbers: rank r has ``E_r`` whole ones)::

    received = the tokens of all ranks that have an expert of rank r, each once, by number         [R, K]
    z[i]     = received[token of row i] @ w[e]^T + b[e]     [n, N]    a row per token and own expert, by expert, then by
    h        = activation(z)                                          token: a range of the rows that
                                                                      all_gather_grouped_matmul makes for all experts

Backward, with dz = dh * activation'(z)::

    dx_r     = sum over the ranks that have an expert of t of sum over its rows there of dz[row] @ w[e]      the dual:
                                                                                              grouped_matmul_combine
    dw[e]    = dz[rows of e]^T @ received[their tokens]      computed while the partials of dx travel
    db[e]    = sum over the rows of e of dz

The weights of the routing are only passed on: their gradient is this rank's rows of the one that arrives.  How many
rows h has follows from the experts that the tokens have: to a compiler it is a number that the graph finds out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack, overload

import torch
from torch import SymInt, Tensor

from tpkernels.comm import agreement
from tpkernels.comm.groups import GroupLike, group_name, process_group, resolve
from tpkernels.comm.same_bits import same_bits_of
from tpkernels.errors import UnsupportedProblem
from tpkernels.gemm.dealt import DealtRows
from tpkernels.ops import agreed_call, expert_blocks, same_bits
from tpkernels.ops.checks import as_list, check_common, check_gate, check_local, check_shard_sizes
from tpkernels.ops.contract import GATED, DispatchGroupedMatmul, GroupedMatmulCombine
from tpkernels.ops.expert_scales import Scales, behind_scales, scales_of
from tpkernels.ops.expert_sizes import check_expert_sizes, dealt_signature, sizes_of_experts
from tpkernels.ops.gradients import fake_of_linears, needs_of_linears, of_linears
from tpkernels.ops.main_grad import Sink
from tpkernels.ops.options import DispatchKeywords, GatedName, Products
from tpkernels.ops.registration import call, call_backward, define, wants_grad
from tpkernels.ops.routing import (
    Routing,
    as_routing,
    check_expert_values,
    check_expert_weights,
    check_routing,
    start_routing,
)
from tpkernels.ops.shapes import flat, fresh, has_bias, pack_biases, unpack_biases
from tpkernels.partition import Layout

__all__ = ["dispatch_grouped_matmul"]

_OP = "dispatch_grouped_matmul"


class _Dispatch(NamedTuple):
    """What a call says beside its tensors."""

    group_name: str
    activation: str | None
    shard_sizes: list[int] | None
    expert_sizes: list[int] | None
    keep_received: bool
    """The received tokens are the last output."""
    keep_preactivation: bool
    """Behind the routing there are the products."""
    implementation: str


@overload
def dispatch_grouped_matmul(
    x: Tensor, weights: Tensor, routing: Routing, group: GroupLike, *, activation: str | None = None,
    **keywords: Unpack[DispatchKeywords],
) -> tuple[Tensor, Routing]: ...  # fmt: skip


@overload
def dispatch_grouped_matmul(  # type: ignore[overload-overlap]  # a str may be one of these
    x: Tensor, weights: Sequence[Tensor], routing: Routing, group: GroupLike, *, activation: GatedName,
    **keywords: Unpack[DispatchKeywords],
) -> tuple[Tensor, Routing]: ...  # fmt: skip


@overload
def dispatch_grouped_matmul(
    x: Tensor, weights: Sequence[Tensor], routing: Routing, group: GroupLike, *, activation: str | None = None,
    **keywords: Unpack[DispatchKeywords],
) -> tuple[list[Tensor], Routing]: ...  # fmt: skip


@overload
def dispatch_grouped_matmul(
    x: Tensor, weights: Tensor | Sequence[Tensor], routing: Routing, group: GroupLike, *, activation: str | None = None,
    **keywords: Unpack[DispatchKeywords],
) -> tuple[Products, Routing]: ...  # fmt: skip


def dispatch_grouped_matmul(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    routing: Routing,
    group: GroupLike,
    *,
    expert_sizes: Sequence[int] | None = None,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    shard_sizes: Sequence[int] | None = None,
    implementation: str = "auto",
) -> tuple[Products, Routing]:
    """Send tokens to the ranks that have their experts, and multiply each with the weights of its experts there.

    The experts are dealt out over the group: this rank has ``expert_sizes[rank]`` whole ones, those that come after the
    experts of the ranks before.  A token goes to a rank once, however many of its experts are there; this rank's own
    tokens are multiplied first, while the others' are on their way.  Unfused equation, with the tokens of all ranks T =
    sum(shard_sizes) and E = sum(expert_sizes)::

        x       = cat(all_gather(x))
        whole   = Routing(cat(all_gather(routing.experts)), cat(all_gather(routing.weights)))
        slots   = [s of argsort(whole.experts.flatten(), stable=True) whose expert this rank has]
        h_i[s]  = activation(x[slots[s] // k] @ weight_i[e]^T + bias_i[e]),   e = whole.experts.flatten()[slots[s]], of
                                                                              which this rank has the (e - first)-th

    =============  ============================  =====================================================================
    argument       shape                         notes
    =============  ============================  =====================================================================
    ``x``          ``[shard_sizes[rank], K]``    this rank's tokens; fp32, bf16, fp16, fp64, fp8 (e4m3); any strides
    ``weights``    ``[E_r, N_i, K]``, or more    those of this rank's experts, of which there may be none
    ``routing``    of ``[shard_sizes[rank], k]`` of this rank's tokens, to experts from 0 to E - 1
    ``bias``       ``[E_r, N_i]`` or None        one per weight
    ``scale_x``    as many as of a gather        fp32, for fp8: per token, or one for all
    ``scale_w...`` ``[E_r, N_i, 1]``, or fewer   fp32, for fp8: per row, per expert or one for all; one per weight
    ``h_i``        ``[n, N_i]``                  a row per token and expert of this rank, by expert, then by token
    =============  ============================  =====================================================================

    Args:
        expert_sizes: number of experts of every rank; needed, on every rank, when they are not all equal.
        scale_x, scale_weight, out_dtype: of fp8 operands, as in :func:`tpkernels.all_gather_grouped_matmul`.
        activation: as in :func:`tpkernels.all_gather_grouped_matmul`.
        shard_sizes: number of tokens of every rank; needed, on every rank, when they are not all equal.
        implementation: "auto" or a name listed by :func:`tpkernels.explain`.

    Returns:
        ``(h, whole)`` for one weight or a gated pair, else ``(list of h, whole)``.  ``whole`` is the
        :class:`~tpkernels.Routing` of all tokens, which :func:`tpkernels.grouped_matmul_combine` needs, equal on all
        ranks.  The gradient that arrives for its weights must be equal on all ranks, as that of the combining op is;
        each rank takes the part of its tokens.

    The received tokens are kept for the gradients of the weights.  ``torch.compile`` makes one graph of it where
    ``torch._dynamo.config.capture_dynamic_output_shape_ops`` is true, and two otherwise: n follows from the experts.

    Examples:
        >>> x, weights = torch.ones(4, 8), torch.ones(3, 5, 8)  # 4 tokens and 3 of 6 experts on each of two ranks
        >>> routing = tpk.Routing(torch.tensor([[0, 5]] * 4), torch.full((4, 2), 0.5))
        >>> h, whole = tpk.dispatch_grouped_matmul(x, weights, routing, mesh["tp"], activation="relu")
        >>> h.shape, whole.experts.shape
        (torch.Size([8, 5]), torch.Size([8, 2]))

    Raises:
        ValueError, UnsupportedProblem, GroupMismatch, PeerLost, CollectiveTimeout, GroupPoisoned: as
            :func:`tpkernels.all_gather_grouped_matmul`, whose notes on CUDA hold here as well.

    Ideas: one message per token and rank, summed there before it goes back, after DeepEP; own tokens first after Flux
    and COMET (Zhang et al., 2025).
    """
    same_bits_of(group)  # refuses compiled code, and more than one thread
    routing = as_routing(routing, group)
    single = isinstance(weights, Tensor) or activation in GATED
    matrices = [weights] if isinstance(weights, Tensor) else list(weights)
    biases = as_list(bias, len(matrices))
    check_local(group, x=[x], weights=matrices, bias=biases, routing=routing)
    scales = scales_of(group, scale_x, scale_weight, out_dtype, x, *matrices, *biases, routing.weights)
    needs_grad = wants_grad(x, *matrices, *biases, routing.weights)
    options = _Dispatch(
        group_name(group), activation, None if shard_sizes is None else list(shard_sizes),
        None if expert_sizes is None else list(expert_sizes), needs_grad, activation is not None and needs_grad,
        implementation,
    )  # fmt: skip
    outputs = call(_OP, x, matrices, pack_biases(biases, x), routing, scales, options)
    count = _num_outputs(activation, len(matrices))
    return outputs[0] if single else outputs[:count], Routing(*outputs[count : count + 2])


def _num_outputs(activation: str | None, num_weights: int) -> int:
    return 1 if activation in GATED else num_weights


def _check(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    routing: Routing,
    scales: Scales,
    options: _Dispatch,
    rank: int,
    size: int,
) -> tuple[Layout, list[int]]:
    """The layout of all tokens, and the number of experts of every rank."""
    check_common(_OP, x, options.implementation, options.activation, scaled=scales.are_given)
    if x.dim() != 2:
        raise ValueError(f"x must be [tokens, K], got shape {tuple(x.shape)}")
    check_expert_weights(x, weights, biases, "x", at_least=0, out_dtype=scales.out_dtype)
    scales.check(x, weights)
    check_gate(options.activation, weights)
    check_routing(routing, x.shape[0], x.device)
    check_shard_sizes(options.shard_sizes, size, own=(rank, x.shape[0]))
    check_expert_sizes(options.expert_sizes, size, own=(rank, weights[0].shape[0]))
    sizes = options.shard_sizes if options.shard_sizes is not None else [x.shape[0]] * size
    return Layout(1, tuple(sizes), 1), sizes_of_experts(options.expert_sizes, weights[0], size)


def _kernel(
    x: Tensor, matrices: list[Tensor], biases: list[Tensor], routing: Routing, scales: Scales, options: _Dispatch
) -> list[Tensor]:
    group = resolve(options.group_name)
    bias_list = unpack_biases(biases, matrices)
    try:
        layout, experts = _check(x, matrices, bias_list, routing, scales, options, group.rank, group.size)
        check_expert_values(routing.experts, sum(experts))
    except ValueError as error:
        agreement.refuse(group, _OP, str(error))
        raise
    whole = start_routing(
        group, routing, layout, sum(experts), x.dtype,
        lambda all_of: DealtRows(all_of, experts, layout.sizes, group.rank),
    )  # fmt: skip
    arguments = DispatchGroupedMatmul(
        scales.travelling(x), layout, whole.rows, scales.matrices(matrices), bias_list, options.activation,
        options.keep_received, options.keep_preactivation, scales.out_dtype, scales.packed(x),
    )  # fmt: skip
    signature = dealt_signature(
        _OP, x, layout, x.shape[1], options.implementation, experts, routing.experts.shape[1],
        activation=options.activation, out_dtype=scales.out_dtype,
    )  # fmt: skip
    try:
        result = agreed_call.run(group, signature, sum([weight.shape[1] for weight in matrices]), arguments, x.device)
    except UnsupportedProblem:  # on all ranks, which go on: so does what has started
        whole.routing()
        raise
    received = [result.whole] if options.keep_received else []
    outputs = [*result.outs, *whole.routing(), *result.preactivations, *received]
    return [fresh(one, one.shape) for one in outputs]


def _fake(
    x: Tensor, matrices: list[Tensor], biases: list[Tensor], routing: Routing, scales: Scales, options: _Dispatch
) -> list[Tensor]:
    pg = process_group(options.group_name)
    layout, _ = _check(x, matrices, unpack_biases(biases, matrices), routing, scales, options, pg.rank(), pg.size())
    tokens, top_k = sum(layout.sizes), routing.experts.shape[1]
    rows: int | SymInt = tokens * top_k
    received: int | SymInt = tokens
    if pg.size() > 1:
        context = torch.library.get_ctx()
        rows = context.new_dynamic_size()
        received = context.new_dynamic_size() if options.keep_received else 0
    kept = matrices if options.keep_preactivation and options.activation is not None else []
    outs, before = (
        [x.new_empty(rows, weight.shape[1], dtype=scales.dtype(x)) for weight in of]
        for of in (matrices[: _num_outputs(options.activation, len(matrices))], kept)
    )
    whole = [one.new_empty(tokens, top_k) for one in routing]
    return [*outs, *whole, *before, *([x.new_empty(received, x.shape[1])] if options.keep_received else [])]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, _, _, *rest = inputs
    options = _Dispatch(*behind_scales(rest))
    kept = options.keep_received and (options.activation is None or options.keep_preactivation)
    if not kept:
        raise ValueError(
            f"torch.ops.tpkernels.{_OP} needs keep_received=True, and with an activation keep_preactivation=True, when "
            "it is differentiated"
        )
    first, count = _num_outputs(options.activation, len(weights)) + 2, len(weights)
    before = output[first : first + count] if options.activation is not None else []
    ctx.save_for_backward(output[-1], output[first - 2], *weights, *before)
    ctx.num_tokens, ctx.num_rows = x.shape[0], output[0].shape[0]
    ctx.sinks = same_bits.sinks_of(options.group_name, weights)
    ctx.has_bias = has_bias(biases)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    options: _Dispatch = ctx.options
    received, experts, *rest = ctx.saved_tensors
    weights, before = rest[: len(ctx.sinks)], rest[len(ctx.sinks) :]
    outputs = _num_outputs(options.activation, len(ctx.sinks))
    size = process_group(options.group_name).size()
    sizes = list(options.shard_sizes) if options.shard_sizes is not None else [ctx.num_tokens] * size
    d_weights = grads[outputs + 1]
    if d_weights is not None:
        d_weights = torch.ops.tpkernels.shard(d_weights, options.group_name, 0, sizes)
    needs = needs_of_linears(ctx)
    results: list[Tensor | None] = []
    if any(needs):
        group, of_ranks = resolve(options.group_name), sizes_of_experts(options.expert_sizes, weights[0], size)
        dzs = expert_blocks.dealt_product_gradients(
            group, options.activation, grads[:outputs], weights, before, ctx.num_rows,
            lambda: DealtRows(experts, of_ranks, sizes, group.rank),
        )  # fmt: skip
        results = call_backward(
            f"{_OP}_backward",
            ctx.sinks,
            dzs,
            received,
            weights,
            experts,
            _Backward(options.group_name, sizes, of_ranks, needs, options.implementation),
        )
    return (*of_linears(ctx, needs, results), None, d_weights)


class _Backward(NamedTuple):
    """What the gradient's call says beside its tensors."""

    group_name: str
    shard_sizes: list[int]
    expert_sizes: list[int]
    needs: list[bool]
    implementation: str


def _backward_kernel(
    dzs: list[Tensor],
    received: Tensor,
    weights: list[Tensor],
    experts: Tensor,
    options: _Backward,
    *,
    sinks: Sequence[Sink | None] | None = None,
) -> list[Tensor | None]:
    group = resolve(options.group_name)
    layout = Layout(1, tuple(options.shard_sizes), 1)
    rows = DealtRows(experts, options.expert_sizes, layout.sizes, group.rank)
    flat_dzs = [flat(dz) for dz in dzs]
    needs_x, needs_w, needs_b = options.needs
    dws: list[Tensor | None] = []

    def meanwhile() -> None:
        if needs_w:
            dws.extend(expert_blocks.weight_gradients(group, flat_dzs, flat(received), rows, sinks))

    results: list[Tensor | None] = []
    if needs_x:
        arguments = expert_blocks.by_slot(
            group, GroupedMatmulCombine(flat_dzs, weights, rows, None, meanwhile=meanwhile, layout=layout)
        )
        signature = dealt_signature(
            "grouped_matmul_combine", received, arguments.layout, received.shape[1], options.implementation,
            options.expert_sizes, arguments.rows.top_k, detail="gradient of a dispatch",
        )  # fmt: skip
        local = sum([weight.shape[1] for weight in weights])
        dx = agreed_call.run(group, signature, local, arguments, received.device)
        dx = expert_blocks.sums_of_slots(group, dx, experts, None, layout)
        results.append(fresh(dx, dx.shape))
    else:
        meanwhile()
    results += dws
    if needs_b:
        results += expert_blocks.bias_gradients(group, flat_dzs, rows)
    return results


def _backward_fake(
    dzs: list[Tensor], received: Tensor, weights: list[Tensor], experts: Tensor, options: _Backward
) -> list[Tensor]:
    own = options.shard_sizes[process_group(options.group_name).rank()]
    return fake_of_linears(received, (own, received.shape[1]), weights, options.needs)


define(_OP, kernel=_kernel, fake=_fake, backward=_backward, setup_context=_setup_context, autocast=3)
define(f"{_OP}_backward", kernel=_backward_kernel, fake=_backward_fake)
