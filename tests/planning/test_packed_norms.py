"""Batch norms between a convolution and code that takes its channels apart: a rank has its part of each segment."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.test_convolution_pairs import differing, paired, step
from tpkernels.errors import UnprovenCallWarning
from tpkernels.nn.packed_norm import check_packed_norm, pack_norm
from tpkernels.partition import chunk_sizes
from tpkernels.planning.styles import Sliced
from tpkernels.testing.spawn import Pools

WIDE, THIN = 7, 5


class Own(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) * 1
        return y


class Aggregation(nn.Module):
    """As the blocks of RT-DETR's kin (D-FINE): halves of the channels, of which one goes on, are concatenated.

    ``how`` its norm does otherwise, and what it is.
    """

    def __init__(self, how: str = "", norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.how, self.wide, self.thin = how, WIDE, THIN
        self.first, self.norm = nn.Conv2d(3, WIDE + THIN, 1, bias=False), norm(WIDE + THIN)
        self.inner, self.inner_norm = nn.Conv2d(THIN, THIN, 3, padding=1, bias=False), nn.BatchNorm2d(THIN)
        self.last = nn.Conv2d(WIDE + 2 * THIN, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        if self.how == "again, whole":
            y = y + self.norm(x.repeat(1, 4, 1, 1))
        beside, one = nn.functional.silu(y).split((self.wide, self.thin), 1)
        two = nn.functional.silu(self.inner_norm(self.inner(one)))
        z: Tensor = self.last(torch.cat([beside, one, two], 1))
        if self.how == "again, otherwise":
            z = z + self.norm(torch.cat([one, beside], 1)).mean(1, keepdim=True)
        return z


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x)
        return y


KINDS: dict[str, Callable[[], nn.Module]] = {
    "": Aggregation,
    "without numbers": lambda: Aggregation(norm=lambda n: nn.BatchNorm2d(n, affine=False)),
    "without means": lambda: Aggregation(norm=lambda n: nn.BatchNorm2d(n, track_running_stats=False)),
}
WHOLE: dict[str, Callable[[], nn.Module]] = {
    "own code": lambda: Aggregation(norm=Own),
    "groups": lambda: Aggregation(norm=lambda n: nn.GroupNorm(4, n)),
    "again, whole": lambda: Aggregation("again, whole"),
    "again, otherwise": lambda: Aggregation("again, otherwise"),
}
"""Norms with code around torch's, of groups of channels that ranks would cut, and that are called anew with whole
channels, or with segments in another order."""


def made(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return Block({**KINDS, **WHOLE}[kind]()).double()


def example() -> Tensor:
    return torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.mark.cpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_a_norm_is_cut_by_the_segments_that_its_channels_are_taken_apart_in(kind: str, world: int) -> None:
    plan = tpk.make_plan(made(kind), world, example_inputs=example())
    assert paired(plan) == "inner.first inner.inner inner.last"
    style: Any = plan["inner.norm"].style
    assert isinstance(style, Sliced) and style.segments == (WIDE, THIN) and not style.runs
    parts = [7, 5] if world == 2 else [3 + 2, 3 + 2, 1 + 1]
    assert all([shape[0] for shape in cut.local_shapes] == parts for cut in plan["inner.norm"].parameters)
    assert plan["inner.norm"].wire_bytes == 0 and plan["inner.inner_norm"].style == Sliced(
        (("bias", 0), ("running_mean", 0), ("running_var", 0), ("weight", 0))
    )
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan


@pytest.mark.cpu
@pytest.mark.parametrize("kind", WHOLE)
def test_norms_that_do_otherwise_are_not_cut_by_segments(kind: str) -> None:
    for world in (2, 3):
        plan = tpk.make_plan(made(kind), world, example_inputs=example())
        assert "first" not in paired(plan) and not isinstance(plan["inner.norm"].style, Sliced)


@pytest.mark.cpu
def test_what_no_rank_could_have_its_part_of_is_refused() -> None:
    check_packed_norm(nn.BatchNorm1d(6), (2, 4), 2)
    for norm, segments, world in [(nn.BatchNorm1d(6), (2, 3), 2), (nn.BatchNorm1d(6), (2, 4), 3), (Own(6), (2, 4), 2)]:
        with pytest.raises(ValueError, match="must be a batch norm over"):
            check_packed_norm(norm, segments, world)
    with pytest.raises(ValueError, match="segments are of a batch norm"):
        Sliced((("weight", 0),), (("weight", (2, 4)),), segments=(2, 4))


def compare(kinds: list[str]) -> list[str]:
    wrong = []
    for kind in kinds:
        plain, x = made(kind), example()
        plan = tpk.make_plan(plain, tp_mesh(), example_inputs=x)
        wrong += [] if "first" in paired(plan) else [f"{kind} is whole"]
        model: Any = tpk.parallelize(copy.deepcopy(plain), tp_mesh(), tpk.ShardingPlan.from_json(plan.to_json()))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnprovenCallWarning)
            for again in range(2):  # the running means of a second step build on those of the first
                wrong += differing(f"{kind}, step {again}", step(model, x + again), step(plain, x + again))
        wrong += differing(f"state of {kind}", tpk.full_state_dict(model), plain.state_dict())
        with torch.no_grad():
            wrong += differing(f"{kind} in evaluation", {"y": model.eval()(x)}, {"y": plain.eval()(x)})
        model.train(), plain.train()
        meta = tpk.parallelize(made(kind).to("meta"), tp_mesh(), plan)
        tpk.load_full_state_dict(meta, plain.state_dict())
        wrong += differing(f"{kind} from the meta device", step(meta, x), step(copy.deepcopy(plain), x))
        for one in (model, plain):
            one.inner.norm.reset_parameters()
        wrong += differing(f"state of {kind} anew", tpk.full_state_dict(model), plain.state_dict())
    return wrong


def means_of_all_batches() -> list[str]:
    """A momentum of None makes means of all batches; the number of these is a value, which no plan follows."""
    torch.manual_seed(3)
    plain, x = nn.BatchNorm2d(WIDE + THIN, momentum=None).double(), torch.randn(2, WIDE + THIN, 3, 3).double()
    norm, mesh = pack_norm(copy.deepcopy(plain), (WIDE, THIN), tp_mesh()), tp_mesh()
    wrong = []

    def own(whole: Tensor) -> Tensor:
        parts = [one.split(chunk_sizes(one.shape[1], mesh.size()), 1) for one in whole.split((WIDE, THIN), 1)]
        return torch.cat([part[mesh.get_local_rank()] for part in parts], 1)

    for factor in (1, 2):
        wrong += differing(f"batch {factor}", {"y": norm(own(x * factor))}, {"y": own(plain(x * factor))})
    wrong += differing("means", tpk.full_state_dict(norm), plain.state_dict())
    norm.reset_running_stats(), plain.reset_running_stats()
    return wrong + differing("means anew", tpk.full_state_dict(norm), plain.state_dict())


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_means_of_all_batches_are_those_of_the_whole_norm(ranks: Pools, world: int) -> None:
    assert ranks(world).run(means_of_all_batches, timeout=LIMIT_S) == [[]] * world


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow("on three ranks"))])
def test_values_gradients_and_running_means_are_those_of_the_whole_model(ranks: Pools, world: int) -> None:
    assert ranks(world).run(compare, list(KINDS), timeout=LIMIT_S) == [[]] * world
