"""Every implementation that ranks of one host can run keeps the contract of the ops; new ones come in by themselves.

Parametrised from the registry: an implementation that is registered tomorrow is judged tomorrow.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tpkernels as tpk
from tests.backends.contract import BASE, exact_cases, judge_all, ops_of, refusals
from tests.ops.support import new_group
from tpkernels.backends.point_to_point import chunked
from tpkernels.dispatch import OPS, Costs, Problem
from tpkernels.gemm.native import why_not
from tpkernels.ops.contract import GATED
from tpkernels.testing.cases import COLLECTIVES, GATHER, REDUCE, SCATTER, Case
from tpkernels.testing.payload import payload
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo


def parameters() -> list[object]:
    """Names that run here; one that only lacks the compiled core is skipped with that reason."""
    found = []
    for name, by_op in refusals().items():
        reasons = set(by_op.values())
        if None in reasons:
            found.append(pytest.param(name))
        elif reasons == {why_not()}:
            found.append(pytest.param(name, marks=pytest.mark.skip(reason=why_not())))
    return found


every_implementation = pytest.mark.parametrize("name", parameters())
few_worlds = pytest.mark.parametrize("world", [3, 2])


def small(op: str, name: str, **changes: object) -> Case:
    """One ordinary case of an op."""
    case = BASE.but(op=op, implementation=name, **changes)
    if op in (GATHER, "all_gather"):
        case = case.but(shape=(12, *case.shape[1:]))  # equal shards for 2, 3 and 4 ranks
    return case.but(bias=False, ns=()) if op in COLLECTIVES else case


def test_the_implementations_of_local_ranks_are_all_here() -> None:
    by_name = refusals()
    assert list(by_name)[:3] == ["unfused", "chunked", "shared_memory"]
    assert all(reason is None for reason in by_name["unfused"].values())
    assert [len(by_name[name]) for name in ("unfused", "chunked", "shared_memory")] == [len(OPS), 3, len(OPS)]


@pytest.mark.sample(5)
@every_implementation
@pytest.mark.parametrize("world", [2, 3, 4])
def test_integers_are_exact_and_have_the_bits_of_unfused(ranks: Pools, world: int, name: str, full: bool) -> None:
    for op in ops_of(name):
        cases = exact_cases(op, name, world)
        if world > 2:  # the shapes are those of the smaller worlds: a sample
            cases = cases[:: {3: 2, 4: 8}[world] if not full else 1]
        ranks(world).run(judge_all, cases, "unfused", 3)


@every_implementation
@few_worlds
def test_large_payloads_are_exact_and_have_the_bits_of_unfused(ranks: Pools, world: int, name: str) -> None:
    """Above the size where an all-reduce goes in two phases, and above what a segment holds at first."""
    cases = []
    for op in ops_of(name):
        for dtype, rows in ((torch.bfloat16, 1001), (torch.float32, 2001), (torch.float32, 31)):
            case = BASE.but(op=op, implementation=name, dtype=dtype, shape=(rows, 320), ns=(300,), call=rows)
            if op in (GATHER, "all_gather"):
                case = case.but(sizes=(rows - 5 * (world - 1), *[5] * (world - 1)))
            cases.append(case.but(bias=False, ns=()) if op in COLLECTIVES else case)
    ranks(world).run(judge_all, cases, "unfused", 5)


@every_implementation
@few_worlds
def test_real_numbers_are_within_the_bound_of_fp64(ranks: Pools, world: int, name: str) -> None:
    cases = []
    for op in ops_of(name):
        for dtype in (torch.float32, torch.bfloat16):
            for shape in ((48, 96), (2, 24, 96)):
                cases.append(small(op, name, integers=False, dtype=dtype).but(shape=shape, dim=len(shape) - 2))
        if op == GATHER:
            cases += [cases[-1].but(activation=activation) for activation in ("relu", "gelu", "gelu_tanh", "silu")]
            cases += [cases[-1].but(activation=gated, ns=(9, 9)) for gated in GATED]
    ranks(world).run(judge_all, cases, "values", 2)


@pytest.mark.sample(3)
@every_implementation
@few_worlds
def test_nothing_of_an_earlier_call_is_left(ranks: Pools, world: int, name: str) -> None:
    """Small buffers, and ones that are reused (`backends/point_to_point/workspace.py`): the calls before had NaN."""
    cases = []
    for number, op in enumerate(ops_of(name)):
        for shape, ns in (((12, 24), (10,)), ((1200, 64), (80,))):
            case = small(op, name, call=10 * number).but(shape=shape)
            cases.append(case if op in COLLECTIVES else case.but(ns=ns))
    ranks(world).run(judge_all, cases, "poison", 3)


@pytest.mark.sample(3)
@every_implementation
@few_worlds
def test_outputs_belong_to_the_caller(ranks: Pools, world: int, name: str) -> None:
    cases = []
    for op in ops_of(name):
        for shape, ns in (((12, 24), (10,)), ((1200, 64), (80,))):
            case = small(op, name, return_gathered=op == GATHER).but(shape=shape)
            cases.append(case if op in COLLECTIVES else case.but(ns=ns))
    ranks(world).run(judge_all, cases, "ownership", 3)


def bias_of_zeros(name: str) -> dict[str, list[torch.Tensor]]:
    """Every op with a bias on an x of zeros: what it returns besides zeros is the bias."""
    results: dict[str, list[torch.Tensor]] = {}
    with new_group(3) as group:
        for shape in ((12, 8), (1200, 64)):
            x, w, b = torch.zeros(shape), torch.ones(30, shape[1]), payload((30,), name="b")
            outs = [
                tpk.all_gather_matmul(x, w, group, bias=b, implementation=name),
                tpk.matmul_reduce_scatter(x, w, group, bias=b, implementation=name),
                tpk.matmul_all_reduce(x, w, group, bias=b, implementation=name),
            ]
            features = tpk.matmul_reduce_scatter(x, w, group, bias=b, scatter_dim=1, implementation=name)
            results[str(shape)] = [*(out.unique(dim=0) for out in outs), features.unique(dim=0)]
    return results


@every_implementation
@few_worlds
def test_bias_is_added_once_after_the_reduction(ranks: Pools, world: int, name: str) -> None:
    b = payload((30,), name="b")
    assert {GATHER, SCATTER, REDUCE} <= set(ops_of(name))
    for rank, by_shape in enumerate(ranks(world).run(bias_of_zeros, name)):
        for shape, (gathered, scattered, reduced, features) in by_shape.items():
            for rows in (gathered, scattered, reduced):
                assert torch.equal(rows, b[None]), f"rank {rank}, {shape}: {rows}"
            assert torch.equal(features, b[None].tensor_split(world, 1)[rank]), f"rank {rank}, {shape}: features"


def judge_with_rounds(cases: list[Case], one: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "_in_one_round", lambda problem, costs: one)
        judge_all(cases, "unfused", 3)


@pytest.mark.parametrize("one", [True, False])
def test_an_all_reduce_is_exact_in_one_round_and_in_two(ranks: Pools, one: bool) -> None:
    ranks(3).run(judge_with_rounds, exact_cases(REDUCE, "chunked", 3), one)


def test_the_number_of_rounds_follows_the_link() -> None:
    """One round sends (W - 1) S, two send 2 (W - 1) / W S: it is latency against bytes."""
    problem = Problem(REDUCE, 64, 512, 512, torch.bfloat16, 4)
    for gbytes, latency_us, one in ((0.1, 50.0, False), (0.1, 5000.0, True), (10.0, 50.0, True)):
        costs = Costs(link_gbytes=gbytes, link_latency_us=latency_us)
        assert chunked._in_one_round(problem, costs) is one, (gbytes, latency_us)
        assert chunked._in_one_round(replace(problem, world_size=2), costs), "the bytes are the same for two ranks"
