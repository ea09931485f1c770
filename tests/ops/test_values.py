"""What every op returns, against fp64 within the elementwise bound, at every option that has a value."""

from __future__ import annotations

import pytest
import torch

from tests.ops.support import IMPLEMENTATIONS, check_all
from tpkernels.testing.cases import COPY, DTYPES, FUSED, GATHER, REDUCE, SCATTER, Case
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

WORLDS = [3, 2, 4]  # three ranks have several peers, and shards that do not divide
COMMUNICATING = (GATHER, SCATTER, REDUCE)


def in_all(case: Case, world: int) -> list[Case]:
    """The case in every implementation, with a payload of its own each time."""
    return [case.but(implementation=name, call=100 * world + i) for i, name in enumerate(IMPLEMENTATIONS)]


def equal(op: str, world: int, **changes: object) -> Case:
    """A case whose default cut is even: 12 divides by 2, 3 and 4."""
    return Case(op, (12, 24)).but(**changes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", WORLDS)
def test_every_dtype_is_within_the_bound(ranks: Pools, world: int) -> None:
    cases = [
        case
        for op in FUSED
        for dtype in DTYPES
        for bias in (False, True)
        for case in in_all(equal(op, world, dtype=dtype, bias=bias, shape=(36, 40), ns=(20,)), world)
    ]
    ranks(world).run(check_all, cases, 3)


@pytest.mark.sample(2)
@pytest.mark.parametrize("world", WORLDS)
def test_any_dimension_can_be_gathered_or_scattered(ranks: Pools, world: int) -> None:
    shapes = [(12, 24), (12, 12, 24), (2, 12, 12, 24), (12, 2, 3, 12)]
    cases = [
        case
        for op in (GATHER, SCATTER)
        for shape in shapes
        for dim in range(-len(shape), len(shape))
        if shape[dim] % world == 0 or op == SCATTER
        for case in in_all(Case(op, shape, ns=(12,), dim=dim, bias=True), world)
    ]
    for num_chunks in (None, 3):
        ranks(world).run(check_all, cases, num_chunks)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", WORLDS)
def test_shards_may_be_uneven_fewer_than_ranks_or_empty(ranks: Pools, world: int) -> None:
    cuts = {2: [(3, 2), (0, 5), (5, 0), (1, 0), (0, 0)], 3: [(4, 3, 3), (0, 7, 0), (1, 0, 1), (0, 0, 0), (2, 9, 1)]}
    cuts[4] = [(4, 3, 3, 3), (0, 0, 5, 0), (1, 1, 0, 0), (0, 0, 0, 0), (7, 0, 2, 9)]
    cases = []
    for sizes in cuts[world]:
        whole = sum(sizes)
        for shape, dim in (((whole, 10), 0), ((2, whole, 10), 1), ((5, 2, whole, 6), 2), ((3, whole), 1)):
            cases += in_all(Case(GATHER, shape, dim=dim, sizes=sizes, ns=(5,), bias=True, return_gathered=True), world)
            if dim < len(shape) - 1:
                cases += in_all(Case(SCATTER, shape, dim=dim, sizes=sizes, ns=(5,), bias=True), world)
            else:
                cases += in_all(Case(SCATTER, (3, 9), dim=dim, sizes=sizes, ns=(whole,), bias=True), world)
    for rows in (0, 1, 2, 5, 7):  # the default cut of the reducing ops
        cases += in_all(Case(SCATTER, (rows, 10), bias=True), world)
        cases += in_all(Case(REDUCE, (rows, 10), bias=True), world)
        cases += in_all(Case(REDUCE, (2, rows, 10), bias=True), world)
        cases += in_all(Case(COPY, (2, rows, 10), bias=True), world)
    for num_chunks in (None, 4):
        ranks(world).run(check_all, cases, num_chunks)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", WORLDS)
def test_inner_sizes_may_be_zero_or_one(ranks: Pools, world: int) -> None:
    cases = []
    for k, n in ((0, 4), (4, 0), (0, 0), (1, 1)):
        for bias in (False, True):
            cases += in_all(Case(GATHER, (12, k), ns=(n,), bias=bias), world)
            cases += in_all(Case(SCATTER, (12, k), ns=(n,), bias=bias), world)
            cases += in_all(Case(SCATTER, (4, k), ns=(n,), dim=-1, bias=bias), world)
            cases += in_all(Case(REDUCE, (12, k), ns=(n,), bias=bias), world)
            cases += in_all(Case(COPY, (12, k), ns=(n,), bias=bias), world)
    ranks(world).run(check_all, cases, 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", WORLDS)
def test_the_size_that_only_a_rank_knows_may_differ_between_ranks(ranks: Pools, world: int) -> None:
    k_sizes = (1, 9) if world == 2 else (5, 0, 7) if world == 3 else (2, 0, 7, 1)
    cases = in_all(Case(GATHER, (12, 10), own_ns=True, bias=True), world)
    cases += in_all(Case(GATHER, (12, 10), ns=(0, 3), own_ns=True, bias=True), world)
    cases += in_all(Case(COPY, (12, 10), own_ns=True, bias=True), world)
    for op in (SCATTER, REDUCE):
        cases += in_all(Case(op, (13, sum(k_sizes)), k_sizes=k_sizes, bias=True), world)
    ranks(world).run(check_all, cases, 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", WORLDS)
def test_one_gather_feeds_several_weights_with_and_without_biases(ranks: Pools, world: int) -> None:
    cases = []
    for op in (GATHER, COPY):
        for biases in (False, True, (True, False, True), (False, False, True)):
            for activation in (None, "silu"):
                cases += in_all(Case(op, (2, 12, 16), ns=(7, 3, 12), bias=biases, activation=activation), world)
    cases += in_all(Case(GATHER, (12, 3, 16), ns=(7, 3), return_gathered=True, save_gathered=True), world)
    for num_chunks in (None, 3):
        ranks(world).run(
            check_all, [c for c in cases if c.op == COPY or c.shape[0] % world == 0 or world == 2], num_chunks
        )


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", WORLDS)
def test_every_activation_is_applied_after_the_bias(ranks: Pools, world: int) -> None:
    cases = [
        case
        for op in (GATHER, COPY)
        for activation in ("relu", "gelu", "gelu_tanh", "silu")
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
        for case in in_all(equal(op, world, activation=activation, dtype=dtype, bias=True), world)
    ]
    ranks(world).run(check_all, cases, 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", WORLDS)
def test_a_gated_activation_makes_one_output_of_gate_and_up(ranks: Pools, world: int) -> None:
    gated = Case(GATHER, (12, 16), ns=(7, 7), activation="swiglu")
    cases = []
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64)):
        for bias in (False, True, (True, False), (False, True)):
            activation = ("swiglu", "geglu")[(number + world) % 2]
            cases += in_all(gated.but(dtype=dtype, bias=bias, activation=activation, own_ns=bias is True), world)
    sizes = (5, 0, 3, 4)[:world]
    cases += in_all(gated.but(shape=(sum(sizes), 16), sizes=sizes, return_gathered=True, bias=True), world)
    cases += in_all(gated.but(shape=(3, 5 * sum(sizes), 16), dim=1, sizes=tuple(5 * s for s in sizes)), world)
    cases += in_all(gated.but(shape=(3, 12), dim=-1, bias=True, strided=True, activation="geglu"), world)
    cases += in_all(gated.but(op=COPY, shape=(2, 5, 16), bias=True), world)
    ranks(world).run(check_all, cases, 3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", WORLDS)
def test_inputs_need_not_be_contiguous(ranks: Pools, world: int) -> None:
    cases = []
    for op in FUSED:
        for shape in ((12, 16), (12, 4, 16)):
            for dtype in (torch.float32, torch.bfloat16):
                cases += in_all(Case(op, shape, bias=True, strided=True, dtype=dtype), world)
    cases += in_all(Case(GATHER, (3, 12), dim=-1, bias=True, strided=True), world)
    cases += in_all(Case(SCATTER, (3, 16), dim=-1, ns=(12,), bias=True, strided=True), world)
    ranks(world).run(check_all, cases, 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.slow("3 s: large shapes")
def test_real_sizes_with_the_chunk_counts_and_choices_of_the_library(ranks: Pools, world: int) -> None:
    cases = []
    for dtype in (torch.bfloat16, torch.float32):
        cases += in_all(Case(GATHER, (512 * world, 512), ns=(256, 128), bias=True, dtype=dtype), world)
        cases += in_all(Case(SCATTER, (512 * world, 512), ns=(512,), bias=True, dtype=dtype), world)
        cases += in_all(Case(REDUCE, (512 * world, 512), ns=(512,), bias=True, dtype=dtype), world)
    ranks(world).run(check_all, cases, None, True, timeout=120)
