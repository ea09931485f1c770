"""Models whose code draws random numbers from NumPy or Python: what is planned, and that all ranks draw the same."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.models.compare import compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tpkernels.nn.host_generators import host_states
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools
from tpkernels.verification.model_passes import run

WIDTH = 6
X = torch.randn(3, 8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


class Block(nn.Module):
    """An MLP that hides tokens between its layers."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.up, self.down, self.draws = nn.Linear(WIDTH, 28), nn.Linear(14, WIDTH), draws

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        h = gate.sigmoid() * value
        if self.training and self.draws:
            h = h * torch.tensor(np.random.rand(*x.shape[:2], 1) < 0.7).to(h.dtype)
        y: Tensor = self.down(h)
        return y


class Masked(nn.Module):
    """It writes one vector over tokens in training, as SpecAugment of Wav2Vec2 does, or draws ``how``."""

    def __init__(self, how: str = "mask") -> None:
        super().__init__()
        self.how, self.hidden = how, nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList([Block(how == "mask"), Block(False)])

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.training and decides(self.how, ONCE)
        for block in self.blocks:
            if skipped or (self.training and decides(self.how, DECISIONS)):
                continue
            if self.training and self.how == "mask":
                x = x.clone()
                x[torch.tensor(np.random.rand(*x.shape[:2]) < 0.3)] = self.hidden
            if self.training and self.how == "number":
                x = x * random.uniform(0.5, 1.5)
            x = x + block(x)
        return x


DECISIONS: dict[str, Callable[[], bool]] = {
    "python": lambda: random.random() < 1e-6, "uniform": lambda: np.random.uniform(0, 9) > 8.9999,
    "whole number": lambda: np.random.randint(1000) == 999, "dice": lambda: random.randint(1, 1000) == 1,
    "choice": lambda: random.choice([False] * 999 + [True]), "sample": lambda: np.random.random_sample() < 1e-6,
}  # fmt: skip


ONCE: dict[str, Callable[[], bool]] = {
    "one number": lambda: random.random() < 1e-6,
    "one of three": lambda: random.randint(0, 2) == 1,
    "one vector": lambda: bool((np.random.rand(2) < 1e-6).any()),
    "another number, too": lambda: random.random() < 1e-6 or np.random.normal() > 9,
}


def decides(how: str, ways: dict[str, Callable[[], bool]]) -> bool:
    return how in ways and bool(ways[how]())


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("how", "draws_from"), [("mask", ("numpy",)), ("number", ("python",)), ("nothing", ()), ("one number", ("python",))]
)
def test_layers_beside_what_is_drawn_are_pairs(how: str, draws_from: tuple[str, ...]) -> None:
    random.seed(1)
    np.random.seed(1)
    before = host_states()
    plan = tpk.make_plan(Masked(how), 2, example_inputs=X.float())
    assert host_states() == before, "planning draws nothing of the user's"
    for place in (0, 1):
        assert [plan[f"blocks.{place}.{name}"].style for name in ("up", "down")] == [Column(segments=(14, 14)), Row()]
    assert plan.draws_from == draws_from
    assert (f"random numbers of {''.join(draws_from)}: all ranks draw the same" in str(plan)) is bool(draws_from)
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan


@pytest.mark.cpu
@pytest.mark.parametrize("how", [*DECISIONS, "one of three", "one vector", "another number, too"])
def test_a_model_that_decides_by_what_is_drawn_is_not_followed(how: str) -> None:
    """Where what is rare was not drawn, one run would show a model that never skips a block."""
    plan = tpk.make_plan(Masked(how), 2, example_inputs=X.float())
    assert "decides by random numbers of Python or NumPy which ops it runs" in plan.fallback
    assert plan["blocks.0.up"].style == Column(gather_output=True) and plan.draws_from


@pytest.mark.cpu
def test_a_plan_draws_from_generators_that_are_known() -> None:
    plan = tpk.make_plan(Masked("nothing"), 2, example_inputs=X.float())
    with pytest.raises(ValueError, match=r"draws from \['numpy', 'python'\], not from \['dice'\]"):
        tpk.ShardingPlan.from_json(dataclasses.replace(plan, draws_from=("dice",)).to_json())


@pytest.mark.cpu
def test_passes_that_are_compared_draw_the_same() -> None:
    model, before = Masked().double(), host_states()
    first, second = (run(net, ((X,), {}), None).outputs for net in (model, copy.deepcopy(model)))
    assert first and all(torch.equal(value, second[name]) for name, value in first.items())
    assert host_states() == before


def by_value() -> list[str]:
    torch.manual_seed(3)
    plain, rank = Masked().double(), tp_mesh().get_local_rank()
    np.random.seed(5 + rank)
    random.seed(rank)
    try:
        tpk.parallelize(copy.deepcopy(plain), tp_mesh(), example_inputs=X, init_weights="same")
        found = ["ranks out of step were not refused"]
    except ValueError as error:
        found = [] if "from numpy, whose generators differ" in str(error) else [str(error)]
    model = tpk.parallelize(copy.deepcopy(plain), tp_mesh(), example_inputs=X, verify=True)
    found += [] if host_states() == _first(5) else ["the ranks do not go on with the first one's states"]
    outputs = []
    for net in (model, plain):
        np.random.seed(8)
        outputs.append(net(X))
        outputs[-1].square().sum().backward()
    np.random.seed(rank)
    try:
        model(X)
        found.append("ranks out of step were not noticed in a call")
    except ValueError as error:
        found += [] if "the state of numpy's random numbers differs" in str(error) else [str(error)]
    model.eval()(X)  # draws nothing
    model.train()
    why = differs(*outputs, 1e-11)
    return found + ([why] if why else []) + compare_tensors(model, plain, 1e-11)


def _first(seed: int) -> object:
    before = host_states()
    np.random.seed(seed)
    random.seed(0)
    states = host_states()
    before.set()
    return states


@pytest.mark.gloo
def test_ranks_draw_what_the_first_one_draws(ranks: Pools) -> None:
    assert ranks(2).run(by_value, timeout=LIMIT_S) == [[], []]
