"""Gradients of a GEMM's operands, as the ops give them to autograd; those that nobody needs are not computed.

Owns the step between ``torch.autograd`` and the op that computes the gradients, for ops with one weight
(:func:`of_linear`) and with several (:func:`of_linears`; of a grouped op, whose weights have a dimension for experts,
too), and ``linear_backward``, the op where nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tpkernels.gemm import widened
from tpkernels.ops.contract import GATED, activation_backward, gate_backward
from tpkernels.ops.main_grad import Sink, weight_gradients
from tpkernels.ops.registration import call_backward, define
from tpkernels.ops.shapes import flat

__all__ = ["fake_of_linear", "fake_of_linears", "needs_of_linears", "of_linear", "of_linears", "of_products"]


def of_linear(ctx: Any, op: str, *arguments: Any) -> list[Tensor | None]:
    """Gradients of x, weight and bias: ``op`` returns those that its last argument, which is added here, asks for."""
    needs = list(ctx.needs_input_grad[:3])
    if not any(needs):
        return [None, None, None]
    results = list(call_backward(op, ctx.sinks, *arguments, needs))
    return [results.pop(0) if need else None for need in needs]


def fake_of_linear(dy: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> list[Tensor]:
    results = [x.new_empty(x.shape), weight.new_empty(weight.shape), x.new_empty(weight.shape[0])]
    return [result for result, need in zip(results, rest[-1], strict=True) if need]


def needs_of_linears(ctx: Any) -> list[bool]:
    """Whether x, any weight, any bias needs a gradient."""
    x, weights, biases = ctx.needs_input_grad[:3]
    return [x, any(weights), any(biases)]


def of_linears(ctx: Any, needs: Sequence[bool], results: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Gradients of x, the weights and the biases from the ``results`` of an op, which has left out what is not needed.

    ``ctx.has_bias``: which weights have one; empty where none of them has.
    """
    rest, count = list(results), len(ctx.sinks)
    dx = rest.pop(0) if needs[0] else None
    dws = rest[:count] if needs[1] else [None] * count
    dbs: list[Tensor | None] = [None] * len(ctx.has_bias)
    if needs[2]:
        dbs = [db if has else None for db, has in zip(rest[-count:], ctx.has_bias, strict=True)]
    return dx, dws, dbs


def fake_of_linears(x: Tensor, shape: Sequence[int], weights: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """``shape``: that of the gradient of x."""
    results = [x.new_empty(shape)] if needs[0] else []
    results += [weight.new_empty(weight.shape) for weight in weights] if needs[1] else []
    results += [x.new_empty(weight.shape[:-1]) for weight in weights] if needs[2] else []
    return results


def of_products(
    activation: str | None, dys: Sequence[Tensor | None], weights: Sequence[Tensor], before: Sequence[Tensor], rows: int
) -> list[Tensor]:
    """Gradients of products of so many ``rows`` from those of the outputs; of an output that was not used they are 0.

    ``before``: the products, where there is an activation.
    """
    given = [
        weight.new_zeros(rows, weight.shape[-2]) if dy is None else dy for dy, weight in zip(dys, weights, strict=False)
    ]
    if activation in GATED:
        return [*gate_backward(activation, given[0], *before)]
    return [activation_backward(activation, dy, before[i] if before else None) for i, dy in enumerate(given)]


def _linear_backward(
    dy: Tensor, x: Tensor, weight: Tensor, needs: list[bool], *, sinks: Sequence[Sink | None] | None = None
) -> list[Tensor | None]:
    dy2d = flat(dy)
    results: list[Tensor | None] = []
    if needs[0]:
        results.append(widened.matmul(dy2d, weight).view(x.shape))
    if needs[1]:
        results += weight_gradients([dy2d], flat(x), sinks)
    if needs[2]:
        results.append(dy2d.sum(0))
    return results


define("linear_backward", kernel=_linear_backward, fake=fake_of_linear)
