"""Gradients of every op against unfused torch autograd on the gathered tensors, whoever needs them."""

from __future__ import annotations

from itertools import chain, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ops.support import IMPLEMENTATIONS, new_group, own_part
from tpkernels.testing.cases import COPY, FUSED, GATHER, REDUCE, SCATTER, Case, Operands, call, operands
from tpkernels.testing.expected import check_bias_gradient, check_input_gradient, check_weight_gradient
from tpkernels.testing.payload import payload
from tpkernels.testing.references import unfused_fp64
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

WORLDS = [3, 2]


def upstream(case: Case, outs: list[Tensor], rank: int) -> list[Tensor]:
    """A gradient for every output; for an all-reduce the same on all ranks, as its contract says."""
    source = 0 if case.op == REDUCE else rank
    return [payload(o.shape, o.dtype, rank=source, call=case.call, name=f"dy{i}") for i, o in enumerate(outs)]


def reference_gradients(case: Case, world: int) -> tuple[list[list[Tensor]], Operands]:
    """Outputs of the unfused equations for all ranks, and the operands with the gradients of the summed losses."""
    parts = operands(case, world)
    leaves = Operands(
        [x.double().requires_grad_() for x in parts.xs],
        [[w.double().requires_grad_() for w in ws] for ws in parts.ws],
        [[None if b is None else b.double().requires_grad_() for b in bs] for bs in parts.bs],
    )
    if case.op in (SCATTER, REDUCE):  # one bias for all ranks
        leaves.bs = [leaves.bs[0]] * world
    if case.op == COPY:  # one x for all ranks
        leaves.xs = [leaves.xs[0]] * world
    outs = unfused_fp64(case, leaves)
    losses = [
        (out * dy).sum()
        for rank in range(1 if case.op == REDUCE else world)
        for out, dy in zip(outs[rank], upstream(case, outs[rank], rank), strict=True)
    ]
    torch.stack(losses).sum().backward()
    return outs, leaves


def close(actual: Tensor | None, expected: Tensor | None, what: str) -> None:
    if expected is None:
        expected = None if actual is None else torch.zeros_like(actual)
    assert (actual is None) == (expected is None), f"{what}: {actual} against {expected}"
    if actual is not None:
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-11, atol=1e-11, msg=lambda m: f"{what}: {m}")


