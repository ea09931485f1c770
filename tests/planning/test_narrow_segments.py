"""Convolutions that give segments of which some are too narrow to be cut: these are whole on every rank."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.test_convolution_pairs import differing, paired, step
from tpkernels.errors import UnprovenCallWarning
from tpkernels.nn.paired_convolution import why_not_paired
from tpkernels.planning.styles import Channels
from tpkernels.testing.spawn import Pools

D = 7


class Weighing(nn.Module):
    """Linear attention of MobileViT V2: one channel weighs the places of all others.

    ``order``: where the narrow channels are; ``how``: what else is done with them.
    """

    def __init__(self, order: str = "qkv", how: str = "", *, bias: bool = True) -> None:
        super().__init__()
        self.order, self.how, self.width = order, how, D
        self.packed = nn.Conv2d(3, order.count("q") + (len(order) - order.count("q")) * D, 1, bias=bias)
        self.out, self.drop = nn.Conv2d(D, 4, 1), nn.Dropout(0.5)
        self.temperature = nn.Parameter(torch.ones(1, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        packed = self.packed(x)
        if self.how == "sliced":
            found = {"q": [packed[:, :1]], "k": [packed[:, 1 : 1 + self.width]], "v": [packed[:, 1 + self.width :]]}
        else:
            found = {"q": [], "k": [], "v": []}
            sizes = [1 if one == "q" else self.width for one in self.order]
            for one, part in zip(self.order, torch.split(packed, sizes, 1), strict=True):
                found[one].append(part)
        query = sum(found["q"][1:], start=found["q"][0])
        if self.how == "scaled":
            query = query * self.temperature
        scores = self.drop(query.softmax(-1)) if self.how == "dropped" else query.softmax(-1)
        key, value = found["k"][0], found["v"][0]
        context = (key * scores).sum(-1, keepdim=True)
        y: Tensor = self.out(value.relu() * context.expand_as(value))
        if self.how == "added":
            y = y + query
        return y.softmax(1) * query if self.how == "goes on" else y


KINDS: dict[str, Callable[[], nn.Module]] = {
    "before": Weighing, "between": lambda: Weighing("kqv", bias=False), "behind": lambda: Weighing("kvq"),
    "two": lambda: Weighing("qqkv"), "sliced": lambda: Weighing(how="sliced"),
    "scaled": lambda: Weighing(how="scaled"), "added": lambda: Weighing(how="added"),
}  # fmt: skip
"""The narrow channel in each place; one that meets a parameter, whose gradient is then summed as well, and one that is
added to the result, whose channels ranks then scatter."""
COPIED = {"between": (1, 1), "behind": (1, 0), "two": (2, 2)}
WHOLE: dict[str, Callable[[], nn.Module]] = {
    "apart": lambda: Weighing("qkqv"), "dropped": lambda: Weighing(how="dropped"),
    "goes on": lambda: Weighing(how="goes on"),
}  # fmt: skip
"""Narrow channels that are not side by side, that are drawn for, and that meet what is whole: their gradient would be
complete on every rank, and a share besides."""


def made(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return {**KINDS, **WHOLE}[kind]().double()


def example() -> Tensor:
    return torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.mark.cpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_channel_that_weighs_all_others_is_whole_on_every_rank(kind: str) -> None:
    for world in (2, 3) if kind != "added" else (2,):  # four channels are too few to be scattered over three
        plan = tpk.make_plan(made(kind), world, example_inputs=example())
        style: Any = plan["packed"].style
        assert paired(plan) == "packed out" and (style.copied, style.behind) == COPIED.get(kind, (1, 2))
        weight, *_ = plan["packed"].parameters
        narrow = style.copied
        parts = [4, 3] if world == 2 else [3, 3, 1]
        assert [shape[0] for shape in weight.local_shapes] == [narrow + 2 * part for part in parts]
        assert plan["packed"].backward.endswith("all-reduce of dw")
        assert "the narrow ones whole" in plan["packed"].reason
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan


@pytest.mark.cpu
def test_sizes_of_parts_are_told_where_the_code_reads_them() -> None:
    plan = tpk.make_plan(made("before"), 3, example_inputs=example())
    assert plan.attributes == {"width": (D, (3, 3, 1))}
    assert not tpk.make_plan(made("sliced"), 1, example_inputs=example()).attributes


@pytest.mark.cpu
@pytest.mark.parametrize("kind", WHOLE)
def test_narrow_channels_that_more_is_done_with_are_not_copied(kind: str) -> None:
    for world in (2, 3):
        assert paired(tpk.make_plan(made(kind), world, example_inputs=example())) == ""


@pytest.mark.cpu
def test_gradients_that_are_summed_are_in_the_bytes() -> None:
    style = Channels(gather_output=False, segments=(1, D, D), copied=1, behind=2)
    plan = tpk.make_plan(made("before"), 2, example_inputs=example())
    assert plan["packed"].style == style and plan["packed"].backward == "all-reduce of dw"
    assert plan["packed"].wire_bytes == 8 * (3 + 1), "a weight of three numbers and a bias, of two ranks"
    frozen = made("before").requires_grad_(False)
    assert tpk.make_plan(frozen, 2, example_inputs=example())["packed"].wire_bytes == 0
    convolution = nn.Conv2d(3, 1 + 2 * D, 1)
    options: dict[str, Any] = {"inputs": False, "outputs": True, "segments": (1, D, D)}
    assert "too few channels in one of its segments" in str(why_not_paired(convolution, 2, **options))
    assert why_not_paired(convolution, 2, **options, copied=1, behind=2) is None
    with pytest.raises(ValueError, match="must be fewer than the segments"):
        Channels(gather_output=False, segments=(1, D), copied=2)
    with pytest.raises(ValueError, match="must be fewer than the segments"):
        Channels(copied=1)


def compare(kinds: list[str]) -> list[str]:
    wrong = []
    for kind in kinds:
        plain, x = made(kind), example()
        plan = tpk.make_plan(plain, tp_mesh(), example_inputs=x)
        wrong += [] if paired(plan) else [f"{kind} is whole"]
        model: Any = tpk.parallelize(copy.deepcopy(plain), tp_mesh(), tpk.ShardingPlan.from_json(plan.to_json()))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnprovenCallWarning)
            wrong += differing(kind, step(model, x), step(plain, x))
        wrong += differing(f"state of {kind}", tpk.full_state_dict(model), plain.state_dict())
        meta = tpk.parallelize(made(kind).to("meta"), tp_mesh(), plan)
        tpk.load_full_state_dict(meta, plain.state_dict())
        wrong += differing(f"{kind} from the meta device", step(meta, x), step(plain, x))
        for one in (model, plain):
            torch.manual_seed(4)
            one.packed.reset_parameters()
        wrong += differing(f"{kind} anew", step(model, x), step(plain, x))
    return wrong


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_values_and_gradients_are_those_of_the_whole_model(ranks: Pools, world: int) -> None:
    assert (
        ranks(world).run(compare, [one for one in KINDS if world == 2 or one != "added"], timeout=LIMIT_S)
        == [[]] * world
    )
