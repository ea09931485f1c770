"""Layer norms of images' channels (RF-DETR) between convolutions: plans, and values and gradients in fp64."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.by_value import problems
from tpkernels.errors import UnprovenCallWarning
from tpkernels.nn import PartLayerNorm
from tpkernels.planning.styles import Channels, PartNorm
from tpkernels.testing.spawn import Pools

X = torch.randn(2, 6, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
"""Images: [N, channels, H, W]."""


class ChannelNorm(nn.LayerNorm):
    """As that of transformers' RF-DETR; or ``how`` it is not quite."""

    def __init__(self, features: int, how: str = "") -> None:
        super().__init__(features, eps=1e-6)
        self.how = how
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        dim = 2 if self.how == "over rows" else 1 if self.how != "by dimensions" or x.dim() == 4 else -1
        y = super().forward(x.movedim(dim, -1)).movedim(-1, dim)
        return y * x.shape[-1] if self.how == "grows with the image" else y


class Pair(nn.Module):
    def __init__(self, channels: int = 6, inner: int = 12, how: str = "") -> None:
        super().__init__()
        self.up, self.norm = nn.Conv2d(channels, inner, 1), ChannelNorm(inner, how)
        self.down, self.how = nn.Conv2d(inner, channels, 3, padding=1), how

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.how == "lines":
            normed: Tensor = self.norm(h.flatten(2)).view(h.shape)
        elif self.how == "over rows":
            normed = self.norm(h.view(h.shape[0], 1, h.shape[1], -1)).view(h.shape)
        else:
            normed = self.norm(h)
        y: Tensor = x + self.down(nn.functional.silu(normed))
        return y


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["", "lines"])
def test_a_norm_of_channels_between_convolutions_is_of_all_ranks(how: str) -> None:
    plan = tpk.make_plan(Pair(how=how), 3, example_inputs=X.float())
    assert plan["up"].style == Channels(gather_output=False)
    assert plan["norm"].style == PartNorm(1e-6, centred=True, channels_first=True)
    assert plan["down"].style == Channels(inputs=True)
    assert plan["norm"].wire_bytes == 2 * 6 * 4 * (2 * 5 * 7) * 2 // 3, "mean and variance of each rank for each place"
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["grows with the image", "over rows"])
def test_what_only_looks_like_one_is_whole(how: str) -> None:
    plan = tpk.make_plan(Pair(how=how), 2, example_inputs=X.float())
    assert not isinstance(plan["norm"].style, PartNorm) and plan["up"].style == Channels()


@pytest.mark.cpu
def test_a_pair_that_would_send_more_with_its_norm_is_not_cut() -> None:
    plan = tpk.make_plan(Pair(8, 4), 2, example_inputs=torch.zeros(2, 8, 5, 7))
    assert plan["up"].style == Channels() and not isinstance(plan["norm"].style, PartNorm)
    assert "with its norms a pair would send more than its layers do without it" in plan["up"].reason


class Linears(nn.Module):
    """The norm is of the last dimension, as between linear layers, of all tensors but those that it is given here."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 12), ChannelNorm(12, "by dimensions"), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(nn.functional.silu(self.norm(self.up(x))))
        return y


PLACES = torch.randn(2, 12, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
"""As many places in dimension 1 as the norm has features."""


@pytest.mark.cpu
def test_a_norm_is_tried_on_tensors_of_as_many_dimensions_as_it_is_given() -> None:
    plan = tpk.make_plan(Linears(), 2, example_inputs=PLACES.float())
    assert not isinstance(plan["norm"].style, PartNorm)
    flat = tpk.make_plan(Linears(), 2, example_inputs=PLACES[0].float())
    assert flat["norm"].style == PartNorm(1e-6, centred=True)


def by_value() -> list[str]:
    torch.manual_seed(3)
    wrong = [one for one in problems("dimensions", Linears(), PLACES.clone(), "down") if "is not cut" not in one]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)
        for how in ("", "lines", "over rows"):
            model = Pair(how=how).double()
            plan = tpk.make_plan(model, tp_mesh(), example_inputs=X)
            if isinstance(plan["norm"].style, PartNorm) == (how == "over rows"):
                wrong.append(f"{how} has {plan['norm'].style}")
            wrong += [one for one in problems(how, model, X.clone(), "down") if "is not cut" not in one]
    norm = PartLayerNorm.from_norm(nn.LayerNorm(12), tp_mesh(), epsilon=1e-6, channels_first=True)
    assert "channels_first" in repr(norm)
    for bad in (torch.zeros(2), torch.zeros(2, 3, 12 // tp_mesh().size())):
        with pytest.raises(ValueError, match="in dimension 1"):
            norm(bad)
    return wrong


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow("on three ranks"))])
def test_values_and_gradients_are_those_of_the_whole_norm(ranks: Pools, world: int) -> None:
    assert ranks(world).run(by_value, timeout=LIMIT_S) == [[]] * world
