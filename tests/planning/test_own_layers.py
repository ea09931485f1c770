"""Layers of a class of their own: which are cut, what stays whole, and values and gradients in fp64."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import tpkernels as tpk
from tests.models.compare import differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.by_value import LIMIT, problems
from tests.planning.own_layers import WIDTH, WORDS, Mlp, OwnLinear, OwnTable, SetApart, Words
from tpkernels.errors import UnprovenCallWarning
from tpkernels.nn.summed_output import sum_output_gradient
from tpkernels.planning.modules.layers import Layer, layer_of
from tpkernels.planning.styles import Column, Replicate, Row, Vocabulary
from tpkernels.testing.spawn import Pools

X = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(2))
IDS = torch.randint(WORDS, (3, 5), generator=torch.Generator().manual_seed(2))
IDS[0, :2] = 1  # padding
OTHER = "rounded", "without its bias", "of something else", "makes more", "gives more", "twice", "quantised"


@pytest.mark.cpu
def test_a_product_with_its_own_weight_makes_a_layer() -> None:
    assert layer_of(OwnLinear(3, 5)) == Layer("linear", 3, 5)
    assert layer_of(OwnTable()) == Layer("embedding", WORDS, WIDTH)
    assert not any(layer_of(OwnLinear(3, 5, how)) for how in OTHER)
    assert not any(layer_of(OwnTable(how)) for how in ("max_norm", "sparse", "doubled"))
    assert layer_of(SetApart(3, 5)) is None and layer_of(nn.Bilinear(1, 3, 5)) is None
    misnamed = OwnLinear(3, 5)
    misnamed.in_features = 4  # which the parallel layer takes for its own
    assert "in_features" in tpk.make_plan(nn.Sequential(misnamed, nn.Identity()), 1)["0"].reason


@pytest.mark.cpu
def test_such_layers_are_cut_in_pairs_and_tables_by_vocabulary() -> None:
    plan = tpk.make_plan(Mlp(), 2, example_inputs=X)
    assert (plan["up"].style, plan["down"].style) == (Column(), Row())
    plan = tpk.make_plan(Words(), 2, example_inputs=IDS)
    assert (plan["words"].style, plan["head"].style) == (Vocabulary(), Column(gather_output=True))
    again = tpk.ShardingPlan.from_json(plan.to_json())
    assert again == plan
    quantised = Words()
    quantised.mlp.up.quantised = True
    with pytest.raises(ValueError, match="OwnLinear"):
        again.validate(quantised)


@pytest.mark.cpu
@pytest.mark.parametrize("how", OTHER)
def test_what_does_more_stays_whole(how: str) -> None:
    with pytest.raises(ValueError, match="nothing to shard"):
        tpk.make_plan(Mlp(how), 2, example_inputs=X)


@pytest.mark.cpu
def test_a_path_that_reads_the_weight_keeps_it_whole() -> None:
    assert layer_of(OwnLinear(3, 5, "scaled")) is not None  # without the scale
    plan = tpk.make_plan(Mlp("scaled"), 2, example_inputs=X)
    assert plan["up"].style == Replicate() and "uses without calling" in plan["up"].reason


@pytest.mark.cpu
def test_along_a_sequence_that_is_cut_they_take_whole_tensors() -> None:
    plan = tpk.make_plan(nn.Sequential(*(Mlp() for _ in range(2))), 2, example_inputs=X, sequence_parallel=True)
    assert not {Column(sequence_parallel=True), Row(sequence_parallel=True)} & {e.style for e in plan.entries}


def by_value() -> list[str]:
    torch.manual_seed(3)
    x = X.double()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)
        wrong = problems("an MLP", Mlp(), x.clone(), "down")
        wrong += problems("a table", Words(), IDS.clone(), "mlp.down")
    return wrong + flags(x) + loaded(x) + summed(x)


def flags(x: torch.Tensor) -> list[str]:
    """A flag that changes the path of one layer, set behind the plan."""
    found = []
    for name, why in (("quantised", "uses a parameter otherwise"), ("idle", "returns without the product")):
        model = tpk.parallelize(Mlp().double(), tp_mesh(), example_inputs=x)
        setattr(model.up, name, True)
        try:
            model(x)
        except ValueError as error:
            found += [] if why in str(error) else [str(error)]
        else:
            found.append(f"{name} is not noticed")
    return found


def loaded(x: torch.Tensor) -> list[str]:
    """A state goes into a parallel model, and comes out of it."""
    plain, other = Mlp().double(), Mlp().double()
    model = tpk.parallelize(copy.deepcopy(other), tp_mesh(), example_inputs=x)
    tpk.load_full_state_dict(model, plain.state_dict())
    state = tpk.full_state_dict(model)
    wrong = [key for key, value in plain.state_dict().items() if not torch.equal(state[key], value)]
    why = differs(model(x), plain(x), LIMIT)
    return wrong + ([f"loaded: {why}"] if why else [])


def summed(x: torch.Tensor) -> list[str]:
    """The gradient of a whole layer's output is summed, where it is the first of what its code gives."""
    layer, mesh = OwnLinear(WIDTH, WIDTH).double(), tp_mesh()
    layer(x)[0].sum().backward()
    assert layer.weight.grad is not None
    expected, layer.weight.grad = layer.weight.grad * mesh.size(), None
    sum_output_gradient(layer, mesh)
    y, nothing = layer(x)
    y.sum().backward()
    assert layer.weight.grad is not None and nothing is None
    why = differs(layer.weight.grad, expected, LIMIT)
    return [f"summed: {why}"] if why else []


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow("on three ranks"))])
def test_they_compute_and_train_as_the_unsharded_model(ranks: Pools, world: int) -> None:
    assert ranks(world).run(by_value, timeout=LIMIT_S) == [[]] * world


def compiled() -> list[str]:
    torch.manual_seed(3)
    plain, x = Mlp().double(), X.double()
    model = tpk.parallelize(copy.deepcopy(plain), tp_mesh(), example_inputs=x)
    ran = torch.compile(model, fullgraph=True, backend="aot_eager")
    why = differs(ran(x), plain(x), LIMIT)
    return [why] if why else []


@pytest.mark.gloo
@pytest.mark.slow("8 s: compiles a model")
def test_they_compile_in_one_graph(ranks: Pools) -> None:
    assert ranks(2).run(compiled, timeout=LIMIT_S) == [[], []]
