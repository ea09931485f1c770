"""Sizes that depend on values, of points that are found (SuperPoint) and lengths that are told (VITS)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.nn.reference import LIMIT_S
from tests.planning.by_value import problems
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools

WIDTH = 8
X = torch.randn(3, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(x).relu())
        return y


class Finder(nn.Module):
    """The rows whose score is large, behind layers; or ``how`` it tells them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.score, self.how = Mlp(), nn.Linear(WIDTH, 1), how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scores = self.score(x)[..., 0]
        if self.how == "of a part":  # of this rank's features
            scores = self.first.up(x)[..., 0]
        if self.how == "a length":
            length = (scores > 0).sum().clamp_min(1)
            return x.flatten(0, 1)[: int(length)]
        if self.how == "a fraction" and scores.mean().item() < 0:
            return x.flatten(0, 1)
        return x[tuple(torch.nonzero(scores > 0).t())]


class Model(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.finder, self.second, self.third, self.how = Finder(how), Mlp(), Mlp(), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "a number":
            return self.third(x if int((x > 0).sum()) > 5 else -x)  # type: ignore[no-any-return]
        rows = self.finder(x)
        if self.how == "the model asks":
            rows = rows[: int((rows > 0).sum().clamp_min(1))]
        if self.how == "nothing is found" and rows.shape[0] == 0:
            return x.new_zeros(1, WIDTH)
        if self.how == "what is left out" and rows.shape[0] < 2:
            rows = rows @ self.second.up.weight.t() @ self.second.down.weight.t()
        elif self.how == "a single one" and rows.shape[0] == 1:
            return rows
        else:
            rows = self.second(rows)
        y: Tensor = self.third(rows)
        return y


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["", "a length", "nothing is found", "a single one", "the model asks"])
def test_what_has_sizes_of_values_is_cut(how: str) -> None:
    plan = tpk.make_plan(Model(how), 2, example_inputs=X.float())
    asks = "the model" if how == "the model asks" else "finder"
    followed = ("finder.first",) if asks == "finder" else ()  # else the finder is one step
    for name in (*followed, "second", "third"):
        assert plan[f"{name}.up"].style == Column() and plan[f"{name}.down"].style == Row(), name
    assert plan.notes[0] == f"{asks} asks for values on which sizes depend: proven for some, as for the sizes of inputs"


@pytest.mark.cpu
def test_what_runs_with_few_rows_is_proven_as_well() -> None:
    plan = tpk.make_plan(Model("what is left out"), 2, example_inputs=X.float())
    assert plan["second.up"].style != Column() and plan["third.up"].style == Column()


@pytest.mark.cpu
def test_a_part_is_not_asked() -> None:
    plan = tpk.make_plan(Model("of a part"), 2, example_inputs=X.float())
    assert plan["finder.first.up"].style == Column(gather_output=True) and plan["second.up"].style == Column()


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["a fraction", "a number"])
def test_what_is_no_size_is_not_guessed(how: str) -> None:
    plan = tpk.make_plan(Model(how), 2, example_inputs=X.float())
    assert plan.fallback.startswith("no data flow") and not isinstance(plan["third.down"].style, Row)


def by_value() -> list[str]:
    torch.manual_seed(3)
    return [why for how in ("", "a length") for why in problems(how, Model(how), X.clone(), "third.down")]


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_values_and_gradients_are_those_of_the_whole_model(ranks: Pools, world: int) -> None:
    assert ranks(world).run(by_value, timeout=LIMIT_S) == [[]] * world
