"""Blocks that share their weights, or some of them, are cut in pairs where all that share a weight are cut alike."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.by_value import problems
from tpkernels.planning.styles import Column, Features, Replicate, Row
from tpkernels.testing.spawn import Pools

WIDTH, HEADS = 12, 6
X = torch.zeros(3, WIDTH)
GIVEN_UP = (
    "read whole",
    "packed",
    "norm",
    "whole gain",
    "gain and more",
    "idle gain",
    "row for a column",
    "not called, and read",
)


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear((2 if how == "packed" else 4) * WIDTH, WIDTH)
        self.norm = nn.RMSNorm(4 * WIDTH, eps=1e-5) if how == "norm" else nn.Identity()
        self.gain = nn.Parameter(torch.ones(1)) if "gain" in how else None
        self.more = nn.Parameter(torch.ones(WIDTH)) if how == "gain and more" else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.up(x).relu())
        hidden = hidden if self.gain is None else hidden * self.gain
        if self.how == "packed":
            gate, hidden = hidden.chunk(2, -1)
            hidden = F.silu(gate) * hidden
        y: Tensor = self.down(hidden)
        if self.how == "whole gain":
            y = y * self.gain
        y = y if self.more is None else y * self.more
        return y + hidden.mean() if self.how == "read whole" else y


class Twins(nn.Module):
    """Two blocks of a residual stream that share all of their weights, as those of Zamba 2."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        alone = {"read whole": "", "whole gain": "gain", "gain and more": "gain"}
        self.idle = Block(how) if how == "idle gain" else None
        self.first, self.second = Block(alone.get(how, how)), Block(how)
        for mine, its in ((self.first.up, self.second.up), (self.first.down, self.second.down)):
            its.weight, its.bias = mine.weight, mine.bias
        if how == "norm":
            self.second.norm.weight = self.first.norm.weight
        if "gain" in how:
            self.second.gain = self.first.gain
        if self.idle is not None:
            self.idle.gain = self.first.gain
        if how == "row for a column":  # the same matrix twice, read the one way and the other
            self.first, self.second = Square(), Square()  # type: ignore[assignment]
            self.second.down.weight = self.first.up.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        if self.how == "not called, and read":
            return x + F.linear(x, self.second.up.weight[:WIDTH])
        y: Tensor = x if self.how == "not called" else x + self.second(x)
        return y


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        return y


@pytest.mark.cpu
def test_blocks_that_share_all_weights_are_cut_in_pairs() -> None:
    plan = tpk.make_plan(Twins(), 2, example_inputs=X)
    assert all(plan[f"{block}.up"].style == Column() for block in ("first", "second")), plan["first.up"].reason
    assert all(plan[f"{block}.down"].style == Row() for block in ("first", "second"))
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    plan.validate(Twins())


@pytest.mark.cpu
def test_a_parameter_that_both_blocks_use_on_parts_has_its_gradient_summed_in_both() -> None:
    plan = tpk.make_plan(Twins("gain"), 2, example_inputs=X)
    assert plan["first.up"].style == Column() and plan["second.down"].style == Row(), plan["first.up"].reason
    assert plan["first"].style == plan["second"].style == Replicate(sequence_parallel=True)


@pytest.mark.cpu
@pytest.mark.parametrize("how", GIVEN_UP)
def test_they_are_given_up_where_one_of_them_cannot_be_cut_as_the_others_are(how: str) -> None:
    plan = tpk.make_plan(Twins(how), 2, example_inputs=X)
    for name in ("first.up", "first.down", "second.up", "second.down"):
        style = plan[name].style
        assert not isinstance(style, Column) or style.gather_output, f"{name}: {plan[name].reason}"
        assert not isinstance(style, Row) or style.split_input, f"{name}: {plan[name].reason}"


