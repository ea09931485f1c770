"""Modules that note the range of what passes through them, behind conditions: plans, values and gradients in fp64."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.models.compare import compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.by_value import LIMIT
from tests.planning.own_layers import WIDTH, Mlp
from tpkernels.errors import UnprovenCallWarning
from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools

X = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(2))


def observed(how: str = "") -> nn.Module:
    return nn.Sequential(*(Mlp(observer=how) for _ in range(2)))


@pytest.mark.cpu
def test_what_an_observer_passes_on_stays_a_part() -> None:
    plan = tpk.make_plan(observed(), 2, example_inputs=X)
    styles = [plan[f"{block}.{name}"].style for block in range(2) for name in ("up", "down")]
    assert styles == [Column(), Row()] * 2 and not plan.notes
    assert plan.maxima == ("0.observer", "1.observer")
    assert plan.statistic_bytes == 2 * 2 * 2 * 4  # two blocks, two ends of a range, two numbers, forward alone
    assert "largest and smallest elements over all ranks: in [0-1].observer (x2), which sends 32 B" in str(plan)


@pytest.mark.cpu
def test_an_answer_that_raises_is_asked_of_each_module_and_recorded_of_none() -> None:
    observation = Observation(observed(), X)
    assert observation.shadow is not None and not observation.shadow.opaque
    assert observation.shadow.branching == {"0.observer", "1.observer"}
    assert {*observation.shadow.known.refused.values()} == {frozenset({(False,), (True, False)})}
    assert observation.shadow.known.refused.keys() == observation.shadow.branching
    given = {tuple(rest.given) for _, recording in observation.recordings for rest in recording.rests}
    assert given == {(True, True, True, True), (True, True, False), (True, True, True, False)}


@pytest.mark.cpu
def test_one_module_that_does_not_raise_is_followed_where_others_of_its_class_do() -> None:
    model = nn.Sequential(OrderedDict(first=Mlp(observer=""), second=Mlp(observer="")))
    model.second.observer.strict = False
    plan = tpk.make_plan(model, 2, example_inputs=X)
    styles = [plan[f"{block}.{name}"].style for block in ("first", "second") for name in ("up", "down")]
    assert styles == [Column(), Row()] * 2
    rests = [rest for _, recording in Observation(model, X).recordings for rest in recording.rests]
    given = {(rest.module, tuple(rest.given)) for rest in rests}
    raising = {(False,), (True, False)}
    assert {path for module, path in given if module == "second.observer"} > raising
    assert not {path for module, path in given if module == "first.observer"} & raising


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["mean", "trained", "attribute", "once", "shape", "gives", "caught", "torch's"])
def test_other_observers_leave_the_layers_gathered(how: str) -> None:
    plan = tpk.make_plan(observed(how), 2, example_inputs=X)
    assert plan["0.up"].style == Column(gather_output=True) and not plan.maxima


def by_value() -> list[str]:
    torch.manual_seed(3)
    plain = observed().double()
    model = tpk.parallelize(copy.deepcopy(plain), tp_mesh(), example_inputs=X.double())
    found, x = [], X.double()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)
        for step, training in enumerate((True, True, False, True)):  # the first range, and means of ranges
            outputs: list[Tensor] = []
            for net in (model, plain):
                net.train(training).zero_grad()
                outputs.append(net(x * (step + 1)))
                outputs[-1].square().sum().backward()
            found += [f"{step} {why}" for why in [differs(outputs[0], outputs[1], LIMIT)] if why]
            found += [f"{step} {problem}" for problem in compare_tensors(model, plain, LIMIT)]
            state = tpk.full_state_dict(model)
            found += [
                f"{step} {key}: {why}" for key, value in plain.state_dict().items()
                if (why := differs(state[key], value, LIMIT)) is not None
            ]  # fmt: skip
    with pytest.raises(AssertionError, match="a range of no numbers"):  # on all ranks, though one has the number
        model.train()(torch.where(x == x.max(), torch.nan, x))
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow("on three ranks"))])
def test_ranges_and_gradients_are_those_of_the_unsharded_model(ranks: Pools, world: int) -> None:
    assert ranks(world).run(by_value, timeout=LIMIT_S) == [[]] * world
