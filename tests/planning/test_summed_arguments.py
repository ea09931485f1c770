"""Modules called with something whole, which meets parts in them (places that LW-DETR samples): plans, and values."""

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
from tests.planning.test_followed import Before
from tpkernels.errors import UnprovenCallWarning
from tpkernels.planning.replays.op_call import Call
from tpkernels.planning.replays.sampling_rules import grid_sample
from tpkernels.planning.splits import Split, Unproven
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools

WIDTH, HEADS, LENGTH, POINTS = 12, 3, 5, 2
SIZE = 2
X = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Sampled(nn.Module):
    """Deformable attention to an image of 2 by 2, at places that are given; or ``how`` it is not."""

    def __init__(self, how: str, heads: int) -> None:
        super().__init__()
        self.value, self.offsets = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, heads * POINTS * 2)
        self.weights, self.out = nn.Linear(WIDTH, heads * POINTS), nn.Linear(WIDTH, WIDTH)
        self.heads, self.how = heads, how

    def forward(self, x: Tensor, places: Tensor, image: Tensor) -> Tensor:
        batch, length, _ = x.shape
        if self.how == "writes":
            places = places.mul_(0.5)
        offsets = self.offsets(x).view(batch, length, self.heads, POINTS, 2)
        weights = self.weights(x).view(batch, length, self.heads, POINTS).softmax(-1)
        value = self.value(image).view(batch, SIZE * SIZE, self.heads, -1).permute(0, 2, 3, 1)
        grid = (places[:, :, None, None, :] + offsets).transpose(1, 2).flatten(0, 1)
        found = F.grid_sample(value.flatten(0, 1).unflatten(-1, (SIZE, SIZE)), grid, align_corners=False)
        heads = (found * weights.transpose(1, 2).flatten(0, 1).unsqueeze(1)).sum(-1)
        y: Tensor = self.out(heads.view(batch, -1, length).transpose(1, 2))
        return y + places.sum(-1, keepdim=True) if self.how == "whole inside" else y


class Model(nn.Module):
    """The places are made of a parameter and by a layer, and go whole into a layer besides, and out of the model."""

    def __init__(self, how: str = "", heads: int = HEADS) -> None:
        super().__init__()
        self.how = how
        self.points = nn.Parameter(torch.rand(LENGTH, 2) - 0.5)
        self.layer, self.turned = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        self.blocks = nn.ModuleList(Sampled(how, heads) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        image = x[:, : SIZE * SIZE]
        places = self.points.expand(x.shape[0], -1, -1)
        places = places + self.layer(x)
        if self.how == "detached":
            places = places.detach()
        x = x + self.turned(places)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(x + block(x, places.clone() if self.how == "writes" else places, image))
        return x + places.sum(-1, keepdim=True)


NAMES = [f"blocks.{place}" for place in range(2)]


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["", "detached"])
def test_attention_is_cut_by_heads_and_the_gradient_of_what_it_is_called_with_is_summed(how: str) -> None:
    model = Model(how)
    plan = tpk.make_plan(model, 3, example_inputs=X.float())
    layers = ("value", "offsets", "weights", "out")
    assert [plan[f"{name}.{layer}"].style for name in NAMES for layer in layers] == [*[Column()] * 3, Row()] * 2
    assert plan.summed_arguments == tuple(f"{name}.places" for name in NAMES)
    assert plan.arguments_to_sum == {name: ["places"] for name in NAMES}
    trained = how != "detached"
    # All-reduces of fp32: 4/3 of the places, of two blocks.
    assert plan.summed_bytes == trained * 2 * 2 * (2 * LENGTH * 2 * 4) * 2 // 3
    assert plan.wire_bytes == plan.summed_bytes + sum(entry.wire_bytes or 0 for entry in plan.entries)
    assert "gradients summed where whole tensors meet parts: of blocks.[0-1].places (x2), which sends" in str(plan)
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match="no module 'other'"):
        dataclasses.replace(plan, summed_arguments=("other.places",)).validate(model)


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["whole inside", "writes"])
def test_an_argument_that_the_module_uses_otherwise_leaves_the_layers_gathered(how: str) -> None:
    """One that meets what is whole there as well, whose gradient would be neither a share nor complete, and one that is
    written to, which others may read."""
    plan = tpk.make_plan(Model(how), 3, example_inputs=X.float())
    assert not plan.summed_arguments and plan["blocks.0.out"].style != Row()