def check_case(case: Case, group: Any, needs: tuple[bool, bool, bool] = (True, True, True)) -> None:
    """Values and gradients of one fp64 case; `needs` says which of x, the weights and the biases require them."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    x, ws, bs = own_part(operands(case, world), rank)
    x.requires_grad_(needs[0])
    for w in ws:
        w.requires_grad_(needs[1])
    for b in bs:
        if b is not None:
            b.requires_grad_(needs[2])
    outs, gathered = call(case, (x, ws, bs), group)
    outs = outs if gathered is None else [*outs, gathered]
    expected, leaves = reference_gradients(case, world)
    what = f"rank {rank}, needs {needs}, {case}"
    for out, want in zip(outs, expected[rank], strict=True):
        close(out.detach(), want.detach(), what)
    differentiable = [
        (o, dy.to(o.device)) for o, dy in zip(outs, upstream(case, outs, rank), strict=True) if o.requires_grad
    ]
    if differentiable:
        torch.autograd.backward([o for o, _ in differentiable], [dy for _, dy in differentiable])
    close(x.grad, leaves.xs[rank].grad if needs[0] else None, f"dx: {what}")
    for i, (w, b) in enumerate(zip(ws, bs, strict=True)):
        close(w.grad, leaves.ws[rank][i].grad if needs[1] else None, f"dw{i}: {what}")
        if b is not None:
            close(b.grad, leaves.bs[rank][i].grad if needs[2] else None, f"db{i}: {what}")  # type: ignore[union-attr]
            assert not needs[2] or b.grad is not None, what
        assert not needs[1] or w.grad is not None, what


def check_cases(cases: list[Case], num_chunks: int | None, needs: list[tuple[bool, bool, bool]]) -> int:
    with new_group(num_chunks) as group:
        for case in cases:
            for need in needs:
                check_case(case, group, need)
    return len(cases) * len(needs)


EVERYTHING = [(True, True, True)]
ANYTHING = [needs for needs in product((True, False), repeat=3) if any(needs)]


def fp64(op: str, shape: tuple[int, ...], **changes: Any) -> Case:
    return Case(op, shape, dtype=torch.float64, bias=True).but(**changes)


def in_all(*cases: Case) -> list[Case]:
    return [case.but(implementation=name) for case in cases for name in IMPLEMENTATIONS]


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", WORLDS)
def test_gradients_of_every_op_for_any_subset_of_inputs(ranks: Pools, world: int) -> None:
    cases = in_all(*(fp64(op, (12, 8)) for op in FUSED))
    ranks(world).run(check_cases, cases, 2, ANYTHING)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", WORLDS)
def test_gradients_of_several_weights_activations_and_the_gathered_input(ranks: Pools, world: int) -> None:
    cases = []
    for activation in (None, "relu", "gelu", "gelu_tanh", "silu"):
        for save_gathered in (False, True):
            for return_gathered in (False, True):
                options = {
                    "activation": activation,
                    "save_gathered": save_gathered,
                    "return_gathered": return_gathered,
                    "implementation": "chunked" if save_gathered else "unfused",
                }
                cases.append(fp64(GATHER, (12, 8), ns=(5, 3), bias=(True, False), own_ns=True, **options))
        cases.append(fp64(COPY, (2, 6, 8), ns=(5, 3), bias=(False, True), activation=activation, own_ns=True))
    for number, gated in enumerate(("swiglu", "geglu")):
        for save in (False, True):
            options = {"activation": gated, "save_gathered": save, "return_gathered": save == bool(number)}
            cases += in_all(fp64(GATHER, (12, 8), ns=(5, 5), bias=(True, False), own_ns=True, **options))
        cases.append(fp64(GATHER, (3, 6), dim=-1, ns=(5, 5), activation=gated))
        cases.append(fp64(COPY, (2, 6, 8), ns=(5, 5), activation=gated, own_ns=True))
    ranks(world).run(check_cases, cases, 2, [(True, True, True), (False, True, True), (True, False, False)])


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", WORLDS)
def test_gradients_along_any_dimension(ranks: Pools, world: int) -> None:
    cases = [
        fp64(op, shape, ns=(12,), dim=dim, return_gathered=op == GATHER)
        for op in (GATHER, SCATTER)
        for shape in ((12, 12), (3, 12, 12), (2, 12, 12, 12))
        for dim in range(-len(shape), len(shape))
        if shape[dim] % world == 0
    ]
    ranks(world).run(check_cases, [c.but(implementation="unfused") for c in cases], None, EVERYTHING)
    ranks(world).run(check_cases, cases, 3, EVERYTHING)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [*WORLDS, 4])
def test_gradients_of_uneven_and_empty_shards(ranks: Pools, world: int) -> None:
    cuts = {2: [(3, 2), (0, 5), (0, 0)], 3: [(4, 3, 3), (0, 7, 0)], 4: [(4, 3, 3, 3), (0, 0, 5, 0)]}[world]
    cases = []
    for sizes in cuts:
        whole = sum(sizes)
        for save in (False, True):
            cases += in_all(fp64(GATHER, (whole, 6), sizes=sizes, save_gathered=save, return_gathered=save))
            cases += in_all(fp64(GATHER, (2, whole, 6), dim=1, sizes=sizes, save_gathered=save, own_ns=True))
            cases += in_all(fp64(GATHER, (4, whole), dim=-1, sizes=sizes, save_gathered=save))
        cases += in_all(fp64(SCATTER, (whole, 6), sizes=sizes), fp64(SCATTER, (2, whole, 6), dim=1, sizes=sizes))
        cases += in_all(fp64(SCATTER, (4, 6), ns=(whole,), dim=-1, sizes=sizes))
    for rows in (0, 1, 5):
        cases += in_all(*(fp64(op, (rows, 6)) for op in (SCATTER, REDUCE, COPY)))
    k_sizes = {2: (0, 5), 3: (2, 0, 5), 4: (1, 2, 0, 3)}[world]
    cases += in_all(*(fp64(op, (7, sum(k_sizes)), k_sizes=k_sizes) for op in (SCATTER, REDUCE)))
    cases += in_all(fp64(GATHER, (12, 4), ns=(0, 3), own_ns=True), fp64(COPY, (12, 4), ns=(0, 3), own_ns=True))
    ranks(world).run(check_cases, cases, 3, EVERYTHING)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", WORLDS)
def test_gradients_of_inputs_that_are_not_contiguous(ranks: Pools, world: int) -> None:
    cases = in_all(*(fp64(op, (12, 4, 8), strided=True) for op in FUSED))
    ranks(world).run(check_cases, cases, 2, EVERYTHING)


def unused_outputs() -> None:
    """Only some outputs of one gather reach the loss; an expanded gradient arrives for another."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with new_group(2) as group:
        for op, name, gathered in product((GATHER, COPY), IMPLEMENTATIONS, (False, True)):
            if op == COPY and gathered:
                continue
            case = fp64(op, (12, 8), ns=(5, 3, 4), return_gathered=gathered, implementation=name, activation="silu")
            for used in ((0,), (2,), (0, 2), *(((3,), (1, 3)) if gathered else ())):
                parts = operands(case, world)
                x, ws, bs = own_part(parts, rank)
                leaves = [x, *ws, *bs]
                for leaf in leaves:
                    assert leaf is not None
                    leaf.requires_grad_()
                outs, whole = call(case, (x, ws, bs), group)
                outs = outs if whole is None else [*outs, whole]
                sum(outs[i].sum() for i in used).backward()  # type: ignore[union-attr]
                everyone = operands(case, world)
                for leaf in (*everyone.xs, *chain(*everyone.ws), *chain(*everyone.bs)):
                    leaf.requires_grad_()
                if op == COPY:
                    everyone.xs = [everyone.xs[0]] * world
                results = unfused_fp64(case, everyone)
                sum(results[r][i].sum() for r in range(world) for i in used).backward()  # type: ignore[union-attr]
                expected = [everyone.xs[rank], *everyone.ws[rank], *everyone.bs[rank]]
                for leaf, want in zip(leaves, expected, strict=True):
                    what = f"rank {rank}, outputs {used} of {case}"
                    close(leaf.grad, want.grad, what)  # type: ignore[union-attr]


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3])
def test_outputs_that_the_loss_does_not_use_cost_nothing(ranks: Pools, world: int) -> None:
    ranks(world).run(unused_outputs)


