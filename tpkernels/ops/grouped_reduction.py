"""What the two grouped ops that reduce share: their checks, the fields of their calls, their gradients.

Forward and backward are written down in :mod:`tpkernels.ops.grouped_matmul_reduce_scatter`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tpkernels.comm import agreement
from tpkernels.comm.groups import Group
from tpkernels.gemm.grouped import TokenRows, reduced_bias_gradient
from tpkernels.ops import expert_blocks, same_bits
from tpkernels.ops.checks import check_common
from tpkernels.ops.contract import accumulation_dtype
from tpkernels.ops.expert_scales import Scales, behind_scales
from tpkernels.ops.main_grad import Sink
from tpkernels.ops.registration import call_backward
from tpkernels.ops.routing import (
    Routing,
    check_expert_values,
    check_expert_weights,
    check_routing,
    row_weights,
    weighted_biases,
)

__all__ = [
    "backward_of",
    "check_reduction",
    "fake_gradients",
    "fields",
    "gradients",
    "refuse_reduction",
    "setup_context",
]

_T = TypeVar("_T")


def check_reduction(
    op: str, h: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, scales: Scales, implementation: str
) -> None:
    """``h`` has a row per expert of every token of ``routing``, ``weight`` is ``[E, H, F]``, ``bias`` ``[E, H]``."""
    check_common(op, h, implementation, scaled=scales.are_given)
    if h.dim() != 2:
        raise ValueError(f"h must be [tokens * k, F], got shape {tuple(h.shape)}")
    check_expert_weights(h, [weight], [bias], "h", out_dtype=scales.out_dtype)
    scales.check(h, [weight])
    check_routing(routing, None, h.device)
    tokens, top_k = routing.experts.shape
    if h.shape[0] != tokens * top_k:
        raise ValueError(
            f"h must have a row per expert of every token ({tokens} * {top_k}), got shape {tuple(h.shape)}; routing is "
            "that of all tokens, as all_gather_grouped_matmul returns it"
        )


def refuse_reduction(group: Group, op: str, weight: Tensor, routing: Routing, check: Callable[[], _T]) -> _T:
    """What ``check`` returns; if the arguments are wrong the peers are told, and this rank raises."""
    try:
        found = check()
        check_expert_values(routing.experts, weight.shape[0])
    except ValueError as error:
        agreement.refuse(group, op, str(error))
        raise
    return found


def fields(
    h: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, scales: Scales, own: slice
) -> dict[str, Any]:
    """The fields that the calls of both ops have; ``own``: the tokens of this rank's result."""
    rows = TokenRows(routing.experts, weight.shape[0])
    return {
        "xs": [scales.rows(h)],
        "matrices": scales.matrices([weight]),
        "rows": rows,
        "weights": row_weights(routing, rows, h.dtype),
        "bias": weighted_biases(Routing(routing.experts[own], routing.weights[own]), bias),
        "out_dtype": scales.out_dtype,
    }


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h, weight, bias, experts, routing_weights, *rest = inputs
    ctx.options = behind_scales(rest)
    ctx.sinks = same_bits.sinks_of(ctx.options[0], [weight])  # the name of the group, in the options of all of them
    ctx.save_for_backward(h, weight, bias, experts, routing_weights)


def backward_of(op: str, kind: type[Any]) -> Callable[[Any, Tensor], tuple[Any, ...]]:
    """From the gradient of y those of h, weight, bias, experts and weights of the routing, by ``{op}_backward``.

    ``kind``: the class of the op's options.
    """

    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        needs = [ctx.needs_input_grad[place] for place in (0, 1, 2, 4)]
        if not any(needs):
            return (None,) * 5
        h, weight, bias, *routing = ctx.saved_tensors
        options = kind(*ctx.options)
        found = list(call_backward(f"{op}_backward", ctx.sinks, dy, h, weight, bias, Routing(*routing), options, needs))
        dh, dw, db, dr = (found.pop(0) if need else None for need in needs)
        return dh, dw, db, None, dr

    return backward


def gradients(
    group: Group,
    dy: Tensor | None,
    products: Tensor | None,
    h: Tensor,
    bias: Tensor | None,
    routing: Routing,
    rows: TokenRows,
    needs: Sequence[bool],
    sinks: Sequence[Sink | None] | None,
) -> list[Tensor | None]:
    """The needed gradients of h, weight, bias and the routing's weights.

    ``dy``: of all tokens, where a gradient of the weight or anything of a bias is needed; ``products``: ``dy[token] @
    weight[expert]`` of every row, where one of h or of the routing's weights is.
    """
    needs_h, needs_w, needs_b, needs_r = needs
    wide = accumulation_dtype(h.dtype)
    weights = row_weights(routing, rows, h.dtype)
    found: list[Tensor | None] = []
    if needs_h:
        assert products is not None
        found.append((products * weights[:, None]).to(h.dtype))
    if needs_w:
        assert dy is not None
        found.append(expert_blocks.reduced_weight_gradient(group, dy, h, weights, rows, sinks))
    if needs_b:
        assert dy is not None
        found.append(reduced_bias_gradient(dy, weights, rows))
    if needs_r:
        assert products is not None
        dots = expert_blocks.routing_gradient(group, products, h, rows, wide)
        if bias is not None:
            assert dy is not None
            of_bias = [(bias.index_select(0, experts).to(wide) * dy).sum(1) for experts in routing.experts.unbind(1)]
            dots = dots + torch.stack(of_bias, 1)
        found.append(dots.to(routing.weights.dtype))
    return found


def fake_gradients(h: Tensor, weight: Tensor, routing: Routing, needs: Sequence[bool]) -> list[Tensor]:
    shapes = [h.shape, weight.shape, weight.shape[:2]]
    found = [h.new_empty(shape) for shape, need in zip(shapes, needs, strict=False) if need]
    return [*found, routing.weights.new_empty(routing.weights.shape)] if needs[3] else found
