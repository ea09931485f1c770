"""Focal modulation: a linear layer gives queries, a context and a gate for each level, which all channels read."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.test_convolution_pairs import differing, paired, step
from tpkernels.errors import UnprovenCallWarning
from tpkernels.planning.proofs.pair_proofs import narrow_segments
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools

D, LEVELS = 12, 2
GATES = LEVELS + 1


class Modulation(nn.Module):
    """As FocalNet's code; ``how`` it does otherwise."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.into = nn.Linear(D, (D if how == "many gates" else GATES) + 2 * D)
        self.levels = nn.ModuleList(nn.Conv2d(D, D, 3, padding=1, groups=D, bias=False) for _ in range(LEVELS))
        self.context, self.out = nn.Conv2d(D, D, 1), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        packed = self.into(x).permute(0, 3, 1, 2).contiguous()
        if self.how == "gates before":
            gates, query, context = torch.split(packed, (GATES, width, width), 1)
        else:
            gates_given = D if self.how == "many gates" else GATES
            query, context, gates = torch.split(packed, (width, width, gates_given), 1)
        total: Any = 0
        for number, level in enumerate(self.levels):
            context = nn.functional.gelu(level(context))
            total = total + context * gates[:, number : number + 1]
        total = total + context.mean((2, 3), keepdim=True) * gates[:, LEVELS : LEVELS + 1]
        if self.how == "width counts":
            total = total / width
        y = (query * self.context(total)).permute(0, 2, 3, 1)
        z: Tensor = self.out(y)
        if self.how == "added within":
            z = z + x
        if self.how == "a gate goes on":
            z = z * gates[:, :1].permute(0, 2, 3, 1)
        return z


class Block(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.norm, self.modulation = nn.LayerNorm(D), Modulation(how)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.modulation(self.norm(x))
        return y


KINDS = {"": (1, 0), "gates before": (1, 2)}
"""Where the gates are, as a number of segments that are whole and of those behind."""
WHOLE = ("many gates", "width counts", "added within", "a gate goes on")
"""Gates that cannot be whole, as each rank would have more of them than of all else; a width that makes values; what
shows the width used by itself; and a gate that meets what is whole, whose gradient would be complete there."""


def made(how: str) -> nn.Module:
    torch.manual_seed(3)
    return Block(how).double()


def example() -> Tensor:
    return torch.randn(2, 3, 4, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.mark.cpu
@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_gates_are_whole_on_every_rank_and_code_reads_its_width(how: str, world: int) -> None:
    plan = tpk.make_plan(made(how), world, example_inputs=example())
    style: Any = plan["modulation.into"].style
    assert paired(plan) == "modulation.context" and plan["modulation.out"].style == Row()
    assert style == Column(segments=style.segments, copied=style.copied, behind=style.behind)
    assert (style.copied, style.behind) == KINDS[how]
    assert [shape[0] for shape in plan["modulation.into"].parameters[0].local_shapes] == [
        GATES + 2 * D // world
    ] * world
    assert plan.attributes["modulation.width(x: into)"] == (D, (D // world,) * world)
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan


@pytest.mark.cpu
@pytest.mark.parametrize("how", WHOLE)
def test_gates_and_widths_that_more_is_done_with_are_gathered(how: str) -> None:
    for world in (2, 3):
        plan = tpk.make_plan(made(how), world, example_inputs=example())
        assert paired(plan) == "" and not plan.attributes


@pytest.mark.cpu
def test_segments_are_narrow_beside_a_ranks_part_of_the_others() -> None:
    assert narrow_segments((12, 12, 3), 2) == (1, 0) and narrow_segments((1, 2, 12), 3) == (2, 1)
    assert narrow_segments((12, 12, 12), 2) is None and narrow_segments((12, 3), 5) is None
    assert narrow_segments((2, 12, 2), 2) is None, "not side by side"


def compare(kinds: list[str]) -> list[str]:
    wrong = []
    for kind in kinds:
        plain, x = made(kind), example()
        plan = tpk.make_plan(plain, tp_mesh(), example_inputs=x)
        wrong += [] if paired(plan) else [f"{kind} is whole"]
        model: Any = tpk.parallelize(copy.deepcopy(plain), tp_mesh(), tpk.ShardingPlan.from_json(plan.to_json()))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnprovenCallWarning)
            wrong += differing(kind, step(model, x), step(plain, x))
            other = x.repeat(1, 2, 1, 1)
            wrong += differing(f"{kind}, larger", step(model, other), step(plain, other))
        wrong += differing(f"state of {kind}", tpk.full_state_dict(model), plain.state_dict())
    return wrong


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow("on three ranks"))])
def test_values_and_gradients_are_those_of_the_whole_model(ranks: Pools, world: int) -> None:
    assert ranks(world).run(compare, list(KINDS), timeout=LIMIT_S) == [[]] * world