@pytest.mark.cpu
def test_no_gradient_of_an_argument_is_summed_along_a_cut_sequence_or_for_all_degrees() -> None:
    model = Model(heads=4)
    assert tpk.make_plan(model, 2, example_inputs=X.float()).summed_arguments
    assert not tpk.make_plan(model, 2, example_inputs=X.float(), same_bits=4).summed_arguments
    assert not tpk.make_plan(model, 2, example_inputs=X.float(), sequence_parallel=True).summed_arguments


@pytest.mark.cpu
def test_a_plan_of_an_earlier_version_sums_no_gradient_of_an_argument() -> None:
    plan = tpk.make_plan(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), 2)
    document = json.loads(plan.to_json())
    assert document["plan"]["summed_arguments"] == [] and document["plan"]["summed_bytes"] == 0


def sampled(image: Split | None, grid: Split | None, mixed: list[int]) -> object:
    shapes = [(4, 6, 3, 3), (4, 5, 2, 2), 0, 0, False]
    return grid_sample(
        Call(shapes, shapes, ({}, {}), [image, grid, None, None, None], [(4, 6, 5, 2)], 2, 0, mixed.append)
    )


@pytest.mark.cpu
def test_images_are_sampled_at_the_places_of_their_own_grids_and_channels_at_those_of_all() -> None:
    mixed: list[int] = []
    assert sampled(Split(0, (2, 2)), Split(0, (2, 2)), mixed) == Split(0, (2, 2)) and not mixed
    assert sampled(Split(1, (6,)), None, mixed) == Split(1, (6,)) and mixed == [1]
    wrong = [
        (Split(0, (4,)), None), (None, Split(0, (4,))), (Split(0, (4,)), Split(0, (2, 2))), (Split(2, (3,)), None),
        (Split(1, (6,)), Split(1, (5,))), (Split(1, (6,)), Split(0, (4,))),
    ]  # fmt: skip
    for image, grid in wrong:
        with pytest.raises(Unproven, match="are not cut alike"):
            sampled(image, grid, [])


class Twice(nn.Module):
    """One tensor as two arguments, of which code asks whether they are one."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.inner = nn.Linear(WIDTH, 1), Scaled()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.given(x).sigmoid()
        y: Tensor = self.inner(x, scale, scale)
        return y * scale


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor, scale: Tensor, other: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)) * scale + other)
        return y


def by_value() -> list[str]:
    torch.manual_seed(3)
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)
        for how in ("", "detached"):
            wrong += problems(f"places {how}", Model(how, 4 if tp_mesh().size() == 2 else 3), X.clone(), "blocks.1.out")
        wrong += problems("twice", Twice(), X.clone(), "inner.down")
        if tp_mesh().size() == 2:  # of its 4 heads
            masked = Before(lambda first: first)
            x = torch.linspace(-1, 1, 6 * masked.first.in_features, dtype=torch.float64).view(2, 3, -1)
            wrong += problems("mask", masked, x, "attention.out")
    model = Model().eval()
    plain = model(X.float())
    plan = tpk.make_plan(model, tp_mesh(), example_inputs=X.float())
    with torch.no_grad():
        found = tpk.parallelize(model, tp_mesh(), plan)(X.float())
    return wrong + ["without gradients"] * (not torch.allclose(found, plain, atol=1e-5))


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_values_and_gradients_are_those_of_the_whole_model(ranks: Pools, world: int) -> None:
    assert ranks(world).run(by_value, timeout=LIMIT_S) == [[]] * world
