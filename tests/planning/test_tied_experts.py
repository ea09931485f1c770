"""Mixtures that share their experts (the encoder and decoder of DiffusionGemma): plans, and values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.by_value import problems
from tests.planning.test_experts import E, H, Mixed
from tpkernels.nn.cut_experts import CutExperts
from tpkernels.planning.styles import Experts, Replicate
from tpkernels.testing.spawn import Pools

X = torch.randn(7, H, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


class Mixture(nn.Module):
    def __init__(self, gate: str) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(H, E, bias=False), Mixed(gate)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        y: Tensor = x + self.experts(x, chosen, weights)
        return y


class Twins(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.first, self.second = (Mixture(how if how in ("halves", "pairs") else "") for _ in range(2))
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)
        self.second.experts.down = self.first.experts.down
        if how != "one of two":
            self.second.experts.up = self.first.experts.up
        if how == "a third":
            self.third = nn.ParameterList([self.first.experts.up])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x + self.down(self.up(x).relu())))
        return y * self.third[0].mean() if self.how == "a third" else y


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["", "halves", "pairs"])
@pytest.mark.parametrize("experts", ["features", "experts"])
def test_experts_that_two_mixtures_share_are_cut_alike(how: str, experts: str) -> None:
    model = Twins(how)
    plan = tpk.make_plan(model, 2, example_inputs=X.float(), experts=experts)
    style = plan["first.experts"].style
    assert isinstance(style, Experts) and style.dealt == (experts == "experts")
    assert plan["second.experts"].style == style
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    plan.validate(Twins(how))


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["one of two", "a third"])
def test_those_that_share_some_or_with_others_stay_whole(how: str) -> None:
    plan = tpk.make_plan(Twins(how), 2, example_inputs=X.float())
    assert plan["first.experts"].style == plan["second.experts"].style == Replicate()
    with pytest.raises(ValueError, match="a parameter is tied to another module's"):
        tpk.make_plan(Twins(how), 2, example_inputs=X.float(), experts="features")


def by_value() -> list[str]:
    torch.manual_seed(0)
    wrong = []
    for how in ("halves", "pairs"):
        wrong += problems(how, Twins(how), X.clone(), "down")
        model = tpk.parallelize(Twins(how).double(), tp_mesh(), example_inputs=X)
        first, second = (dict(one.experts.named_parameters()) for one in (model.first, model.second))
        if first.keys() != second.keys() or any(second[key] is not one for key, one in first.items()):
            wrong.append(f"{how}: two weights")
        if not isinstance(model.second.experts, CutExperts):
            wrong.append(f"{how}: whole")
    return wrong


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow("on three ranks"))])
def test_they_compute_and_train_as_unsharded_and_stay_one_weight(ranks: Pools, world: int) -> None:
    assert ranks(world).run(by_value, timeout=LIMIT_S) == [[]] * world
