"""Layers whose weights a model's code multiplies by itself are cut as those that it calls."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

import tpkernels as tpk
from tests.models.compare import compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.by_weight import WIDTH, made
from tpkernels.planning.styles import Column, Replicate, Row, Style
from tpkernels.testing.spawn import Pools

X = torch.zeros(2, 5, WIDTH)
GATHERED = Column(gather_output=True)
STYLES: dict[str, tuple[Style, Style, tuple[str, ...]]] = {
    "eva": (GATHERED, GATHERED, ("qkv",)),
    "swin": (GATHERED, GATHERED, ("proj", "qkv")),
    "swin 2": (Replicate(), GATHERED, ("proj",)),  # a changed copy of the bias is no bias of the layer
    "pair": (Column(), Row(), ("proj", "up")),
    "read once more": (GATHERED, Replicate(), ("up",)),
    "converted": (GATHERED, Replicate(), ("up",)),  # also where it has that dtype, as in LongCat-Flash
    "packed": (GATHERED, GATHERED, ("qkv",)),
}
"""Of the first layer and the last, and which of them are called where the code multiplies."""


@pytest.mark.cpu
@pytest.mark.parametrize("how", STYLES)
def test_a_product_with_a_weight_is_planned_as_a_call_of_the_layer(how: str) -> None:
    plan = tpk.make_plan(made(how), 2, example_inputs=X)
    first, last, called = STYLES[how]
    names = "block.up" if how in ("pair", "read once more", "converted") else "block.qkv", "block.proj"
    assert tuple(plan[name].style for name in names) == (first, last)
    assert plan.by_weight == {"block": tuple(f"block.{name}" for name in called)}
    assert f"called where block multiplies by the weight: {', '.join(called)}" in str(plan)
    again = tpk.ShardingPlan.from_json(plan.to_json())
    assert again == plan
    again.validate(made(how))
    with pytest.raises(ValueError, match="no module 'other'"):
        dataclasses.replace(plan, by_weight={"other": ("block.proj",)}).validate(made(how))
    if how == "packed":
        assert "kept in several parts" in plan["block.qkv"].reason


def all_by_value(compiled: bool) -> list[str]:
    return [problem for how in ("eva", "swin", "pair") for problem in by_value(how, compiled)]


def by_value(how: str, compiled: bool) -> list[str]:
    torch.manual_seed(0)
    plain = made(how).double()
    model = tpk.parallelize(copy.deepcopy(plain), tp_mesh(), example_inputs=X.double())
    x, outputs = torch.randn(2, 5, WIDTH, dtype=torch.float64), []
    ran: nn.Module = copy.deepcopy(model)  # a copy calls its own layers
    model = ran
    if compiled:
        ran = torch.compile(ran, fullgraph=True, backend="aot_eager")
    inputs = [x, x.clone()]
    for net, one in zip((ran, plain), inputs, strict=True):
        outputs.append(net(one.requires_grad_()))
        outputs[-1].square().sum().backward()
    pairs = {"output": outputs, "gradient of x": [one.grad for one in inputs]}
    found = [f"{how} {name}: {why}" for name, (a, b) in pairs.items() if (why := differs(a, b, 1e-11))]
    return found + [f"{how} {problem}" for problem in compare_tensors(model, plain, 1e-11)]


@pytest.mark.gloo
@pytest.mark.slow("8 s: trains three models, and compiles them")
@pytest.mark.parametrize("compiled", [False, True])
def test_they_compute_and_train_as_the_unsharded_model(ranks: Pools, compiled: bool) -> None:
    assert ranks(2).run(all_by_value, compiled, timeout=LIMIT_S) == [[], []]


@pytest.mark.cpu
def test_a_layer_whose_weight_is_multiplied_in_place_by_a_number_is_cut() -> None:
    plan = tpk.make_plan(made("rescaled"), 2, example_inputs=X)
    assert (plan["block.up"].style, plan["block.proj"].style) == (Column(), Row())
    centred = tpk.make_plan(made("centred"), 2, example_inputs=X, overrides={"norm": "replicate"})
    assert "uses without calling" in centred["block.up"].reason and "uses without" in centred["block.proj"].reason
    packed = tpk.make_plan(made("rescaled packed"), 2, example_inputs=X)
    assert packed["block.qkv"].style == GATHERED and "kept in several parts" in packed["block.qkv"].reason


def rescaled_by_value() -> list[str]:
    torch.manual_seed(0)
    plain = made("rescaled").double()
    model = tpk.parallelize(copy.deepcopy(plain), tp_mesh(), example_inputs=X.double())
    x, found = torch.randn(2, 5, WIDTH, dtype=torch.float64), []
    for training in (False, True, False, False):
        outputs = [net.train(training)(x) for net in (model, plain)]
        found += [f"training {training}: {why}"] if (why := differs(*outputs, 1e-11)) else []
        state = tpk.full_state_dict(model)
        found += [key for key, value in plain.state_dict().items() if not torch.equal(state[key], value)]
        for out in outputs if training else ():
            out.square().sum().backward()
    return found + compare_tensors(model, plain, 1e-11)


@pytest.mark.gloo
def test_ranks_multiply_their_parts_by_the_number(ranks: Pools) -> None:
    assert ranks(2).run(rescaled_by_value, timeout=LIMIT_S) == [[], []]
