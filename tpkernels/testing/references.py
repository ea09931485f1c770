"""What a case must give: outputs and gradients by the unfused equations, and the judge of a rank's outputs.

Integers and collectives are judged bit for bit: their sums are exact, or run in rank order and are rounded once.
Everything else is judged by the elementwise fp64 bound of `numeric.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tpkernels.partition import offsets
from tpkernels.testing.cases import ALL_GATHER, COLLECTIVES, COPY, GATHER, REDUCE, Case, Operands
from tpkernels.testing.expected import (
    expected_all_gather_matmul,
    expected_bias_gradient,
    expected_gated_matmul,
    expected_input_gradient,
    expected_matmul_all_reduce,
    expected_matmul_reduce_scatter,
    expected_weight_gradient,
)
from tpkernels.testing.numeric import GATED, Bounded, activate, assert_bitwise_equal, gate
from tpkernels.testing.payload import exact_matmul

__all__ = ["check_values", "exact_outputs", "expected_gradients", "expected_outputs", "unfused_fp64"]


def expected_outputs(case: Case, parts: Operands, rank: int) -> list[Bounded]:
    """One rank's outputs within their bounds."""
    ws, bs, dtype = parts.ws[rank], parts.bs[rank], case.dtype
    if case.op == ALL_GATHER:
        return [Bounded.exact(torch.cat(parts.xs, case.axis))]
    if case.op in COLLECTIVES:
        return [_shard(case, _sum(parts.xs, dtype), rank, len(parts.xs)) if case.scatters else _sum(parts.xs, dtype)]
    if not case.sums_products:
        whole = _whole_x(case, parts, rank)
        if case.activation is not None and case.activation in GATED:
            return [expected_gated_matmul(whole, ws, dtype=dtype, activation=case.activation, biases=bs)]
        return [
            expected_all_gather_matmul(whole, w, bias=b, dtype=dtype, activation=case.activation)
            for w, b in zip(ws, bs, strict=True)
        ]
    weights = [w[0] for w in parts.ws]
    if case.op == REDUCE:
        return [expected_matmul_all_reduce(parts.xs, weights, dtype=dtype, bias=bs[0])]
    return [
        expected_matmul_reduce_scatter(
            parts.xs, weights, rank=rank, dtype=dtype, bias=bs[0], scatter_dim=case.dim, shard_sizes=case.sizes
        )
    ]


def exact_outputs(case: Case, parts: Operands, rank: int) -> list[Tensor] | None:
    """One rank's outputs where every bit of them is known: of collectives, and of products of integers."""
    if case.op == ALL_GATHER:
        return [torch.cat(parts.xs, case.axis)]
    if case.op in COLLECTIVES:
        wide = torch.float64 if case.dtype == torch.float64 else torch.float32
        total = parts.xs[0].to(wide)
        for x in parts.xs[1:]:
            total = total + x.to(wide)
        sums = total.to(case.dtype)
    elif not case.integers or case.activation not in (None, "relu"):
        return None
    elif not case.sums_products:
        whole = _whole_x(case, parts, rank)
        pairs = zip(parts.ws[rank], parts.bs[rank], strict=True)
        products = [exact_matmul([whole], [w], bias=b, dtype=case.dtype) for w, b in pairs]
        return [F.relu(product) if case.activation else product for product in products]
    else:
        sums = exact_matmul(parts.xs, [w[0] for w in parts.ws], bias=parts.bs[rank][0], dtype=case.dtype)
    return [sums.split(list(case.cut(len(parts.xs))), case.axis)[rank] if case.scatters else sums]


def check_values(case: Case, parts: Operands, outs: Sequence[Tensor], gathered: Tensor | None, rank: int) -> None:
    """Raise AssertionError, which names the case, unless these are the outputs that the rank must get."""
    what = f"rank {rank}, {case}"
    assert len(outs) == case.num_outputs, what
    assert all(out.is_contiguous() for out in outs), f"{what}: strides"
    if case.return_gathered:
        assert gathered is not None, what
        assert_bitwise_equal(gathered, _whole_x(case, parts, rank), f"{what}: gathered")
    exact = exact_outputs(case, parts, rank)
    if exact is not None:
        for out, bits in zip(outs, exact, strict=True):
            assert_bitwise_equal(out, bits, what, either_zero=case.op != ALL_GATHER)
        return
    for out, expected in zip(outs, expected_outputs(case, parts, rank), strict=True):
        expected.check(out, what)


