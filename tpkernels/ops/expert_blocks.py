"""What the ops with experts do where their group gives the same bits at every degree: :mod:`tpkernels.ops.same_bits`
for each expert's rows, which are those of all tokens.

Experts whose features are cut have blocks of them.  Those that are dealt out are whole: an expert's rows are the same
ones, in the same order, on whichever rank it is, and each expert is one block (:func:`_blocks`).  A combination then
sends back the product of every slot (a token and one of its experts) instead of a rank's sum (:func:`by_slot`), and the
rank that has the token weights and adds them in the order of the experts (:func:`sums_of_slots`).

Each function takes the group and does what the op does anyhow where nothing was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tpkernels.comm import timeline
from tpkernels.comm.groups import Group
from tpkernels.gemm import canonical, grouped
from tpkernels.gemm.dealt import DealtRows
from tpkernels.gemm.fp8 import ExpertMatrices, Operand, Scaled
from tpkernels.gemm.grouped import TokenRows
from tpkernels.ops import main_grad, same_bits
from tpkernels.ops.collectives import start_gather
from tpkernels.ops.contract import GroupedMatmulCombine, accumulation_dtype
from tpkernels.ops.gradients import of_products
from tpkernels.ops.main_grad import Sink
from tpkernels.partition import Layout

__all__ = [
    "bias_dots",
    "bias_gradients",
    "by_slot",
    "dealt_product_gradients",
    "dealt_routing_gradient",
    "product_gradients",
    "products",
    "reduced_bias_gradient",
    "reduced_weight_gradient",
    "routing_gradient",
    "sums_of_slots",
    "weight_gradients",
]


def _blocks(group: Group, rows: TokenRows) -> int:
    """Of how many blocks this rank's part of an expert is; 0 where the bits may depend on the degree."""
    blocks = same_bits.blocks_of(group)
    return min(blocks, 1) if isinstance(rows, DealtRows) else blocks