def within_bounds(
    dtype: torch.dtype,
    num_chunks: int,
    names: tuple[str, ...] = IMPLEMENTATIONS,
    rows: int = 48,
    ops: tuple[str, ...] = FUSED,
) -> None:
    """dgrad, wgrad and bias gradient of the linear ops, each judged against exact operands of its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with new_group(num_chunks) as group:
        for op, name in product(ops, names):
            case = Case(op, (rows, 64), ns=(40,), dtype=dtype, bias=True, implementation=name)
            parts = operands(case, world)
            x, (w,), (b,) = own_part(parts, rank)
            assert b is not None
            for leaf in (x, w, b):
                leaf.requires_grad_()
            (y,), _ = call(case, (x, [w], [b]), group)
            y.backward(upstream(case, [y], rank)[0].to(y.device))
            assert x.grad is not None and w.grad is not None and b.grad is not None
            shapes = [p[0].shape[0] for p in parts.ws]
            dys = [
                upstream(case, [torch.empty(case.cut(world)[r] if op == SCATTER else rows, shapes[r], dtype=dtype)], r)[
                    0
                ]
                for r in range(world)
            ]
            weights = [p[0].detach() for p in parts.ws]
            what = f"rank {rank}, {case}"
            if op in (GATHER, COPY):
                whole = torch.cat([p.detach() for p in parts.xs]) if op == GATHER else parts.xs[0].detach()
                start = rank * (rows // world) if op == GATHER else 0
                check_input_gradient(x.grad, dys, weights, start=start, what=what)
                check_weight_gradient(w.grad, dys[rank], whole, what=what)
                check_bias_gradient(b.grad, dys[rank], what=what)
            else:
                dy = torch.cat(dys) if op == SCATTER else dys[0]
                check_input_gradient(x.grad, [dy], [weights[rank]], what=what)
                check_weight_gradient(w.grad, dy, parts.xs[rank].detach(), what=what)
                check_bias_gradient(b.grad, dy, what=what)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_gradients_in_low_precision_are_within_the_bound(ranks: Pools, world: int, dtype: torch.dtype) -> None:
    ranks(world).run(within_bounds, dtype, 3)
