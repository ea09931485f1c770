"""States that modules are given whole and write to, of which a rank reads and writes its part (RWKV): plans, values."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.models.compare import compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tpkernels.errors import UnprovenCallWarning
from tpkernels.nn.written_states import place_written
from tpkernels.planning.styles import Column, Row, Sliced
from tpkernels.testing.spawn import Pools

WIDTH, LENGTH, BLOCKS, LIMIT = 12, 3, 2, 1e-11
X = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Recurrence(nn.Module):
    """RWKV's attention in short; or ``how`` it is not."""

    def __init__(self, place: int, how: str) -> None:
        super().__init__()
        self.place, self.how = place, how
        self.mix, self.decay = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.key, self.value, self.gate, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, state: Any = None, other: bool = False) -> tuple[Tensor, Any]:
        shifted = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        if state is not None:
            shifted[:, 0] = state[0][:, :, self.place]
        k, gate = self.key(x * self.mix + shifted * (1 - self.mix)), torch.sigmoid(self.gate(x))
        v = self.value(x)
        h = torch.zeros_like(k[:, 0]) if state is None else state[1][:, :, self.place].clone()
        found = torch.zeros_like(k)
        for t in range(x.shape[1]):
            h = h * torch.sigmoid(self.decay) + k[:, t] * v[:, t]
            found[:, t] = h
        if state is not None:
            state[0][:, :, self.place] = x[:, -1]
            state = self._write(state, "added" if other else self.how, h, x)
        return self.output(gate * found), state

    def _write(self, state: Any, how: str, h: Tensor, x: Tensor) -> Any:
        if how == "added":
            state[1][:, :, self.place] += h
        elif how == "copied":
            state[1][:, :, self.place].copy_(h)
        elif how == "whole":
            state[1][:, :, self.place] = x[:, -1]
        elif how == "a number":
            state[1][:, :, self.place] = 0
        elif how == "some features":
            state[1][:, : WIDTH // 2, self.place] = h[:, : WIDTH // 2]
        elif how == "another":
            state[1] = torch.stack([h] * BLOCKS, -1)
        elif how == "a view":
            state[1][:, :, self.place] = h
            return [*state[:2], state[1][:, :, 0]]
        else:
            state[1][:, :, self.place] = h
            if how == "appended":
                state.append(x[:, -1])
        return state


class Model(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(BLOCKS))
        self.blocks = nn.ModuleList(Recurrence(place, how) for place in range(BLOCKS))
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor, state: Any = None, other: bool = False) -> tuple[Tensor, Any]:
        if state is None and not self.training:
            state = [x.new_zeros(x.shape[0], WIDTH, BLOCKS) for _ in range(2)]
            state = [state[1], state[1]] if self.how == "one for both" else state
        for norm, block in zip(self.norms, self.blocks, strict=True):
            y, left = block(norm(x), state=state, other=other)
            x, state = x + y, state if self.how == "appended" else left
            if state is not None and len(state) > 2 and self.how == "a view":
                state.pop().neg()  # of what nobody reads, so that nothing else is wrong with it
        return x + self.mlp(x), state


STATES = {f"blocks.{place}.state[1]": (1, WIDTH) for place in range(BLOCKS)}


@pytest.mark.cpu
def test_a_recurrence_is_cut_by_features_with_the_state_that_it_writes_to() -> None:
    """In training there is none; a call in evaluation makes one."""
    model = Model()
    plan = tpk.make_plan(model, 2, example_inputs=X.float())
    styles = [plan[f"blocks.1.{name}"].style for name in ("key", "value", "gate", "output")]
    assert styles == [Column(), Column(), Column(), Row()]
    assert plan["blocks.0"].style == Sliced(parameters=(("decay", 0),))
    assert plan.states == STATES
    # Half of what the two blocks write in fp32, forward alone.
    assert plan.state_bytes == BLOCKS * 2 * WIDTH * 4 // 2
    assert plan.wire_bytes == plan.state_bytes + sum(entry.wire_bytes or 0 for entry in plan.entries)
    assert "states: this rank's of 12 in blocks.[0-1].state[1] (x2), which sends 96 B" in str(plan)
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match="no module 'other'"):
        dataclasses.replace(plan, states={"other.state[1]": (1, WIDTH)}).validate(model)


