"""Tensors of one number that code makes of the number of heads, and adds heads to (GPT-NeoX Japanese's scores)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.nn.reference import LIMIT_S
from tests.planning.by_value import problems
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools

WIDTH, HEADS = 24, 6
X = torch.randn(3, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Attention(nn.Module):
    """The scores begin with a tensor of one number for all heads of the batch; ``how`` they do otherwise."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.how, self.heads, self.head = how, HEADS, WIDTH // HEADS

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            one(x).view(batch, length, self.heads, self.head).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        q, k = (one.reshape(batch * self.heads, length, self.head) for one in (q, k))
        begun = torch.full((batch * self.heads, length, length), 0.5, dtype=x.dtype)
        if self.how == "the first otherwise":
            begun[0] = 1.0
        if self.how == "counted":
            begun = torch.arange(batch * self.heads, dtype=x.dtype)[:, None, None].expand(-1, length, length)
        if self.how == "added":
            scores = begun + q @ k.transpose(1, 2)
        else:
            scores = torch.baddbmm(begun, q, k.transpose(1, 2), beta=2.0, alpha=0.7)
        weights = (scores + (begun if self.how == "again" else 0)).view(batch, self.heads, length, length).softmax(-1)
        y: Tensor = self.o((weights @ v).transpose(1, 2).reshape(batch, length, self.heads * self.head))
        return y


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["", "added", "again"])
def test_what_heads_are_added_to_is_cut_as_they_are(how: str) -> None:
    plan = tpk.make_plan(Attention(how), 2, example_inputs=X.float())
    assert [plan[layer].style for layer in ("q", "k", "v", "o")] == [Column(), Column(), Column(), Row()]


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["the first otherwise", "counted"])
def test_other_numbers_leave_the_layers_gathered(how: str) -> None:
    plan = tpk.make_plan(Attention(how), 2, example_inputs=X.float())
    assert plan["o"].style != Row()


def by_value() -> list[str]:
    torch.manual_seed(3)
    return [wrong for how in ("", "added", "again") for wrong in problems(how, Attention(how), X.clone(), "o")]


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_values_and_gradients_are_those_of_the_whole_model(ranks: Pools, world: int) -> None:
    assert ranks(world).run(by_value, timeout=LIMIT_S) == [[]] * world
