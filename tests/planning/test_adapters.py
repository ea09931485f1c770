"""Narrow pairs beside a layer (LoRA) are cut with it: the last of a column's, the first of a row's."""

from __future__ import annotations

import pytest
import torch

import tpkernels as tpk
from tests.nn.reference import LIMIT_S
from tests.planning.adapted import WIDTH, Block
from tests.planning.by_value import problems
from tpkernels.planning.styles import Column, Replicate, Row
from tpkernels.testing.spawn import Pools

X = torch.zeros(2, 5, WIDTH)


@pytest.mark.cpu
def test_a_layer_is_cut_as_without_its_pair() -> None:
    plan = tpk.make_plan(Block(up=0.5), 2, example_inputs=X)
    assert plan["qkv.base"].style == plan["qkv.last"].style == Column(segments=(WIDTH,) * 3)
    assert plan["up.base"].style == plan["up.last"].style == Column()
    for row in ("out", "down"):
        assert plan[f"{row}.base"].style == plan[f"{row}.first"].style == Row()
    for whole in ("qkv.first", "out.last", "up.first", "down.last"):
        assert plan[whole].style == Replicate(distributed=True) and "small beside" in plan[whole].reason
    assert not plan.random, "the mask is of a whole tensor"


@pytest.mark.cpu
def test_what_a_narrow_layer_takes_is_not_dropped_where_it_is_a_part() -> None:
    plan = tpk.make_plan(Block(down=0.5), 2, example_inputs=X)
    assert plan["up.base"].style == Column(gather_output=True) and plan["qkv.base"].style == Column(segments=(24,) * 3)
    assert plan["up.first"].style == Column() and plan["up.last"].style == Row()


@pytest.mark.cpu
def test_what_a_narrow_layer_takes_is_dropped_alike_beside_parts_that_are_not() -> None:
    plan = tpk.make_plan(Block(up=0.5, inside=0.5), 2, example_inputs=X)
    assert plan["up.base"].style == Column() and plan["down.base"].style == Row()
    assert plan.random == (("up.base", "down.base"),) and plan.whole_draws == ("up.dropout",)


def by_value() -> list[str]:
    torch.manual_seed(0)
    return problems("adapters", Block(up=0.5), torch.randn(2, 5, WIDTH).double(), "out.base")


@pytest.mark.sample(1)
@pytest.mark.gloo
@pytest.mark.parametrize("world", [3, 2])
@pytest.mark.slow("3 s; that they are cut is asked without training")
def test_they_compute_and_train_as_the_unsharded_model(ranks: Pools, world: int) -> None:
    assert ranks(world).run(by_value, timeout=LIMIT_S) == [[]] * world
