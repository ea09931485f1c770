"""Cases and their references agree with the unfused equations in fp64, along every dimension, without any rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tpkernels.testing.cases import (
    ALL_GATHER,
    ALL_REDUCE,
    COLLECTIVES,
    COPY,
    FUSED,
    GATHER,
    OPS,
    REDUCE,
    SCATTER,
    Case,
    Operands,
    operands,
    upstream,
)
from tpkernels.testing.numeric import BoundExceeded
from tpkernels.testing.references import check_values, expected_gradients, expected_outputs, unfused_fp64

pytestmark = pytest.mark.cpu

WORLDS = (1, 2, 3)


def cases(op: str) -> list[Case]:
    found = [Case(op, shape, dim=dim) for shape in ((7, 5), (2, 7, 5)) for dim in range(len(shape))]
    if op in COLLECTIVES:
        return found
    found = [replace(case, dtype=torch.float64, bias=True) for case in found]
    return found + ([replace(case, activation="silu") for case in found] if op in (GATHER, COPY) else [])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("op", FUSED)
def test_outputs_and_gradients_are_those_of_the_unfused_equations(op: str, world: int) -> None:
    for case in cases(op):
        parts, dys = operands(case, world), upstream(case, world)
        leaves = Operands(
            [x.clone().requires_grad_() for x in parts.xs],
            [[w.clone().requires_grad_() for w in ws] for ws in parts.ws],
            [[b.clone().requires_grad_() for b in bs if b is not None] for bs in parts.bs],  # type: ignore[misc]
        )
        leaves.xs = [leaves.xs[0]] * world if op == COPY else leaves.xs
        leaves.bs = [leaves.bs[0]] * world if case.sums_products else leaves.bs
        outs = unfused_fp64(case, leaves)
        ranks = range(1 if op == REDUCE else world)  # one output that all ranks have counts once
        torch.stack([(outs[rank][0] * dys[rank]).sum() for rank in ranks]).sum().backward()
        for rank in range(world):
            assert outs[rank][0].shape == case.y_shape(rank, world), case
            check_values(case, parts, [outs[rank][0].detach().contiguous()], None, rank)
            bounds = expected_gradients(case, parts, dys, rank)
            for name, leaf in (("x", leaves.xs[rank]), ("weight", leaves.ws[rank][0]), ("bias", leaves.bs[rank][0])):
                assert leaf is not None and leaf.grad is not None
                bounds[name].check(leaf.grad, f"d{name}, rank {rank}, {case}")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("op", COLLECTIVES)
def test_collectives_move_and_sum_what_all_ranks_have(op: str, world: int) -> None:
    for case in cases(op):
        parts, dys = operands(case, world), upstream(case, world)
        whole = torch.cat(parts.xs, case.axis) if op == ALL_GATHER else torch.stack(parts.xs).sum(0)
        dx = torch.cat(dys, case.axis) if case.scatters else torch.stack(dys).sum(0)
        for rank in range(world):
            y = whole.split(list(case.cut(world)), case.axis)[rank] if case.scatters else whole
            (expected,) = expected_outputs(case, parts, rank)
            expected.check(y, str(case))
            mine = dx.split(list(case.cut(world)), case.axis)[rank] if op == ALL_GATHER else dx
            mine = dys[rank] if op == ALL_REDUCE else mine
            expected_gradients(case, parts, dys, rank)["x"].check(mine, f"dx, rank {rank}, {case}")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("integers", [False, True])
def test_one_wrong_element_is_seen(op: str, integers: bool) -> None:
    case = Case(op, (7, 5), integers=integers)
    parts = operands(case, 2)
    right = expected_outputs(case, parts, 1)[0].value.float()
    if integers or op == ALL_GATHER or op in FUSED:
        check_values(case, parts, [right], None, 1)
    right[0, 0] += 0.5
    with pytest.raises(BoundExceeded, match="rank 1, Case"):
        check_values(case, parts, [right], None, 1)


def test_several_weights_have_no_bounded_gradient() -> None:
    case = Case(SCATTER, (7, 5)).but(op=GATHER, ns=(3, 4))
    with pytest.raises(ValueError, match=r"ns \(\(3, 4\)\) must be of one weight"):
        expected_gradients(case, operands(case, 2), upstream(case, 2), 0)
