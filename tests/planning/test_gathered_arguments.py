"""Modules that take all of what heads take this rank's part of (FunASR's memory of values): plans, and values."""

from __future__ import annotations

import dataclasses
import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.by_value import problems
from tpkernels.errors import UnprovenCallWarning
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools

WIDTH, HEAD, LENGTH = 16, 4, 5
X = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Memory(nn.Module):
    """FunASR's, a convolution over neighbouring values; or ``how`` it is not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH, bias=False)
        self.how = how

    def forward(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.how == "writes":
            values = values.mul_(2)
        if self.how == "of any width":
            return values.mean(-1, keepdim=True)
        if self.how == "packed":
            values = values[..., -WIDTH:]
        if self.how == "meets a part":
            return values.softmax(-1)
        if mask is not None:
            values = values * mask
        y = self.conv(values.transpose(1, 2)).transpose(1, 2) + values
        return F.dropout(y, 0.3, self.training)


class Attention(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.groups = how, 3 if how == "of any width" else 1
        own = WIDTH * 3 // 2 if self.groups == 3 else WIDTH
        self.q, self.k, self.v = (nn.Linear(WIDTH, size) for size in (own, own // self.groups, own // self.groups))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH) if how == "packed" else None
        self.num_heads, self.o = own // HEAD, nn.Linear(own, WIDTH)
        self.memory = Memory(how)

    def forward(self, x: Tensor, wrong: bool = False) -> Tensor:
        if self.qkv is not None:
            packed = self.qkv(x)
            given = packed
            q, k, v = packed.chunk(3, -1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
            given = v
        early = self.memory(given) if self.how in ("before the row", "meets a part", "writes") else None
        q, k, v = (one.unflatten(-1, (-1, HEAD)).transpose(1, 2) for one in (q, k, v))
        k, v = (one.repeat_interleave(self.groups, 1) for one in (k, v))
        heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if self.how == "meets a part":
            heads = heads * early
        y: Tensor = self.o(heads)
        if self.how == "twice":
            y = y + self.memory(x)
        if self.how == "meets a part":
            return y
        return y + (self.memory(x if wrong else given) if early is None else early)


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(how)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor, wrong: bool = False) -> Tensor:
        x = x + self.attention(self.norm(x), wrong)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(how) for _ in range(2))

    def forward(self, x: Tensor, wrong: bool = False) -> Tensor:
        for block in self.blocks:
            x = block(x, wrong)
        return x


NAMES = [f"blocks.{place}.attention" for place in range(2)]


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["", "before the row"])
def test_attention_is_cut_by_heads_and_the_values_are_gathered_for_the_module_beside_it(how: str) -> None:
    model = Model(how)
    plan = tpk.make_plan(model, 2, example_inputs=X.float())
    styles = [plan[f"{name}.{layer}"].style for name in NAMES for layer in ("q", "k", "v", "o")]
    assert styles == [Column(), Column(), Column(), Row()] * 2
    assert plan.gathered == {f"{name}.memory.values": (WIDTH, 1) for name in NAMES}
    # Half of the values in fp32, forward alone.
    assert plan.gathered_bytes == 2 * X.numel() * 4 // 2
    beside = sum(entry.wire_bytes or 0 for entry in plan.entries)
    assert plan.wire_bytes == plan.gathered_bytes + beside
    assert "all 16 features for blocks.[0-1].attention.memory.values (x2), which sends 640 B" in str(plan)
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match="no module 'other'"):
        dataclasses.replace(plan, gathered={"other.values": (WIDTH, 1)}).validate(model)


@pytest.mark.cpu
def test_heads_that_do_not_divide_are_gathered_as_they_are_dealt_out() -> None:
    plan = tpk.make_plan(Model(), 3, example_inputs=X.float())
    assert plan["blocks.1.attention.v"].style == Column(unit=HEAD)
    assert plan.gathered["blocks.1.attention.memory.values"] == (WIDTH, HEAD)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("how", "world"), [("meets a part", 2), ("twice", 2), ("writes", 2), ("packed", 2), ("of any width", 3)]
)
def test_what_could_not_be_gathered_so_leaves_the_layers_gathered(how: str, world: int) -> None:
    """A result that meets parts, a module that is called with something whole as well, one that writes to what others
    read, values that are packed with others, and copies of heads, of which there would be more than the model has."""
    plan = tpk.make_plan(Model(how), world, example_inputs=X.float())
    assert not plan.gathered and plan["blocks.0.attention.o"].style != Row()


@pytest.mark.cpu
def test_nothing_is_gathered_along_a_cut_sequence_or_for_all_degrees() -> None:
    assert not tpk.make_plan(Model(), 2, example_inputs=X.float(), same_bits=4).gathered
    assert not tpk.make_plan(Model(), 2, example_inputs=X.float(), sequence_parallel=True).gathered


@pytest.mark.cpu
@pytest.mark.parametrize("numbers", [[16], [16, 0], [16, 3], [16, 32]])
def test_a_plan_file_with_other_numbers_is_refused(numbers: list[int]) -> None:
    plan = tpk.make_plan(Model(), 2, example_inputs=X.float())
    wrong = dataclasses.replace(plan, gathered={"blocks.0.attention.memory.values": tuple(numbers)})
    with pytest.raises(ValueError, match="must have features and a unit that divides them"):
        tpk.ShardingPlan.from_json(wrong.to_json())


@pytest.mark.cpu
def test_a_plan_of_an_earlier_version_gathers_nothing() -> None:
    plan = tpk.make_plan(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), 2)
    document = json.loads(plan.to_json())
    assert document["plan"]["gathered"] == {} and document["plan"]["gathered_bytes"] == 0


def by_value() -> list[str]:
    torch.manual_seed(3)
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)
        for how in ("", "before the row"):
            wrong += problems(f"memory {how}", Model(how), X.clone(), "blocks.1.attention.o")
    model = tpk.parallelize(Model().double(), tp_mesh(), example_inputs=X)
    with pytest.raises(ValueError, match=r"with this rank's \d+ of 16 features, got"):
        model(X, wrong=True)
    return wrong


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_values_and_gradients_are_those_of_the_whole_model(ranks: Pools, world: int) -> None:
    assert ranks(world).run(by_value, timeout=LIMIT_S) == [[]] * world
