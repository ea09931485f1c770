"""What a user asks for: overrides, and names of styles from elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate as Whole
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

import tpkernels as tpk
from tests.models import zoo
from tests.planning.leaking import Leaking
from tpkernels.planning.style_names import as_style
from tpkernels.sharding import Column, Replicate, Row, Vocabulary

pytestmark = pytest.mark.cpu


def test_overrides_win_and_reach_options() -> None:
    plan = tpk.make_plan(zoo.mlp(), 2, overrides={"0": Column(implementation="chunked"), "5": "replicate"})
    assert plan["0"].style == Column(implementation="chunked") and plan["2"].style == Row()
    assert plan["5"].style == Replicate() and plan["4"].style == Column(gather_output=True)
    assert "asked for" in plan["0"].reason


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"*.nothing": "replicate"}, "matches no module"),
        ({"0": "column", "?": "replicate"}, "matches '0' with"),
        ({"0": "sideways"}, "must be one of"),
        ({"0": "row", "2": "column"}, "conflict"),
        ({"0": "column", "2": "replicate"}, "conflict with the model"),
        ({"2": "row", "0": "replicate"}, "conflict with the model"),
    ],
)
def test_overrides_that_match_nothing_or_conflict_are_refused(overrides: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tpk.make_plan(zoo.mlp(), 2, overrides=overrides)


def test_the_unit_of_one_layer_alone_is_refused_where_its_neighbours_are_cut_otherwise() -> None:
    """10 units over 3 ranks are 24, 24 and 12 features, where the data flow proves 20 for each."""
    model, unit = nn.Sequential(nn.Linear(8, 60), nn.GELU(), nn.Linear(60, 8)), Column(unit=6)
    with pytest.raises(ValueError, match="'0' conflict with the model: the input of 2 is cut"):
        tpk.make_plan(model, 3, overrides={"0": unit})
    plan = tpk.make_plan(model, 3, overrides={"0": unit, "2": Row(unit=6)})
    assert [plan[name].style.local_features(60, 3) for name in ("0", "2")] == [(24, 24, 12)] * 2


def test_an_override_of_a_layer_whose_weight_is_read_is_refused() -> None:
    with pytest.raises(ValueError, match="'up' conflicts with the model: it has parameters that the model uses"):
        tpk.make_plan(Leaking("weight read"), 2, example_inputs=torch.zeros(5, 6), overrides={"up": "column_gather"})


def test_an_override_of_one_of_two_tied_weights_is_refused() -> None:
    model = zoo.build("gpt2")
    assert tpk.make_plan(model, 2)["lm_head"].style == Column(gather_output=True)
    with pytest.raises(ValueError, match=r"tied to that of transformer\.wte"):
        tpk.make_plan(model, 2, overrides={"lm_head": "column_gather", "*.wte": "replicate"})


def test_names_of_transformers_and_styles_of_torch_are_understood() -> None:
    assert as_style("x", "colwise") == Column() and as_style("x", "rowwise") == Row()
    assert as_style("x", "colwise_gather_output") == Column(gather_output=True)
    assert as_style("x", ColwiseParallel()) == Column()
    assert as_style("x", ColwiseParallel(output_layouts=Whole())) == Column(gather_output=True)
    assert as_style("x", ColwiseParallel(input_layouts=Shard(1))) == Column(sequence_parallel=True, sequence_dim=1)
    assert as_style("x", RowwiseParallel(input_layouts=Whole())) == Row(split_input=True)
    assert as_style("x", RowwiseParallel(output_layouts=Shard(0))) == Row(sequence_parallel=True, sequence_dim=0)
    assert as_style("x", SequenceParallel()) == Replicate(sequence_parallel=True)
    assert as_style("x", RowwiseParallel(input_layouts=Whole()), embedding=True) == Vocabulary()
    with pytest.raises(ValueError, match="no counterpart"):
        as_style("x", ColwiseParallel(output_layouts=Shard(0)))
    with pytest.raises(ValueError, match="packed_colwise"):
        as_style("x", "packed_colwise")
