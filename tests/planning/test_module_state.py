"""What one call leaves in modules for the next: both calls are followed, and every run of a trace begins alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.planning.styles import Column, Row

pytestmark = pytest.mark.cpu

WIDTH = 8
X = torch.zeros(4, WIDTH)


class Positions(nn.Module):
    """It keeps a table by the length of its input, as transformers 5.24 does (models/clvp/modeling_clvp.py)."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.table = 0, None

    def forward(self, x: Tensor) -> Tensor:
        if self.length != len(x):
            self.length, self.table = len(x), torch.arange(len(x), dtype=x.dtype)[:, None] ** 0.5
        return x + self.table  # type: ignore[operator]


class Registered(nn.Module):
    table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(len(x), dtype=x.dtype)[:, None] ** 0.5, persistent=False)
        return x + self.table


class Pair(nn.Module):
    """A column and a row around what ``between`` does in each call; it knows how often it was called."""

    def __init__(self, between: Callable[[Pair, Tensor], Tensor] = lambda pair, h: h.relu(), wide: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, wide * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.between, self.calls, self.kind = between, 0, "whole"
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.down(self.between(self, self.up(x)))
        return y


class Choosing(nn.Module):
    """It tells its block what to do, and exchanges a module of it for good, as BigBird does for short inputs."""

    def __init__(self, *, at_once: bool) -> None:
        super().__init__()
        self.norm: nn.Module = nn.LayerNorm(WIDTH)
        self.block, self.at_once = Pair(_of_kind, wide=8), at_once

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if not isinstance(self.norm, nn.Identity):
            self.norm = nn.Identity()
            if self.at_once:
                self.block.kind = "parts"
        y: Tensor = self.block(x)
        return y


class Collecting(nn.Module):
    """Its first call registers hooks that collect what blocks give, as transformers 5.24 does
    (utils/output_capturing.py); ``for_good``, or each call does and removes them."""

    def __init__(self, *, for_good: bool) -> None:
        super().__init__()
        self.blocks, self.for_good, self.ready = nn.Sequential(Pair(), Pair()), for_good, False
        self.collected: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        handles = [] if self.ready else [block.register_forward_hook(self.collects) for block in self.blocks]
        self.ready = self.for_good
        self.collected.clear()
        self.blocks(x)
        for handle in () if self.for_good else handles:
            handle.remove()
        return torch.stack(self.collected).sum(0)

    def collects(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.collected.append(output)


def _of_kind(pair: Pair, h: Tensor) -> Tensor:
    """A gate, which is proven within the block alone."""
    gate, value = h.chunk(2, -1)
    return gate.relu() * value if pair.kind == "parts" else gate - value.cumsum(-1)


def _sum_later(pair: Pair, h: Tensor) -> Tensor:
    return h.relu() if pair.calls == 1 else h - h.cumsum(-1)


def _keeps(pair: Pair, h: Tensor) -> Tensor:
    pair.kept = h
    return h.relu()


CASES: dict[str, tuple[nn.Module, bool]] = {
    "a table": (nn.Sequential(Positions(), Pair()), True),
    "a buffer": (nn.Sequential(Registered(), Pair()), True),
    "told before": (Choosing(at_once=True), True),
    "never told": (Choosing(at_once=False), False),
    "features read by a second call": (nn.Sequential(Pair(_sum_later)), False),
    "hooks": (Collecting(for_good=True), True),
    "hooks for a call": (Collecting(for_good=False), True),
    "a part of the features, kept": (nn.Sequential(Pair(_keeps)), False),
}


@pytest.mark.parametrize("how", CASES)
def test_a_pair_is_proven_for_a_first_call_and_for_those_after_it(how: str) -> None:
    model, proven = CASES[how]
    before = {name: {**vars(module)} for name, module in model.named_modules()}
    plan = tpk.make_plan(model, 2, example_inputs=X)
    pair = next(name for name, module in reversed([*model.named_modules()]) if isinstance(module, Pair))
    up, down = plan[f"{pair}.up"], plan[f"{pair}.down"]
    assert isinstance(up.style, Column) and isinstance(down.style, Row)
    assert up.style.gather_output != proven and down.style.split_input != proven, up.reason
    assert before == {name: vars(module) for name, module in model.named_modules()}, "the model is as it was"


@pytest.mark.parametrize("for_good", [False, True])
def test_a_later_call_runs_the_hooks_that_an_earlier_one_has_left_once(for_good: bool) -> None:
    recordings = Observation(Collecting(for_good=for_good), X).examples[0]
    stacked = {event.outputs[0][0] for _, recording in recordings for event in recording.events[-2:-1]}
    assert stacked == {2} and all(recording.after is None for _, recording in recordings), "all calls are alike"


def test_what_a_call_leaves_is_recorded_as_a_call_of_its_own() -> None:
    recordings = Observation(nn.Sequential(Positions(), Pair()), X).examples[0]
    ran = [[str(event.packet) for event in recording.events] for _, recording in recordings]
    assert ["aten.arange" in packets for packets in ran] == [True, False] * (len(ran) // 2)
    modes = {(mode, recording.after is None) for mode, recording in recordings}
    assert len(modes) == len(recordings) and {first for _, first in modes} == {True, False}
