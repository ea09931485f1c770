"""A product between each two of all heads is of no use to anybody but elementwise code; it may be dropped."""

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
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools

HEADS, EACH = 3, 4
WIDTH = HEADS * EACH
X = torch.zeros(2, 5, WIDTH)


class Attention(nn.Module):
    """As SAM 2's: queries and keys of one token are multiplied, head by head, and ``what`` becomes of the product."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.heads, self.kept = what, HEADS, None
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mean, self.variance = nn.Buffer(torch.zeros(5)), nn.Buffer(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, -1).unbind(2)
        product = (q * 0.5) @ k.transpose(-2, -1)
        if self.what == "dropped":
            product.softmax(-1).to(q.dtype)
        elif self.what == "kept":
            self.kept = product.softmax(-1)
        elif self.what == "summed":  # Keras keeps a loss of activities where the run does not look
            product.square().sum()
        elif self.what == "contracted":
            (q.flatten(2) @ k.flatten(2).transpose(-2, -1)).softmax(-1)
        elif self.what == "counted":
            F.batch_norm(product, self.mean, self.variance, training=True)
        elif self.what == "written":
            places = torch.empty_like(product)
            places[:] = product
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        if self.what == "read":
            heads = heads + product.sum(-1, keepdim=True)
        elif self.what == "written":
            heads = heads + places.sum(-1, keepdim=True)
        y: Tensor = self.out(heads.reshape(batch, length, -1))
        return y


@pytest.mark.cpu
def test_heads_are_cut_where_a_product_that_mixes_them_is_dropped() -> None:
    plan = tpk.make_plan(Attention("dropped"), 2, example_inputs=X)
    assert plan["qkv"].style == Column(segments=(WIDTH,) * 3, units=(EACH,) * 3)
    assert plan["out"].style == Row(unit=EACH) and plan.attributes == {"heads": (3, (2, 1))}


@pytest.mark.cpu
@pytest.mark.parametrize("what", ["kept", "summed", "contracted", "counted", "written", "read"])
def test_they_are_not_where_anything_else_takes_it(what: str) -> None:
    plan = tpk.make_plan(Attention(what), 2, example_inputs=X)
    assert plan["qkv"].style == plan["out"].style == Column(gather_output=True)


def by_value() -> list[str]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)  # the first call is followed past the product
        return problems("dropped", Attention("dropped"), torch.randn(2, 5, WIDTH).double(), "out")


@pytest.mark.gloo
def test_it_computes_and_trains_as_the_unsharded_model(ranks: Pools) -> None:
    assert ranks(2).run(by_value, timeout=LIMIT_S) == [[], []]
