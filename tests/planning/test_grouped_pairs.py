"""Convolutions in groups that are ends of pairs (SqueezeBERT): plans, and values and gradients in fp64."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpkernels as tpk
from tests.nn.reference import LIMIT_S
from tests.planning.by_value import problems
from tpkernels.errors import UnprovenCallWarning
from tpkernels.planning.alone.convolutions import check_channels
from tpkernels.planning.styles import Channels
from tpkernels.testing.spawn import Pools

WIDTH, GROUPS, LENGTH = 16, 4, 5
X = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
GIVES, TAKES, BOTH = Channels(gather_output=False), Channels(inputs=True), Channels(inputs=True, gather_output=False)
GATHERS = Channels(inputs=True, gather_output=False, gather_input=True)


def conv(taken: int, given: int, groups: int = GROUPS) -> nn.Conv1d:
    return nn.Conv1d(taken, given, 1, groups=groups)


class Attention(nn.Module):
    """SqueezeBERT's, which reads the numbers of its heads and channels."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = conv(WIDTH, WIDTH), conv(WIDTH, WIDTH), conv(WIDTH, WIDTH)
        self.num_heads, self.size, self.all_sizes = 4, WIDTH // 4, WIDTH

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(x.shape[0], self.num_heads, self.size, x.shape[-1]).transpose(2, 3)
            for layer in (self.query, self.key, self.value)
        )
        heads = F.scaled_dot_product_attention(q, k, v)
        return heads.transpose(2, 3).contiguous().view(x.shape[0], self.all_sizes, x.shape[-1])


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.attention, self.post = Attention(), conv(WIDTH, WIDTH, 1)
        self.first, self.inner, self.last = conv(WIDTH, 32), conv(32, 32), conv(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.post(self.attention(x))
        y = self.first(x).relu()
        if self.how == "shuffles":  # ShuffleNet's, so that groups see each other
            y = y.view(y.shape[0], GROUPS, -1, y.shape[-1]).transpose(1, 2).flatten(1, 2)
        if self.how == "three":
            y = self.inner(y).relu()
        if self.how == "normed":
            y = F.layer_norm(y.transpose(1, 2), (32,)).transpose(1, 2)
        return x + self.last(y)


class Model(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(how) for _ in range(2))
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for block in self.blocks:
            x = block.forward(x)  # as SqueezeBERT's encoder does
        y: Tensor = self.mlp(self.norm(x.transpose(1, 2)))
        return y


class Stream(nn.Module):
    """Groups around a convolution over all channels that gives more than it takes, up to what the model returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.last = conv(WIDTH, WIDTH), conv(WIDTH, 64, 1), conv(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.wide(self.first(x.transpose(1, 2)).relu())
        z: Tensor = self.last(y) + y
        return z


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["", "three"])
def test_groups_take_their_channels_of_a_whole_tensor_and_gather_what_they_give(how: str) -> None:
    plan = tpk.make_plan(Model(how), 2, example_inputs=X.float())
    for place in range(2):
        at = f"blocks.{place}"
        made = [plan[f"{at}.attention.{name}"].style for name in ("query", "key", "value")]
        assert made == [GIVES] * 3 and plan[f"{at}.post"].style == TAKES
        assert plan.attributes[f"{at}.attention.num_heads"] == (4, (2, 2))
        assert plan[f"{at}.first"].style == GIVES and plan[f"{at}.last"].style == TAKES
        assert plan[f"{at}.inner"].style == (BOTH if how else Channels())
    first, last, post = (plan[f"blocks.1.{name}"] for name in ("first", "last", "post"))
    assert (first.forward, first.backward) == ("-", "all-gather of dx")
    assert (last.forward, last.backward) == ("all-gather of y", "-")
    assert post.forward == "all-reduce of y"
    # The inputs of the first, or the outputs of the last, in fp32, half of them each.
    assert first.wire_bytes == last.wire_bytes == X.numel() * 4 // 2
    assert "takes what first cut" in last.reason or how
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan


@pytest.mark.cpu
@pytest.mark.parametrize(("how", "world"), [("shuffles", 2), ("normed", 2), ("", 3)])
def test_what_groups_of_one_rank_could_not_make_is_gathered(how: str, world: int) -> None:
    """Code that mixes groups, or all channels, and groups that ranks would have to cut."""
    plan = tpk.make_plan(Model(how), world, example_inputs=X.float())
    assert plan["blocks.1.first"].style == plan["blocks.1.last"].style and plan["blocks.1.last"].style != TAKES
    if world == 3:
        assert "groups of channels" in plan["blocks.0.first"].reason


@pytest.mark.cpu
def test_groups_gather_no_input() -> None:
    """A convolution over all channels may gather what it takes; ranks have no use for the groups of others."""
    check_channels("inner", conv(32, 32, 1), 2, GATHERS)
    with pytest.raises(ValueError, match="4 groups of channels, which are in no segments and gather no input"):
        check_channels("inner", conv(32, 32), 2, GATHERS)


@pytest.mark.cpu
def test_groups_are_neighbours_of_what_gathers_its_input_and_of_a_result() -> None:
    plan = tpk.make_plan(Stream(), 2, example_inputs=X.float())
    assert [plan[name].style for name in ("first", "wide", "last")] == [GIVES, GATHERS, BOTH]
    assert plan.cut_results == ((0, 1, 64),) and plan.result_bytes == 64 * LENGTH * 2 * 4 // 2
    assert (plan["last"].forward, plan["last"].backward, plan["last"].wire_bytes) == ("-", "-", 0)


def by_value() -> list[str]:
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)
        stream = [why for why in problems("stream", Stream(), X.clone(), "wide") if why != "stream is not cut"]
        return stream + [why for how in ("", "three") for why in problems(how, Model(how), X.clone(), "mlp.2")]


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_values_and_gradients_are_those_of_the_whole_model(ranks: Pools, world: int) -> None:
    assert ranks(world).run(by_value, timeout=LIMIT_S) == [[]] * world
