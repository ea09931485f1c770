"""Sums, means and spreads over features that are cut (Gemma 3n): plans, and values and gradients in fp64."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, TOLERANCE, tp_mesh
from tests.planning.by_value import problems
from tpkernels.errors import UnprovenCallWarning
from tpkernels.nn.part_statistics import Parts, PartStatistics, statistic_of
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools

WIDTH, FEATURES = 8, 13
X = torch.randn(3, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Centred(nn.Module):
    """A module that holds no layers of the MLP."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)


class Unit(nn.Module):
    """A norm without parameters, as nGPT has before a row: onto the unit sphere."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


class Sparse(nn.Module):
    """The MLP of transformers' Gemma 3n, which keeps what is far above the mean of a token; or ``how`` it is not."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        features = 2 * WIDTH if how.startswith("half") else FEATURES
        self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((WIDTH, features), (WIDTH, features), (features, WIDTH))
        )
        self.centred, self.unit, self.how = Centred(), Unit(), how
        self.elsewhere: list[Centred] = []

    def forward(self, x: Tensor, centre: bool = False) -> Tensor:
        gate = self.gate(x)
        for centred in self.elsewhere:
            gate = centred(gate)
        if self.how == "of tokens":
            gate = gate - gate.mean((-2, -1), keepdim=True)
        if self.how == "half is whole" or centre:  # as many as a rank has
            x = x - x.mean(-1, keepdim=True)
        mean = torch.mean(gate, dim=-1, keepdim=True)
        spread = gate.std(-1, unbiased=False).unsqueeze(-1) + torch.var(gate, -1, keepdim=True)
        kept = F.relu(gate - (mean + 0.3 * spread))
        if self.how == "meets an activation":
            x = x + mean
        y: Tensor = x + self.down(self.unit(self.centred(F.gelu(kept) * self.up(x))))
        return y


class Model(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.mlp = Sparse(how)
        if how == "in a module elsewhere":
            self.centred = Centred()
            self.mlp.elsewhere = [self.centred]

    def forward(self, x: Tensor, centre: bool = False) -> Tensor:
        y: Tensor = self.mlp(x, centre)
        return y


@pytest.mark.cpu
def test_statistics_between_linears_are_of_all_ranks() -> None:
    plan = tpk.make_plan(Model(), 3, example_inputs=X.float())
    assert [plan[f"mlp.{name}"].style for name in ("gate", "up", "down")] == [Column(), Column(), Row()]
    sizes = FEATURES, (5, 5, 3)
    assert plan.statistics == {"mlp": sizes, "mlp.centred": sizes, "mlp.unit": sizes}
    # A number per row of the sum and both means, two of each rank of both spreads, forward and backward, in fp32.
    assert plan.statistic_bytes == 15 * 2 * 4 * (3 * 2 + 2 * 6) * 2 // 3
    assert plan.wire_bytes == plan.statistic_bytes + sum(entry.wire_bytes or 0 for entry in plan.entries)
    assert (
        f"sums, means and spreads over all ranks: of {FEATURES} features in mlp, {FEATURES} features in mlp.centred, "
        f"{FEATURES} features in mlp.unit, which sends 1.4 KiB"
    ) in " ".join(str(plan).split())
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match="no module 'other'"):
        dataclasses.replace(plan, statistics={"other": (FEATURES, (5, 5, 3))}).validate(Model())


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("in a module elsewhere", "aten.mean: the dimension that is cut is reduced"),
        ("of tokens", "aten.mean: the dimension that is cut is reduced"),
        ("half is whole", "mlp takes sums, means or spreads over 8 features that are whole, too"),
        ("meets an activation", "activation that is whole meets parts"),
    ],
)
def test_other_statistics_leave_the_layers_gathered(how: str, why: str) -> None:
    plan = tpk.make_plan(Model(how), 2, example_inputs=X.float())
    assert plan["mlp.gate"].style == Column(gather_output=True) and not plan.statistics
    assert why in plan["mlp.gate"].reason


@pytest.mark.cpu
def test_layers_are_gathered_where_sums_would_be_in_no_blocks() -> None:
    plan = tpk.make_plan(Model(), 2, example_inputs=X.float(), same_bits=2)
    assert not plan.statistics and plan["mlp.gate"].style != Column()


