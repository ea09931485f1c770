"""``all_gather_grouped_matmul``: gather tokens, multiply each with this rank's slice of its experts' weights.

Forward, on rank r of W (x by its rows; w by its columns N of every expert; E experts, k per token)::

    x        = concat(x_0, ..., x_{W-1})                      [T, K]       so are the ranks' routings
    slots    = argsort(experts of all tokens, flat, stable)   [T*k]        slot t*k + j: expert j of token t
    z[i]     = x[slots[i] // k] @ w_r[e]^T + b_r[e]           [T*k, N/W]   e: the expert of slots[i]
    h        = activation(z)                                  "swiglu", of two weights: silu(z_gate) * z_up

Backward, with dz = dh * activation'(z)::

    dx_r     = (sum over ranks of sum_j dz[row of t, j] @ w[e])[r]     the dual: grouped_matmul_reduce_scatter
    dw_r[e]  = dz[rows of e]^T @ x[their tokens]              computed while the partials of dx travel
    db_r[e]  = sum over the rows of e of dz

The weights of the routing are only passed on: their gradient is this rank's rows of the one that arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Unpack, cast, overload

import torch
from torch import Tensor

from tpkernels.comm import agreement
from tpkernels.comm.groups import GroupLike, group_name, process_group, resolve
from tpkernels.comm.same_bits import refuse, same_bits_of
from tpkernels.errors import UnsupportedProblem
from tpkernels.gemm.grouped import TokenRows
from tpkernels.ops import agreed_call, expert_blocks, same_bits
from tpkernels.ops.checks import as_list, check_common, check_gate, check_local, check_shard_sizes
from tpkernels.ops.collectives import start_gather
from tpkernels.ops.contract import GATED, AllGatherGroupedMatmul, GroupedMatmulReduceScatter
from tpkernels.ops.expert_scales import Scales, behind_scales, scales_of
from tpkernels.ops.gradients import fake_of_linears, needs_of_linears, of_linears
from tpkernels.ops.main_grad import Sink
from tpkernels.ops.options import GatedName, GroupedGatherKeywords, Products
from tpkernels.ops.registration import call, call_backward, define, wants_grad
from tpkernels.ops.routing import (
    Routing,
    as_routing,
    check_expert_values,
    check_expert_weights,
    check_routing,
    grouped_signature,
    start_routing,
)
from tpkernels.ops.shapes import flat, fresh, has_bias, pack_biases, unpack_biases
from tpkernels.partition import Layout

__all__ = ["all_gather_grouped_matmul"]

GroupedGathered = tuple[Products, Routing] | tuple[Products, Routing, Tensor] | tuple[Products, Routing, Tensor, Tensor]
"""What a gather returns where a type checker cannot tell: with ``return_gathered`` also x, and of fp8 its scales."""


class _Gather(NamedTuple):
    """What a call says beside its tensors."""

    group_name: str
    activation: str | None
    shard_sizes: list[int] | None
    keep_gathered: bool
    """The gathered x is the last output."""
    keep_preactivation: bool
    """Behind the routing there are the products."""
    implementation: str


@overload
def all_gather_grouped_matmul(
    x_shard: Tensor, weights: Tensor, routing: Routing, group: GroupLike, *, scale_x: Tensor | None = None,
    activation: str | None = None, return_gathered: Literal[False] = False, **keywords: Unpack[GroupedGatherKeywords],
) -> tuple[Tensor, Routing]: ...  # fmt: skip


@overload
def all_gather_grouped_matmul(  # type: ignore[overload-overlap]  # a str may be one of these
    x_shard: Tensor, weights: Sequence[Tensor], routing: Routing, group: GroupLike, *, scale_x: Tensor | None = None,
    activation: GatedName, return_gathered: Literal[False] = False, **keywords: Unpack[GroupedGatherKeywords],
) -> tuple[Tensor, Routing]: ...  # fmt: skip


@overload
def all_gather_grouped_matmul(
    x_shard: Tensor, weights: Sequence[Tensor], routing: Routing, group: GroupLike, *, scale_x: Tensor | None = None,
    activation: str | None = None, return_gathered: Literal[False] = False, **keywords: Unpack[GroupedGatherKeywords],
) -> tuple[list[Tensor], Routing]: ...  # fmt: skip


@overload
def all_gather_grouped_matmul(
    x_shard: Tensor, weights: Tensor, routing: Routing, group: GroupLike, *, scale_x: None = None,
    activation: str | None = None, return_gathered: Literal[True], **keywords: Unpack[GroupedGatherKeywords],
) -> tuple[Tensor, Routing, Tensor]: ...  # fmt: skip


@overload
def all_gather_grouped_matmul(
    x_shard: Tensor, weights: Tensor, routing: Routing, group: GroupLike, *, scale_x: Tensor,
    activation: str | None = None, return_gathered: Literal[True], **keywords: Unpack[GroupedGatherKeywords],
) -> tuple[Tensor, Routing, Tensor, Tensor]: ...  # fmt: skip


@overload
def all_gather_grouped_matmul(
    x_shard: Tensor, weights: Tensor | Sequence[Tensor], routing: Routing, group: GroupLike, *,
    scale_x: Tensor | None = None, activation: str | None = None, return_gathered: bool = False,
    **keywords: Unpack[GroupedGatherKeywords],
) -> GroupedGathered: ...  # fmt: skip


def all_gather_grouped_matmul(
    x_shard: Tensor,
    weights: Tensor | Sequence[Tensor],
    routing: Routing,
    group: GroupLike,
    *,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    shard_sizes: Sequence[int] | None = None,
    return_gathered: bool = False,
    save_gathered: bool = False,
    implementation: str = "auto",
) -> GroupedGathered:
    """Gather tokens and their routing over the group, and multiply each token with the weights of its experts.

    Unfused equation, with the tokens of all ranks T = sum(shard_sizes)::

        x       = cat(all_gather(x_shard))
        whole   = Routing(cat(all_gather(routing.experts)), cat(all_gather(routing.weights)))
        slots   = argsort(whole.experts.flatten(), stable=True)
        h_i[s]  = activation(x[slots[s] // k] @ weight_i[e]^T + bias_i[e]),     e = whole.experts.flatten()[slots[s]]

    and for a gated activation one h of two weights, (gate, up), as in :func:`tpkernels.all_gather_matmul`.

    =============  ===============================  ==================================================================
    argument       shape                            notes
    =============  ===============================  ==================================================================
    ``x_shard``    ``[shard_sizes[rank], K]``       this rank's tokens; fp32, bf16, fp16, fp64, fp8 (e4m3); any strides
    ``weights``    ``[E, N_i, K]``, one or several  this rank's rows of every expert; N_i may differ between ranks
    ``routing``    of ``[shard_sizes[rank], k]``    of this rank's tokens
    ``bias``       ``[E, N_i]`` or None             one per weight, this rank's part
    ``scale_x``    ``[shard_sizes[rank], 1]`` or 1  fp32, for fp8: per token, or one for all
    ``scale_w...`` ``[E, N_i, 1]``, or see below    fp32, for fp8: per row of each expert's weight; one per weight
    ``h_i``        ``[T * k, N_i]``                 a row per token and expert, by expert, then by token; dtype of x
    =============  ===============================  ==================================================================

    Args:
        scale_x, scale_weight: x and weights are fp8, and stand for ``x * scale_x`` and ``weights * scale_weight``; the
            latter may also be ``[E, 1, 1]``, per expert, or one for all.  :func:`tpkernels.quantize_fp8` makes both.
            Scales of x are gathered with it.  There is no gradient.
        out_dtype: dtype of h and of biases in fp8 calls: bfloat16 (default), float16 or float32; h is rounded once.
        shard_sizes: number of tokens of every rank; needed, on every rank, when they are not all equal.
        activation: None, "relu", "gelu", "gelu_tanh" or "silu"; or "swiglu", "geglu" or "clamped_swiglu" (that of
            GPT-OSS), of two weights, which may be views: ``both[:, 0::2]`` and ``both[:, 1::2]`` where they interleave.
        return_gathered: also return the gathered x (differentiable); of an fp8 x its scales as well, ``[T, 1]``.
        save_gathered: keep the gathered x for the backward pass instead of gathering it again.
        implementation: "auto" or a name listed by :func:`tpkernels.explain`.

    Returns:
        ``(h, whole)`` for one weight or a gated pair, else ``(list of h, whole)``; with ``return_gathered`` also the
        gathered x, for fp8 and its scales.  ``whole`` is the :class:`~tpkernels.Routing` of all tokens, which
        :func:`tpkernels.grouped_matmul_reduce_scatter` needs, equal on all ranks.  The gradient that arrives for its
        weights must be equal on all ranks, as that of the reducing ops is; each rank takes the part of its tokens.

    Examples:
        >>> x, weights = torch.ones(4, 8), torch.ones(3, 5, 8)  # 4 tokens on each of two ranks, 3 experts
        >>> routing = tpk.Routing(torch.tensor([[0, 2]] * 4), torch.full((4, 2), 0.5))
        >>> h, whole = tpk.all_gather_grouped_matmul(x, weights, routing, mesh["tp"], activation="relu")
        >>> h.shape, whole.experts.shape
        (torch.Size([16, 5]), torch.Size([8, 2]))

    Raises:
        ValueError: bad arguments, such as experts that do not exist; nothing was sent.
        UnsupportedProblem, GroupMismatch, PeerLost, CollectiveTimeout, GroupPoisoned: as
            :func:`tpkernels.all_gather_matmul`.

    All ranks must call it in the same order.  A rank may have no tokens, and an expert none either.  On CUDA the
    host waits for the routing.  Weight gradients are not added to a ``main_grad``, but returned.
    """
    same_bits_of(group)  # refuses compiled code, and more than one thread
    routing = as_routing(routing, group)
    single = isinstance(weights, Tensor) or activation in GATED
    matrices = [weights] if isinstance(weights, Tensor) else list(weights)
    biases = as_list(bias, len(matrices))
    check_local(group, x_shard=[x_shard], weights=matrices, bias=biases, routing=routing)
    scales = scales_of(group, scale_x, scale_weight, out_dtype, x_shard, *matrices, *biases, routing.weights)
    needs_grad = wants_grad(x_shard, *matrices, *biases, routing.weights)
    if return_gathered and needs_grad:
        refuse(
            group, "return_gathered=True with a gradient", "each rank's gradient of the gathered x is a sum of its own"
        )
    options = _Gather(
        group_name(group), activation, None if shard_sizes is None else list(shard_sizes),
        return_gathered or (save_gathered and needs_grad), activation is not None and needs_grad, implementation,
    )  # fmt: skip
    outputs = call(
        "all_gather_grouped_matmul", x_shard, matrices, pack_biases(biases, x_shard), routing, scales, options
    )
    count = _num_outputs(activation, len(matrices))
    h = outputs[0] if single else outputs[:count]
    whole = Routing(*outputs[count : count + 2])
    gathered = outputs[-2 if scales.are_given else -1 :] if return_gathered else []
    return cast(GroupedGathered, (h, whole, *gathered))


def _num_outputs(activation: str | None, num_weights: int) -> int:
    return 1 if activation in GATED else num_weights


def _layout(x: Tensor, sizes: Sequence[int] | None, size: int) -> Layout:
    return Layout(1, tuple(sizes if sizes is not None else [x.shape[0]] * size), 1)


def _check(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    routing: Routing,
    scales: Scales,
    options: _Gather,
    rank: int,
    size: int,
) -> Layout:
    """The layout of the gathered tokens."""
    check_common("all_gather_grouped_matmul", x, options.implementation, options.activation, scaled=scales.are_given)
    if x.dim() != 2:
        raise ValueError(f"x_shard must be [tokens, K], got shape {tuple(x.shape)}")
    check_expert_weights(x, weights, biases, out_dtype=scales.out_dtype)
    scales.check(x, weights)
    check_gate(options.activation, weights)
    check_routing(routing, x.shape[0], x.device)
    check_shard_sizes(options.shard_sizes, size, own=(rank, x.shape[0]))
    return _layout(x, options.shard_sizes, size)


def _kernel(
    x: Tensor, matrices: list[Tensor], biases: list[Tensor], routing: Routing, scales: Scales, options: _Gather
) -> list[Tensor]:
    group = resolve(options.group_name)
    bias_list = unpack_biases(biases, matrices)
    try:
        layout = _check(x, matrices, bias_list, routing, scales, options, group.rank, group.size)
        check_expert_values(routing.experts, matrices[0].shape[0])
    except ValueError as error:
        agreement.refuse(group, "all_gather_grouped_matmul", str(error))
        raise
    same_bits.agree_on_blocks(group, "all_gather_grouped_matmul", [matrix.shape[1] for matrix in matrices])
    num_experts = matrices[0].shape[0]
    whole = start_routing(group, routing, layout, num_experts, x.dtype, lambda experts: TokenRows(experts, num_experts))
    arguments = AllGatherGroupedMatmul(
        scales.travelling(x), layout, whole.rows, scales.matrices(matrices), bias_list, options.activation,
        options.keep_gathered, options.keep_preactivation, scales.out_dtype, scales.packed(x),
    )  # fmt: skip
    signature = grouped_signature(
        "all_gather_grouped_matmul", x, layout, x.shape[1], options.implementation,
        (num_experts, routing.experts.shape[1]), activation=options.activation, out_dtype=scales.out_dtype,
    )  # fmt: skip
    try:
        result = agreed_call.run(group, signature, sum([weight.shape[1] for weight in matrices]), arguments, x.device)
    except UnsupportedProblem:  # on all ranks, which go on: so does what has started
        whole.routing()
        raise
    gathered = scales.arrived(result.whole, x) if options.keep_gathered else []
    outputs = [*result.outs, *whole.routing(), *result.preactivations, *gathered]
    return [fresh(one, one.shape) for one in outputs]


def _fake(
    x: Tensor, matrices: list[Tensor], biases: list[Tensor], routing: Routing, scales: Scales, options: _Gather
) -> list[Tensor]:
    pg = process_group(options.group_name)
    layout = _check(x, matrices, unpack_biases(biases, matrices), routing, scales, options, pg.rank(), pg.size())
    tokens, top_k = sum(layout.sizes), routing.experts.shape[1]
    whole = [one.new_empty(tokens, top_k) for one in routing]
    kept = matrices if options.keep_preactivation and options.activation is not None else []
    outs, before = (
        [x.new_empty(tokens * top_k, weight.shape[1], dtype=scales.dtype(x)) for weight in of]
        for of in (matrices[: _num_outputs(options.activation, len(matrices))], kept)
    )
    return [*outs, *whole, *before, *(scales.fake_arrived(tokens, x) if options.keep_gathered else [])]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, _, _, *rest = inputs
    options = _Gather(*behind_scales(rest))
    if options.activation is not None and not options.keep_preactivation:
        raise ValueError(
            "torch.ops.tpkernels.all_gather_grouped_matmul needs keep_preactivation=True when it is differentiated"
        )
    first, count = _num_outputs(options.activation, len(weights)) + 2, len(weights)
    before = output[first : first + count] if options.activation is not None else []
    ctx.save_for_backward(output[-1] if options.keep_gathered else x, output[first - 2], *weights, *before)
    ctx.num_tokens = x.shape[0]
    ctx.sinks = same_bits.sinks_of(options.group_name, weights)
    ctx.has_bias = has_bias(biases)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    options: _Gather = ctx.options
    x, experts, *rest = ctx.saved_tensors
    weights, before = rest[: len(ctx.sinks)], rest[len(ctx.sinks) :]
    outputs = _num_outputs(options.activation, len(ctx.sinks))
    size = process_group(options.group_name).size()
    sizes = list(options.shard_sizes) if options.shard_sizes is not None else [ctx.num_tokens] * size
    d_weights = grads[outputs + 1]
    if d_weights is not None:
        d_weights = torch.ops.tpkernels.shard(d_weights, options.group_name, 0, sizes)
    needs = needs_of_linears(ctx)
    d_gathered = grads[-1] if options.keep_gathered else None
    dzs = expert_blocks.product_gradients(
        resolve(options.group_name), options.activation, grads[:outputs], weights, before, experts.numel()
    )
    results: list[Tensor | None] = []
    if any(needs):
        results = call_backward(
            "all_gather_grouped_matmul_backward", ctx.sinks, dzs, x, weights, experts, d_gathered,
            _Backward(options.group_name, sizes, options.keep_gathered, needs, options.implementation),
        )  # fmt: skip
    return (*of_linears(ctx, needs, results), None, d_weights)


class _Backward(NamedTuple):
    """What the gradient's call says beside its tensors."""

    group_name: str
    shard_sizes: list[int]
    is_gathered: bool
    """x is the whole."""
    needs: list[bool]
    implementation: str


def _backward_kernel(
    dzs: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    experts: Tensor,
    d_gathered: Tensor | None,
    options: _Backward,
    *,
    sinks: Sequence[Sink | None] | None = None,
) -> list[Tensor | None]:
    group = resolve(options.group_name)
    layout = _layout(x, options.shard_sizes, group.size)
    rows = TokenRows(experts, weights[0].shape[0])
    flat_dzs, x2d = [flat(dz) for dz in dzs], flat(x)
    needs_x, needs_w, needs_b = options.needs
    pending = None
    if needs_w and not options.is_gathered and group.size > 1:
        pending = start_gather(group, x2d, layout, "auto")
    dws: list[Tensor | None] = []

    def meanwhile() -> None:
        if needs_w:
            whole = x2d if pending is None else pending()
            dws.extend(expert_blocks.weight_gradients(group, flat_dzs, whole, rows, sinks))

    results: list[Tensor | None] = []
    if needs_x:
        addend = None if d_gathered is None else flat(d_gathered)
        arguments = GroupedMatmulReduceScatter(flat_dzs, weights, rows, None, None, addend, meanwhile, layout=layout)
        signature = grouped_signature(
            "grouped_matmul_reduce_scatter", x, layout, x.shape[1], options.implementation,
            (rows.num_experts, rows.top_k), detail="gradient of a gather",
        )  # fmt: skip
        local = sum([weight.shape[1] for weight in weights])
        results.append(agreed_call.run(group, signature, local, arguments, x.device))
    else:
        meanwhile()
    results += dws
    if needs_b:
        results += expert_blocks.bias_gradients(group, flat_dzs, rows)
    return results


def _backward_fake(
    dzs: list[Tensor], x: Tensor, weights: list[Tensor], experts: Tensor, d_gathered: Tensor | None, options: _Backward
) -> list[Tensor]:
    own = options.shard_sizes[process_group(options.group_name).rank()]
    return fake_of_linears(x, (own, x.shape[1]), weights, options.needs)


define(
    "all_gather_grouped_matmul",
    kernel=_kernel,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
    autocast=3,
)
define("all_gather_grouped_matmul_backward", kernel=_backward_kernel, fake=_backward_fake)
