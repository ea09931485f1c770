"""Modules that need the values of tensors: one step of the run, traced around, and never seen by a part."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.models.compare import LIMIT, compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.asking import Asking
from tpkernels.planning.runs.events import Opaque
from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.sharding import Column, Replicate, Row
from tpkernels.testing.spawn import Pools

X = torch.zeros(3, 5, 8)


def opaque_in(model: nn.Module) -> list[str]:
    observation = Observation(model, X)
    assert observation.recording is not None, observation.problem
    return [event.packet.name for event in observation.recording.events if isinstance(event.packet, Opaque)]


@pytest.mark.sample(2)
@pytest.mark.cpu
@pytest.mark.parametrize("how", ["unique", "tolist", "reads"])
@pytest.mark.slow("4 s")
def test_a_router_that_needs_values_is_traced_around(how: str) -> None:
    model = Asking(how)
    assert opaque_in(model) == ["moe"]
    plan = tpk.make_plan(model, 2, example_inputs=X)
    assert not plan.notes
    pairs = {name: type(plan[name].style) for name in ("up", "down", "after", "last")}
    assert pairs == {"up": Column, "down": Row, "after": Column, "last": Row}
    assert plan["up"].style == Column() and plan["down"].style == Row()


@pytest.mark.cpu
def test_blocks_inside_are_cut_also_those_that_no_guess_reaches() -> None:
    plan = tpk.make_plan(Asking(), 2, example_inputs=X)
    styles = [[plan[f"moe.experts.{index}.{layer}"].style for layer in (0, 2)] for index in range(4)]
    assert styles == [[Column(), Row()]] * 4
    assert plan["moe.experts.3.0"].wire_bytes is None, "how many rows an expert gets depends on values"
    assert plan["up"].wire_bytes is not None


@pytest.mark.cpu
def test_layers_whose_weights_are_read_inside_stay_whole_with_all_their_like() -> None:
    plan = tpk.make_plan(Asking("reads"), 2, example_inputs=X)
    assert all(isinstance(plan[f"moe.experts.{index}.0"].style, Replicate) for index in range(4))


class Branching(nn.Module):
    """One of two layers, by the values of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.positive(x) if x.sum() > 0 else self.negative(x)
        return y


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["positive", "negative"])
def test_an_override_inside_of_an_opaque_module_is_refused_also_where_no_guess_reaches_it(name: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Branching(), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=f"1.{name} is inside of a module that needs values"):
        tpk.make_plan(model, 2, example_inputs=X, overrides={f"1.{name}": "column"})


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["size", "writes", "leaks"])
def test_a_module_that_does_more_than_take_and_give_tensors_is_not_traced_around(how: str) -> None:
    """The module around takes its place; here that is the model itself, which has no data flow then."""
    observation = Observation(Asking(how), X)
    assert observation.recording is None
    assert {"size": "depend", "writes": "writes", "leaks": "passes"}[how] in observation.problem
    # That is no fault of the inputs: its layers are gathered, as they are without.
    plan = tpk.make_plan(Asking(how), 2, example_inputs=X)
    assert plan.notes[0].startswith("no data flow")
    assert all(style.gather_output for style in (e.style for e in plan.entries) if isinstance(style, Column))
    assert all(style.split_input for style in (e.style for e in plan.entries) if isinstance(style, Row))


class Around(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.up, self.down = Asking(how), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(self.inner(x)).relu())
        return y


@pytest.mark.sample(1)
@pytest.mark.cpu
@pytest.mark.parametrize("how", ["size", "writes", "leaks"])
@pytest.mark.slow("3 s")
def test_the_module_around_takes_the_place_of_one_that_cannot_be_opaque(how: str) -> None:
    model = Around(how)
    if how == "writes":  # what it writes to was made inside
        model.inner.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert opaque_in(model) == ["inner"]
    plan = tpk.make_plan(model, 2, example_inputs=X)
    assert plan["up"].style == Column() and plan["down"].style == Row()
    assert all(plan[f"inner.{name}"].style != Column() for name in ("up", "after"))


@pytest.mark.cpu
def test_a_group_whose_parts_an_opaque_module_would_read_is_not_cut() -> None:
    plan = tpk.make_plan(Asking("part"), 2, example_inputs=X)
    assert plan["up"].style != Column() and plan["down"].style != Row()
    assert plan["after"].style == Column()


class Waiting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        while x.sum() > 0 or not x.sum() < 1:
            x = x - 1
        y: Tensor = self.down(self.up(x))
        return y


@pytest.mark.cpu
def test_a_loop_that_waits_for_a_value_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpkernels.planning.runs.fake_answers.MOST_ANSWERS", 20)
    observation = Observation(nn.Sequential(Waiting(), nn.Linear(8, 8)), X)
    assert "loop without end" in observation.problem


def wrong_values(hows: list[str]) -> list[list[str]]:
    found = []
    for how in hows:
        torch.manual_seed(1)
        plain = Asking(how).double()
        model = copy.deepcopy(plain)
        tpk.parallelize(model, tp_mesh(), tpk.make_plan(model, tp_mesh(), example_inputs=X.double()))
        x = torch.randn(3, 5, 8, dtype=torch.float64)
        for net in (plain, model):
            net(x).square().sum().backward()
        problem = differs(model(x), plain(x), LIMIT[False])
        found.append(compare_tensors(model, plain, LIMIT[False]) + ([problem] if problem else []))
    return found


@pytest.mark.gloo
@pytest.mark.slow("2 s")
def test_models_with_opaque_modules_compute_what_the_unsharded_model_computes(ranks: Pools, full: bool) -> None:
    hows = ["unique", "tolist", "reads", "part"][:: 1 if full else 2]
    for rank, found in enumerate(ranks(2).run(wrong_values, hows, timeout=LIMIT_S)):
        assert not any(found), (rank, dict(zip(hows, found, strict=True)))
