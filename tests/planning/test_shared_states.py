"""Modules take their heads of keys and values that are whole outside, and in dicts and lists: plans, and values."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.by_value import problems
from tests.planning.shared_states import EACH, LENGTH, WIDTH, Model
from tpkernels.errors import UnprovenCallWarning
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools

X = torch.linspace(-1, 1, 2 * LENGTH * WIDTH, dtype=torch.float64).view(2, LENGTH, WIDTH).sin()
NAMES = {
    "in a dict": ("shared['near'][0]", "shared['near'][1]"),
    "in a dict of its own": ("shared['near'][0]", "shared['near'][1]"),
    "in a list": ("shared[0][0]", "shared[1]"),
    "apart": ("shared", "values"),
    "detached": ("shared['near'][0]", "shared['near'][1]"),
}


@pytest.mark.cpu
@pytest.mark.parametrize("how", NAMES)
def test_queries_are_cut_by_heads_and_take_their_part_of_keys_and_values_that_are_given(how: str) -> None:
    model = Model(how)
    plan = tpk.make_plan(model, 2, example_inputs=X.float())
    for place in range(2):
        query, out = (plan[f"blocks.{place}.{layer}"] for layer in ("query", "out"))
        assert query.style == Column() and out.style == Row() and "4 heads, 2 per rank" in query.reason
    assert plan.arguments == {f"blocks.{place}.{name}": (1, 2) for place in range(2) for name in NAMES[how]}
    # All-gathers of fp32: half of the gradient of keys and values, in two blocks.
    assert plan.argument_bytes == (how != "detached") * 2 * 2 * (2 * 2 * LENGTH * EACH * 4) // 2
    assert plan.summed_arguments == ("blocks.0.bias", "blocks.1.bias")
    others = sum(entry.wire_bytes or 0 for entry in plan.entries) + plan.summed_bytes
    assert plan.wire_bytes == plan.argument_bytes + others
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    assert f"blocks.[0-1].{NAMES[how][0]} (x2): this rank's of 2 heads" in str(plan)
    assert ("gradients of these arguments are gathered, which sends 640 B" in str(plan)) == (how != "detached")


@pytest.mark.cpu
@pytest.mark.parametrize(
    "how", ["sums them", "writes", "stores", "stores by number", "replaces", "takes out", "by number"]
)
def test_what_a_module_does_with_them_besides_leaves_its_layers_gathered(how: str) -> None:
    """Sums over all heads, writes that others would see, changes of the dict, and one that has no words for keys."""
    plan = tpk.make_plan(Model(how), 2, example_inputs=X.float())
    assert not any(name.startswith("blocks.1.") for name in plan.arguments) and plan["blocks.1.out"].style != Row()
    assert (plan["blocks.0.out"].style == Row()) == (how != "by number")


@pytest.mark.cpu
def test_heads_that_do_not_divide_are_dealt_out_and_too_few_leave_the_layers_gathered() -> None:
    plan = tpk.make_plan(Model("in a dict", 6, 3), 2, example_inputs=X.float())
    assert plan.arguments["blocks.0.shared['near'][1]"] == (1, 3)
    assert plan["blocks.0.query"].style == Column(unit=2 * EACH) and plan["blocks.0.out"].style == Row(unit=2 * EACH)
    for heads, groups in ((6, 2), (4, 2)):
        assert not tpk.make_plan(Model("in a dict", heads, groups), 3, example_inputs=X.float()).arguments


@pytest.mark.cpu
def test_nothing_is_taken_in_part_along_a_cut_sequence_or_for_all_degrees() -> None:
    for options in ({"same_bits": 2}, {"sequence_parallel": True}):
        assert not tpk.make_plan(Model(), 2, example_inputs=X.float(), **options).arguments


@pytest.mark.cpu
def test_a_plan_of_an_earlier_version_gathers_no_gradient_of_an_argument() -> None:
    document = json.loads(tpk.make_plan(Model("detached"), 2, example_inputs=X.float()).to_json())
    assert document["plan"]["argument_bytes"] == 0


def by_value() -> list[str]:
    torch.manual_seed(3)
    two, wrong = tp_mesh().size() == 2, []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)
        for how in ("in a dict of its own", "in a list", "apart") if two else ("in a dict", "detached"):
            model = Model(how, 4, 2) if two else Model(how, 6, 3)
            wrong += problems(how, model, X.clone(), "blocks.1.out")
        uneven = Model("in a dict", 6, 3) if two else Model("in a dict", 8, 4)
        wrong += problems("uneven", uneven, X.clone(), "blocks.1.out")
    return wrong + changed()


def changed() -> list[str]:
    """A module that changes the dict behind a plan that is proven for one that does not."""
    heads = 2 * tp_mesh().size()
    model = Model("in a dict", heads, heads // 2)
    tpk.parallelize(model, tp_mesh(), tpk.make_plan(model, tp_mesh(), example_inputs=X.float()))
    model.blocks[1].how = "stores"
    try:
        model(X.float())
    except ValueError as error:
        return [] if "the module changes what shared holds, of which it has a part" in str(error) else [str(error)]
    return ["a change of the dict is lost"]


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow("on three ranks"))])
def test_values_and_gradients_are_those_of_the_whole_model(ranks: Pools, world: int) -> None:
    assert ranks(world).run(by_value, timeout=LIMIT_S) == [[]] * world
