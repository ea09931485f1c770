"""Parts that a module keeps from one call for the next (the recurrence of RecurrentGemma), and cells whose gates are
log-sigmoids (xLSTM): plans, and values and gradients in fp64."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpkernels as tpk
from tests.models.compare import compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.by_value import LIMIT, problems
from tpkernels.planning.modules.element_code import works_on_elements
from tpkernels.planning.styles import Column, Row, Sliced
from tpkernels.testing.spawn import Pools

WIDTH, FEATURES = 8, 12
X = torch.randn(3, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


class Root(torch.autograd.Function):
    """A square root whose gradient is bounded, as RecurrentGemma's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return dy[0] / torch.clip(4 * x, min=1e-6).sqrt()


class RootOfAll(Root):
    """One that is bounded by all of the tensor."""

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return dy[0] / torch.clip(4 * x, min=float(x.abs().mean())).sqrt()


class Recurrence(nn.Module):
    """States that the next call begins with; or ``how`` they are not what a plan can follow."""

    state: Any = None

    def __init__(self, how: str = "", features: int = FEATURES) -> None:
        super().__init__()
        self.into, self.gate, self.out = (
            nn.Linear(WIDTH, features),
            nn.Linear(WIDTH, features),
            nn.Linear(features, WIDTH),
        )
        self.decay = nn.Parameter(torch.linspace(-1.0, 1.0, features))
        self.wide, self.how, self.num_heads, self.block = features, how, 6, features // 6
        self.last: Any = None
        self.states: list[Tensor] = []

    def forward(self, x: Tensor, keep: bool | str = True) -> Tensor:
        h, state = self.into(x), self.state
        if self.how == "in heads":
            h = h.reshape(len(x), x.shape[1], self.num_heads, self.block).tanh().flatten(-2)
        if not keep or state is None or len(state) != len(x):
            state = torch.zeros(len(x), self.wide, dtype=x.dtype) if keep else torch.zeros_like(h[:, 0])
        if self.how == "sums its state" and self.state is not None:
            x = x + self.state.sum(-1)[:, None, None]
        decay, found = self.decay.sigmoid(), []
        scale = Root.apply(1 - decay * decay)  # type: ignore[no-untyped-call]
        for place in range(x.shape[1]):
            state = state * decay + h[:, place] * scale
            found.append(state)
        if self.how == "in a list":
            self.states = [state.detach()]
        elif self.how == "for others":
            self.last = state.detach()
        elif keep == "other things":
            self.state = torch.zeros(len(x), FEATURES, dtype=x.dtype)
        elif keep:
            self.state = state.detach()
        y: Tensor = self.out(torch.stack(found, 1) * self.gate(x).sigmoid())
        return y

    def forget(self) -> None:
        del self.state


class Model(nn.Module):
    def __init__(self, how: str = "", features: int = FEATURES) -> None:
        super().__init__()
        self.block, self.how = Recurrence(how, features), how

    def forward(self, x: Tensor, keep: bool | str = True) -> Tensor:
        if self.how == "read around" and self.block.state is not None:
            x = x + self.block.state.mean()
        y: Tensor = x + self.block(x, keep)
        return y


@pytest.mark.cpu
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_module_may_keep_parts_for_its_next_call(ranks: int) -> None:
    plan = tpk.make_plan(Model(), ranks, example_inputs=X.float())
    assert [plan[f"block.{name}"].style for name in ("into", "gate", "out")] == [Column(), Column(), Row()]
    assert isinstance(plan["block"].style, Sliced) and plan.kept == {"block.state": (1, FEATURES)}
    assert plan.attributes == {"block.wide": (FEATURES, (FEATURES // ranks,) * ranks)}
    assert f"kept block.state: this rank's of {FEATURES}" in str(plan)
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match="no module 'other'"):
        dataclasses.replace(plan, kept={"other.state": (1, FEATURES)}).validate(Model())
    for size in (1, FEATURES + 1):
        wrong = dataclasses.replace(plan, kept={"block.state": (1, size)}).to_json()
        with pytest.raises(ValueError, match=r"kept: block.state must have a dimension and a number"):
            tpk.ShardingPlan.from_json(wrong)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("in a list", "kept by the model as block.states"),
        ("for others", "kept by the model as block.last"),
        ("sums its state", "an activation that is whole meets parts"),
        ("read around", "all elements are reduced"),
    ],
)
def test_other_parts_that_are_kept_leave_the_layers_gathered(how: str, why: str) -> None:
    plan = tpk.make_plan(Model(how), 2, example_inputs=X.float())
    assert plan["block.into"].style == Column(gather_output=True) and not plan.kept
    assert why in plan["block.into"].reason


@pytest.mark.cpu
def test_a_state_is_whole_that_does_not_divide_or_begins_whole_or_would_be_in_no_blocks() -> None:
    begun = Model()
    begun.block.state = torch.zeros(3, FEATURES)
    for model, same_bits in ((Model(features=13), None), (begun, None), (Model(), 2)):
        plan = tpk.make_plan(model, 2, example_inputs=X.float(), same_bits=same_bits)
        assert plan["block.into"].style != Column() and not plan.kept


