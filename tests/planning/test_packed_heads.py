"""The queries of a packed projection are cut, and keys and values that they share stay whole on every rank."""

from __future__ import annotations

import warnings

import pytest
import torch

import tpkernels as tpk
from tests.nn.reference import LIMIT_S
from tests.planning.by_value import problems
from tests.planning.packed_heads import WIDTH, Grouped, SharedKey
from tpkernels.errors import UnprovenCallWarning
from tpkernels.planning.splits import Split, Unproven, through_view
from tpkernels.planning.styles import Column, Replicate, Row
from tpkernels.testing.spawn import Pools

X = torch.zeros(2, 5, WIDTH)


@pytest.mark.cpu
def test_queries_are_cut_and_their_key_and_value_copied() -> None:
    plan = tpk.make_plan(SharedKey("features"), 2, example_inputs=X)
    assert plan["qkv"].style == Column(segments=(24, 4, 4), copied=2) and plan["out"].style == Row()
    assert plan["qkv"].parameters[0].local_shapes == ((20, WIDTH),) * 2
    assert plan["norm"].style == Replicate(sequence_parallel=True), "it works on what ranks have shares of"
    plan = tpk.make_plan(SharedKey("heads", 7), 3, example_inputs=X)
    assert plan["qkv"].style == Column(segments=(28, 8), units=(4, 1), copied=1) and plan["out"].style == Row(unit=4)
    assert [shape[0] for shape in plan["qkv"].parameters[0].local_shapes] == [20, 20, 12]
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    plan.validate(SharedKey("heads", 7))


@pytest.mark.cpu
@pytest.mark.parametrize(
    "how", ["nothing behind", "places", "key that drops out", "dropout", "another order", "value that leaves"]
)
def test_what_only_looks_so_is_gathered(how: str) -> None:
    assert tpk.make_plan(SharedKey(how), 2, example_inputs=X)["qkv"].style == Column(gather_output=True)


@pytest.mark.cpu
def test_a_rank_computes_the_keys_and_values_that_its_queries_need() -> None:
    plan = tpk.make_plan(Grouped(), 3, example_inputs=X)
    assert plan["qkv"].style == Column(segments=(24, 8, 8), copied=2, copied_heads=2, copies=6)
    assert plan["out"].style == Row() and plan["qkv"].parameters[0].local_shapes == ((24, WIDTH),) * 3
    assert plan.attributes["num_key_value_heads"] == (2, (2, 2, 2))
    assert "2 key-value heads for 3 ranks: whole on every rank" in plan["qkv"].reason
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    plan.validate(Grouped())
    assert tpk.make_plan(Grouped(), 2, example_inputs=X)["qkv"].style == Column(segments=(24, 8, 8))
    uneven = tpk.make_plan(Grouped("", 4), 3, example_inputs=X)  # 2, 1 and 1
    assert uneven["qkv"].style == Column(segments=(16, 8, 8), units=(4, 1, 1), copied=2, copied_heads=2, copies=4)
    assert tpk.make_plan(Grouped("turned"), 3, example_inputs=X)["qkv"].style == Column(gather_output=True)


@pytest.mark.cpu
def test_a_part_beside_copies_is_viewed_and_taken_apart() -> None:
    packed = Split(2, (24, 4, 4), copied=2)
    assert packed.local_shape((2, 5, 32), 2, 1) == (2, 5, 20)
    seen = through_view(packed, (2, 5, 32), (2, 5, 8, 4), 2)
    assert seen == Split(2, (6, 1, 1), copied=2)
    assert seen.part(0, 6, 2, 0) == (Split(2, (6,)), 0, 3)
    assert seen.part(7, 8, 2, 0) == (Split(2, (1,), copied=1), 4, 5) and seen.part(7, 8, 2, 0)[0].is_whole
    with pytest.raises(Unproven, match="interleave"):
        through_view(Split(1, (24, 4, 4), copied=2), (2, 32, 5), (2 * 32, 5), 2)
    with pytest.raises(Unproven, match="different sizes"):
        through_view(packed, (2, 5, 32), (2, 5, 4, 8), 2)
    with pytest.raises(Unproven, match="3 heads do not divide"):
        through_view(Split(0, (12, 4), copied=1), (16,), (4, 4), 2)


def all_by_value(full: bool) -> list[str]:
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)  # the first call is followed, with rules for these layouts
        for how, heads in (("features", 6), ("heads", 7), *([("heads", 6), ("features", 7)] if full else [])):
            torch.manual_seed(0)
            found += problems(how, SharedKey(how, heads), torch.randn(2, 5, WIDTH).double(), "out")
        for heads in (6, 4):
            found += problems(f"grouped {heads}", Grouped("", heads), torch.randn(2, 5, WIDTH).double(), "out")
    return found


@pytest.mark.sample(1)
@pytest.mark.gloo
@pytest.mark.parametrize("world", [3, 2])
def test_they_compute_and_train_as_the_unsharded_model(ranks: Pools, world: int, full: bool) -> None:
    assert ranks(world).run(all_by_value, full, timeout=LIMIT_S) == [[]] * world
