"""Code that asks for integers among the example inputs gets them; its layers are cut as others are."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpkernels as tpk
from tests.models.compare import compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools

WIDTH, HEADS = 24, 4
GRID = torch.tensor([[1, 2, 3], [2, 2, 2]])
X = torch.zeros(14, WIDTH)


class Packed(nn.Module):
    """Attention within each image of several in one row of patches, as Qwen2-VL's tower has it.

    ``how``: what it does with the sizes beside that.
    """

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.heads, self.how = HEADS, how
        self.register_buffer("angles", torch.randn(8, WIDTH // HEADS), persistent=False)

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        lengths = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])
        ends = F.pad(lengths.cumsum(0), (1, 0))
        if self.how == "listed":
            ends = torch.tensor([0, *lengths]).cumsum(0)
        places = torch.cat([torch.arange(h).repeat_interleave(w).repeat(t) for t, h, w in grid.tolist()])
        if self.how == "branches" and (grid[:, 0] > 1).any():
            x = x + 1
        if self.how == "own numbers" and torch.arange(2, 2 + len(x))[0] == 2:
            x = x + 1
        if self.how == "both" and (torch.arange(2) + grid[0, :2])[0] > 1:
            x = x + 1
        filled = ends[-1] == len(x)
        if self.how == "fills" and not filled:  # what is left of the last window of Qwen3-ASR
            places = places[: len(places) - 1]
        if self.how == "writes":
            ends[1:] = ends[1:] * 1
        q, k, v = self.qkv(x).reshape(len(x), 3, self.heads, -1).permute(1, 2, 0, 3).unbind(0)
        q = q * self.angles[places]  # type: ignore[index]
        pieces = [torch.split(part, (ends[1:] - ends[:-1]).tolist(), 1) for part in (q, k, v)]
        heads = torch.cat([F.scaled_dot_product_attention(*one) for one in zip(*pieces, strict=True)], 1)
        y: Tensor = self.proj(heads.transpose(0, 1).reshape(len(x), -1))
        return x + y[ends[-1] - 14 :][places >= 0]


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["", "listed"])
def test_a_model_that_asks_for_sizes_in_its_inputs_is_cut_in_pairs(how: str) -> None:
    plan = tpk.make_plan(Packed(how), 2, example_inputs=(X, GRID))
    assert plan["qkv"].style == Column(segments=(WIDTH,) * 3) and plan["proj"].style == Row() and not plan.notes


@pytest.mark.cpu
def test_a_branch_on_numbers_that_code_made_of_its_own_is_one_on_these_numbers() -> None:
    """As the depth decoder of CSM asks whether its positions begin with 0."""
    plan = tpk.make_plan(Packed("own numbers"), 2, example_inputs=(X, GRID))
    assert plan["qkv"].style == Column(segments=(WIDTH,) * 3) and plan["proj"].style == Row() and not plan.notes


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["branches", "both"])
def test_a_branch_on_numbers_that_are_given_is_run_both_ways(how: str) -> None:
    observation = Observation(Packed(how), (X, GRID))
    turns = {recording.turns for _, recording in observation.recordings}
    assert turns == {(False,), (True,)} and observation.recordings[0][1].decisions[0].truth is (how == "branches")
    plan = tpk.make_plan(Packed(how), 2, example_inputs=(X, GRID))
    assert plan["qkv"].style == Column(segments=(WIDTH,) * 3) and plan["proj"].style == Row() and not plan.notes


@pytest.mark.cpu
def test_a_branch_that_contradicts_what_is_given_and_raises_is_no_run() -> None:
    observation = Observation(Packed("fills"), (X, GRID))
    assert {recording.turns for _, recording in observation.recordings} == {(False,)}
    plan = tpk.make_plan(Packed("fills"), 2, example_inputs=(X, GRID))
    assert plan["qkv"].style == Column(segments=(WIDTH,) * 3) and plan["proj"].style == Row() and not plan.notes


@pytest.mark.cpu
@pytest.mark.parametrize(("how", "grid"), [("writes", GRID), ("", GRID.to("meta"))])
def test_numbers_that_nobody_gave_are_not_known(how: str, grid: Tensor) -> None:
    """Of what is written to in part nothing is known."""
    plan = tpk.make_plan(Packed(how), 2, example_inputs=(X, grid))
    assert plan["proj"].style == Column(gather_output=True) and "layers are taken one by one" in plan.notes[0]


class Padded(nn.Module):
    """A pair of layers on what is padded by the number in a buffer, as Mimi's convolutions are.

    ``how``: what the buffer is, beside that.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down, self.how = nn.Linear(8, 32), nn.Linear(32, 8), how
        self.register_buffer("padding", torch.tensor(2), persistent=how == "in checkpoints")

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "counts first":
            self.padding.add_(1)
        x = F.pad(x, (0, 0, int(self.padding + 1), 0))
        if self.how == "a flag" and (self.padding == 2):
            x = x + 1
        if self.how == "counts":
            self.padding.add_(1)
        y: Tensor = self.down(self.up(x).relu())
        return y


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["", "in checkpoints", "a flag", "counts", "counts first"])
def test_a_number_in_a_buffer_that_no_checkpoint_has_is_one_of_the_configuration(how: str) -> None:
    plan = tpk.make_plan(Padded(how), 2, example_inputs=torch.zeros(3, 5, 8))
    assert plan["up"].style == Column()
    assert bool(plan.notes) == (how not in ("", "a flag"))  # of others sizes are guessed


def values() -> list[str]:
    torch.manual_seed(0)
    plain = Packed().double()
    model = tpk.parallelize(copy.deepcopy(plain), tp_mesh(), example_inputs=(X.double(), GRID))
    found = []
    for grid in (GRID, torch.tensor([[1, 7, 2]]), torch.tensor([[3, 1, 4], [1, 2, 1]])):  # other sizes as well
        x = torch.randn(14, WIDTH, dtype=torch.float64)
        inputs, outputs = [x, x.clone()], []
        for net, one in zip((model, plain), inputs, strict=True):
            net.zero_grad()
            outputs.append(net(one.requires_grad_(), grid))
            outputs[-1].square().sum().backward()
        pairs = {"output": outputs, "gradient of x": [one.grad for one in inputs]}
        found += [f"{name}: {why}" for name, (a, b) in pairs.items() if (why := differs(a, b, 1e-11))]
        found += compare_tensors(model, plain, 1e-11)
    return found


@pytest.mark.gloo
@pytest.mark.slow("2 s: trains on two ranks; that it is cut is asked without training")
def test_it_computes_and_trains_as_the_unsharded_model_with_any_sizes(ranks: Pools) -> None:
    assert ranks(2).run(values, timeout=LIMIT_S) == [[], []]