@pytest.mark.cpu
@pytest.mark.parametrize(("how", "heads"), [("", {}), ("in heads", {"block.num_heads": (6, (3, 3))})])
def test_what_is_proven_holds_in_a_call_that_keeps_a_state_as_in_one_that_does_not(how: str, heads: Any) -> None:
    without, kept = {"x": X.float(), "keep": False}, {"x": X.float()}
    assert tpk.make_plan(Model(how), 2, example_inputs=without).attributes == heads
    plan = tpk.make_plan(Model(how), 2, example_inputs=[{**without}, kept])
    assert plan.attributes == {"block.wide": (FEATURES, (6, 6)), **heads} and plan.kept == {
        "block.state": (1, FEATURES)
    }


@pytest.mark.cpu
def test_a_function_of_numbers_above_zero_is_tried_on_these() -> None:
    x = (torch.zeros(2, 3),)
    assert works_on_elements(Root.apply, x, {})
    assert not works_on_elements(RootOfAll.apply, x, {})


def calls_by_value() -> list[str]:
    mesh, wrong = tp_mesh(), list[str]()
    torch.manual_seed(3)
    plain = Model().double()
    model = tpk.parallelize(copy.deepcopy(plain), mesh, example_inputs=X)
    model = copy.deepcopy(model)
    for number, x in enumerate((X, X.flip(0), X[:, :1], X[:2], X)):  # a step, another batch, and back
        ys = [net(x.clone()) for net in (model, plain)]
        for y in ys:
            y.square().sum().backward()
        wrong += [f"call {number}: {why}" for why in [differs(*ys, LIMIT)] if why]
        wrong += [f"call {number}: {problem}" for problem in compare_tensors(model, plain, LIMIT)]
        state = model.block.state
        if not isinstance(state, DTensor) or differs(state.full_tensor(), plain.block.state, LIMIT):
            wrong.append(f"the state of call {number}")
    for net in (model, plain):
        net.block.state = torch.ones(3, FEATURES, dtype=torch.float64)
    wrong += [f"given: {why}" for why in [differs(model(X), plain(X), LIMIT)] if why]
    for net in (model, plain):
        net.block.forget()
    wrong += [f"forgotten: {why}" for why in [differs(model(X), plain(X), LIMIT)] if why]
    with pytest.raises(ValueError, match=r"block.state keeps a tensor of \[3, 12\], which is not this rank's"):
        model(X, keep="other things")
    plan = tpk.make_plan(Model().double(), mesh, example_inputs=X)
    late = tpk.parallelize(copy.deepcopy(plain), mesh, plan)  # it has been called before
    return wrong + [f"late: {why}" for why in [differs(late(X), plain(X), LIMIT)] if why]


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_each_call_begins_with_the_state_of_the_one_before(ranks: Pools, world: int) -> None:
    assert ranks(world).run(calls_by_value, timeout=LIMIT_S) == [[]] * world


def unproven_call() -> list[str]:
    model = tpk.parallelize(Model().double(), tp_mesh(), example_inputs={"x": X, "keep": False})
    model(X, keep=False)
    with pytest.raises(RuntimeError, match="size of tensor") as raised:
        model(X)
    return [note for note in raised.value.__notes__ if "make the plan with example_inputs" in note]


@pytest.mark.gloo
def test_a_call_that_keeps_a_state_and_was_not_proven_raises_and_says_what_to_do(ranks: Pools) -> None:
    notes = ranks(2).run(unproven_call, timeout=LIMIT_S)
    assert [len(some) for some in notes] == [1, 1]


class Cell(nn.Module):
    """Gates of xLSTM: a log-sigmoid of each head, summed over the words before."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.forget, self.out = nn.Linear(WIDTH, FEATURES), nn.Linear(WIDTH, 6), nn.Linear(FEATURES, WIDTH)
        self.num_heads = 6

    def forward(self, x: Tensor) -> Tensor:
        value = self.value(x).unflatten(-1, (self.num_heads, -1))
        kept = nn.functional.logsigmoid(self.forget(x)).cumsum(1).exp()
        y: Tensor = self.out((value * kept[..., None]).flatten(-2))
        return y


@pytest.mark.cpu
def test_a_log_sigmoid_of_parts_is_followed() -> None:
    plan = tpk.make_plan(nn.Sequential(Cell()), 2, example_inputs=X.float())
    assert [plan[f"0.{name}"].style for name in ("value", "forget", "out")] == [Column(), Column(), Row()]


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_values_and_gradients_of_gates_are_those_of_all_heads(ranks: Pools, world: int) -> None:
    run = functools.partial(problems, "cell", nn.Sequential(Cell()), X, "0.out")
    assert ranks(world).run(run, timeout=LIMIT_S) == [[]] * world