@pytest.mark.cpu
def test_layers_are_cut_in_pairs_where_nothing_calls_the_others_of_their_weights() -> None:
    for world in (2, 3):
        plan = tpk.make_plan(Twins("not called"), world, example_inputs=X)
        assert (plan["first.up"].style, plan["first.down"].style) == (Column(), Row())
        assert plan["second.up"].style == Column(gather_output=True), "who calls it gives and gets whole tensors"
        assert plan["second.down"].style == Row(split_input=True) and "and idle" in plan["second.down"].reason
        plan.validate(Twins("not called"))
    three = Twins()
    three.third = Block("")
    for mine, its in ((three.first.up, three.third.up), (three.first.down, three.third.down)):
        its.weight, its.bias = mine.weight, mine.bias
    plan = tpk.make_plan(three, 2, example_inputs=X)
    assert plan["second.up"].style == Column() and plan["third.up"].style == Column(gather_output=True)
    asked = tpk.make_plan(Twins("not called"), 2, example_inputs=X, overrides={"second.up": "replicate"})
    assert isinstance(asked["first.up"].style, Replicate) and asked["first.down"].style != Row()


def by_value() -> list[str]:
    torch.manual_seed(0)
    x = torch.randn(3, WIDTH).double()
    wrong = problems("twins", Twins(), x.clone(), "second.down")
    wrong += problems("gains", Twins("gain"), x.clone(), "second.down")
    wrong += problems("idle twin", Twins("not called"), x.clone(), "first.down")
    plain = Twins("not called").double()
    model = tpk.parallelize(copy.deepcopy(plain), tp_mesh(), example_inputs=x)
    off = (model.second(x) - plain.second(x)).abs().max()  # who calls it after all
    same = model.second.down.weight is model.first.down.weight
    return wrong + ([] if same and off < 1e-12 else [f"an idle twin is off by {off}"])


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_they_compute_and_train_as_unsharded_and_stay_one_weight(ranks: Pools, world: int) -> None:
    for found in ranks(world).run(by_value, timeout=LIMIT_S):
        assert not found, found[:5]


class Biased(nn.Module):
    """Attention with a relative bias per head, whose table another module holds as well, as UDOP's stacks do."""

    def __init__(self, how: str = "idle") -> None:
        super().__init__()
        self.how = how
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.table = nn.Embedding(HEADS, HEADS)
        self.other = nn.Linear(HEADS, HEADS, bias=False) if how == "no table" else nn.Embedding(HEADS, HEADS)
        self.other.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        distances = (places[:, None] - places).abs().clamp(max=HEADS - 1)
        bias = self.table(distances).permute(2, 0, 1)[None]
        if self.how == "called":
            bias = bias + self.other(distances).permute(2, 0, 1)[None]
        q, k, v = (
            one(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.query, self.key, self.value)
        )
        weights = (q @ k.transpose(2, 3) + bias).softmax(-1)
        y: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return y


@pytest.mark.cpu
def test_a_table_is_cut_with_heads_where_nothing_calls_the_others_of_its_weight() -> None:
    rows = torch.zeros(2, 5, WIDTH)
    plan = tpk.make_plan(Biased(), 2, example_inputs=rows)
    assert plan["table"].style == Features() and plan["other"].style == Features(gather_output=True)
    assert plan["query"].style == Column() and plan["out"].style == Row()
    for how in ("called", "no table"):
        plan = tpk.make_plan(Biased(how), 2, example_inputs=rows)
        assert plan["table"].style != Features() and plan["query"].style != Column(), how


def tables_by_value() -> list[str]:
    torch.manual_seed(3)
    rows = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    wrong = problems("tied table", Biased(), rows, "out")
    model = tpk.parallelize(Biased().double(), tp_mesh(), example_inputs=rows)
    numbers = torch.arange(4)
    whole = model.other(numbers)  # who calls it after all gets whole rows
    same = model.table.weight is model.other.weight and whole.shape == (4, HEADS)
    return wrong + ([] if same and torch.equal(whole, tpk.full_state_dict(model)["table.weight"][:4]) else ["untied"])


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_tied_tables_compute_and_train_as_the_unsharded_ones(ranks: Pools, world: int) -> None:
    assert ranks(world).run(tables_by_value, timeout=LIMIT_S) == [[]] * world
