"""``all_gather_matmul``: gather the shards of x, multiply with this rank's weights; one gather, many GEMMs.

Forward, on rank r of W (x cut along ``gather_dim``, w by its rows)::

    x  = concat(x_0, ..., x_{W-1})            [M, K]
    z  = x @ w_r^T + b_r                      [M, N/W]
    y  = activation(z)                        "swiglu", of two weights: y = silu(z_gate) * z_up, likewise "geglu"

Backward, with dz = dy * activation'(z)::

    dx_r = (sum over ranks of dz @ w)[r]      the dual: matmul_reduce_scatter
    dw_r = dz^T @ x                           computed while the partials of dx travel
    db_r = sum over rows of dz

``x`` is kept from the forward pass (``save_gathered``) or gathered again, which hides behind the GEMM of dx.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Unpack, cast, overload

import torch
from torch import Tensor

from tpkernels.comm import agreement
from tpkernels.comm.groups import GroupLike, group_name, group_size, process_group, resolve
from tpkernels.comm.same_bits import refuse, same_bits_of
from tpkernels.ops import agreed_call, same_bits
from tpkernels.ops.agreed_call import Signature
from tpkernels.ops.checks import (
    as_list,
    check_common,
    check_dim,
    check_gate,
    check_gather,
    check_local,
    check_shard_sizes,
    check_weights,
    plain_linear,
)
from tpkernels.ops.collectives import start_gather
from tpkernels.ops.contract import (
    GATED,
    AllGatherMatmul,
    MatmulReduceScatter,
    activation_forward,
    gate_forward,
)
from tpkernels.ops.gradients import fake_of_linears, needs_of_linears, of_linears
from tpkernels.ops.main_grad import Sink
from tpkernels.ops.options import GatedName, Gathered, GatherKeywords
from tpkernels.ops.registration import call, call_backward, define, wants_grad
from tpkernels.ops.scaled_matmul import ScaledGather, all_gather_scaled_matmul
from tpkernels.ops.shapes import (
    flat,
    fresh,
    gather_layout,
    gathered_shape,
    has_bias,
    pack_biases,
    shard_shape,
    unpack_biases,
)
from tpkernels.partition import Layout

__all__ = ["all_gather_matmul"]


class Gather(NamedTuple):
    """What a call says beside its tensors."""

    group_name: str
    activation: str | None
    gather_dim: int
    shard_sizes: list[int] | None
    keep_gathered: bool
    """The gathered x is the last output."""
    keep_preactivation: bool
    """Behind the results there are the products."""
    implementation: str


class _Backward(NamedTuple):
    """The same of its gradient."""

    group_name: str
    gather_dim: int
    shard_sizes: list[int] | None
    is_gathered: bool
    """x is the whole."""
    needs: list[bool]
    implementation: str

    def layout(self, x: Tensor, group_size: int) -> Layout:
        dim, sizes = self.gather_dim % x.dim(), self.shard_sizes
        if sizes is None and self.is_gathered:
            sizes = [x.shape[dim] // group_size] * group_size
        return gather_layout(x, dim, sizes, group_size)


@overload
def all_gather_matmul(
    x_shard: Tensor, weight: Tensor, group: GroupLike, *, scale_x: Tensor | None = None,
    activation: str | None = None, return_gathered: Literal[False] = False, **keywords: Unpack[GatherKeywords],
) -> Tensor: ...  # fmt: skip


@overload
def all_gather_matmul(  # type: ignore[overload-overlap]  # a str may be one of these two
    x_shard: Tensor, weight: Sequence[Tensor], group: GroupLike, *, scale_x: Tensor | None = None,
    activation: GatedName, return_gathered: Literal[False] = False, **keywords: Unpack[GatherKeywords],
) -> Tensor: ...  # fmt: skip


@overload
def all_gather_matmul(
    x_shard: Tensor, weight: Sequence[Tensor], group: GroupLike, *, scale_x: Tensor | None = None,
    activation: str | None = None, return_gathered: Literal[False] = False, **keywords: Unpack[GatherKeywords],
) -> list[Tensor]: ...  # fmt: skip


@overload
def all_gather_matmul(
    x_shard: Tensor, weight: Tensor, group: GroupLike, *, scale_x: None = None,
    activation: str | None = None, return_gathered: Literal[True], **keywords: Unpack[GatherKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def all_gather_matmul(
    x_shard: Tensor, weight: Tensor, group: GroupLike, *, scale_x: Tensor,
    activation: str | None = None, return_gathered: Literal[True], **keywords: Unpack[GatherKeywords],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


@overload
def all_gather_matmul(  # type: ignore[overload-overlap]
    x_shard: Tensor, weight: Sequence[Tensor], group: GroupLike, *, scale_x: None = None,
    activation: GatedName, return_gathered: Literal[True], **keywords: Unpack[GatherKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def all_gather_matmul(  # type: ignore[overload-overlap]
    x_shard: Tensor, weight: Sequence[Tensor], group: GroupLike, *, scale_x: Tensor,
    activation: GatedName, return_gathered: Literal[True], **keywords: Unpack[GatherKeywords],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


@overload
def all_gather_matmul(
    x_shard: Tensor, weight: Sequence[Tensor], group: GroupLike, *, scale_x: None = None,
    activation: str | None = None, return_gathered: Literal[True], **keywords: Unpack[GatherKeywords],
) -> tuple[list[Tensor], Tensor]: ...  # fmt: skip


@overload
def all_gather_matmul(
    x_shard: Tensor, weight: Sequence[Tensor], group: GroupLike, *, scale_x: Tensor,
    activation: str | None = None, return_gathered: Literal[True], **keywords: Unpack[GatherKeywords],
) -> tuple[list[Tensor], Tensor, Tensor]: ...  # fmt: skip


@overload
def all_gather_matmul(
    x_shard: Tensor, weight: Tensor | Sequence[Tensor], group: GroupLike, *, scale_x: Tensor | None = None,
    activation: str | None = None, return_gathered: bool, **keywords: Unpack[GatherKeywords],
) -> Gathered: ...  # fmt: skip


def all_gather_matmul(
    x_shard: Tensor,
    weight: Tensor | Sequence[Tensor],
    group: GroupLike,
    *,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    gather_dim: int = 0,
    shard_sizes: Sequence[int] | None = None,
    return_gathered: bool = False,
    save_gathered: bool = False,
    implementation: str = "auto",
) -> Gathered:
    """Gather ``x`` over the group and multiply it with this rank's weight(s), the transfer hidden behind the GEMM.

    Unfused equation::

        y_i = activation(cat(all_gather(x_shard), gather_dim) @ weight_i^T + bias_i)
        y   = silu(cat(...) @ gate^T + bias_gate) * (cat(...) @ up^T + bias_up)     "swiglu", weight = (gate, up)

    =============  =============================================  ==================================================
    argument       shape                                          notes
    =============  =============================================  ==================================================
    ``x_shard``    ``[..., shard_sizes[rank], ..., K]``           fp32, bf16, fp16, fp64, or fp8 (e4m3); any strides
    ``weight``     ``[N_i, K]``, one or several                   this rank's rows; N_i may differ between ranks
    ``bias``       ``[N_i]`` or None, one per weight              this rank's part
    ``scale_x``    ``[..., shard_sizes[rank], ..., 1]`` or 1      fp32, for fp8: per row of x_shard, or one for all
    ``scale_w...`` ``[N_i, 1]`` or 1, one per weight              fp32, for fp8: per row of the weight, or one for all
    ``y_i``        ``[..., sum(shard_sizes), ..., N_i]``          contiguous; dtype of x, for fp8 ``out_dtype``
    =============  =============================================  ==================================================

    Args:
        scale_x, scale_weight: x and weight are fp8, and stand for ``x * scale_x`` and ``weight * scale_weight``;
            :func:`tpkernels.quantize_fp8` makes both.  Scales of x are gathered with it.  There is no gradient.
        out_dtype: dtype of y and of biases in fp8 calls: bfloat16 (default), float16 or float32; y is rounded once.
        gather_dim: the dimension of x that is cut over the ranks; the last one gathers features (K).
        shard_sizes: size of every rank's shard; needed, on every rank, when they are not all equal.
        activation: None, "relu", "gelu", "gelu_tanh" or "silu", applied to every output; or "swiglu" or "geglu", which
            take two weights of one shape, (gate, up), to one output ``act(gate) * up`` (act: "silu", "gelu").
        return_gathered: also return the gathered x (differentiable); of an fp8 x its scales as well, gathered along
            ``gather_dim``.
        save_gathered: keep the gathered x for the backward pass instead of gathering it again.
        implementation: "auto" or a name listed by :func:`tpkernels.explain`.

    Returns:
        y for one weight or a gated pair, a list of y for a sequence; with ``return_gathered`` a tuple (that, gathered
        x), for fp8 (that, gathered x, gathered scale_x).

    Examples:
        >>> x, weight = torch.ones(4, 8), torch.ones(3, 8)
        >>> tpk.all_gather_matmul(x, weight, mesh["tp"], activation="relu").shape
        torch.Size([8, 3])

    Raises:
        ValueError: bad arguments; nothing was sent.
        UnsupportedProblem: the forced implementation cannot run this.
        GroupMismatch, PeerLost, CollectiveTimeout, GroupPoisoned: see :mod:`tpkernels.errors`.

    All ranks must call it in the same order.  On CUDA it enqueues on the current stream and does not synchronise the
    host.  Calls of several threads on one group are serialised.
    """
    single = isinstance(weight, Tensor) or activation in GATED
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    biases = as_list(bias, len(weights))
    check_local(group, x_shard=[x_shard], weight=weights, bias=biases)
    sizes = None if shard_sizes is None else list(shard_sizes)
    if scale_x is not None or scale_weight is not None or out_dtype is not None:
        scaled = ScaledGather(
            group_name(group), out_dtype or torch.bfloat16, activation, gather_dim, sizes, return_gathered,
            implementation,
        )  # fmt: skip
        results = all_gather_scaled_matmul(x_shard, weights, biases, scale_x, scale_weight, scaled)
        count = _num_outputs(activation, len(weights))
        y = results[0] if single else results[:count]
        return cast(Gathered, (y, *results[count:])) if return_gathered else y
    keeps_bits = same_bits_of(group) > 0
    if group_size(group) == 1 and not keeps_bits:
        check_common("all_gather_matmul", x_shard, implementation, activation)
        check_dim("gather_dim", gather_dim, x_shard.dim())
        if shard_sizes is not None:
            check_shard_sizes(shard_sizes, 1, own=(0, x_shard.shape[gather_dim]))
        if activation is not None:
            check_gate(activation, weights)
        outs = [plain_linear(x_shard, w, b) for w, b in zip(weights, biases, strict=True)]
        if activation is not None:
            outs = _activated(activation, outs)
        y = outs[0] if single else outs
        return (y, x_shard.clone(memory_format=torch.contiguous_format)) if return_gathered else y
    needs_grad = wants_grad(x_shard, *weights, *biases)
    if keeps_bits and return_gathered and needs_grad:
        refuse(
            group, "return_gathered=True with a gradient", "each rank's gradient of the gathered x is a sum of its own"
        )
    options = Gather(
        group_name(group), activation, gather_dim, sizes, return_gathered or (save_gathered and needs_grad),
        activation is not None and needs_grad, implementation,
    )  # fmt: skip
    outputs = call("all_gather_matmul", x_shard, weights, pack_biases(biases, x_shard), options)
    y = outputs[0] if single else outputs[: len(weights)]
    return (y, outputs[-1]) if return_gathered else y


def _num_outputs(activation: str | None, num_weights: int) -> int:
    return 1 if activation in GATED else num_weights


def _activated(activation: str, products: Sequence[Tensor]) -> list[Tensor]:
    if activation in GATED:
        return [gate_forward(activation, *products)]
    return [activation_forward(activation, product) for product in products]


def _check(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], options: Gather, rank: int, size: int
) -> tuple[list[int], Layout]:
    """Shape and layout of the gathered x."""
    check_common("all_gather_matmul", x, options.implementation, options.activation)
    shape, layout = check_gather(x, options.gather_dim, options.shard_sizes, rank, size)
    check_weights(x, shape[-1], weights, biases)
    check_gate(options.activation, weights)
    return shape, layout


def _kernel(x: Tensor, weights: list[Tensor], biases: list[Tensor], options: Gather) -> list[Tensor]:
    group = resolve(options.group_name)
    bias_list = unpack_biases(biases, weights)
    try:
        shape, layout = _check(x, weights, bias_list, options, group.rank, group.size)
    except ValueError as error:
        agreement.refuse(group, "all_gather_matmul", str(error))
        raise
    same_bits.agree_on_blocks(group, "all_gather_matmul", [w.shape[0] for w in weights])
    arguments = AllGatherMatmul(
        flat(x), layout, [w.t() for w in weights], bias_list, options.activation, options.keep_gathered,
        options.keep_preactivation,
    )  # fmt: skip
    signature = Signature(
        "all_gather_matmul", x.dtype, x.device.type, layout, shape[-1], options.implementation,
        activation=options.activation,
    )  # fmt: skip
    result = agreed_call.run(group, signature, sum([w.shape[0] for w in weights]), arguments, x.device)
    outputs = [fresh(out, (*shape[:-1], out.shape[1])) for out in (*result.outs, *result.preactivations)]
    if options.keep_gathered:
        outputs.append(fresh(result.whole, shape))
    return outputs


def _fake(x: Tensor, weights: list[Tensor], biases: list[Tensor], options: Gather) -> list[Tensor]:
    pg = process_group(options.group_name)
    shape, _ = _check(x, weights, unpack_biases(biases, weights), options, pg.rank(), pg.size())
    of = weights[: _num_outputs(options.activation, len(weights))]
    if options.keep_preactivation and options.activation is not None:
        of = [*of, *weights]
    outputs = [x.new_empty(*shape[:-1], w.shape[0]) for w in of]
    return [*outputs, x.new_empty(shape)] if options.keep_gathered else outputs


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, *rest = inputs
    options = Gather(*rest)
    if options.activation is not None and not options.keep_preactivation:
        raise ValueError(
            "torch.ops.tpkernels.all_gather_matmul needs keep_preactivation=True when it is differentiated"
        )
    first, count = _num_outputs(options.activation, len(weights)), len(weights)
    before = output[first : first + count] if options.activation is not None else []
    ctx.save_for_backward(output[-1] if options.keep_gathered else x, *weights, *before)
    ctx.has_bias = has_bias(biases)
    ctx.options = options
    ctx.sinks = same_bits.sinks_of(options.group_name, weights)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    options: Gather = ctx.options
    activation, count = options.activation, len(ctx.sinks)
    x, *rest = ctx.saved_tensors
    weights, before = rest[:count], rest[count:]
    dys: list[Tensor] = []
    for weight, grad in zip(weights[: _num_outputs(activation, count)], grads, strict=False):
        if grad is None:  # this output was not used
            grad = x.new_zeros(*_whole_shape(x, options)[:-1], weight.shape[0])
        dys.append(grad)
    dzs = same_bits.preactivation_gradients(resolve(options.group_name), activation, dys, before)
    needs = needs_of_linears(ctx)
    results = call_backward(
        "all_gather_matmul_backward", ctx.sinks, dzs, x, weights, grads[-1] if options.keep_gathered else None,
        _Backward(
            options.group_name, options.gather_dim, options.shard_sizes, options.keep_gathered, needs,
            options.implementation,
        ),
    )  # fmt: skip
    return of_linears(ctx, needs, results)


def _whole_shape(x: Tensor, options: Gather) -> Sequence[int]:
    if options.keep_gathered:
        return x.shape
    dim = options.gather_dim % x.dim()
    layout = gather_layout(x, dim, options.shard_sizes, process_group(options.group_name).size())
    return gathered_shape(x, dim, layout)


def _backward_kernel(
    dzs: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    d_gathered: Tensor | None,
    options: _Backward,
    *,
    sinks: Sequence[Sink | None] | None = None,
) -> list[Tensor | None]:
    group = resolve(options.group_name)
    layout = options.layout(x, group.size)
    flat_dzs = [flat(dz) for dz in dzs]
    needs_x, needs_w, needs_b = options.needs
    x2d = flat(x)
    pending = None
    if needs_w and not options.is_gathered:
        pending = start_gather(group, x2d, layout, "auto")
    dws: list[Tensor | None] = []

    def meanwhile() -> None:
        if needs_w:
            whole = pending() if pending is not None else x2d
            dws.extend(same_bits.weight_gradients(group, flat_dzs, whole, sinks))

    results: list[Tensor | None] = []
    if needs_x:
        addend = None if d_gathered is None else flat(d_gathered)
        arguments = MatmulReduceScatter(flat_dzs, weights, layout, None, addend, meanwhile)
        columns = weights[0].shape[1]
        signature = Signature(
            "matmul_reduce_scatter", x.dtype, x.device.type, layout, columns, options.implementation,
            "gradient of a gather",
        )  # fmt: skip
        local = sum([weight.shape[0] for weight in weights])
        dx = agreed_call.run(group, signature, local, arguments, x.device)
        results.append(dx.view(shard_shape(x, options.gather_dim % x.dim(), layout.sizes[group.rank])))
    else:
        meanwhile()
    results += dws
    if needs_b:
        results += same_bits.bias_gradients(group, flat_dzs)
    return results


def _backward_fake(
    dzs: list[Tensor], x: Tensor, weights: list[Tensor], d_gathered: Tensor | None, options: _Backward
) -> list[Tensor]:
    pg = process_group(options.group_name)
    layout = options.layout(x, pg.size())
    shape = shard_shape(x, options.gather_dim % x.dim(), layout.sizes[pg.rank()])
    return fake_of_linears(x, shape, weights, options.needs)


define(
    "all_gather_matmul",
    kernel=_kernel,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
    autocast=True,
)
define("all_gather_matmul_backward", kernel=_backward_kernel, fake=_backward_fake)
