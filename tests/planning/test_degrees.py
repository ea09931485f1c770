"""Plans for several numbers of ranks (`same_bits`): at each of them what the largest one cuts, and nothing else."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpkernels as tpk
from tests.ops.same_bits import assert_same
from tests.ops.support import new_group
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools

SAME_BITS = 8


class LiteralHeads(nn.Module):
    """Says how many heads it has: the code runs on one rank, and on no part."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(64, 64) for _ in range(4))
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (of(x).view(*x.shape[:2], 8, 8).transpose(1, 2) for of in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return cast(Tensor, x + self.down(F.relu(self.up(x))))


@pytest.mark.cpu
def test_layers_that_the_largest_number_of_ranks_gathers_are_gathered_at_every_number() -> None:
    x = torch.zeros(2, 16, 64)
    styles = [tpk.make_plan(LiteralHeads(), world, example_inputs=x, same_bits=SAME_BITS).styles for world in (8, 1)]
    assert all(one == styles[0] for one in styles), styles
    assert styles[0]["up"] == Column() and styles[0]["down"] == Row(), styles[0]
    assert isinstance(styles[0]["query"], Column) and styles[0]["query"].gather_output, styles[0]
    alone = tpk.make_plan(LiteralHeads(), 1, example_inputs=x).styles["query"]
    assert alone == Column(), alone  # which nothing speaks against on one rank


class GroupedHeads(nn.Module):
    """20 heads of queries, two for each key-value head: on one rank 10 pairs, on eight a copy of a key for each."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 8
        self.query, self.out = nn.Linear(64, 160), nn.Linear(160, 64)
        self.key, self.value = nn.Linear(64, 80), nn.Linear(64, 80)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            of(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for of in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return cast(Tensor, x + self.out(y.transpose(1, 2).flatten(2)))


@pytest.mark.cpu
def test_grouped_heads_are_cut_at_every_number_of_ranks_as_at_the_largest() -> None:
    x = torch.zeros(2, 16, 64)
    plans = [tpk.make_plan(GroupedHeads(), world, example_inputs=x, same_bits=SAME_BITS) for world in (8, 1)]
    assert all(plan.styles == plans[0].styles for plan in plans), [plan.styles for plan in plans]
    query = plans[0]["query"].style
    assert isinstance(query, Column) and not query.gather_output and query.unit == 8, plans[0]["query"]


@pytest.mark.gloo
@pytest.mark.slow("plans on three ranks")
def test_code_with_a_literal_number_of_heads_gives_the_same_bits(ranks: Pools) -> None:
    (expected,) = ranks(1).run(output)
    for found in ranks(2).run(output):
        assert_same(found, expected, "output")


def output() -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 64)
    with new_group() as group:
        return cast(Tensor, tpk.parallelize(LiteralHeads(), group, example_inputs=x, same_bits=SAME_BITS)(x).detach())
