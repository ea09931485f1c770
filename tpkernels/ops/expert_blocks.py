"""What the ops with experts do where their group gives the same bits at every degree: :mod:`tpkernels.ops.same_bits`
for each expert's rows, which are those of all tokens.

Each function takes the group and does what the op does anyhow where nothing was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.comm import timeline
from tpkernels.comm.groups import Group
from tpkernels.errors import UnsupportedProblem
from tpkernels.gemm import canonical, grouped
from tpkernels.gemm.fp8 import ExpertMatrices, Operand, Scaled
from tpkernels.gemm.grouped import TokenRows
from tpkernels.ops import main_grad, same_bits
from tpkernels.ops.collectives import start_gather
from tpkernels.ops.gradients import of_products
from tpkernels.ops.main_grad import Sink
from tpkernels.partition import Layout

__all__ = [
    "bias_gradients",
    "product_gradients",
    "products",
    "reduced_weight_gradient",
    "routing_gradient",
    "weight_gradients",
]


def products(
    group: Group,
    x: Operand,
    matrices: ExpertMatrices,
    rows: TokenRows,
    biases: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`tpkernels.gemm.grouped.products`, whose columns are cut."""
    blocks = same_bits.blocks_of(group)
    if not blocks:
        return grouped.products(x, matrices, rows, biases, out_dtype=out_dtype)
    like = x.like(out_dtype) if isinstance(x, Scaled) else x
    found = like.new_empty(rows.count, matrices.shape[2])
    for expert, low, high in rows.runs():
        picked, bias = x.index_select(0, rows.tokens[low:high]), None if biases is None else biases[expert]
        found[low:high] = canonical.columns_of_product(picked, matrices[expert], bias, blocks, out_dtype=out_dtype)
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

    Raises:
        UnsupportedProblem: a weight has a ``main_grad``.
    """
    blocks = same_bits.blocks_of(group)
    if not blocks:
        return main_grad.grouped_weight_gradients(dzs, x, rows, sinks)
    _refuse_sinks(group, sinks)
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
    """:func:`tpkernels.gemm.grouped.reduced_matrix_gradient`, whose contraction is cut; raises as the one above."""
    blocks, sink = same_bits.blocks_of(group), sinks[0] if sinks else None
    if not blocks:
        found = grouped.reduced_matrix_gradient(dy, h, weights, rows, None if sink is None else sink.add_of_expert)
        return found if sink is None else sink.added(h.dtype)
    _refuse_sinks(group, sinks)
    made = h.new_zeros(rows.num_experts, dy.shape[1], h.shape[1])
    for expert, low, high in rows.runs():
        weighted = (h[low:high] * weights[low:high, None]).to(h.dtype)
        picked = dy.index_select(0, rows.tokens[low:high])
        made[expert] = canonical.weight_gradient_of_row(picked, weighted, blocks)
    return made


def bias_gradients(group: Group, dzs: Sequence[Tensor], rows: TokenRows) -> list[Tensor]:
    """:func:`tpkernels.gemm.grouped.bias_gradients` of each, whose columns are cut."""
    blocks = same_bits.blocks_of(group)
    if not blocks:
        return [grouped.bias_gradients(dz, rows) for dz in dzs]
    found = [dz.new_zeros(rows.num_experts, dz.shape[1]) for dz in dzs]
    for expert, low, high in rows.runs():
        for dz, gradient in zip(dzs, found, strict=True):
            gradient[expert] = canonical.sum_of_rows(dz[low:high], blocks)
    return found


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


def _refuse_sinks(group: Group, sinks: Sequence[Sink | None] | None) -> None:
    if sinks is not None and any(sinks):
        raise UnsupportedProblem(
            f"a weight's main_grad does not go with same_bits={group.same_bits}: what is in it already would be added "
            "within the GEMM"
        )
