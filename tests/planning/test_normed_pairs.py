"""Convolutions under torch's weight norm that are cut in pairs: plans, and values and gradients of v and of g."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.normed_convolutions import CUT, WHOLE, inputs, made, normed
from tests.planning.test_convolution_pairs import differing, paired, step
from tpkernels.errors import UnprovenCallWarning
from tpkernels.nn.paired_convolution import why_not_paired
from tpkernels.planning.styles import Channels
from tpkernels.testing.spawn import Pools

PAIRS = {
    "two": "0 2", "beside a plain one": "0 2", "of places": "0 2", "transposed": "0 2", "halves": "0 2",
    "halves of places": "0 2", "joined": "first second third", "decoder": "0 2 4 6", "weighed": "first second",
    "gated stream": "stem inner last", "waves": "first last ins.0 ins.1 ins.2 outs.0 outs.1 outs.2",
}  # fmt: skip


def planned(name: str, world: int) -> tpk.ShardingPlan:
    return tpk.make_plan(made(name), world, example_inputs=inputs())


def pairs(plan: tpk.ShardingPlan) -> str:
    return " ".join(name for name in paired(plan).split() if not name.endswith("parametrizations.weight"))


@pytest.mark.cpu
@pytest.mark.parametrize("name", CUT)
def test_a_convolution_whose_weight_a_norm_makes_is_cut_in_a_pair(name: str) -> None:
    for world in (2, 3):
        plan = planned(name, world)
        assert pairs(plan) == PAIRS[name]
        for entry in plan.entries:  # what makes a weight is cut as the weight is
            owner = entry.path.removesuffix("parametrizations.weight").removesuffix(".")
            assert entry.style == plan[owner].style
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan


@pytest.mark.cpu
def test_segments_and_numbers_of_a_wavenet_are_those_of_a_rank() -> None:
    plan = planned("waves", 3)
    assert plan.attributes == {"width": (6, (2, 2, 2))}
    for name in ("ins.0", "outs.0"):
        assert plan[name].style == Channels(gather_output=False, inputs=True, gather_input=True, segments=(6, 6))
    assert plan["outs.2"].style == Channels(gather_output=False, inputs=True, gather_input=True), "sums no squares"
    assert "gathers what first, 0, 1, 2 cut, by channels of each segment, and gives channels" in plan["ins.0"].reason
    g, v = plan["ins.0.parametrizations.weight"].parameters
    assert g.local_shapes == ((4, 1, 1),) * 3 and v.local_shapes == ((4, 6, 5),) * 3, "two of each half, of all inputs"
    for name, convolution, shape in (("weighed", "first", (4, 3, 3)), ("joined", "second", (5, 6, 3))):
        _, v = planned(name, 2)[f"{convolution}.parametrizations.weight"].parameters
        assert v.local_shapes[0] == shape, name


@pytest.mark.cpu
@pytest.mark.parametrize("name", WHOLE)
def test_what_uses_a_weight_or_a_number_otherwise_is_not_cut_in_pairs(name: str) -> None:
    for world in (2, 3):
        assert not pairs(planned(name, world))


@pytest.mark.cpu
def test_the_sums_of_a_norm_are_counted() -> None:
    """One of a row's norms is of each output channel, of which all ranks have a part: squares, their gradient, dg."""
    plan, size = planned("two", 2), 8
    norm = plan["2.parametrizations.weight"]
    assert norm.forward == "all-reduce of sums of squares" and norm.wire_bytes == 4 * size * 3
    assert plan["0.parametrizations.weight"].wire_bytes == 0, "its norms are of its own channels"
    assert planned("transposed", 2)["0.parametrizations.weight"].wire_bytes == 3 * size * 3
    assert planned("transposed", 2)["2.parametrizations.weight"].wire_bytes == 0


@pytest.mark.cpu
def test_what_no_norm_of_parts_can_make_is_refused() -> None:
    for module, options, why in (
        (normed(6, 6, groups=3), {"inputs": True}, "groups of channels, and a weight that a norm makes"),
        (normed(3, 7, dim=2), {"segments": (1, 6), "copied": 1, "behind": 1}, "a norm is over segments that every"),
        (nn.Conv1d(6, 6, 3), {"inputs": True, "segments": (3, 3)}, "segments [3, 3] do not make up"),
        (
            nn.Conv1d(6, 6, 3),
            {"inputs": True, "segments": (3, 3), "taken": (3, 3), "gathers": True},
            "gives several segments, and takes several",
        ),
    ):
        sizes: Any = options
        assert why in str(why_not_paired(module, 3, **{"inputs": False, "outputs": True} | sizes)), why


def compare(names: list[str]) -> list[str]:
    wrong = []
    for name in names:
        plain, x = made(name), inputs()
        plan = tpk.make_plan(plain, tp_mesh(), example_inputs=x)
        model = copy.deepcopy(tpk.parallelize(copy.deepcopy(plain), tp_mesh(), plan))
        assert pairs(plan) == PAIRS[name]
        expected = step(plain, x)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnprovenCallWarning)
            wrong += differing(name, step(model, x), expected)
        state = tpk.full_state_dict(model)
        assert list(state) == list(plain.state_dict()) and "=" in repr(model)
        wrong += differing(f"state of {name}", state, plain.state_dict())
        meta = tpk.parallelize(made(name).to("meta"), tp_mesh(), plan)
        tpk.load_full_state_dict(meta, plain.state_dict())
        wrong += differing(f"{name} from the meta device", step(meta, x), expected)
        first = made(name)
        with torch.no_grad():
            for parameter in first.parameters():
                parameter.mul_(1.5)
        model.load_state_dict(first.state_dict())
        wrong += differing(f"{name} loaded", step(model, x), step(first, x))
        wrong += differing(f"{name} read", tpk.full_state_dict(model), first.state_dict())
    return wrong


def begun_anew() -> list[str]:
    """Those of several segments, too: torch begins their biases anew, and leaves what makes weights."""
    wrong = []
    for name in ("halves", "waves"):
        plain: Any = made(name)
        model: Any = tpk.parallelize(
            copy.deepcopy(plain), tp_mesh(), tpk.make_plan(plain, tp_mesh(), example_inputs=inputs())
        )
        for one in (model, plain):
            torch.manual_seed(4)
            (one.ins[0] if name == "waves" else one[0]).reset_parameters()
        wrong += differing(f"{name} anew", tpk.full_state_dict(model), plain.state_dict())
    return wrong


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow("on three ranks"))])
def test_values_and_gradients_of_normed_weights_are_those_of_the_whole_model(ranks: Pools, world: int) -> None:
    assert ranks(world).run(compare, list(CUT), timeout=LIMIT_S) == [[]] * world
    assert ranks(world).run(begun_anew, timeout=LIMIT_S) == [[]] * world
