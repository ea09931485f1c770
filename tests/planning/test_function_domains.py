"""A function with a backward of its own that works on each head, but gives numbers for small ones alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpkernels as tpk
from tests.nn.reference import LIMIT_S
from tests.planning.by_value import problems
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools

WIDTH, EACH = 24, 4
X = torch.zeros(5, WIDTH)


class Angles(torch.autograd.Function):
    """Of vectors at most one long, as YOSO's (transformers' YosoCumulation): there are no angles of longer ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        angles = torch.acos(x @ x.transpose(-2, -1))
        ctx.save_for_backward(angles)
        return angles @ x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        (angles,) = ctx.saved_tensors
        return angles.transpose(-2, -1) @ dy


class OfAllHeads(Angles):
    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy - dy.mean(0, keepdim=True)


class OfLongOnes(Angles):
    """Adds up the gradients of all heads, where their numbers are not near zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.far = x.abs() > 0.05
        return Angles.forward(ctx, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy + (dy * ctx.far).sum(0)


class OfNone(Angles):
    """Gives no numbers, whatever it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Angles.forward(ctx, x) * float("nan")


class Mlp(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = F.normalize(self.up(x).unflatten(-1, (-1, EACH)).transpose(0, 1), dim=-1) / 2
        y: Tensor = self.down(self.function.apply(heads).transpose(0, 1).flatten(-2))
        return y


@pytest.mark.cpu
@pytest.mark.parametrize("world_size", [2, 3])
def test_it_may_meet_heads_where_it_gives_each_its_own(world_size: int) -> None:
    plan = tpk.make_plan(Mlp(Angles), world_size, example_inputs=X)
    assert plan["up"].style == Column() and plan["down"].style == Row(), plan["up"].reason


@pytest.mark.cpu
@pytest.mark.parametrize("function", [OfAllHeads, OfLongOnes, OfNone])
def test_it_may_not_where_it_gives_none_or_asks_others(function: Any) -> None:
    plan = tpk.make_plan(Mlp(function), 2, example_inputs=X)
    assert plan["up"].style == plan["down"].style == Column(gather_output=True)


def by_value() -> list[str]:
    torch.manual_seed(0)
    return problems("angles", Mlp(Angles), torch.randn(5, WIDTH).double(), "down")


@pytest.mark.gloo
@pytest.mark.parametrize("world_size", [2, 3])
def test_it_computes_and_trains_as_the_unsharded_model(world_size: int, ranks: Pools) -> None:
    assert ranks(world_size).run(by_value, timeout=LIMIT_S) == [[]] * world_size
