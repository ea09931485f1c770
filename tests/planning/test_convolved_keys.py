"""Attention of which a convolution makes keys: windows of channels, a convolution beside linear layers, and a last
layer that takes what is concatenated of two streams that are cut."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, close, tp_mesh, whole
from tests.planning.by_value import problems
from tests.planning.convolved_keys import CUT, EACH, HEADS, WHOLE, WIDTH, made
from tpkernels.errors import UnprovenCallWarning
from tpkernels.nn import PackedRowParallelLinear
from tpkernels.partition import chunk_sizes
from tpkernels.planning.alone.ties import tie_kind
from tpkernels.planning.styles import Channels, Column, Row, Sliced
from tpkernels.sharding.same_bits import check_styles
from tpkernels.testing.spawn import Pools
from tpkernels.verification.part_places import part_at

X = torch.zeros(2, 5, WIDTH)
FEATURES = HEADS * EACH


@pytest.mark.cpu
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("how", CUT)
def test_a_convolution_is_cut_by_heads_with_the_layers_that_its_channels_meet(how: str, world: int) -> None:
    plan = tpk.make_plan(made(how), world, example_inputs=X)
    for name in ("query", "key", "value", "beside"):
        assert plan[name].style == Column()
    assert plan["convolved.pointwise"].style == Channels(gather_output=False)
    assert plan["convolved"].style == Sliced((("bias", 0),))
    assert plan["kernels"].style == Row(scatter_unit=1)
    assert plan["kernels"].forward == "reduce-scatter of y"
    segments = {"by feature": (), "three": (FEATURES,) * 3}.get(how, (FEATURES,) * 2)
    assert plan["out"].style == Row(segments=segments)
    counted = {"heads": (HEADS, (HEADS // world,) * world), "features": (FEATURES, (FEATURES // world,) * world)}
    assert plan.attributes == (counted if how == "counted" else {})
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    plan.validate(made(how))


@pytest.mark.cpu
@pytest.mark.parametrize("how", WHOLE)
def test_windows_and_kernels_of_other_heads_stay_whole(how: str) -> None:
    for world in (2, 3):
        plan = tpk.make_plan(made(how), world, example_inputs=X)
        assert plan["convolved.pointwise"].style == Channels() and plan["out"].style == Row(split_input=True)


class Windows(nn.Module):
    """Channels that are cut, and windows of them: of no batch, of uneven channels, with a stride."""

    def __init__(self, channels: int, kernel: tuple[int, int], **options: Any) -> None:
        super().__init__()
        self.kernel, self.options = kernel, options
        self.first, self.last = nn.Linear(4, channels), nn.Linear(channels, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).transpose(-1, -2).unsqueeze(-1)
        found = F.unfold(y, self.kernel, **self.options)
        places = self.kernel[0] * self.kernel[1]
        y = found.unflatten(-2, (-1, places)).sum(-2)
        z: Tensor = self.last(y.transpose(-1, -2))
        return z


@pytest.mark.cpu
def test_windows_are_of_each_channel_by_itself() -> None:
    cut = Row(), Column()
    for x in (X[..., :4], X[0, :, :4]):
        for kernel, options in (((2, 1), {}), ((3, 1), {"stride": 2, "padding": (1, 0)})):
            plan = tpk.make_plan(Windows(6, kernel, **options), 2, example_inputs=x)
            assert (plan["last"].style, plan["first"].style) == cut
    plan = tpk.make_plan(Windows(7, (2, 1)), 2, example_inputs=X[..., :4])
    assert plan["first"].parameters[0].local_shapes == ((4, 4), (3, 4)), "not half of 14 places"


@pytest.mark.cpu
def test_what_only_a_proof_can_say_of_segments_is_refused_by_hand() -> None:
    with pytest.raises(ValueError, match="a row of several segments, which only the data flow can prove"):
        tpk.make_plan(made(""), 2, example_inputs=X, overrides={"out": Row(segments=(FEATURES, FEATURES))})
    for options in ({"split_input": True}, {"unit": 2}):
        with pytest.raises(ValueError, match="segments are of a row that takes this rank's part of each"):
            Row(segments=(4, 4), **options)
    with pytest.raises(ValueError, match="its sums over these are in no blocks"):
        check_styles({"out": Row(segments=(4, 4))}, 2)
    assert tie_kind(Row(segments=(4, 4))) is None and tie_kind(Row()) == 1


@pytest.mark.cpu
def test_a_verification_finds_the_features_of_each_segment() -> None:
    numbers = torch.arange(16.0).view(2, 8)
    for rank, mine in enumerate(([0, 1, 2, 5, 6], [3, 4, 7])):
        found = part_at(numbers[:, mine], numbers, Row(segments=(5, 3)), leaves=False, rank=rank, world_size=2)
        assert found is not None and isinstance(found[1], torch.Tensor) and found[1].tolist() == mine


def all_by_value() -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)  # the first call is followed, with rules for these layouts
        torch.manual_seed(0)
        given: list[Any] = [(how, made(how), torch.randn(2, 5, WIDTH), "out") for how in CUT]
        given.append(("seven channels", Windows(7, (2, 1)), torch.randn(2, 5, 4), "last"))
        return [problem for how, net, x, row in given for problem in problems(how, net, x.double(), row)]


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_they_compute_and_train_as_the_unsharded_model(ranks: Pools, world: int) -> None:
    assert ranks(world).run(all_by_value, timeout=LIMIT_S) == [[]] * world


def alone(bias: bool, options: dict[str, Any]) -> None:
    """Such a row in plain torch: its part of each segment in, and the sum out."""
    torch.manual_seed(0)
    mesh, segments, out = tp_mesh(), (5, 3), 6
    rank, world = mesh.get_local_rank(), mesh.size()
    plain = nn.Linear(8, out, bias, dtype=torch.float64)
    layer = PackedRowParallelLinear.from_linear(plain, mesh, segments=segments, **options)
    x, g = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(2, 3, out, dtype=torch.float64)
    parts = [part.tensor_split(_ends(part.shape[-1], world), -1)[rank] for part in x.split(segments, -1)]
    assert layer.sizes_taken == tuple(part.shape[-1] for part in parts) and layer.mesh.size() == world
    assert layer.shard_sizes[rank] == sum(layer.sizes_taken)
    x_r, x = torch.cat(parts, -1).requires_grad_(), x.requires_grad_()
    expected = plain(x)
    scattered = "scatter_unit" in options
    mine = _mine(out if scattered else 3, world, rank) if options else slice(None)
    of = (..., mine) if scattered else (slice(None), mine)
    y = layer(x_r)
    close(y, expected[of], "y")
    y.backward(g[of])
    expected.backward(g)
    assert x_r.grad is not None and x.grad is not None
    of_each = [part.tensor_split(_ends(part.shape[-1], world), -1)[rank] for part in x.grad.split(segments, -1)]
    close(x_r.grad, torch.cat(of_each, -1), "dx")
    grads = [whole(part.weight.grad) for part in (layer.part0, layer.part1)]
    close(torch.cat(grads, 1), plain.weight.grad, "dw")
    if bias:
        close(whole(layer.bias.grad), plain.bias.grad, "db")
    assert "segments=5/3" in repr(layer) and layer.weight.shape == plain.weight.shape
    assert layer.packed_parameters() == {"weight": (1, ("part0.weight", "part1.weight"))}
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    plain.reset_parameters()
    close(torch.cat([whole(part.weight) for part in (layer.part0, layer.part1)], 1), plain.weight, "fresh weight")
    if bias:
        close(whole(layer.bias), plain.bias, "fresh bias")


def _ends(size: int, world: int) -> list[int]:
    sizes = chunk_sizes(size, world)
    return [sum(sizes[:rank]) for rank in range(1, world)]


def _mine(size: int, world: int, rank: int) -> slice:
    sizes = chunk_sizes(size, world)
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


@pytest.mark.gloo
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_row_takes_its_part_of_each_segment(ranks: Pools, world: int) -> None:
    for bias, options in ((True, {}), (False, {"scatter_unit": 1}), (True, {"sequence_parallel": True})):
        ranks(world).run(alone, bias, options, timeout=LIMIT_S)


def refused() -> str:
    try:
        PackedRowParallelLinear.from_linear(nn.Linear(8, 6), tp_mesh(), segments=(5, 4))
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.gloo
def test_segments_that_are_not_its_features_are_refused(ranks: Pools) -> None:
    for said in ranks(2).run(refused, timeout=LIMIT_S):
        assert said == "segments [5, 4] must be positive and sum to in_features (8)"
