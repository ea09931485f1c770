"""``copy_matmul``: multiply an x that every rank holds with this rank's weights; the dual of ``matmul_all_reduce``.

Forward, on rank r of W (w by its rows); nothing is sent::

    y = activation(x @ w_r^T + b_r)

Backward, with dz = dy * activation'(z)::

    dx   = sum over ranks of dz @ w           matmul_all_reduce, equal on all ranks
    dw_r = dz^T @ x                           computed while the partials of dx travel
    db_r = sum over rows of dz
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Unpack, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from tpkernels.comm.groups import GroupLike, group_name, group_size, resolve
from tpkernels.comm.same_bits import same_bits_of
from tpkernels.gemm import few_rows, widened
from tpkernels.ops import agreed_call, fast_path, same_bits
from tpkernels.ops.agreed_call import Signature
from tpkernels.ops.checks import as_list, check_common, check_gate, check_local, check_weights, plain_linear
from tpkernels.ops.contract import GATED, MatmulAllReduce, activation_forward, gate_forward
from tpkernels.ops.gradients import fake_of_linears, needs_of_linears, of_linears
from tpkernels.ops.main_grad import Sink
from tpkernels.ops.options import CopyKeywords, GatedName, Reduce
from tpkernels.ops.plain_calls import is_plain
from tpkernels.ops.registration import call, call_backward, define
from tpkernels.ops.shapes import flat, fresh, has_bias, pack_biases, rows_layout, unpack_biases

__all__ = ["copy_matmul"]


@overload
def copy_matmul(
    x: Tensor, weight: Tensor, group: GroupLike, *, activation: str | None = None, **keywords: Unpack[CopyKeywords]
) -> Tensor: ...


@overload
def copy_matmul(  # type: ignore[overload-overlap]  # a str may be one of these two
    x: Tensor, weight: Sequence[Tensor], group: GroupLike, *, activation: GatedName, **keywords: Unpack[CopyKeywords]
) -> Tensor: ...


@overload
def copy_matmul(
    x: Tensor,
    weight: Sequence[Tensor],
    group: GroupLike,
    *,
    activation: str | None = None,
    **keywords: Unpack[CopyKeywords],
) -> list[Tensor]: ...


def copy_matmul(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    group: GroupLike,
    *,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    activation: str | None = None,
    implementation: str = "auto",
) -> Tensor | list[Tensor]:
    """Multiply a replicated ``x`` with this rank's weight(s); the gradient of x is summed over the group.

    Unfused equation::

        y_i = activation(x @ weight_i^T + bias_i),     dx = all_reduce(sum_i dz_i @ weight_i)

    A gated activation makes one y of two weights, as in :func:`tpkernels.all_gather_matmul`.

    ``x`` is ``[..., K]`` and equal on all ranks, ``weight_i`` is ``[N_i, K]``, ``y_i`` is ``[..., N_i]``.

    Examples:
        >>> x, weight = torch.ones(4, 8, requires_grad=True), torch.ones(3, 8)
        >>> tpk.copy_matmul(x, weight, mesh["tp"]).sum().backward()
        >>> x.grad[0, 0]  # 3 columns on each of two ranks
        tensor(6.)

    Raises:
        ValueError, UnsupportedProblem, GroupMismatch, PeerLost, CollectiveTimeout, GroupPoisoned: as
        :func:`tpkernels.all_gather_matmul`; those of the group only in the backward pass.
    """
    single = isinstance(weight, Tensor)
    if single and activation is None and implementation == "auto":
        y = fast_path.product(group, x, cast(Tensor, weight), cast("Tensor | None", bias))
        if y is not None:
            return y
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    biases = as_list(bias, len(weights))
    plain = is_plain(x, *weights, *[bias for bias in biases if bias is not None])
    if not plain:
        check_local(None, x=[x], weight=weights, bias=biases)
    check_common("matmul_all_reduce", x, implementation, activation)
    if activation is not None:
        check_gate(activation, weights)
    if same_bits_of(group):
        packed = pack_biases(biases, x)
        outs: list[Tensor] = call("copy_matmul", x, weights, packed, Reduce(group_name(group), implementation))
        outs = same_bits.activated(resolve(group), activation, outs)
        return outs[0] if single or activation in GATED else outs
    alone = group_size(group) == 1
    if alone or not (torch.is_grad_enabled() and x.requires_grad):
        # The unfused way and one rank are what others are compared with: torch's GEMM.
        product = _product if plain and not alone and implementation != "unfused" else plain_linear
        outs = [_by_rows(product, x, w, b) for w, b in zip(weights, biases, strict=True)]
    else:
        packed = pack_biases(biases, x)
        outs = call("copy_matmul", x, weights, packed, Reduce(group_name(group), implementation))
    if activation is not None:
        if activation in GATED:
            return gate_forward(activation, *outs)
        outs = [activation_forward(activation, out) for out in outs]
    return outs[0] if single else outs


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` of a plain call by whichever GEMM was measured to be faster for so many rows.

    Nothing is sent, so each rank decides for itself.
    """
    y = few_rows.linear(x, weight, bias)
    if y is not None:
        return y
    if x.dim() == 0 or not widened.wins(x.shape[:-1].numel(), x.dtype):
        return plain_linear(x, weight, bias)
    check_weights(x, x.shape[-1], [weight], [bias])
    return widened.linear(flat(x), weight, bias).view(*x.shape[:-1], weight.shape[0])


