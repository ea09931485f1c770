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
from typing import Any

import torch
from torch import Tensor

from tpkernels.comm import agreement
from tpkernels.comm.groups import GroupLike, group_name, group_size, process_group, resolve
from tpkernels.ops import calling
from tpkernels.ops.calling import Signature
from tpkernels.ops.checks import (
    as_list,
    check_common,
    check_dim,
    check_gate,
    check_local,
    check_shard_sizes,
    check_weights,
    plain_linear,
)
from tpkernels.ops.contract import (
    GATED,
    AllGatherMatmul,
    MatmulReduceScatter,
    activation_backward,
    activation_forward,
    gate_backward,
    gate_forward,
)
from tpkernels.ops.main_grad import Sink, sinks_of, weight_gradients
from tpkernels.ops.registration import call, call_backward, define, wants_grad
from tpkernels.ops.scaled_matmul import all_gather_scaled_matmul
from tpkernels.ops.shapes import flat, fresh, gather_layout, gathered_shape, pack_biases, start_gather, unpack_biases
from tpkernels.partition import Layout

__all__ = ["all_gather_matmul"]


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
) -> Any:
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
            :func:`tpkernels.quantize_fp8` makes both.  Scales of x are gathered along.  No gradient.
        out_dtype: of fp8 calls: bfloat16 (default), float16 or float32; y is rounded once.  Biases have it.
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
    check_local("x_shard", x_shard, group=group)
    check_local("weight", *weights, group=group)
    check_local("bias", *biases, group=group)
    if scale_x is not None or scale_weight is not None or out_dtype is not None:
        results = all_gather_scaled_matmul(
            x_shard, weights, biases, group, scale_x=scale_x, scale_weight=scale_weight, out_dtype=out_dtype,
            activation=activation, gather_dim=gather_dim, shard_sizes=shard_sizes, return_gathered=return_gathered,
            implementation=implementation,
        )  # fmt: skip
        count = _num_outputs(activation, len(weights))
        y = results[0] if single else results[:count]
        return (y, *results[count:]) if return_gathered else y
    if group_size(group) == 1:
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
    outputs = call(
        "all_gather_matmul",
        x_shard,
        weights,
        pack_biases(biases, x_shard),
        group_name(group),
        activation,
        gather_dim,
        None if shard_sizes is None else list(shard_sizes),
        return_gathered or (save_gathered and needs_grad),
        activation is not None and needs_grad,
        implementation,
    )
    y = outputs[0] if single else outputs[: len(weights)]
    return (y, outputs[-1]) if return_gathered else y


def _num_outputs(activation: str | None, num_weights: int) -> int:
    return 1 if activation in GATED else num_weights


def _activated(activation: str, products: Sequence[Tensor]) -> list[Tensor]:
    if activation in GATED:
        return [gate_forward(activation, *products)]
    return [activation_forward(activation, product) for product in products]


def _check(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    rank: int,
    size: int,
    dim: int,
    sizes: Sequence[int] | None,
    activation: str | None,
    implementation: str,
) -> tuple[int, Layout]:
    check_common("all_gather_matmul", x, implementation, activation)
    dim = check_dim("gather_dim", dim, x.dim())
    check_shard_sizes(sizes, size, own=(rank, x.shape[dim]))
    layout = gather_layout(x, dim, sizes, size)
    k = sum(layout.sizes) if layout.feature else x.shape[-1]
    check_weights(x, k, weights, biases)
    check_gate(activation, weights)
    return dim, layout


