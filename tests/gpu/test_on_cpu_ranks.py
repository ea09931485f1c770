"""What the ranks of this folder do runs on CPU ranks as well: a typo must not wait for a GPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.gpu import ranks as scenarios
from tests.gpu.test_experts import cases_of as experts_of
from tests.gpu.test_symmetric import cases_of, scaled_cases_of
from tests.ops import test_gated
from tests.ops.test_gradients import within_bounds
from tpkernels.dispatch import GROUPED, OPS
from tpkernels.ops.residual_norm import Norm
from tpkernels.testing.cases import GATHER, REDUCE, SCATTER
from tpkernels.testing.spawn import Pools, RanksFailed, WorkerPool

pytestmark = pytest.mark.gloo

STAND_IN = "unfused"


@pytest.mark.slow("2 s")
def test_the_cases_for_symmetric_are_right_for_another_implementation(ranks: Pools) -> None:
    for op in OPS:
        cases = [case.but(implementation=STAND_IN) for case in cases_of(op, 2, full=False)]
        assert ranks(2).run(scenarios.judge_all, cases[-3:], "values", 3) == [len(cases[-3:])] * 2
    assert ranks(2).run(scenarios.judge_all, scaled_cases_of(STAND_IN, 2)[-5:], "values", 3) == [5, 5]


@pytest.mark.slow("2 s")
def test_the_cases_with_experts_are_right_for_another_implementation(ranks: Pools) -> None:
    for op in GROUPED:
        cases = [case.but(implementation=STAND_IN) for case in experts_of(op, 2, full=False)]
        assert ranks(2).run(scenarios.judge_experts, cases[-2:], 3) == [2, 2]


def test_replays_are_judged_with_fresh_data_and_a_stale_one_is_caught(ranks: Pools) -> None:
    for op in (GATHER, SCATTER, REDUCE):
        assert ranks(2).run(scenarios.replay, STAND_IN, op, 3, 192) == [6, 6]
    with pytest.raises(RanksFailed, match=r"matmul_all_reduce, replay 0, call 0, rank \d"):
        ranks(2).run(_replay_that_computes_once)


def _replay_that_computes_once() -> None:
    captured = scenarios.captured
    scenarios.captured = lambda work: (captured(work)[0], lambda: None)
    try:
        scenarios.replay(STAND_IN, REDUCE, 2)
    finally:
        scenarios.captured = captured


def test_sums_with_a_norm_are_judged(ranks: Pools) -> None:
    assert ranks(2).run(scenarios.sums_with_a_norm, STAND_IN, (1, 7, 300)) == [18, 18]
    with pytest.raises(RanksFailed, match="normed"):
        ranks(2).run(_norm_with_another_eps)


def _norm_with_another_eps() -> None:
    def of(residual: Tensor, norm_weight: Tensor, eps: float | None) -> Norm:
        return Norm(residual, norm_weight, 10.0)

    with mock.patch.object(Norm, "of", of):
        scenarios.sums_with_a_norm(STAND_IN, (7,))


def test_gradients_of_as_many_rows_as_on_a_gpu_are_within_the_bound(ranks: Pools) -> None:
    ranks(2).run(within_bounds, torch.bfloat16, 3, (STAND_IN,), 264)
    ranks(2).run(test_gated.judge_all, (STAND_IN,), torch.bfloat16, 264)


@pytest.mark.parametrize(("how", "timeout_s"), [("late", 3.0), ("dies", 20.0)])
def test_a_missing_rank_is_named_on_gloo_as_it_has_to_be_on_nccl(how: str, timeout_s: float) -> None:
    with WorkerPool(2, forked=True) as pool:
        scenarios.check_without_a_peer(pool, how, timeout_s, within_s=15.0)


@pytest.mark.full("tests/selftest compares the same modules on CPU ranks")
def test_modules_of_the_selftest_are_right_on_cpu_ranks(ranks: Pools) -> None:
    assert ranks(2).run(scenarios.modules_of_the_selftest, ("fp64",)) == [[], []]
