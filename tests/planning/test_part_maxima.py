"""The largest element of scores of all heads, of which a rank has some (Grounding DINO), and rows that are repeated for
each head: plans, and values and gradients in fp64."""

from __future__ import annotations

import copy
import dataclasses
import warnings

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.models.compare import differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.by_value import LIMIT, problems
from tpkernels.errors import UnprovenCallWarning
from tpkernels.nn.part_maxima import PartMaxima, over_all_ranks, take_maxima
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools

WIDTH, HEADS, SIZE, SHORT = 8, 4, 3, 2
X = torch.randn(3, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Largest(nn.Module):
    """A module that holds no layers of the attention."""

    def forward(self, x: Tensor) -> Tensor:
        return x - torch.max(x)


class Fused(nn.Module):
    """The attention of transformers' Grounding DINO between images and texts, here the first tokens; or ``how`` it is
    not."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.heads, self.how = HEADS, how
        self.images, self.texts, self.image_values, self.text_values = (
            nn.Linear(WIDTH, HEADS * SIZE) for _ in range(4)
        )
        self.image_out, self.text_out = (nn.Linear(HEADS * SIZE, WIDTH) for _ in range(2))
        self.share = nn.Parameter(torch.tensor(0.5))
        self.elsewhere: list[Largest] = []

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.heads, SIZE).transpose(1, 2).reshape(x.shape[0] * self.heads, -1, SIZE)

    def joined(self, x: Tensor) -> Tensor:
        return x.view(-1, self.heads, x.shape[1], SIZE).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, less: bool = False) -> Tensor:
        text = x[:, :SHORT]
        if self.how == "of what is whole" or less:
            text = text - text.max()
        scores = torch.bmm(self.split(self.images(x)), self.split(self.texts(text)).transpose(1, 2))
        for module in self.elsewhere:
            scores = module(scores)
        largest = scores.max()
        scores = torch.clamp(scores - self.share * largest, min=-0.3, max=50000)
        backward = scores.transpose(1, 2)
        backward = (backward - torch.max(backward, dim=-1, keepdim=True)[0]).softmax(-1)
        hidden = text[..., 0] > 0.5
        repeated = hidden[:, None, None].repeat(1, self.heads, 1, 1).flatten(0, 1)
        weights = scores.masked_fill_(repeated, -1e9).softmax(-1)
        image = self.image_out(self.joined(weights @ self.split(self.text_values(text))))
        back = self.text_out(self.joined(backward @ self.split(self.image_values(x))))
        if self.how == "meets an activation":
            back = back + largest
        return torch.cat((x + image, text + back), 1)


class Model(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.fused = Fused(how)
        if how == "in a module elsewhere":
            self.largest = Largest()
            self.fused.elsewhere = [self.largest]

    def forward(self, x: Tensor, less: bool = False) -> Tensor:
        y: Tensor = self.fused(x, less)
        return y


@pytest.mark.cpu
def test_the_largest_element_of_all_heads_is_of_all_ranks() -> None:
    plan = tpk.make_plan(Model(), 2, example_inputs=X.float())
    names = ("images", "texts", "image_values", "text_values", "image_out", "text_out")
    assert [plan[f"fused.{name}"].style for name in names] == [Column()] * 4 + [Row()] * 2
    assert plan.maxima == ("fused",)
    assert plan.statistic_bytes == 2 * 2 * 4  # two numbers in fp32, forward and backward
    assert plan.wire_bytes == plan.statistic_bytes + sum(entry.wire_bytes or 0 for entry in plan.entries)
    assert "largest and smallest elements over all ranks: in fused, which sends 16 B" in str(plan)
    assert tpk.make_plan(Model().double(), 2, example_inputs=X).statistic_bytes == 2 * plan.statistic_bytes
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match="no module 'other'"):
        dataclasses.replace(plan, maxima=("other",)).validate(Model())


@pytest.mark.cpu
def test_a_frozen_model_is_planned_as_one_that_trains() -> None:
    plan = tpk.make_plan(Model(), 2, example_inputs=X.float())
    frozen = tpk.make_plan(Model().requires_grad_(False), 2, example_inputs=X.float())
    assert frozen.maxima == plan.maxima
    assert [entry.style for entry in frozen.entries] == [entry.style for entry in plan.entries]


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["in a module elsewhere", "of what is whole", "meets an activation"])
def test_other_largest_elements_leave_the_layers_gathered(how: str) -> None:
    plan = tpk.make_plan(Model(how), 2, example_inputs=X.float())
    assert plan["fused.images"].style == Column(gather_output=True) and not plan.maxima


class Repeated(nn.Module):
    """As many rows as ``how`` says are repeated, and hide what each head has."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HEADS * SIZE), nn.Linear(HEADS * SIZE, WIDTH)
        self.heads, self.how = HEADS, how

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).view(*x.shape[:2], self.heads, SIZE)
        hidden = x > 0.5
        if self.how == "one":
            rows = hidden[:, :, None, :SIZE].repeat(1, 1, self.heads, 1)
        else:  # two, one after the other, of which a rank's heads would begin with the first
            rows = hidden[..., : 2 * SIZE].view(*x.shape[:2], 2, SIZE).repeat(1, 1, self.heads // 2, 1)
        y: Tensor = self.down(heads.masked_fill(rows, 0.5).flatten(2))
        return y


@pytest.mark.cpu
def test_one_row_is_repeated_for_each_head_of_a_rank() -> None:
    plan = tpk.make_plan(Repeated("one"), 2, example_inputs=X.float())
    assert plan["up"].style == Column() and plan["down"].style == Row()
    plan = tpk.make_plan(Repeated("two"), 2, example_inputs=X.float())
    assert plan["up"].style == Column(gather_output=True)


def by_value() -> list[str]:
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)
        wrong = problems("fused attention", Model(), X.clone(), "fused.image_out")
    wrong += problems("repeated rows", Repeated("one"), X.clone(), "down")
    mesh = tp_mesh()
    plain = Model().double()
    model = tpk.parallelize(copy.deepcopy(plain), mesh, example_inputs=X)
    with pytest.raises(ValueError, match="or the maximum of a whole tensor"):
        model(X.clone().requires_grad_(), less=True)
    if (why := differs(model(X, less=True), plain(X, less=True), LIMIT)) is not None:  # it has no gradient
        wrong.append(f"the largest of what is whole: {why}")
    return wrong + [
        f"{dtype}: {why}" for dtype in (torch.float64, torch.float32, torch.bfloat16) for why in _ties(dtype)
    ]