def _kernel(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    name: str,
    activation: str | None,
    gather_dim: int,
    shard_sizes: list[int] | None,
    keep_gathered: bool,
    keep_preactivation: bool,
    implementation: str,
) -> list[Tensor]:
    group = resolve(name)
    bias_list = unpack_biases(biases, weights)
    try:
        dim, layout = _check(
            x, weights, bias_list, group.rank, group.size, gather_dim, shard_sizes, activation, implementation
        )
    except ValueError as error:
        agreement.refuse(group, "all_gather_matmul", str(error))
        raise
    x2d = flat(x)
    columns = sum(layout.sizes) if layout.feature else x2d.shape[1]
    arguments = AllGatherMatmul(
        x2d, layout, [w.t() for w in weights], bias_list, activation, keep_gathered, keep_preactivation
    )
    signature = Signature(
        "all_gather_matmul", x.dtype, x.device.type, layout, columns, implementation, activation=activation
    )
    result = calling.run(group, signature, sum(w.shape[0] for w in weights), arguments, x.device)
    shape = gathered_shape(x, dim, layout)
    outputs = [fresh(out, (*shape[:-1], out.shape[1])) for out in (*result.outs, *result.preactivations)]
    if keep_gathered:
        outputs.append(fresh(result.whole, shape))
    return outputs


def _fake(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    name: str,
    activation: str | None,
    gather_dim: int,
    shard_sizes: list[int] | None,
    keep_gathered: bool,
    keep_preactivation: bool,
    implementation: str,
) -> list[Tensor]:
    pg = process_group(name)
    bias_list = unpack_biases(biases, weights)
    dim, layout = _check(
        x, weights, bias_list, pg.rank(), pg.size(), gather_dim, shard_sizes, activation, implementation
    )
    shape = gathered_shape(x, dim, layout)
    of = weights[: _num_outputs(activation, len(weights))]
    if keep_preactivation and activation is not None:
        of = [*of, *weights]
    outputs = [x.new_empty(*shape[:-1], w.shape[0]) for w in of]
    return [*outputs, x.new_empty(shape)] if keep_gathered else outputs


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, name, activation, gather_dim, shard_sizes, keep_gathered, keep_preactivation, impl = inputs
    if activation is not None and not keep_preactivation:
        raise ValueError(
            "torch.ops.tpkernels.all_gather_matmul needs keep_preactivation=True when it is differentiated"
        )
    first, count = _num_outputs(activation, len(weights)), len(weights)
    before = output[first : first + count] if activation is not None else []
    ctx.save_for_backward(output[-1] if keep_gathered else x, *weights, *before)
    ctx.count = count
    ctx.has_bias = [bias is not None for bias in unpack_biases(biases, weights)] if biases else []
    ctx.settings = (name, activation, gather_dim, shard_sizes, keep_gathered, impl)
    ctx.sinks = sinks_of(weights)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    name, activation, gather_dim, shard_sizes, keep_gathered, implementation = ctx.settings
    x, *rest = ctx.saved_tensors
    weights, before = rest[: ctx.count], rest[ctx.count :]
    dys: list[Tensor] = []
    for weight, grad in zip(weights[: _num_outputs(activation, ctx.count)], grads, strict=False):
        if grad is None:  # this output was not used
            grad = x.new_zeros(_out_shape(ctx, x, weight, gather_dim, shard_sizes, keep_gathered, name))
        dys.append(grad)
    if activation in GATED:
        dzs = [*gate_backward(activation, dys[0], *before)]
    else:
        dzs = [activation_backward(activation, dy, before[i] if before else None) for i, dy in enumerate(dys)]
    d_gathered = grads[-1] if keep_gathered else None
    needs_x, needs_w, needs_b = (ctx.needs_input_grad[0], any(ctx.needs_input_grad[1]), any(ctx.needs_input_grad[2]))
    results = call_backward(
        "all_gather_matmul_backward",
        ctx.sinks,
        dzs,
        x,
        weights,
        d_gathered,
        name,
        gather_dim,
        shard_sizes,
        keep_gathered,
        [needs_x, needs_w, needs_b],
        implementation,
    )
    dx = results[0] if needs_x else None
    dws = results[needs_x : needs_x + ctx.count] if needs_w else [None] * ctx.count
    dbs = results[-ctx.count :] if needs_b else [None] * len(ctx.has_bias)
    dbs = [db if has else None for db, has in zip(dbs, ctx.has_bias, strict=True)]
    return dx, dws, dbs, None, None, None, None, None, None, None


