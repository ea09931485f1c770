"""Global response norms (ConvNeXt V2) over features that are cut: plans, and values and gradients in fp64."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.by_value import problems
from tpkernels.errors import UnprovenCallWarning
from tpkernels.nn import PartResponseNorm
from tpkernels.planning.styles import Column, PartNorm, Replicate, Row, Sliced
from tpkernels.testing.spawn import Pools

X = torch.randn(3, 4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
"""Images: [N, H, W, features]."""


class ResponseNorm(nn.Module):
    """As that of transformers' ConvNeXt V2; or ``how`` it is not quite."""

    def __init__(self, features: int, how: str = "") -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(1, 1, 1, features)) for _ in range(2))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        sizes = torch.linalg.vector_norm(x, ord=1 if self.how == "sums" else 2, dim=(1, 2), keepdim=True)
        dims = (0, -1) if self.how == "of all images" else (-1,)
        scaled = sizes / (sizes.mean(dims, keepdim=True) + 1e-6)
        y: Tensor = self.weight * (x * scaled) + self.bias
        return y if self.how == "no residual" else y + x


class Block(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 12), ResponseNorm(12, how), nn.Linear(12, 6)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.gelu(self.up(x))
        if self.how == "rows":
            normed: Tensor = self.norm(h.flatten(0, 1)[:, :, None]).view(h.shape)
        elif self.how == "more dimensions":
            normed = self.norm(h[:, :, :, None])[:, :, :, 0]
        else:
            normed = self.norm(h)
        y: Tensor = x + self.down(normed)
        if self.how == "bias is read":
            y = y + self.norm.bias.mean()
        return y


@pytest.mark.cpu
def test_a_response_norm_between_linears_is_of_all_ranks() -> None:
    plan = tpk.make_plan(Block(), 3, example_inputs=X.float())
    assert (plan["up"].style, plan["norm"].style, plan["down"].style) == (
        Column(), PartNorm(1e-6, response=True), Row()
    )  # fmt: skip
    assert all(cut.dim == 3 and cut.local_shapes[0] == (1, 1, 1, 4) for cut in plan["norm"].parameters)
    assert plan["norm"].forward == "all-reduce of sums of norms"
    assert plan["norm"].wire_bytes == 2 * 2 * 4 * 3 * 2 // 3, "a number per image forward, and one backward"
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    assert tpk.make_plan(Block("rows"), 2, example_inputs=X.float())["norm"].style == PartNorm(1e-6, response=True)


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["of all images", "bias is read"])
def test_what_only_looks_like_a_response_norm_is_whole(how: str) -> None:
    plan = tpk.make_plan(Block(how), 2, example_inputs=X.float())
    assert plan["norm"].style == Replicate() and plan["up"].style == Column(gather_output=True)


OTHERS = ["sums", "no residual", "more dimensions"]


@pytest.mark.cpu
@pytest.mark.parametrize("how", OTHERS)
def test_what_only_looks_like_one_is_other_code_that_takes_means_over_features(how: str) -> None:
    plan = tpk.make_plan(Block(how), 2, example_inputs=X.float())
    assert plan["norm"].style == Sliced((("bias", 3), ("weight", 3))) and plan["up"].style == Column()
    assert plan.statistics == {"norm": (12, (6, 6))}


@pytest.mark.cpu
def test_a_response_norm_is_whole_where_its_sums_would_be_in_no_blocks() -> None:
    plan = tpk.make_plan(Block(), 2, example_inputs=X.float(), same_bits=2)
    assert plan["norm"].style == Replicate()


def by_value() -> list[str]:
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)
        wrong = problems("response norm", Block(), X, "down")
        wrong += [problem for how in OTHERS for problem in problems(how, Block(how), X.detach().clone(), "down")]
    norm = PartResponseNorm.from_norm(ResponseNorm(12), tp_mesh(), epsilon=1e-6)
    for call, why in (
        (lambda: norm(torch.zeros(2, 3, 12 // tp_mesh().size())), "takes"),
        (lambda: norm(torch.zeros(2, 3, 3, 5)), "got"),
        (lambda: PartResponseNorm.from_norm(nn.LayerNorm(12), tp_mesh(), epsilon=1e-6), "must have"),
        (PartResponseNorm, "from_norm"),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=why):
            call()
    return wrong


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_values_and_gradients_are_those_of_the_whole_norm(ranks: Pools, world: int) -> None:
    assert ranks(world).run(by_value, timeout=LIMIT_S) == [[]] * world
