"""Attention whose weights the model returns (BridgeTower): plans, what they send, and values."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpkernels as tpk
from tests.models.compare import compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.by_value import LIMIT
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools

WIDTH, HEADS, LENGTH = 24, 6, 4
NAMES = [f"blocks.{place}.attention" for place in range(2)]


def inputs(length: int = LENGTH) -> Tensor:
    return torch.randn(2, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Attention(nn.Module):
    """It returns its weights as well, or ``how`` it does otherwise."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.how, self.head = how, WIDTH // HEADS

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (one(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for one in (self.q, self.k, self.v))
        weights = (q @ k.transpose(2, 3) / self.head**0.5).softmax(-1)
        if self.how == "drawn":
            weights = F.dropout(weights, 0.5, self.training)
        y: Tensor = self.o((weights @ v).transpose(1, 2).flatten(2))
        if self.how == "first head":
            weights = weights[:, 0]
        if self.how == "mean of heads":
            weights = weights.mean(1)
        if self.how == "packed":
            weights = torch.cat([weights, weights], 1)
        if self.how == "whole numbers":
            weights = weights.argmax(-1)
        return y, weights


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(how)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = self.attention(self.norm(x))
        return x + y, weights


class Model(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(how) for _ in range(2))

    def forward(self, x: Tensor, few: bool = False) -> dict[str, Tensor | tuple[Tensor, ...]]:
        every = []
        for block in self.blocks:
            x, weights = block(x)
            every.append(weights)
        return {"x": x, "weights": (every[-1],) if few else tuple(every)}


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["", "drawn"])
def test_heads_are_cut_and_their_weights_are_gathered(how: str) -> None:
    plan = tpk.make_plan(Model(how), 2, example_inputs=inputs().float())
    styles = [plan[f"{name}.{layer}"].style for name in NAMES for layer in ("q", "k", "v", "o")]
    assert styles == [Column(), Column(), Column(), Row()] * 2
    assert plan.cut_results == ((1, 1, HEADS), (2, 1, HEADS))
    # Half of the weights in fp32, forward alone.
    assert plan.result_bytes == 2 * (2 * HEADS * LENGTH * LENGTH) * 4 // 2
    assert "2 of the results are gathered, which sends 768 B" in str(plan)
    assert bool(plan.random) == bool(how)
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan


@pytest.mark.cpu
def test_weights_of_long_sequences_are_more_than_the_layers_send() -> None:
    """At length 4 the weights of all heads are as many as a layer's features; at 24 they are 6 times as many."""
    for length, cut in ((4, True), (24, False)):
        plan = tpk.make_plan(Model(), 2, example_inputs=inputs(length).float())
        entry = plan["blocks.0.attention.o"]
        assert (entry.style == Row()) == cut == bool(plan.cut_results), length
        assert cut or "that it would gather, a pair would send as much" in entry.reason


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["first head", "mean of heads", "packed", "whole numbers"])
def test_what_could_not_be_gathered_so_leaves_the_layers_gathered(how: str) -> None:
    plan = tpk.make_plan(Model(how), 2, example_inputs=inputs().float())
    assert not plan.cut_results and plan["blocks.0.attention.o"].style != Row()


@pytest.mark.cpu
def test_calls_that_return_other_results_leave_the_layers_gathered() -> None:
    x = inputs().float()
    plan = tpk.make_plan(Model(), 2, example_inputs=[{"x": x}, {"x": x, "few": True}])
    assert not plan.cut_results and plan["blocks.0.attention.o"].style != Row()


@pytest.mark.cpu
def test_results_are_not_cut_along_a_cut_sequence_or_for_all_degrees() -> None:
    assert not tpk.make_plan(Model(), 2, example_inputs=inputs().float(), same_bits=2).cut_results
    assert not tpk.make_plan(Model(), 2, example_inputs=inputs().float(), sequence_parallel=True).cut_results


def returns_whole() -> list[str]:
    torch.manual_seed(3)
    plain, x = Model().double(), inputs()
    plan = tpk.make_plan(plain, tp_mesh(), example_inputs=x)
    model = tpk.parallelize(copy.deepcopy(plain), tp_mesh(), plan)
    wrong = [] if plan.cut_results else ["no result is cut"]
    for how, called in (("as it is", model), ("compiled", torch.compile(model, backend="eager", fullgraph=True))):
        found = []
        for net, one in ((plain, plain), (model, called)):
            net.zero_grad()
            y = x.clone().requires_grad_()
            out = one(y)
            (
                out["x"].square().sum() + sum((w.square() * place).sum() for place, w in enumerate(out["weights"], 1))
            ).backward()
            found.append({"x": out["x"], "dx": y.grad} | {f"weights {n}": w for n, w in enumerate(out["weights"])})
        wrong += [f"{how} {name}: {why}" for name, a in found[0].items() if (why := differs(found[1][name], a, LIMIT))]
        wrong += [f"{how} {problem}" for problem in compare_tensors(model, plain, LIMIT)]
    return wrong


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_weights_and_gradients_are_those_of_the_whole_model(ranks: Pools, world: int) -> None:
    assert ranks(world).run(returns_whole, timeout=LIMIT_S) == [[]] * world