def _out_shape(
    ctx: Any, x: Tensor, weight: Tensor, gather_dim: int, sizes: Sequence[int] | None, gathered: bool, name: str
) -> list[int]:
    if gathered:
        return [*x.shape[:-1], weight.shape[0]]
    dim = gather_dim % x.dim()
    layout = gather_layout(x, dim, sizes, process_group(name).size())
    return [*gathered_shape(x, dim, layout)[:-1], weight.shape[0]]


def _backward_kernel(
    dzs: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    d_gathered: Tensor | None,
    name: str,
    gather_dim: int,
    shard_sizes: list[int] | None,
    is_gathered: bool,
    needs: list[bool],
    implementation: str,
    *,
    sinks: Sequence[Sink | None] | None = None,
) -> list[Tensor | None]:
    group = resolve(name)
    dim = gather_dim % x.dim()
    layout = _backward_layout(x, dim, shard_sizes, is_gathered, group.size)
    flat_dzs = [flat(dz) for dz in dzs]
    needs_x, needs_w, needs_b = needs
    x2d = flat(x)
    pending = None
    if needs_w and not is_gathered:
        pending = start_gather(group, x2d, layout, "auto")
    dws: list[Tensor | None] = []

    def meanwhile() -> None:
        if needs_w:
            whole = pending() if pending is not None else x2d
            dws.extend(weight_gradients(flat_dzs, whole, sinks))

    results: list[Tensor | None] = []
    if needs_x:
        addend = None if d_gathered is None else flat(d_gathered)
        arguments = MatmulReduceScatter(flat_dzs, weights, layout, None, addend, meanwhile)
        columns = weights[0].shape[1]
        signature = Signature(
            "matmul_reduce_scatter", x.dtype, x.device.type, layout, columns, implementation, "gradient of a gather"
        )
        local = sum(weight.shape[0] for weight in weights)
        dx = calling.run(group, signature, local, arguments, x.device)
        shape = list(x.shape)
        shape[dim] = layout.sizes[group.rank]
        results.append(dx.view(shape))
    else:
        meanwhile()
    results += dws
    if needs_b:
        results += [dz.sum(0) for dz in flat_dzs]
    return results


def _backward_layout(x: Tensor, dim: int, sizes: Sequence[int] | None, is_gathered: bool, group_size: int) -> Layout:
    if sizes is None and is_gathered:
        sizes = [x.shape[dim] // group_size] * group_size
    return gather_layout(x, dim, sizes, group_size)


def _backward_fake(
    dzs: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    d_gathered: Tensor | None,
    name: str,
    gather_dim: int,
    shard_sizes: list[int] | None,
    is_gathered: bool,
    needs: list[bool],
    implementation: str,
) -> list[Tensor]:
    pg = process_group(name)
    dim = gather_dim % x.dim()
    results: list[Tensor] = []
    if needs[0]:
        shape = list(x.shape)
        shape[dim] = _backward_layout(x, dim, shard_sizes, is_gathered, pg.size()).sizes[pg.rank()]
        results.append(x.new_empty(shape))
    if needs[1]:
        results += [torch.empty_like(weight, memory_format=torch.contiguous_format) for weight in weights]
    if needs[2]:
        results += [x.new_empty(weight.shape[0]) for weight in weights]
    return results


define(
    "all_gather_matmul",
    "(Tensor x, Tensor[] weights, Tensor[] biases, str group_name, str? activation, int gather_dim, "
    "SymInt[]? shard_sizes, bool keep_gathered, bool keep_preactivation, str implementation) -> Tensor[]",
    kernel=_kernel,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
    autocast=True,
)
define(
    "all_gather_matmul_backward",
    "(Tensor[] dzs, Tensor x, Tensor[] weights, Tensor? d_gathered, str group_name, int gather_dim, "
    "SymInt[]? shard_sizes, bool is_gathered, bool[] needs, str implementation) -> Tensor[]",
    kernel=_backward_kernel,
    fake=_backward_fake,
)
