"""A plan says of every layer why it is cut by itself; one layer that gives to the scores of many blocks is not cut with
their heads, and these are."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpkernels as tpk
from tests.models.compare import compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tpkernels.planning.styles import Column, Replicate, Row
from tpkernels.testing.spawn import Pools

WIDTH, HEADS, LENGTH = 24, 4, 5
X = torch.zeros(2, LENGTH, WIDTH)
PLACES = torch.zeros(2, LENGTH, LENGTH, 3)


class Attention(nn.Module):
    """As BROS's: scores have a term of the query and of what all blocks are given of the places of words."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heads = HEADS

    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (f(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) + torch.einsum("bnid,bijd->bnij", q, places)
        y: Tensor = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2)), scores


class Places(nn.Module):
    def __init__(self, how: str = "", blocks: int = 2) -> None:
        super().__init__()
        self.how = how
        self.place = nn.Embedding(50, WIDTH // HEADS) if how == "table" else nn.Linear(3, WIDTH // HEADS)
        self.blocks = nn.ModuleList(Attention() for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(blocks))

    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        given, results = self.place(places[..., 0].long() if self.how == "table" else places), []
        for block, norm in zip(self.blocks, self.norms, strict=True):
            y, scores = block(norm(x), given)
            x, results = x + y, [*results, scores]
        if self.how == "gives what all take":
            return x, given
        return (x, *results) if self.how == "gives scores" else (x,)


@pytest.mark.cpu
def test_a_layer_that_gives_to_the_heads_of_every_block_stays_whole() -> None:
    plan = tpk.make_plan(Places(), 2, example_inputs=(X, PLACES))
    for block in ("blocks.0", "blocks.1"):
        assert plan[f"{block}.q"].style == plan[f"{block}.v"].style == Column()
        assert plan[f"{block}.out"].style == Row() and "4 heads, 2 per rank" in plan[f"{block}.k"].reason
    assert plan["place"].style == Column(gather_output=True, summed_gradient=True)
    assert "parts are made of it" in plan["place"].reason


@pytest.mark.cpu
@pytest.mark.parametrize(("how", "reason"), [
    ("gives what all take", "what has a part of its gradient is among the model's outputs"),
    ("gives scores", "9 layers give and take the same features"),
])  # fmt: skip
def test_what_other_results_are_made_of_is_gathered_and_says_so(how: str, reason: str) -> None:
    plan = tpk.make_plan(Places(how), 2, example_inputs=(X, PLACES))
    for name in ("blocks.0.q", "blocks.1.out", "place"):
        style = plan[name].style
        assert isinstance(style, Column) and style.gather_output and not style.summed_gradient
        assert f"(not with its neighbours: {reason})" in plan[name].reason


@pytest.mark.cpu
def test_a_table_that_gives_to_the_heads_of_every_block_sums_the_gradient_of_its_weight() -> None:
    """SpeechT5's places: of one that is cut by vocabulary nothing would sum the gradient of what it gives."""
    plan = tpk.make_plan(Places("table", blocks=3), 2, example_inputs=(X, PLACES))
    assert plan["place"].style == Replicate(sequence_parallel=True)
    assert plan["blocks.0.q"].style == plan["blocks.2.v"].style == Column() and plan["blocks.2.out"].style == Row()


class Pair(nn.Module):
    """Two layers, and what stands against them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.up(x).relu()
        if self.how == "input":
            hidden = hidden + torch.cat([x, x], -1)
        y = self.last(self.down(hidden).relu())
        return (y, hidden) if self.how == "result" else (y,)


@pytest.mark.cpu
@pytest.mark.parametrize(("how", "reason"), [
    ("result", "up also gives to a result of the model"), ("input", "down also takes what no layer gives"),
])  # fmt: skip
def test_a_layer_that_is_cut_by_itself_has_a_reason(how: str, reason: str) -> None:
    plan = tpk.make_plan(Pair(how), 2, example_inputs=torch.zeros(3, 8))
    assert plan["up"].style == Column(gather_output=True)
    assert f"(not with its neighbours: {reason})" in plan["up"].reason


class Shaped(nn.Module):
    """Tensors that have the shape of others: a mask of what the first layer gives, as Funnel makes it, and one that
    code writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Pair("") for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        mask = F.pad(x.new_ones(x.shape[0] - 1, 1), (0, 0, 1, 0))
        for block in self.blocks:
            hidden = block.up(x) * mask
            made = torch.empty_like(hidden)
            made[:1], made[1:] = hidden[:1].relu(), hidden[1:].tanh()
            x = x + block.down(made)
        return x


@pytest.mark.cpu
def test_nothing_comes_from_a_tensor_whose_shape_another_one_has_but_what_is_written_to_that() -> None:
    plan = tpk.make_plan(Shaped(), 2, example_inputs=torch.zeros(3, 8))
    for block in ("blocks.0", "blocks.1"):
        assert plan[f"{block}.up"].style == Column() and plan[f"{block}.down"].style == Row()


@pytest.mark.cpu
def test_of_layers_that_cannot_be_followed_the_module_around_is_named() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(self.up(x).relu())
            return y if x.sum().item() > 0 else y + 1

    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), Asks())
    plan = tpk.make_plan(model, 2, example_inputs=torch.zeros(3, 8))
    assert plan["0"].style == Column() and plan["2.up"].style == Column(gather_output=True)
    assert "2 needs the values of tensors, and what it runs cannot be followed" in plan["2.up"].reason


def values() -> list[str]:
    torch.manual_seed(0)
    plain = Places().double()
    model = tpk.parallelize(copy.deepcopy(plain), tp_mesh(), example_inputs=(X.double(), PLACES.double()))
    x, places = (torch.randn_like(one, dtype=torch.float64) for one in (X, PLACES))
    inputs = [(x.clone().requires_grad_(), places.clone().requires_grad_()) for _ in range(2)]
    outputs = [net(*some)[0] for net, some in zip((model, plain), inputs, strict=True)]
    for y in outputs:
        y.square().sum().backward()
    pairs = {"output": outputs} | {f"gradient {i}": [some[i].grad for some in inputs] for i in range(2)}
    return [f"{n}: {why}" for n, (a, b) in pairs.items() if (why := differs(a, b, 1e-11))] + compare_tensors(
        model, plain, 1e-11
    )


@pytest.mark.gloo
@pytest.mark.slow("2 s: trains on two ranks; that it is cut is asked without training")
def test_blocks_that_a_whole_layer_feeds_compute_and_train_as_the_unsharded_ones(ranks: Pools) -> None:
    assert ranks(2).run(values, timeout=LIMIT_S) == [[], []]
