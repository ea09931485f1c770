"""Mixtures whose experts are a list of blocks, as in code from elsewhere: each block is cut within itself."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpkernels as tpk
from tests.models.compare import LIMIT, compare_tensors, differs
from tests.nn.reference import LIMIT_S, plan_once, tp_mesh
from tpkernels.sharding import Column, Row
from tpkernels.testing.spawn import Pools

H, E = 8, 4


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(H, 12), nn.Linear(12, H), nn.Linear(H, 12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(self.dropout(F.silu(self.w1(x)) * self.w3(x)))
        return y


class Listed(nn.Module):
    """Each token goes to two blocks of a list."""

    def __init__(self, how: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        self.how = how
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(Block(dropout) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        mask = F.one_hot(chosen, E).permute(2, 1, 0)
        for index, expert in enumerate(self.experts):
            slot, token = torch.where(mask[index])
            if self.how == "past" and index == 3:  # a layer of the block without the block
                found = expert.w2(F.silu(expert.w1(rows[token])) * expert.w3(rows[token]))
            else:
                found = expert(rows[token])
            out.index_add_(0, token, found * weights[token, slot, None])
        return out.view(x.shape)


class Model(nn.Module):
    def __init__(self, how: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.mixture, self.head = nn.LayerNorm(H), Listed(how, dropout), nn.Linear(H, 20)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x + self.mixture(self.norm(x)))
        return y


@pytest.mark.cpu
def test_a_block_of_a_list_is_columns_and_a_row() -> None:
    plan = tpk.make_plan(Model(), 2, example_inputs=torch.zeros(3, 5, H))
    for index in range(E):
        name = f"mixture.experts.{index}"
        assert [plan[f"{name}.{w}"].style for w in ("w1", "w3", "w2")] == [Column(), Column(), Row()]
        assert (f"{name}.w1", f"{name}.w3") in plan.shared
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan


@pytest.mark.cpu
@pytest.mark.parametrize(("how", "dropout"), [("past", 0.0), ("", 0.1)])
def test_blocks_that_are_taken_apart_or_drop_inside_are_gathered(how: str, dropout: float) -> None:
    plan = tpk.make_plan(Model(how, dropout), 2, example_inputs=torch.zeros(3, 5, H))
    styles = [plan[f"mixture.experts.{index}.{w}"].style for index in range(E) for w in ("w1", "w2", "w3")]
    assert all(getattr(style, "gather_output", False) or getattr(style, "split_input", False) for style in styles)


def trained() -> list[str]:
    """What differs from the unsharded model, in calls with many tokens and with one."""
    torch.manual_seed(0)
    plain = Model().double()
    model = copy.deepcopy(plain)
    plan = plan_once(model, tp_mesh(), example_inputs=torch.zeros(3, 5, H, dtype=torch.float64))
    tpk.parallelize(model, tp_mesh(), plan)
    wrong = []
    for shape in ((3, 5, H), (1, 1, H)):
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(wrong)))
        given = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [net(one) for net, one in zip((model, plain), given, strict=True)]
        for net, y in zip((model, plain), outputs, strict=True):
            net.zero_grad()
            y.square().sum().backward()
        pairs = [(outputs[0], outputs[1]), (given[0].grad, given[1].grad)]
        wrong += [problem for a, b in pairs if a is None or b is None or (problem := differs(a, b, LIMIT[False]))]
        wrong += compare_tensors(model, plain, LIMIT[False])
    return [str(problem) for problem in wrong]


@pytest.mark.gloo
@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3])
def test_blocks_of_a_list_compute_what_they_did(ranks: Pools, world: int) -> None:
    for wrong in ranks(world).run(trained, timeout=LIMIT_S):
        assert not wrong, wrong[:5]
