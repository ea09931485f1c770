"""Parts that a module keeps for its next call in a dict, as LeViT keeps the biases of its scores in evaluation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpkernels as tpk
from tests.models.compare import compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.by_value import LIMIT
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools

WIDTH, HEADS, SIZE, LENGTH = 8, 6, 2, 5
X = torch.randn(3, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


class Biased(nn.Module):
    """Attention with a bias for each head and pair of places; or ``how`` its dict is not what a plan can follow."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.out, self.how = nn.Linear(HEADS * SIZE, WIDTH), how
        self.biases = nn.Parameter(torch.linspace(-1.0, 1.0, HEADS * LENGTH).view(HEADS, LENGTH))
        self.places = nn.Buffer((torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs(), persistent=False)
        self.cache: dict[str, Any] = {}

    def train(self, mode: bool = True) -> Biased:
        if mode and self.cache and self.how != "never emptied":
            self.cache = {}
        return super().train(mode)

    def bias(self) -> Tensor:
        if self.training:
            return self.biases[:, self.places]
        if "cpu" not in self.cache:
            self.cache["cpu"] = self.biases[:, self.places]
            if self.how == "with a number":
                self.cache["count"] = 1
            if self.how == "cut in different ways":
                self.cache["turned"] = self.cache["cpu"].movedim(0, 1).contiguous()
        found: Tensor = self.cache["cpu"]
        return found

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for one in (self.query, self.key, self.value))
        scores = q @ k.transpose(-2, -1) + self.bias()
        y: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
        return y


class Around(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.block, self.how = Biased(how), how

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.block(x)
        if self.how == "read around" and not self.training:
            y = y + self.block.cache["cpu"].mean()
        return y


@pytest.mark.cpu
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_module_may_keep_parts_in_a_dict(ranks: int) -> None:
    model = Around()
    plan = tpk.make_plan(model, ranks, example_inputs=X.float())
    assert [plan[f"block.{name}"].style for name in ("query", "key", "value", "out")] == [*[Column()] * 3, Row()]
    assert plan.kept == {"block.cache": (0, HEADS)} and model.block.cache == {}
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("with a number", "kept by the model as block.cache"),
        ("cut in different ways", "keeps tensors that are cut in different ways"),
        ("read around", "all elements are reduced"),
    ],
)
def test_other_dicts_leave_the_layers_gathered(how: str, why: str) -> None:
    plan = tpk.make_plan(Around(how), 2, example_inputs=X.float())
    assert plan["block.query"].style == Column(gather_output=True) and not plan.kept
    assert why in plan["block.query"].reason


@pytest.mark.cpu
def test_a_dict_that_is_full_already_and_heads_that_do_not_divide_stay_whole() -> None:
    begun = Around("never emptied")
    with torch.no_grad():
        begun.eval()(X.float())
    for model, ranks in ((begun, 2), (Around(), 4)):
        plan = tpk.make_plan(model, ranks, example_inputs=X.float())
        assert not plan.kept and plan["block.query"].style == Column(gather_output=True)


def by_value() -> list[str]:
    mesh, wrong = tp_mesh(), list[str]()
    torch.manual_seed(3)
    plain: Any = Around().double()
    plan = tpk.make_plan(plain, mesh, example_inputs=X)
    if plan.kept != {"block.cache": (0, HEADS)}:
        return [f"it keeps {plan.kept}"]
    model: Any = copy.deepcopy(tpk.parallelize(copy.deepcopy(plain), mesh, plan))
    for number, training in enumerate((True, False, False, True, False)):
        for net in (model, plain):
            net.train(training).zero_grad()
            if number != 2:
                net(X).square().sum().backward()
        wrong += [f"call {number}: {why}" for why in [differs(model(X), plain(X), LIMIT)] if why]
        wrong += [f"call {number}: {problem}" for problem in compare_tensors(model, plain, LIMIT) if number != 2]
        seen = model.block.cache
        if training:
            wrong += ["the cache is not empty"] if seen else []
        elif not isinstance(seen["cpu"], DTensor) or differs(
            seen["cpu"].full_tensor(), plain.block.cache["cpu"], LIMIT
        ):
            wrong.append(f"the cache of call {number}")
    with pytest.raises(TypeError, match="does not support item assignment"):
        model.block.cache["cpu"] = torch.zeros(HEADS, LENGTH, LENGTH)
    for net in (model, plain):
        net.block.cache = {"cpu": torch.ones(HEADS, LENGTH, LENGTH, dtype=torch.float64).cumsum(1)}
    wrong += [f"given: {why}" for why in [differs(model(X), plain(X), LIMIT)] if why]
    late: Any = tpk.parallelize(copy.deepcopy(plain), mesh, plan)  # it has been called before
    return wrong + [f"late: {why}" for why in [differs(late(X), plain(X), LIMIT)] if why]


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_calls_find_in_the_dict_what_is_this_ranks(ranks: Pools, world: int) -> None:
    assert ranks(world).run(by_value, timeout=LIMIT_S) == [[]] * world