def _by_rows(product: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``product`` of an x of any strides; for a strided N-D x torch would add the bias in a second rounding."""
    if torch.is_grad_enabled() or is_dynamo_compiling():  # traced code cannot ask whether something is a view
        y = product(flat(x), weight, bias)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])
    if not x.is_contiguous():
        y = product(flat(x), weight, bias)
        return fresh(y, (*x.shape[:-1], y.shape[1]))
    y = product(x, weight, bias)
    return y.detach() if y._is_view() else y  # a view could not be written to later on


def _check(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], options: Reduce) -> None:
    check_common("matmul_all_reduce", x, options.implementation)
    check_weights(x, x.shape[-1], weights, biases)


def _kernel(x: Tensor, weights: list[Tensor], biases: list[Tensor], options: Reduce) -> list[Tensor]:
    bias_list = unpack_biases(biases, weights)
    _check(x, weights, bias_list, options)
    group = resolve(options.group_name)
    same_bits.agree_on_blocks(group, "copy_matmul", [w.shape[0] for w in weights])
    rows = flat(x)  # for a strided N-D x torch would add the bias in a second rounding
    linear = F.linear if options.implementation == "unfused" else widened.linear
    if group.same_bits:
        linear = partial(same_bits.linear, group)
    outs = (linear(rows, w, b) for w, b in zip(weights, bias_list, strict=True))
    return [fresh(out, (*x.shape[:-1], out.shape[1])) for out in outs]


def _fake(x: Tensor, weights: list[Tensor], biases: list[Tensor], options: Reduce) -> list[Tensor]:
    _check(x, weights, unpack_biases(biases, weights), options)
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, *options = inputs
    ctx.options = Reduce(*options)
    ctx.save_for_backward(x, *weights)
    ctx.has_bias = has_bias(biases)
    ctx.sinks = same_bits.sinks_of(ctx.options.group_name, weights)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    dzs = [
        x.new_zeros(*x.shape[:-1], weight.shape[0]) if grad is None else grad
        for grad, weight in zip(grads, weights, strict=True)
    ]
    needs = needs_of_linears(ctx)
    results = call_backward("copy_matmul_backward", ctx.sinks, dzs, x, weights, ctx.options, needs)
    return of_linears(ctx, needs, results)


def _backward_kernel(
    dzs: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    options: Reduce,
    needs: list[bool],
    *,
    sinks: Sequence[Sink | None] | None = None,
) -> list[Tensor | None]:
    group = resolve(options.group_name)
    flat_dzs, x2d = [flat(dz) for dz in dzs], flat(x)
    dws: list[Tensor | None] = []

    def meanwhile() -> None:
        if needs[1]:
            dws.extend(same_bits.weight_gradients(group, flat_dzs, x2d, sinks))

    results: list[Tensor | None] = []
    if needs[0]:
        layout = rows_layout(x2d.shape[0], group.size)
        arguments = MatmulAllReduce(flat_dzs, weights, None, meanwhile)
        signature = Signature(
            "matmul_all_reduce", x.dtype, x.device.type, layout, x2d.shape[1], options.implementation,
            "gradient of a copy",
        )  # fmt: skip
        local = sum([weight.shape[0] for weight in weights])
        results.append(agreed_call.run(group, signature, local, arguments, x.device).view(x.shape))
    else:
        meanwhile()
    results += dws
    if needs[2]:
        results += same_bits.bias_gradients(group, flat_dzs)
    return results


def _backward_fake(
    dzs: list[Tensor], x: Tensor, weights: list[Tensor], options: Reduce, needs: list[bool]
) -> list[Tensor]:
    return fake_of_linears(x, x.shape, weights, needs)


define(
    "copy_matmul",
    kernel=_kernel,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
    autocast=True,
)
define("copy_matmul_backward", kernel=_backward_kernel, fake=_backward_fake)