CALLS: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.sum(x, -1),
    lambda x: x.sum(dim=2, keepdim=True, dtype=torch.float64),
    lambda x: torch.mean(x, -1),
    lambda x: x.mean(dim=(-1,), keepdim=True),
    lambda x: x.mean(axis=2, dtype=torch.float64),
    lambda x: torch.std(x, -1),
    lambda x: torch.std(x, [-1], False, True),
    lambda x: x.std(-1, correction=0, keepdim=True),
    lambda x: x.var(2, unbiased=False),
    lambda x: torch.var(input=x, dim=-1, correction=2.5),
]
OTHERS: list[Callable[[Tensor], Tensor]] = [
    torch.mean, torch.std, lambda x: x.std(True), lambda x: x.mean(1), lambda x: x.var((-1, -2)), torch.sum,
]  # fmt: skip


@pytest.mark.cpu
def test_only_statistics_of_the_last_dimension_are_taken_for_one() -> None:
    def taken(call: Callable[[Tensor], Tensor]) -> bool:
        found = []

        class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[name-defined]
            def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                found.append(statistic_of(func, args, kwargs or {}))
                return func(*args, **(kwargs or {}))

        with Mode():
            call(X)
        return any(one is not None for one in found)

    assert all(map(taken, CALLS)) and not any(map(taken, OTHERS))
    assert statistic_of(torch.mean, (torch.ones(2, dtype=torch.int32), -1), {}) is None


def by_value() -> list[str]:
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)
        wrong = problems("sparse MLP", Model(), X, "mlp.down")
    mesh = tp_mesh()
    halves = tpk.parallelize(Model("half").double(), mesh, example_inputs=X)
    with pytest.raises(ValueError, match="takes a sum, a mean, a spread or the maximum of a whole tensor"):
        halves(X, centre=True)
    sizes = (FEATURES - FEATURES // 2, FEATURES // 2)
    for dtype, number in ((torch.float64, 0), (torch.float32, 1)):
        for place, call in enumerate(CALLS):
            wrong += [f"{dtype} {place}: {why}" for why in _differences(call, dtype, number, sizes)]
    model = tpk.parallelize(nn.Sequential(Model()).double(), mesh, example_inputs=X)
    constant = torch.zeros(1, 2, WIDTH, dtype=torch.float64, requires_grad=True)
    model(constant).sum().backward()  # a spread of 0 has a gradient of 0, as torch's
    return wrong + ([] if constant.grad is not None and torch.isfinite(constant.grad).all() else ["not finite"])


def _differences(call: Callable[[Tensor], Tensor], dtype: torch.dtype, seed: int, sizes: tuple[int, int]) -> list[str]:
    """Of the result, and of this rank's part of the gradient, from those of the whole tensor in fp64."""
    generator, rank = torch.Generator().manual_seed(seed), tp_mesh().get_local_rank()
    whole = (torch.randn(3, 4, sum(sizes), dtype=torch.float64, generator=generator) + 2).requires_grad_()
    part = whole.detach().split(sizes, -1)[rank].to(dtype).requires_grad_()
    with PartStatistics(Parts(sizes, tp_mesh())):
        y = call(part)
    expected = call(whole)
    dy = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    expected.backward(dy)
    (y * dy.to(y.dtype) * 0.5).sum().backward()  # each of two ranks has a share of the gradient
    assert whole.grad is not None and part.grad is not None
    pairs = {"value": (y, expected), "gradient": (part.grad, whole.grad.split(sizes, -1)[rank])}
    limit = TOLERANCE[dtype]
    return [
        f"{name} {tuple(mine.shape)} of {tuple(its.shape)}"
        for name, (mine, its) in pairs.items()
        if mine.shape != its.shape or not torch.allclose(mine.double(), its, rtol=limit, atol=limit)
    ]


@pytest.mark.gloo
def test_values_and_gradients_are_those_of_all_features(ranks: Pools) -> None:
    assert ranks(2).run(by_value, timeout=LIMIT_S) == [[], []]


def compiled_by_value() -> list[str]:
    torch.manual_seed(3)
    plain = Model().double()
    model = tpk.parallelize(nn.Sequential(plain), tp_mesh(), example_inputs=X)
    ran = torch.compile(model, fullgraph=True, backend="aot_eager")
    return [] if torch.allclose(ran(X), model(X), rtol=1e-12, atol=1e-12) else ["compiled"]


@pytest.mark.gloo
@pytest.mark.slow("6 s: compiles a model")
def test_they_are_compiled_as_one_graph(ranks: Pools) -> None:
    assert ranks(2).run(functools.partial(compiled_by_value), timeout=LIMIT_S) == [[], []]