REFUSED = ["added", "copied", "whole", "a number", "some features", "another", "appended", "a view", "one for both"]


@pytest.mark.cpu
@pytest.mark.parametrize("how", REFUSED)
def test_what_ranks_would_not_follow_leaves_the_layers_gathered(how: str) -> None:
    plan = tpk.make_plan(Model(how), 2, example_inputs=X.float())
    assert not plan.states and plan["blocks.0.output"].style != Row()


@pytest.mark.cpu
def test_no_state_is_written_to_along_a_cut_sequence_or_for_all_degrees() -> None:
    assert not tpk.make_plan(Model(), 2, example_inputs=X.float(), same_bits=4).states
    assert not tpk.make_plan(Model(), 2, example_inputs=X.float(), sequence_parallel=True).states


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("index", "place"),
    [
        ((slice(None), slice(None), 1), (1, (2, 6))),
        ((0, slice(None), slice(1, 3)), (0, (6, 2))),
        (1, (0, (6, 3))),
        ((slice(0, 1),), (1, (1, 6, 3))),
        ((slice(None), 2), None),
        ((slice(None), slice(0, 3), 1), None),
        ((Ellipsis, 1), None),
        ((slice(None), slice(None), True), None),
        ((slice(None), slice(None), torch.tensor(1)), None),
        ((0, slice(None), 0, 0), None),
    ],
)
def test_the_place_that_is_written_to_is_known_of_numbers_and_slices(index: Any, place: Any) -> None:
    assert place_written(index, (2, 6, 3), 1) == place
    if place is not None:
        assert tuple(torch.zeros(2, 6, 3)[index].shape) == place[1]


def by_value() -> list[str]:
    torch.manual_seed(3)
    plain = Model().double()
    model = copy.deepcopy(plain)
    plan = tpk.make_plan(model, tp_mesh(), example_inputs=X)
    wrong = [] if plan.states == STATES else [f"states {plan.states}"]
    tpk.parallelize(model, tp_mesh(), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)
        for training in (True, False):
            found = [_calls(net.train(training)) for net in (model, plain)]
            wrong += [f"{training} {number}: {why}" for number, (a, b) in enumerate(zip(*found, strict=True))
                      if (why := differs(a, b, LIMIT))]  # fmt: skip
            wrong += [f"{training} {problem}" for problem in compare_tensors(model, plain, LIMIT)]
    if tp_mesh().size() > 1:
        with pytest.raises(ValueError, match=r"writes to state\[1\] by other means than an index"), torch.no_grad():
            model(X, other=True)
        with pytest.raises(ValueError, match="must be a tensor with 12 features in dimension 1, got"):
            model(X, state=[torch.zeros(2, WIDTH, BLOCKS), torch.zeros(2, 1, BLOCKS)])
    return wrong


def _calls(net: nn.Module) -> list[Tensor]:
    """What three calls give, each with the state that the one before it has left, and the gradients of the first."""
    x, first = X.clone().requires_grad_(), torch.rand(2, WIDTH, BLOCKS, 2, dtype=X.dtype).requires_grad_()
    with torch.no_grad():
        first.copy_(torch.arange(first.numel(), dtype=X.dtype).view_as(first) / first.numel())
    state: Any = None if net.training else [one * 2 for one in first.unbind(-1)]
    found = []
    for step in range(3):
        y, state = net(x * (1 + step), state=state)
        found.append(y)
    total = sum(y.square().sum() for y in found) + sum(one.square().sum() for one in state or [])
    total.backward()  # type: ignore[union-attr]
    assert x.grad is not None
    return [*found, *(state or []), x.grad, *([] if first.grad is None else [first.grad])]


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_values_states_and_gradients_are_those_of_the_whole_model(ranks: Pools, world: int) -> None:
    assert ranks(world).run(by_value, timeout=LIMIT_S) == [[]] * world
