"""Modules that branch on a condition: cut before it, one step from there on, and proven on every path."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.models.compare import LIMIT, compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.branching import LARGEST, Blocks, Guarded, Normed
from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.sharding import Column, Row
from tpkernels.testing.spawn import Pools

X = torch.zeros(3, 5, 8)
PAIR = [Column(), Row()] * 2


def pairs(plan: tpk.ShardingPlan) -> list[object]:
    return [plan[f"layers.{index}.{name}"].style for index in range(2) for name in ("up", "down")]


def asking(model: nn.Module) -> tuple[set[str], set[str]]:
    """Modules that are opaque, and modules that branch."""
    shadow = Observation(model, X).shadow
    assert shadow is not None
    opaque, branching, _ = shadow.asking
    return set(opaque), set(branching)


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["clamp", "training", "two"])
def test_what_a_module_does_before_a_condition_is_cut(how: str) -> None:
    assert asking(Blocks(how)) == (set(), {"layers.0", "layers.1"})
    plan = tpk.make_plan(Blocks(how), 2, example_inputs=X)
    assert pairs(plan) == PAIR and not plan.notes


@pytest.mark.cpu
def test_every_path_is_recorded_once() -> None:
    observation = Observation(Blocks("two"), X)
    paths = [recording.paths for _, recording in observation.recordings]
    assert paths == [((),), ((False,),), ((False, False),), ((False, False, False),)] * 2, (
        "in training, and in evaluation"
    )
    observation = Observation(Blocks("training"), X)
    assert [(str(mode), recording.paths) for mode, recording in observation.recordings] == [
        ("training", ((),)), ("training", ((False,),)), ("evaluation", ((),)),
    ]  # fmt: skip


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["part", "gives"])
def test_a_path_that_reads_or_gives_a_part_is_refused_though_the_other_one_does_not(how: str) -> None:
    model = Blocks(how)
    if how == "gives":  # a tensor like the other path's
        for layer in model.layers:
            layer.width, layer.up, layer.down = 8, nn.Linear(8, 8), nn.Linear(8, 8)
    plan = tpk.make_plan(model, 2, example_inputs=X)
    assert not {Column(), Row()} & set(pairs(plan))
    why = {"part": "read by layers.0, after a condition", "gives": "given by layers.0, which branches on a condition"}
    assert f"a part of one rank is {why[how]}" in plan["layers.0.up"].reason


@pytest.mark.cpu
@pytest.mark.parametrize(
    "how",
    [
        "shape",
        "dtype",
        "writes",
        "counts",
        "changes",
        "detaches",
        "layer",
        "channels",
        "number",
        "rows",
        "many",
    ],
)
def test_a_module_whose_rest_does_more_than_to_make_whole_tensors_alike_is_opaque(how: str) -> None:
    model = nn.Sequential(Blocks(how), nn.Linear(8, 8))
    opaque, branching = asking(model)
    assert not branching and opaque & {"0", "0.layers.0", "0.layers.1"}
    plan = tpk.make_plan(model, 2, example_inputs=X)
    assert not any(plan[f"0.layers.0.{name}"].style in (Column(), Row()) for name in ("up", "down"))


@pytest.mark.cpu
def test_a_loop_that_waits_for_a_condition_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpkernels.planning.runs.fake_answers.MOST_ANSWERS", 20)
    assert asking(nn.Sequential(Blocks("loop"), nn.Linear(8, 8)))[1] == set()


@pytest.mark.cpu
def test_a_mixture_of_paths_that_other_code_can_see_is_not_followed() -> None:
    assert asking(nn.Sequential(Blocks("lists"), nn.Linear(8, 8)))[1] == set()


@pytest.mark.cpu
def test_a_number_of_one_rank_after_a_condition_is_refused() -> None:
    plan = tpk.make_plan(Blocks("width"), 2, example_inputs=X)
    assert not {Column(), Row()} & set(pairs(plan))
    assert "layers.0" in plan["layers.0.up"].reason and "one rank" in plan["layers.0.up"].reason


@pytest.mark.cpu
def test_a_condition_of_a_part_is_refused_and_the_module_named() -> None:
    plan = tpk.make_plan(Guarded(between=False), 2, example_inputs=X)
    assert [plan["up"].style, plan["down"].style] == [Column(), Row()]
    plan = tpk.make_plan(Guarded(between=True), 2, example_inputs=X)
    assert Column() != plan["up"].style and Row() != plan["down"].style
    with pytest.raises(ValueError, match="asked by guard for a condition"):
        tpk.make_plan(Guarded(between=True), 2, example_inputs=X, overrides={"up": "column", "down": "row"})


@pytest.mark.cpu
def test_a_norm_that_asks_is_not_taken_for_one_that_does_not() -> None:
    plan = tpk.make_plan(Normed(), 2, example_inputs=X)
    assert plan["up"].style != Column() and plan["down"].style != Row()
    with pytest.raises(ValueError, match="conflict with the model"):
        tpk.make_plan(Normed(), 2, example_inputs=X, overrides={"up": "column", "down": "row"})


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["clamp", "equal"])
def test_along_a_sequence_that_is_cut_no_condition_is_asked(how: str) -> None:
    plan = tpk.make_plan(Blocks(how), 2, sequence_parallel=True, example_inputs=X)
    assert pairs(plan) == PAIR
    (note,) = plan.notes
    assert "the residual of layers is not cut along the sequence" in note
    why = {"clamp": "aten.all works on a residual", "equal": "layers.0 branches on a condition, and a rank has a part"}
    assert why[how] in note


def wrong_values(offset: float) -> list[str]:
    """Of two blocks of which one clamps, and the other one does not."""
    torch.manual_seed(1)
    plain = Blocks("offset").double()
    plain.layers[0].offset[0] = offset
    model = copy.deepcopy(plain)
    plan = tpk.make_plan(model, tp_mesh(), example_inputs=X.double())
    assert pairs(plan) == PAIR
    tpk.parallelize(model, tp_mesh(), plan)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    between: list[Tensor] = []
    plain.layers[1].register_forward_pre_hook(lambda module, args: between.append(args[0]))
    plain.layers[1].register_forward_hook(lambda module, args, out: between.append(out))
    for net in (plain, model):
        net(x).square().sum().backward()
    clamped = [bool((one[..., 0] == LARGEST).all()) for one in between[:2]]
    assert clamped == ([True, False] if offset > LARGEST else [False, False]), clamped
    problem = differs(model(x), plain(x), LIMIT[False])
    return compare_tensors(model, plain, LIMIT[False]) + ([problem] if problem else [])


@pytest.mark.gloo
def test_values_are_right_where_one_block_clamps_and_the_next_does_not(ranks: Pools) -> None:
    for offset in (float("inf"), 1.0):
        for rank, found in enumerate(ranks(2).run(wrong_values, offset, timeout=LIMIT_S)):
            assert not found, (rank, offset, found)
