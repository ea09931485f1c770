"""`unfused` and `chunked` on NCCL, with several ranks on one GPU: the same cases as over gloo on CPUs."""

from __future__ import annotations

import pytest
import torch

from tests.backends.contract import BASE, exact_cases, ops_of
from tests.gpu import ranks as scenarios
from tests.gpu.conftest import Shared
from tests.gpu.test_symmetric import scaled_cases_of
from tests.ops.test_gradients import check_cases, fp64, within_bounds
from tpkernels.testing.cases import COLLECTIVES, FUSED, GATHER, REDUCE, SCATTER

pytestmark = pytest.mark.gpu

CALL_S = 120.0
NAMES = ("unfused", "chunked")


@pytest.mark.parametrize("name", NAMES)
def test_integers_are_exact(nccl_ranks: Shared, name: str, full: bool) -> None:
    for op in ops_of(name):
        cases = exact_cases(op, name, 2)
        nccl_ranks(2).run(scenarios.judge_all, cases if full else cases[::3], "values", 3, timeout=CALL_S)
    scaled = scaled_cases_of(name, 2)
    nccl_ranks(2).run(scenarios.judge_all, scaled if full else scaled[::3], "values", 3, timeout=CALL_S)


@pytest.mark.parametrize("name", NAMES)
def test_large_payloads_are_exact_and_nothing_is_left_of_earlier_calls(nccl_ranks: Shared, name: str) -> None:
    cases = []
    for op in ops_of(name):
        case = BASE.but(op=op, implementation=name, dtype=torch.bfloat16, shape=(2001, 320), ns=(300,))
        if op in (GATHER, "all_gather"):
            case = case.but(sizes=(1996, 5))
        cases.append(case.but(bias=False, ns=()) if op in COLLECTIVES else case)
    for judge in ("values", "poison", "ownership"):
        nccl_ranks(2).run(scenarios.judge_all, cases, judge, 5, timeout=CALL_S)


def test_gradients_are_exact_in_fp64_and_bounded_below(nccl_ranks: Shared) -> None:
    cases = [fp64(op, (12, 8), implementation=name) for op in FUSED for name in NAMES]
    cases += [fp64(GATHER, (5, 6), sizes=(5, 0), implementation=name) for name in NAMES]
    nccl_ranks(2).run(check_cases, cases, 3, [(True, True, True)], timeout=CALL_S)
    nccl_ranks(2).run(within_bounds, torch.bfloat16, 3, NAMES, 264, timeout=CALL_S)


@pytest.mark.parametrize("how", ["late", "dies"])
def test_a_rank_that_is_missing_is_named_and_the_others_live(nccl_ranks: Shared, how: str) -> None:
    scenarios.check_without_a_peer(nccl_ranks(2), how, 10.0)


@pytest.mark.parametrize("op", [GATHER, SCATTER, REDUCE])
@pytest.mark.parametrize("name", NAMES)
def test_a_captured_graph_replays_with_fresh_data(nccl_ranks: Shared, name: str, op: str) -> None:
    nccl_ranks(2).run(scenarios.replay, name, op, 50, timeout=CALL_S)
