"""Attention whose code reads the width of its input, and adds places to that before layers take it (DAB-DETR's)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.nn.reference import LIMIT_S
from tests.planning.by_value import problems
from tpkernels.nn.shown_width import MovedWidth
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools

HEADS, EACH = 6, 4
WIDTH = HEADS * EACH
X = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
LAYERS = ("q", "k", "v", "o")


class Attention(nn.Module):
    """As DETR's code; ``how`` it does otherwise with the sum or with what is added."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.how, self.heads, self.head = how, HEADS, EACH

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        batch, length, width = x.size()
        before = x
        if self.how == "multiplied":
            x = x * places
        elif self.how == "one number for all":
            x = x + places[..., :1]
        elif self.how == "the other way":
            x = places.add(x)
        else:
            x = x + places
        q, k, v = self.q(x), self.k(x), self.v(before)
        q, k, v = (one.view(batch, -1, self.heads, self.head).transpose(1, 2) for one in (q, k, v))
        y = ((q @ k.transpose(2, 3) * self.head**-0.5).softmax(-1) @ v).transpose(1, 2)
        z: Tensor = self.o(y.reshape(batch, length, width))
        if self.how == "the sum is added":
            z = z + x
        return z


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(how)
        self.places = nn.Parameter(torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.attention(self.norm(x), self.places.expand(x.shape))
        return y


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["", "the other way"])
def test_heads_are_cut_where_places_are_added_to_the_input(how: str) -> None:
    plan = tpk.make_plan(Block(how), 2, example_inputs=X.float())
    assert [plan[f"attention.{layer}"].style for layer in LAYERS] == [Column(), Column(), Column(), Row()]
    assert plan.attributes["attention.width(x, moved: q, k, v)"] == (WIDTH, (WIDTH // 2, WIDTH // 2))


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["multiplied", "one number for all", "the sum is added"])
def test_code_that_does_more_with_the_sum_leaves_the_layers_gathered(how: str) -> None:
    plan = tpk.make_plan(Block(how), 2, example_inputs=X.float())
    assert plan["attention.o"].style != Row()


@pytest.mark.cpu
def test_what_is_shown_is_added_to_as_a_whole() -> None:
    whole, other = X[0], X[1]
    shown = MovedWidth.of(whole, EACH)
    for added in (shown + other, shown.add(other, alpha=2), torch.add(shown, MovedWidth.of(other, EACH))):
        assert isinstance(added, MovedWidth) and added.shape == (5, EACH)
    assert torch.equal((shown + other).whole, whole + other)  # type: ignore[attr-defined]
    assert torch.equal(shown.add(other, alpha=2).whole, whole + 2 * other)  # type: ignore[attr-defined]
    assert type(shown + 1.0) is type(shown + other[:, :EACH]) is Tensor


def by_value() -> list[str]:
    torch.manual_seed(3)
    return [wrong for how in ("", "the other way") for wrong in problems(how, Block(how), X.clone(), "attention.o")]


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_values_and_gradients_are_those_of_the_whole_model(ranks: Pools, world: int) -> None:
    assert ranks(world).run(by_value, timeout=LIMIT_S) == [[]] * world
