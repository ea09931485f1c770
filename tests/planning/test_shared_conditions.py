"""Conditions of inputs and random numbers: all ranks answer alike, and layers behind them are cut, for any answer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tpkernels as tpk
from tests.models.compare import LIMIT, compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.deciding import Chooses, Dropped, Padded, Sized, SizedAround
from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.sharding import Column, Row
from tpkernels.testing.spawn import Pools

X = torch.zeros(3, 5, 8)
IDS = torch.zeros(3, 5, dtype=torch.long)


def are_pairs(plan: tpk.ShardingPlan, *blocks: str) -> list[bool]:
    return [(plan[f"{b}.up"].style, plan[f"{b}.down"].style) == (Column(), Row()) for b in blocks]


def observed(model: nn.Module, x: object) -> tuple[bool, list[object]]:
    """Whether conditions were answered in every way, and the answers of the runs in training."""
    observation = Observation(model, x)
    assert observation.shadow is not None
    runs = [recording.turns for mode, recording in observation.recordings if str(mode) == "training"]
    return observation.shadow.decides, runs


@pytest.mark.cpu
def test_every_combination_of_few_answers_is_a_run_and_the_one_with_all_layers_is_the_first() -> None:
    expected = [(False, False), (False, True), (True, False), (True, True)]
    assert observed(Dropped(2), X) == (True, expected)
    assert observed(Padded("part"), IDS.to("meta")) == (True, [(True,), (False,)])


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["skips", "before"])
@pytest.mark.parametrize("count", [2, 5])
def test_blocks_that_may_be_skipped_or_that_ask_before_their_layers_are_cut(count: int, how: str) -> None:
    plan = tpk.make_plan(Dropped(count, how), 2, example_inputs=X)
    assert are_pairs(plan, *(f"layers.{index}" for index in range(count))) == [True] * count and not plan.notes


@pytest.mark.cpu
def test_of_many_conditions_each_is_answered_both_ways_behind_both_answers() -> None:
    assert observed(Dropped(5), X) == (True, [(False,), (True,), (False, True), (True, False)])


@pytest.mark.cpu
def test_many_conditions_whose_answers_change_what_later_blocks_run_are_those_of_their_module() -> None:
    assert not observed(Dropped(5, "counts"), X)[0]
    assert observed(Dropped(2, "counts"), X)[0], "all combinations are runs"


@pytest.mark.cpu
@pytest.mark.parametrize("count", [2, 5])
def test_a_part_that_passes_a_condition_is_refused(count: int) -> None:
    plan = tpk.make_plan(Dropped(count, "between"), 2, example_inputs=X)
    assert are_pairs(plan, "layers.0") == [False]
    assert "read behind a condition, and was made before it" in plan["layers.0.up"].reason


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["parameter", "written", "activation"])
def test_a_condition_that_parameters_or_activations_go_into_is_that_of_its_module(how: str) -> None:
    observation = Observation(nn.Sequential(Dropped(2, how), nn.Linear(8, 8)), X)
    assert observation.shadow is not None and observation.shadow.opaque == {"0"}


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["skips", "before"])
@pytest.mark.parametrize("count", [2, 5])
def test_no_residual_is_cut_along_the_sequence_over_a_condition(count: int, how: str) -> None:
    plan = tpk.make_plan(Dropped(count, how), 2, sequence_parallel=True, example_inputs=X)
    assert all(are_pairs(plan, "layers.0", "layers.1"))
    (note,) = plan.notes
    assert "the residual of layers is not cut along the sequence" in note


@pytest.mark.cpu
def test_a_rank_that_would_ask_another_condition_is_refused() -> None:
    plan = tpk.make_plan(Chooses(), 2, example_inputs=(X, torch.tensor(True), torch.tensor(True)))
    assert (plan["up"].style, plan["down"].style) != (Column(), Row())


@pytest.mark.cpu
def test_what_one_answer_runs_alone_is_proven_as_well() -> None:
    plan = tpk.make_plan(Padded("part"), 2, example_inputs=IDS)
    assert are_pairs(plan, "layer", "rare") == [True, False]
    assert not plan["rare.up"].reason.endswith("gathered")
    assert are_pairs(tpk.make_plan(Padded(), 2, example_inputs=IDS), "layer") == [True]


@pytest.mark.cpu
def test_an_answer_that_the_model_refuses_leaves_the_condition_to_its_module() -> None:
    assert not observed(nn.Sequential(Padded("refuses"), nn.Linear(8, 8)), IDS.to("meta"))[0]
    assert observed(nn.Sequential(Padded("refuses"), nn.Linear(8, 8)), IDS)[0], "these numbers are words"


@pytest.mark.cpu
def test_a_call_that_raises_whatever_is_answered_leaves_the_conditions_to_the_next_one() -> None:
    model = Padded("two")
    observation = Observation(model, X.to("meta"))
    assert "refuses these" in observation.problem
    assert observation.shadow is not None and observation.shadow.decides and not observation.shadow.opaque


@pytest.mark.cpu
def test_of_many_conditions_none_is_left_out_where_some_are_mixed_with_what_numbers_tell() -> None:
    model = Dropped(5, "mixed")
    observation = Observation(model, (X, torch.tensor([3, 5, 8])))
    assert observation.shadow is None or not observation.shadow.decides


@pytest.mark.cpu
@pytest.mark.parametrize("kind", [Sized, SizedAround])
@pytest.mark.parametrize("count", [2, 4])
def test_what_raises_under_another_answer_settles_no_other_condition(count: int, kind: type[Sized]) -> None:
    """Of many conditions, few turns answer every other one: behind the first, which raises, some would not be tried."""
    plan = tpk.make_plan(kind(count), 2, example_inputs=(X, torch.arange(1, count + 2)))
    blocks = [f"layers.{index}" for index in range(count)]
    assert are_pairs(plan, *blocks) == [False] * count and not plan.notes


def wrong_values() -> list[str]:
    """Of a training step in which ranks skip the same blocks, and of evaluation."""
    torch.manual_seed(1)
    plain = Dropped(5).double()
    model = copy.deepcopy(plain)
    plan = tpk.make_plan(model, tp_mesh(), example_inputs=X.double())
    assert all(are_pairs(plan, *(f"layers.{index}" for index in range(5))))
    tpk.parallelize(model, tp_mesh(), plan)
    x, found = torch.randn(3, 5, 8, dtype=torch.float64), list[str]()
    for step in range(3):
        for net in (plain, model):
            net.zero_grad()
            torch.manual_seed(step)
            net(x).square().sum().backward()
        skipped = [layer.up.weight.grad is None for layer in plain.layers]
        assert 0 < sum(skipped) < 5, skipped
        found += compare_tensors(model, plain, LIMIT[False])
    problem = differs(model.eval()(x), plain.eval()(x), LIMIT[False])
    return found + ([problem] if problem else [])


@pytest.mark.gloo
def test_values_are_right_where_blocks_are_skipped(ranks: Pools) -> None:
    for rank, found in enumerate(ranks(2).run(wrong_values, timeout=LIMIT_S)):
        assert not found, (rank, found)