def products(
    group: Group,
    x: Operand,
    matrices: Sequence[ExpertMatrices],
    rows: TokenRows,
    biases: Sequence[Tensor | None] | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """:func:`tpkernels.gemm.grouped.products`, whose columns are cut."""
    blocks = same_bits.blocks_of(group)
    if not blocks:
        return grouped.products(x, matrices, rows, biases, out_dtype=out_dtype)
    like = x.like(out_dtype) if isinstance(x, Scaled) else x
    found = [like.new_empty(rows.count, one.shape[2]) for one in matrices]
    for one, of_one, out in zip(matrices, biases or [None] * len(matrices), found, strict=True):
        for expert, low, high in rows.runs():
            picked, bias = x.index_select(0, rows.tokens[low:high]), None if of_one is None else of_one[expert]
            out[low:high] = canonical.columns_of_product(picked, one[expert], bias, blocks, out_dtype=out_dtype)
    return found


def product_gradients(
    group: Group,
    activation: str | None,
    dys: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    before: Sequence[Tensor],
    rows: int,
) -> list[Tensor]:
    """:func:`tpkernels.ops.gradients.of_products`, whose columns are cut."""
    given = of_products(None, dys, weights, [], rows)
    return same_bits.preactivation_gradients(group, activation, given, before)


def weight_gradients(
    group: Group, dzs: Sequence[Tensor], x: Tensor, rows: TokenRows, sinks: Sequence[Sink | None] | None
) -> list[Tensor | None]:
    """:func:`tpkernels.ops.main_grad.grouped_weight_gradients`, whose columns are cut.

    Where they are in blocks there are no ``sinks``: :func:`tpkernels.ops.same_bits.sinks_of` refuses them in the call.
    """
    blocks = _blocks(group, rows)
    if not blocks:
        return main_grad.grouped_weight_gradients(dzs, x, rows, sinks)
    found = [dz.new_zeros(rows.num_experts, dz.shape[1], x.shape[1]) for dz in dzs]
    with timeline.span("gemm of weight gradients", "gemm"):
        for expert, low, high in rows.runs():
            picked = x.index_select(0, rows.tokens[low:high])
            for dz, gradient in zip(dzs, found, strict=True):
                gradient[expert] = canonical.weight_gradient(dz[low:high], picked, blocks)
    return [*found]


def reduced_weight_gradient(
    group: Group, dy: Tensor, h: Tensor, weights: Tensor, rows: TokenRows, sinks: Sequence[Sink | None] | None
) -> Tensor | None:
    """:func:`tpkernels.gemm.grouped.reduced_matrix_gradient`, whose contraction is cut; ``sinks`` as above."""
    blocks, sink = _blocks(group, rows), sinks[0] if sinks else None
    if not blocks:
        found = grouped.reduced_matrix_gradient(dy, h, weights, rows, None if sink is None else sink.add_of_expert)
        return found if sink is None else sink.added(h.dtype)
    made = h.new_zeros(rows.num_experts, dy.shape[1], h.shape[1])
    for expert, low, high in rows.runs():
        weighted = (h[low:high] * weights[low:high, None]).to(h.dtype)
        picked = dy.index_select(0, rows.tokens[low:high])
        made[expert] = canonical.weight_gradient_of_row(picked, weighted, blocks)
    return made


def bias_gradients(group: Group, dzs: Sequence[Tensor], rows: TokenRows) -> list[Tensor]:
    """:func:`tpkernels.gemm.grouped.bias_gradients` of each, whose columns are cut."""
    blocks = _blocks(group, rows)
    if not blocks:
        return [grouped.bias_gradients(dz, rows) for dz in dzs]
    found = [dz.new_zeros(rows.num_experts, dz.shape[1]) for dz in dzs]
    for expert, low, high in rows.runs():
        for dz, gradient in zip(dzs, found, strict=True):
            gradient[expert] = canonical.sum_of_rows(dz[low:high], blocks)
    return found


def reduced_bias_gradient(group: Group, dy: Tensor, weights: Tensor, rows: TokenRows) -> Tensor:
    """:func:`tpkernels.gemm.grouped.reduced_bias_gradient`: of tokens that all ranks have it is the same everywhere."""
    if not (isinstance(rows, DealtRows) and same_bits.blocks_of(group)):
        return grouped.reduced_bias_gradient(dy, weights, rows)
    found = dy.new_zeros(rows.num_experts, dy.shape[1])
    for expert, low, high in rows.runs():
        picked = dy.index_select(0, rows.tokens[low:high]).to(weights.dtype)
        found[expert] = canonical.dense(weights[low:high]) @ picked
    return found


def bias_dots(group: Group, dy: Tensor, bias: Tensor, rows: DealtRows, dtype: torch.dtype) -> Tensor:
    """``dy[token] . bias[e]`` of every row, summed in ``dtype``."""
    found, in_blocks = torch.empty(rows.count, dtype=dtype, device=dy.device), same_bits.blocks_of(group) > 0
    for expert, low, high in rows.runs():
        of_expert = bias[expert].to(dtype)
        picked = dy.index_select(0, rows.tokens[low:high]).to(dtype)
        found[low:high] = picked @ (canonical.dense(of_expert) if in_blocks else of_expert)
    return found


def dealt_routing_gradient(group: Group, dots: Tensor) -> Tensor:
    """``dots``, ``[T, k]``, summed over the ranks, of which one has a slot's and the others 0."""
    if group.size == 1:
        return dots + 0.0 if group.same_bits else dots  # -0 becomes 0, as in a sum with zeros
    if not group.same_bits:
        summed: Tensor = torch.ops.tpkernels.all_reduce(dots, group.name)
        return summed
    layout = Layout(1, (dots.shape[0],) * group.size, 1)
    return start_gather(group, dots, layout, "auto", at_once=True)().view(group.size, *dots.shape).sum(0)


def dealt_product_gradients(
    group: Group,
    activation: str | None,
    dys: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    before: Sequence[Tensor],
    count: int,
    rows: Callable[[], DealtRows],
) -> list[Tensor]:
    """:func:`tpkernels.ops.gradients.of_products` of ``count`` rows; ``rows``: of this rank's whole experts."""
    if activation is None or not same_bits.blocks_of(group):
        return of_products(activation, dys, weights, before, count)
    given = of_products(None, dys, weights, [], count)
    found = [torch.empty_like(z) for z in before]
    for _, low, high in rows().runs():
        parts = [dy[low:high] for dy in given], weights, [z[low:high] for z in before]
        for whole, part in zip(found, of_products(activation, *parts, high - low), strict=True):
            whole[low:high] = part
    return found


def by_slot(group: Group, call: GroupedMatmulCombine) -> GroupedMatmulCombine:
    """``call``, or the one whose results are the products of each of its tokens' slots: :func:`sums_of_slots`."""
    if not group.same_bits:
        return call
    layout = Layout(1, tuple(size * call.rows.top_k for size in call.layout.sizes), 1)
    return replace(call, rows=call.rows.by_slot(), weights=None, layout=layout)


def sums_of_slots(group: Group, found: Tensor, experts: Tensor, weights: Tensor | None, layout: Layout) -> Tensor:
    """This rank's tokens from the results ``found`` of :func:`by_slot`: weighted and added in the order of the experts.

    ``experts`` and ``weights`` (None: all are 1) are ``[T, k]``, of all tokens; ``layout``: whose these are.
    """
    if not group.same_bits:
        return found
    start = sum(layout.sizes[: group.rank])
    own = slice(start, start + layout.sizes[group.rank])
    wide, order = accumulation_dtype(found.dtype), experts[own].argsort(dim=1, stable=True)
    products = found.view(*order.shape, found.shape[1])
    total = torch.zeros(products.shape[0], found.shape[1], dtype=wide, device=found.device)
    tokens = torch.arange(len(order), device=found.device)
    for places in order.unbind(1):
        product = products[tokens, places].to(wide)
        total += product if weights is None else product * weights[own][tokens, places, None].to(wide)
    return total.to(found.dtype)


def routing_gradient(group: Group, products: Tensor, h: Tensor, rows: TokenRows, dtype: torch.dtype) -> Tensor:
    """``products[row] . h[row]`` of every slot, summed over the features of all ranks, ``[T, k]`` in ``dtype``."""
    blocks = same_bits.blocks_of(group)
    if not blocks:
        dots = grouped.row_dots(products, h, rows, dtype)
        summed: Tensor = torch.ops.tpkernels.all_reduce(dots, group.name) if group.size > 1 else dots
        return summed
    parts = [
        grouped.row_dots(canonical.dense(products[:, panel]), canonical.dense(h[:, panel]), rows, dtype)
        for panel in canonical.panels(h.shape[1], blocks)
    ]
    own = torch.empty_like(parts[0])
    canonical.top_of_tree(parts, own)
    if group.size > 1:
        layout = Layout(1, (own.shape[0],) * group.size, 1)
        whole = start_gather(group, own, layout, "auto", at_once=True)()
        canonical.top_of_tree(whole.view(group.size, *own.shape).unbind(), own)
    return own
