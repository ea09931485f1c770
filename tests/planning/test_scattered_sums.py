"""A layer that takes what is cut and gives what is cut: ranks scatter the features of its sum."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import tpkernels as tpk
from tests.models.compare import compare_tensors, differs
from tests.nn.reference import LIMIT_S, close, tp_mesh, whole
from tests.planning.by_value import LIMIT, problems
from tests.planning.scattered_sums import EACH, WIDTH, Gated, made
from tpkernels.errors import UnprovenCallWarning
from tpkernels.nn import RowParallelLinear
from tpkernels.partition import chunk_sizes, offsets
from tpkernels.planning.styles import Column, Row, Sliced
from tpkernels.sharding.same_bits import check_styles
from tpkernels.testing.spawn import Pools
from tpkernels.verification.part_places import part_at

X = torch.zeros(2, 5, WIDTH)
CUT = ("", "5 heads", "pairs of numbers", "4 heads pairs of numbers", "read on")


@pytest.mark.cpu
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("how", CUT)
def test_a_layer_between_heads_gives_each_rank_the_numbers_of_its_own(how: str, world: int) -> None:
    plan = tpk.make_plan(made(how), world, example_inputs=X)
    uneven = (how.startswith("5") or (how.startswith("4") and world == 3)) * 1
    numbers = 2 if "pairs" in how else 1
    unit = EACH if uneven else 1
    assert plan["query"].style == plan["value"].style == Column(unit=unit)
    assert plan["out"].style == Row(unit=unit)
    assert plan["gate"].style == Row(unit=unit, scatter_unit=numbers if uneven else 1)
    assert plan["gate"].forward == "reduce-scatter of y" and plan["gate"].backward == "all-gather of dy"
    heads = made(how).gate.out_features
    assert plan["gate"].wire_bytes == 2 * 4 * heads * 10 * (world - 1) // world
    assert "and scatters the sum, up to gate, " in plan["gate"].reason
    if numbers == 1:
        assert plan[""].style == Sliced((("slope", 0),))
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    plan.validate(made(how))


@pytest.mark.cpu
@pytest.mark.parametrize("how", [
    "all heads first", "flipped", "mean", "of the input too", "that leaves", "read by a norm", "in halves",
    "features first",
])  # fmt: skip
def test_a_sum_that_more_than_its_heads_read_is_not_scattered(how: str) -> None:
    plan = tpk.make_plan(made(how), 2, example_inputs=X)
    assert plan["gate"].style not in (Row(scatter_unit=1), Row(scatter_unit=2))
    # a mean of numbers that are summed for all ranks may meet parts, as what selects the states of Mamba does
    assert plan["out"].style == (Row() if how == "mean" else Row(split_input=True))


@pytest.mark.cpu
def test_without_a_head_for_each_rank_nothing_is_scattered() -> None:
    plan = tpk.make_plan(made("4 heads"), 3, example_inputs=X)  # a dimension of heads alone has no free places
    assert plan["out"].style == Row(split_input=True)


@pytest.mark.cpu
def test_features_of_a_sum_are_in_no_blocks() -> None:
    plan = tpk.make_plan(made(""), 2, example_inputs=X, same_bits=2)
    assert plan["out"].style == Row(split_input=True)
    with pytest.raises(ValueError, match="gives this rank's features of what it sums, which are in no blocks"):
        check_styles({"gate": Row(scatter_unit=1)}, 2)


@pytest.mark.cpu
def test_what_only_a_proof_can_say_is_refused_by_hand() -> None:
    with pytest.raises(ValueError, match="which only the data flow can prove"):
        tpk.make_plan(made(""), 2, example_inputs=X, overrides={"gate": Row(scatter_unit=1)})
    plan = tpk.make_plan(made(""), 2, example_inputs=X, overrides={"gate": Row(implementation="unfused")})
    assert plan["gate"].style == Row(implementation="unfused", scatter_unit=1)
    for options in ({"sequence_parallel": True}, {"split_input": True}, {"summed_gradient": True}):
        with pytest.raises(ValueError, match="scatter_unit is of a row that takes this rank's features"):
            Row(scatter_unit=1, **options)


@pytest.mark.cpu
def test_dropout_between_is_one_region_with_numbers_of_each_rank() -> None:
    plan = tpk.make_plan(Gated(p=0.5), 2, example_inputs=X)
    assert plan.random == (("query", "out"),)


def by_value(how: str) -> list[str]:
    torch.manual_seed(0)
    return problems(
        how, made(how), torch.randn(2, 5, WIDTH).double(), "layers.0.attention.out" if how == "tied" else "out"
    )


def all_by_value() -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)  # the first call is followed, with rules for these layouts
        return [problem for how in (*CUT, "tied") for problem in by_value(how)]


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_they_compute_and_train_as_the_unsharded_model(ranks: Pools, world: int) -> None:
    assert ranks(world).run(all_by_value, timeout=LIMIT_S) == [[]] * world


def along_the_sequence() -> list[str]:
    torch.manual_seed(0)
    plain: Any = made("stack").double()
    model, x = copy.deepcopy(plain), torch.randn(2, 5, WIDTH).double()
    plan = tpk.make_plan(model, tp_mesh(), example_inputs=x, sequence_parallel=True)
    gate, out = (plan[f"layers.0.attention.{name}"].style for name in ("gate", "out"))
    found = [] if (gate, out) == (Row(scatter_unit=1), Row(sequence_parallel=True)) else [f"{gate}, {out}"]
    tpk.parallelize(model, tp_mesh(), plan)
    outputs = [net(x) for net in (model, plain)]
    for y in outputs:
        y.square().sum().backward()
    problem = differs(outputs[0], outputs[1], LIMIT)
    return found + ([problem] if problem else []) + compare_tensors(model, plain, LIMIT)


@pytest.mark.gloo
def test_with_a_sequence_in_parts_the_numbers_are_of_the_whole_one(ranks: Pools) -> None:
    assert ranks(2).run(along_the_sequence, timeout=LIMIT_S) == [[], []]


@pytest.mark.cpu
def test_a_verification_finds_the_features_of_each_rank() -> None:
    numbers = torch.arange(14.0).view(2, 7)
    for rank, mine in enumerate(([0, 1, 2, 3], [4, 5, 6])):
        found = part_at(numbers[:, mine], numbers, Row(scatter_unit=1), leaves=True, rank=rank, world_size=2)
        assert found is not None and isinstance(found[1], torch.Tensor) and found[1].tolist() == mine
    assert part_at(numbers[:, :4], numbers, Row(), leaves=True, rank=0, world_size=2) is None


def alone(unit: int, bias: bool, dtype: torch.dtype, autocast: bool) -> None:
    """Column and then such a row, in plain torch; the gradient that arrives is this rank's features of it."""
    torch.manual_seed(0)
    mesh, hidden, out = tp_mesh(), 8, 5 * unit
    rank, world = mesh.get_local_rank(), mesh.size()
    plain = nn.Linear(hidden, out, bias, dtype=dtype)
    layer = RowParallelLinear.from_linear(plain, mesh, scatter_unit=unit)
    x, g = torch.randn(2, 3, hidden, dtype=dtype), torch.randn(2, 3, out, dtype=dtype)
    sizes, inputs = chunk_sizes(out, world, unit), chunk_sizes(hidden, world)
    mine = slice(offsets(sizes)[rank], offsets(sizes)[rank] + sizes[rank])
    taken = slice(offsets(inputs)[rank], offsets(inputs)[rank] + inputs[rank])
    x_r, x = x[..., taken].clone().requires_grad_(), x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, expected = layer(x_r), plain(x)
    assert y.dtype == expected.dtype and y.shape[-1] == sizes[rank] == layer.scattered_sizes[rank]
    if autocast:
        return
    close(y, expected[..., mine], "y")
    y.backward(g[..., mine])
    expected.backward(g)
    assert x_r.grad is not None and x.grad is not None
    close(x_r.grad, x.grad[..., taken], "dx")
    close(whole(layer.weight.grad), plain.weight.grad, "dw")
    if bias:
        close(whole(layer.bias.grad), plain.bias.grad, "db")
    close(layer(torch.ones(inputs[rank], dtype=dtype)), plain(torch.ones(hidden, dtype=dtype))[mine], "one row")
    text = repr(layer)
    assert f"gives={'/'.join(map(str, sizes))}" in text, text


@pytest.mark.gloo
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_row_scatters_its_sum_in_multiples_of_a_unit(ranks: Pools, world: int) -> None:
    for unit, bias in ((1, True), (3, False), (2, True)):
        ranks(world).run(alone, unit, bias, torch.float64, False, timeout=LIMIT_S)
    ranks(world).run(alone, 2, True, torch.float32, True, timeout=LIMIT_S)


def refused() -> list[str]:
    said = []
    for options in ({"sequence_parallel": True}, {"split_input": True}, {"unit": 2, "scatter_unit": 4}):
        try:
            RowParallelLinear(8, 6, tp_mesh(), **{"scatter_unit": 2, **options})
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.gloo
def test_options_that_contradict_a_scattered_sum_are_refused(ranks: Pools) -> None:
    for said in ranks(2).run(refused, timeout=LIMIT_S):
        assert [("neither" in one, "multiple" in one) for one in said] == [(True, False), (True, False), (False, True)]