def expected_gradients(case: Case, parts: Operands, dys: Sequence[Tensor], rank: int) -> dict[str, Bounded]:
    """d of one rank's x, weight and bias ("x", "weight", "bias"), given the gradients of all ranks' outputs.

    Raises ValueError for a case of several weights: their gradients of x add up, which no step here bounds.
    """
    dtype, world = case.dtype, len(parts.xs)
    if case.op == ALL_GATHER:
        return {"x": _shard(case, _sum(dys, dtype), rank, world)}
    dy = torch.cat(list(dys), case.axis) if case.scatters else dys[rank]
    if case.op in COLLECTIVES:
        return {"x": Bounded.exact(dy)}
    if len(case.ns) != 1:
        raise ValueError(f"ns ({case.ns}) must be of one weight")
    weights, biases = [w[0] for w in parts.ws], [b[0] for b in parts.bs]
    if case.sums_products:
        dz: Tensor | Bounded = dy
        x, dx = parts.xs[rank], expected_input_gradient([dy], weights[rank : rank + 1], dtype=dtype)
    else:
        x = _whole_x(case, parts, rank)
        dzs = [_before(case, x, w, b, dy) for w, b, dy in zip(weights, biases, dys, strict=True)]
        dz, dx = dzs[rank], expected_input_gradient(dzs, weights, dtype=dtype)
        if case.gathers:
            dx = _shard(case, dx, rank, world)
    found = {"x": dx, "weight": expected_weight_gradient(dz, x, dtype=dtype)}
    return found | ({"bias": expected_bias_gradient(dz, dtype=dtype)} if case.bias else {})


def _before(case: Case, x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor) -> Tensor | Bounded:
    """The gradient before the activation."""
    if case.activation is None:
        return dy
    product = Bounded.sum_of_products([x], [weight], bias=bias, dtype=case.dtype)
    return product.activation_gradient(case.activation, dy, dtype=case.dtype).rounded(case.dtype)


def _whole_x(case: Case, parts: Operands, rank: int) -> Tensor:
    return parts.xs[rank] if case.op == COPY else torch.cat(parts.xs, case.axis)


def _shard(case: Case, whole: Bounded, rank: int, world: int) -> Bounded:
    cut = case.cut(world)
    return whole.narrow(case.axis, offsets(cut)[rank], cut[rank])


def _sum(parts: Sequence[Tensor], dtype: torch.dtype) -> Bounded:
    """Over ranks, in the accumulation dtype, with one rounding."""
    ones = torch.ones(1, len(parts), dtype=torch.float64)
    columns = torch.stack([part.double().flatten() for part in parts])
    total = Bounded.sum_of_products([columns.T], [ones], dtype=dtype).rounded(dtype)
    return Bounded(total.value.view(parts[0].shape), total.error.view(parts[0].shape))


def unfused_fp64(case: Case, parts: Operands) -> list[list[Tensor]]:
    """Outputs of all ranks by the unfused equations in differentiable torch: [rank][i], the gathered x appended."""
    world = len(parts.xs)
    if case.op in (GATHER, COPY):
        wholes = [torch.cat(parts.xs, case.axis)] * world if case.op == GATHER else [parts.xs[0]] * world
        results = []
        for rank in range(world):
            outs = [F.linear(wholes[rank], w, b) for w, b in zip(parts.ws[rank], parts.bs[rank], strict=True)]
            if case.activation is not None and case.activation in GATED:
                outs = [gate(case.activation, *outs)]
            elif case.activation is not None:
                outs = [activate(out, case.activation) for out in outs]
            results.append([*outs, wholes[rank]] if case.return_gathered else outs)
        return results
    total = sum(F.linear(x, w[0]) for x, w in zip(parts.xs, parts.ws, strict=True))
    assert isinstance(total, Tensor)
    if parts.bs[0][0] is not None:
        total = total + parts.bs[0][0]
    if case.op == REDUCE:
        return [[total]] + [[total.detach()]] * (world - 1)  # one y that all ranks share: its gradient counts once
    return [[piece] for piece in total.split(list(case.cut(world)), case.axis)]