def _ties(dtype: torch.dtype) -> list[str]:
    """What differs where one rank has one of the largest elements, and the last has two, from the whole tensor."""
    mesh = tp_mesh()
    rank, world = mesh.get_local_rank(), mesh.size()
    whole = torch.arange(4.0 * world, dtype=dtype).view(2, 2 * world)
    whole[0, 0] = whole[1, -2:] = 4.0 * world
    whole.requires_grad_()
    part = whole.detach().split(2, -1)[rank].clone().requires_grad_()
    whole.max().backward()
    y = over_all_ranks(part, mesh)
    (y / world).backward()  # each rank has a share of the gradient
    assert whole.grad is not None and part.grad is not None
    limit = 2.0**-7 if dtype == torch.bfloat16 else 1e-6
    alike = torch.allclose(part.grad, whole.grad.split(2, -1)[rank], rtol=limit, atol=0)
    within = nn.Identity()
    take_maxima([""], {"": within}, mesh)
    told = isinstance(within, nn.Identity) and PartMaxima.__name__ in "".join(within.__dict__)
    return [
        *([] if y.dtype == dtype and y.shape == () and y == whole.max() else ["value"]),
        *([] if alike else [f"gradient {part.grad}"]),
        *([] if told else ["a module is not told"]),
    ]


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 4])
def test_values_and_gradients_are_those_of_all_heads(ranks: Pools, world: int) -> None:
    assert ranks(world).run(by_value, timeout=LIMIT_S) == [[]] * world
