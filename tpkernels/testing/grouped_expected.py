"""What the grouped ops and their gradients must return, within the elementwise bound of `numeric`.

Operands are whole: the tokens of all ranks, and a list with every rank's slice of the experts' weights. Steps and
roundings are those of the unfused equations; the order of rows is worked out here, in plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.testing.numeric import Bounded

__all__ = [
    "bias_gradient",
    "combined",
    "of_rows",
    "products",
    "reduced",
    "reduced_bias_gradient",
    "reduced_weight_gradient",
    "routing_gradient",
    "row_order",
    "weight_gradient",
]

Operand = Tensor | Bounded


def row_order(experts: Tensor) -> list[tuple[int, int, int]]:
    """(expert, token, which of the token's experts) of every row."""
    lists = experts.tolist()
    return sorted((expert, t, j) for t, row in enumerate(lists) for j, expert in enumerate(row))


def products(
    x: Operand, weights: Operand, experts: Tensor, *, dtype: torch.dtype, bias: Tensor | None = None
) -> Bounded:
    """x[token] @ weights[e]^T + bias[e] for every row, not yet rounded; x by token."""
    tokens = _tokens(experts)
    return _by_expert(
        experts,
        lambda e, rows: Bounded.sum_of_products(
            [_take(x, tokens[rows])], [weights[e]], bias=None if bias is None else bias[e], dtype=dtype
        ),
        weights.shape[1],
    )


def reduced(
    xs: Sequence[Sequence[Operand]],
    weights: Sequence[Sequence[Operand]],
    experts: Tensor,
    row_weights: Tensor | None,
    *,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Bounded:
    """Sum over ranks and rows of a token of weight * sum_i xs[rank][i][row] @ weights[rank][i][e]^T, + the biases.

    row_weights: [T, k]; None: all 1. Partials may be rounded to the dtype where they are not the result: where there
    are several ranks, and before the bias.
    """
    total: Bounded | None = None
    for rank_xs, rank_weights in zip(xs, weights, strict=True):
        partial = _partial(rank_xs, rank_weights, experts, row_weights, dtype)
        if len(xs) > 1 or bias is not None:
            partial = partial.rounded(dtype)
        total = partial if total is None else total.plus(partial)
    assert total is not None
    if bias is not None:
        of_slots = torch.ones(experts.shape, dtype=torch.float64) if row_weights is None else row_weights.double()
        added = sum(bias[e].double() * w.unsqueeze(1) for e, w in zip(experts.unbind(1), of_slots.unbind(1)))  # noqa: B905
        assert isinstance(added, Tensor)
        total = total.plus(Bounded(added, _eps(dtype) * experts.shape[1] * added.abs()))
    return Bounded(total.value, total.error + (len(xs) + 1) * _eps(dtype) * total.largest).rounded(dtype)


def _partial(
    xs: Sequence[Operand], weights: Sequence[Operand], experts: Tensor, row_weights: Tensor | None, dtype: torch.dtype
) -> Bounded:
    rows = _by_expert(
        experts,
        lambda e, at: Bounded.sum_of_products(
            [_take(x, at) for x in xs], [weight[e] for weight in weights], dtype=dtype, partials_rounded=len(xs) > 1
        ),
        weights[0].shape[1],
    ).rounded(dtype)
    scale = torch.ones(len(rows.value)).double() if row_weights is None else of_rows(row_weights, experts)
    return _summed(rows, scale, experts, dtype)


def combined(
    xs: Sequence[Operand],
    weights: Sequence[Operand],
    experts: Tensor,
    row_weights: Tensor | None,
    expert_sizes: Sequence[int],
    *,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Bounded:
    """Sum over rows of a token of weight * (sum_i xs[i][row] @ weights[i][e]^T + bias[e]), where experts are dealt out.

    weights: of all experts; xs: of all rows. The sum over the experts of one rank is rounded where there are several.
    """
    rows = _by_expert(
        experts,
        lambda e, at: Bounded.sum_of_products(
            [_take(x, at) for x in xs], [weight[e] for weight in weights], dtype=dtype, partials_rounded=len(xs) > 1,
            bias=None if bias is None else bias[e],
        ),
        weights[0].shape[1],
    ).rounded(dtype)  # fmt: skip
    scale = torch.ones(len(rows.value)).double() if row_weights is None else of_rows(row_weights, experts)
    of_row, total, first = torch.tensor([e for e, _, _ in row_order(experts)], dtype=torch.int64), None, 0
    for size in expert_sizes:
        here = ((of_row >= first) & (of_row < first + size)).double()
        partial = _summed(rows, scale * here, experts, dtype)
        partial = partial.rounded(dtype) if len(expert_sizes) > 1 else partial
        total = partial if total is None else total.plus(partial)
        first += size
    assert total is not None
    return Bounded(total.value, total.error + (len(expert_sizes) + 1) * _eps(dtype) * total.largest).rounded(dtype)


def _summed(rows: Bounded, scale: Tensor, experts: Tensor, dtype: torch.dtype) -> Bounded:
    """Sums of the rows of each token, by their scales."""
    value, magnitude, error = torch.zeros(3, experts.shape[0], rows.value.shape[1], dtype=torch.float64)
    tokens, scale = _tokens(experts), scale.unsqueeze(1)
    value.index_add_(0, tokens, rows.value * scale)
    magnitude.index_add_(0, tokens, rows.largest * scale.abs())
    error.index_add_(0, tokens, rows.error * scale.abs())
    return Bounded(value, error + (experts.shape[1] + 2) * _eps(dtype) * magnitude)


def weight_gradient(dz: Operand, x: Operand, experts: Tensor, num_experts: int, *, dtype: torch.dtype) -> Bounded:
    """dz[rows of e]^T @ x[their tokens], [E, N, K]; dz by row, x by token."""
    tokens = _tokens(experts)
    return _stacked(experts, num_experts, lambda rows: _gradient(_take(dz, rows), _take(x, tokens[rows]), dtype))


def bias_gradient(dz: Operand, experts: Tensor, num_experts: int, *, dtype: torch.dtype) -> Bounded:
    """Sums of the rows of each expert, [E, N]."""
    ones = torch.ones(experts.shape[0], 1, dtype=torch.float64)
    found = weight_gradient(dz, ones, experts, num_experts, dtype=dtype)
    return Bounded(found.value.squeeze(-1), found.error.squeeze(-1))


def reduced_weight_gradient(
    dy: Tensor, h: Tensor, experts: Tensor, row_weights: Tensor, num_experts: int, *, dtype: torch.dtype
) -> Bounded:
    """dy[tokens of e]^T @ (weights * h)[rows of e], [E, H, F]; dy by token, h by row."""
    tokens, scale = _tokens(experts), of_rows(row_weights, experts).unsqueeze(1)
    weighted = Bounded.exact(h).times(scale).rounded(dtype)
    return _stacked(experts, num_experts, lambda rows: _gradient(_take(dy, tokens[rows]), _take(weighted, rows), dtype))


def reduced_bias_gradient(
    dy: Tensor, experts: Tensor, row_weights: Tensor, num_experts: int, *, dtype: torch.dtype
) -> Bounded:
    """Sums of weight * dy[token] over the rows of each expert, [E, H]."""
    tokens, scale = _tokens(experts), of_rows(row_weights, experts).unsqueeze(1)
    found = _stacked(experts, num_experts, lambda rows: _gradient(_take(dy, tokens[rows]), scale[rows], dtype))
    return Bounded(found.value.squeeze(-1), found.error.squeeze(-1))


def routing_gradient(
    dy: Tensor,
    hs: Sequence[Tensor],
    weights: Sequence[Tensor],
    experts: Tensor,
    *,
    dtype: torch.dtype,
    to: torch.dtype,
    bias: Tensor | None = None,
) -> Bounded:
    """Sum over ranks of (dy[token] @ weights[e]) . h[row] + dy[token] . bias[e], by slot, [T, k], rounded to `to`."""
    value, error = torch.zeros(2, *experts.shape, dtype=torch.float64)
    order = row_order(experts)
    places = tuple(torch.tensor([row[i] for row in order], dtype=torch.int64) for i in (1, 2))
    for h, weight in zip(hs, weights, strict=True):
        row = products(dy, weight.transpose(1, 2), experts, dtype=dtype).rounded(dtype).times(h)
        value[places] += row.value.sum(1)
        error[places] += row.error.sum(1) + 2 * h.shape[1] ** 0.5 * _eps(dtype) * row.largest.sum(1)
    if bias is not None:
        of_bias = bias.double()[experts] * dy.double().unsqueeze(1)
        value += of_bias.sum(2)
        error += 2 * dy.shape[1] ** 0.5 * _eps(dtype) * of_bias.abs().sum(2)
    error += (len(hs) + 1) * _eps(dtype) * value.abs()
    return Bounded(value, error).rounded(to)


def _tokens(experts: Tensor) -> Tensor:
    return torch.tensor([t for _, t, _ in row_order(experts)], dtype=torch.int64)


def of_rows(values: Tensor, experts: Tensor) -> Tensor:
    """[T, k] in the order of the rows."""
    return torch.tensor([values[t, j].item() for _, t, j in row_order(experts)], dtype=torch.float64)


def _take(x: Operand, rows: Tensor) -> Bounded:
    return Bounded.exact(x)[rows]


def _gradient(left: Operand, right: Operand, dtype: torch.dtype) -> Bounded:
    a, b = Bounded.exact(left).transposed(), Bounded.exact(right).transposed()
    return Bounded.sum_of_products([a], [b], dtype=dtype).rounded(dtype)


def _rows_of(experts: Tensor, e: int) -> Tensor:
    return torch.tensor([i for i, (expert, _, _) in enumerate(row_order(experts)) if expert == e], dtype=torch.int64)


def _by_expert(experts: Tensor, function: object, columns: int) -> Bounded:
    parts = [function(e, _rows_of(experts, e)) for e in sorted(set(experts.flatten().tolist()))]  # type: ignore[operator]
    if not parts:
        return Bounded.exact(torch.empty(0, columns))
    return Bounded(torch.cat([part.value for part in parts]), torch.cat([part.error for part in parts]))


def _stacked(experts: Tensor, num_experts: int, function: object) -> Bounded:
    parts: list[Bounded] = [function(_rows_of(experts, e)) for e in range(num_experts)]  # type: ignore[operator]
    return Bounded(torch.stack([part.value for part in parts]), torch.stack([part.error for part in parts]))


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
