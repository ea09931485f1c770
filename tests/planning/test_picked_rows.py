"""Numbers of the rows that a rank has pick each of these rows, and are of no use to anybody else."""

from __future__ import annotations

import pytest
import torch

import tpkernels as tpk
from tests.nn.reference import LIMIT_S
from tests.planning.by_value import problems
from tests.planning.picked_rows import HEADS, LENGTH, WIDTH, PickedRows
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools

X = torch.zeros(2, LENGTH, WIDTH)
ALONE = Column(gather_output=True)


@pytest.mark.cpu
@pytest.mark.parametrize("what", ["nothing", "all rows alike"])
def test_attention_that_picks_queries_of_each_head_is_cut_by_heads(what: str) -> None:
    plan = tpk.make_plan(PickedRows(what), 2, example_inputs=X)
    assert plan["q"].style == plan["k"].style == plan["v"].style == Column()
    assert plan["out"].style == Row() and plan.attributes == {"heads": (HEADS, (3, 3))}


@pytest.mark.cpu
@pytest.mark.parametrize(
    "what",
    [
        "of other rows", "by place", "in other places", "backwards", "from one on", "to a number", "picked", "moved",
        "of some rows", "kept", "largest", "sum",
    ],
)  # fmt: skip
def test_it_is_not_where_the_numbers_are_others_or_serve_another_purpose(what: str) -> None:
    plan = tpk.make_plan(PickedRows(what), 2, example_inputs=X)
    assert plan["q"].style == plan["out"].style == ALONE


@pytest.mark.cpu
@pytest.mark.parametrize("training", [True, False])
def test_it_is_not_where_ranks_would_sample_other_keys_because_of_dropout(training: bool) -> None:
    plan = tpk.make_plan(PickedRows(dropout=0.1).train(training), 2, example_inputs=X)
    assert plan["q"].style == plan["out"].style == ALONE


def by_value() -> list[str]:
    torch.manual_seed(0)
    x = torch.randn(2, LENGTH, WIDTH).double()
    kinds = ("nothing", "all rows alike")
    return [one for what in kinds for one in problems(what, PickedRows(what), x.clone(), "out")]


@pytest.mark.gloo
@pytest.mark.parametrize("count", [2, 3, 4])
def test_it_computes_and_trains_as_the_unsharded_model(ranks: Pools, count: int) -> None:
    assert ranks(count).run(by_value, timeout=LIMIT_S) == [[]] * count
