"""Windows by places in memory, rows that are written by numbers, and widths that are read of rows in other places."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.nn.reference import LIMIT_S
from tests.planning.by_value import problems
from tests.planning.windowed import COLUMNS, EACH, IDS, ROW, Words
from tpkernels.errors import UnprovenCallWarning
from tpkernels.nn.shown_width import MovedWidth, show_width
from tpkernels.planning.modules.numbers import may_move, width_in, width_name
from tpkernels.planning.proofs.hypotheses import Proof
from tpkernels.planning.proofs.joined_groups import join
from tpkernels.planning.replays.memory_rules import as_strided
from tpkernels.planning.replays.op_call import Call
from tpkernels.planning.replays.picking_rules import indexed, put
from tpkernels.planning.runs.example_inputs import observe
from tpkernels.planning.runs.layer_groups import Group
from tpkernels.planning.splits import Split, Unproven
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools


@pytest.mark.cpu
def test_heads_within_windows_are_cut_and_words_that_attend_to_all() -> None:
    plan = tpk.make_plan(Words(4), 2, example_inputs=IDS)
    assert plan[ROW].style == Row() and {plan[name].style for name in COLUMNS} == {Column()}
    layers = "query, key, value, everywhere"
    assert plan.attributes[f"attention.width(x, moved: {layers})"] == (4 * EACH, (2 * EACH, 2 * EACH))
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    plan.validate(Words(4))


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["shared", "features", "added", "swapped", "asks", "twice"])
def test_other_windows_and_other_uses_of_the_input_are_not_cut(how: str) -> None:
    plan = tpk.make_plan(Words(4, how), 2, example_inputs=IDS)
    assert plan[ROW].style == Column(gather_output=True) and not plan.attributes


@pytest.mark.cpu
def test_what_only_one_answer_leads_through_is_settled() -> None:
    settled = [one.settled for _, one in observe(Words(4), IDS).recordings]
    assert settled and all(numbers == {1} for numbers in settled), "there may be marked words or none"


def strided(
    shape: Any, size: Any, stride: Any, cut: Split, *, offset: int = 0, steps: Any = None, rank: int = 0
) -> Split:
    """How windows are cut of a tensor that lies in memory in order, or by the ``steps`` of its dimensions."""
    sizes, strides, memories = [], [], []
    for local in (False, True):
        own = cut.local_shape(shape, 2, rank) if local else shape
        empty = torch.empty(own)
        memories.append({"memory": (empty.stride() if steps is None else steps(own), 0)})
        sizes.append(size(own))
        strides.append(stride(own))
    whole, local_ = (
        [s, size_, stride_, offset]
        for s, size_, stride_ in zip((shape, cut.local_shape(shape, 2, rank)), sizes, strides, strict=True)
    )
    call = Call(whole, local_, (memories[0], memories[1]), [cut], [tuple(sizes[0])], 2, rank, lambda index: None)
    return as_strided(call)


@pytest.mark.cpu
@pytest.mark.parametrize("rank", [0, 1])
def test_windows_that_overlap_keep_the_parts_of_other_dimensions(rank: int) -> None:
    def windows(shape: Any) -> list[int]:
        return [shape[0], 3, 4, shape[2]]

    cut = Split(0, (2, 2, 2))
    ordered = strided((6, 8, 3), windows, lambda s: [8 * 3, 2 * 3, 3, 1], cut, rank=rank)
    assert ordered == cut
    inner = strided(
        (6, 8, 3), windows, lambda s: [3, 2 * 3 * s[0], 3 * s[0], 1], cut, rank=rank, steps=lambda s: (3, 3 * s[0], 1)
    )
    assert inner == cut
    first = strided((8, 6), lambda s: [s[1], 8], lambda s: [1, s[1]], Split(1, (6,)), rank=rank)
    assert first == Split(0, (6,))


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("size", "stride", "offset", "why"),
    [
        (lambda s: [s[0], 8], lambda s: [2, 1], 0, "elements of different parts"),
        (lambda s: [s[0], 8], lambda s: [8, 1], 4, "what lies beside the tensor"),
        (lambda s: [s[0], 4 * s[0]], lambda s: [4, 1], 0, "elements of different parts"),
        (lambda s: [s[0], 2], lambda s: [8, s[0]], 0, "elements of different parts"),
        (lambda s: [s[0], 4], lambda s: [4 * (7 - s[0]), 1], 0, "elements of different parts|beside"),
    ],
)
def test_windows_into_other_parts_are_refused(size: Any, stride: Any, offset: int, why: str) -> None:
    with pytest.raises(Unproven, match=why):
        strided((4, 8), size, stride, Split(0, (4,)), offset=offset)


@pytest.mark.cpu
def test_nothing_is_known_of_windows_without_their_memory() -> None:
    call = Call([(4, 8), [4, 8], [8, 1]], [(2, 8), [2, 8], [8, 1]], ({}, {}), [Split(0, (4,))], [(4, 8)], 2, 0, print)
    with pytest.raises(Unproven, match="lies in memory is not known"):
        as_strided(call)


def picking(indices: list[Any], cut: Split, value: Any = None, valued: Any = None, *, masks: bool = False) -> Call:
    shape, local = (3, 4, 6, 5), cut.local_shape((3, 4, 6, 5), 2, 0)
    named = {"indices": None, "masks": masks}
    output = shape if value is not None else tuple(torch.empty(shape)[tuple(_index(one) for one in indices)].shape)
    splits = [cut, [None] * len(indices), valued]
    mixed = Mixed()
    call = Call([shape, indices, value], [local, indices, value], (named, named), splits, [output], 2, 0, mixed.append)
    return call


class Mixed(list[int]):
    pass


def _index(shape: Any) -> Any:
    return slice(None) if shape is None else torch.zeros(shape, dtype=torch.long)


@pytest.mark.cpu
def test_rows_are_picked_in_dimensions_that_do_not_follow_each_other() -> None:
    assert indexed(picking([(7,), None, (7,)], Split(1, (4,)))) == Split(1, (4,))
    assert indexed(picking([None, (7, 2), None, (2,)], Split(2, (6,)))) == Split(3, (6,))
    assert indexed(picking([None, (7,), None, (7,)], Split(0, (3,)))) == Split(1, (3,))
    assert indexed(picking([None, (7, 2)], Split(2, (6,)))) == Split(3, (6,))
    assert indexed(picking([None, None, (2,)], Split(1, (4,)))) == Split(1, (4,))
    with pytest.raises(Unproven, match="a mask and other indices"):
        indexed(picking([(7,), None, (7,)], Split(1, (4,)), masks=True))


@pytest.mark.cpu
def test_rows_that_are_written_are_cut_as_what_they_are_written_to() -> None:
    apart: list[Any] = [(7,), None, (7,)]
    assert put(picking(apart, Split(1, (4,)), (7, 4, 5), Split(1, (4,)))) == Split(1, (4,))
    assert put(picking([None, (7,)], Split(2, (6,)), (3, 7, 6, 5), Split(2, (6,)))) == Split(2, (6,))
    assert put(picking(apart, Split(1, (4,)), (), None)) == Split(1, (4,))
    for values, cut, why in (
        ((7, 4, 5), Split(0, (7,)), "different ways"),
        ((7, 4, 5), None, "a whole tensor of shape"),
        ((7, 4, 5), Split(1, (2, 2)), "different ways"),
    ):
        with pytest.raises(Unproven, match=why):
            put(picking(apart, Split(1, (4,)), values, cut))
    with pytest.raises(Unproven, match="along the dimension that is cut"):
        put(picking(apart, Split(2, (6,)), (), None))
    with pytest.raises(Unproven, match="where a mask says"):
        put(picking(apart, Split(1, (4,)), (), None, masks=True))


@pytest.mark.cpu
def test_rows_that_move_are_shown_in_part_and_taken_whole() -> None:
    whole = torch.randn(3, 4, 6)
    shown = MovedWidth.of(whole, 2)
    assert shown.shape == (3, 4, 2)
    moved = shown.transpose(0, 1)
    assert moved.shape == (4, 3, 2) and torch.equal(moved.whole, whole.transpose(0, 1))
    zeros, at = moved.new_zeros(2, 3, 2), (torch.tensor([0, 1]), torch.tensor([2, 0]))
    zeros[at] = moved[at]
    expected = torch.zeros(2, 3, 6)
    expected[at] = whole.transpose(0, 1)[at]
    assert torch.equal(zeros.whole, expected) and zeros.shape == (2, 3, 2)
    for plain in (moved + 1, moved[..., :1], moved.transpose(1, 2), moved.new_zeros(2, 3), moved.swapaxes(0, 1)):
        assert not hasattr(plain, "whole"), "features are not rows, and other functions are not followed"


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.transpose(0, 1))
        return y


@pytest.mark.cpu
@pytest.mark.parametrize("moved", [False, True])
def test_a_layer_takes_whole_rows_from_other_places(moved: bool) -> None:
    module, x = Takes(), torch.randn(2, 3, 5)
    show_width(module, "x", [module.layer], 4, moved=moved)
    assert module(x).shape == (3, 2, 5 if moved else 4)


@pytest.mark.cpu
def test_widths_of_one_argument_are_one_where_groups_are_joined() -> None:
    name = width_name("x", ["a", "b"], moved=True)
    assert name == "width(x, moved: a, b)" and width_in(name) == ("x", ("a", "b")) and may_move(name)
    assert not may_move("width(x: a)") and not may_move("heads")
    key = "block", "width(x: a)"
    for values, expected in (
        ((4, 4), {("block", "width(x, moved: a, b)"): (4, 4)}),
        ((8, 8), {key: (4, 4), ("block", "width(x, moved: b)"): (8, 8)}),
    ):
        first = Proof({"block.a": (8,)}, {key: (4, 4)})
        second = Proof({"block.b": (8,)}, {("block", "width(x, moved: b)"): values})
        groups = [Group((f"block.{column}",), ("block.out",), False) for column in "ab"]
        _, proof = join(groups[1], second, groups[0], first)
        assert proof.attributes == expected


def by_value(*sizes: int) -> list[str]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)
        return [problem for heads in sizes for problem in problems(f"{heads} heads", Words(heads), IDS, ROW)]


@pytest.mark.gloo
@pytest.mark.parametrize("world_size", [2, 3])
def test_it_computes_and_trains_as_the_unsharded_model(world_size: int, ranks: Pools) -> None:
    assert ranks(world_size).run(by_value, 2 * world_size, timeout=LIMIT_S) == [[]] * world_size
