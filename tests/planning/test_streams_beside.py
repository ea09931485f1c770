"""A stream between convolutions is cut by channels beside the MLPs of its blocks, which gather and scatter it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import tpkernels as tpk
from tests.models.compare import differs
from tests.nn.reference import LIMIT_S, close, tp_mesh, whole
from tests.planning.by_value import LIMIT, problems
from tests.planning.streams_beside import LENGTH, Cache, Codec
from tpkernels.errors import UnprovenCallWarning
from tpkernels.nn import ColumnParallelLinear
from tpkernels.partition import chunk_sizes, offsets
from tpkernels.planning.styles import Channels, Column, PartNorm, Row, Sliced
from tpkernels.sharding.same_bits import check_styles
from tpkernels.testing.spawn import Pools
from tpkernels.verification.part_places import part_at

X = torch.zeros(2, 3, LENGTH)
BETWEEN = ("stem", "between", "head")
CUT = ("", "bare", "layer", "dropped", "noise within", "scaled")


def planned(how: str, world: int, channels: int = 18) -> tpk.ShardingPlan:
    return tpk.make_plan(Codec(how, channels), world, example_inputs=X)


def is_cut(plan: tpk.ShardingPlan) -> list[bool]:
    """Whether the first stream is, and the second one."""
    return [isinstance(plan[f"{block}.up"].style, Column) and plan[f"{block}.up"].style.gather_input  # type: ignore[union-attr]
            for block in ("two", "three")]  # fmt: skip


@pytest.mark.cpu
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("how", CUT)
def test_mlps_gather_and_scatter_the_stream_that_convolutions_begin_and_end(how: str, world: int) -> None:
    narrow = 48 if how == "layer" else 18  # what layer norms send does not depend on how wide they are
    plan = planned(how, world, narrow)
    assert plan["stem"].style == Channels(gather_output=False)
    assert plan["between"].style == Channels(gather_output=False, inputs=True)
    assert plan["head"].style == Channels(inputs=True)
    for block, rows in (("one", 2 * LENGTH), ("two", 2 * LENGTH), ("three", LENGTH)):
        width, sent = narrow * (1 + (block == "three")), (world - 1) / world
        assert plan[f"{block}.up"].style == Column(gather_input=True)
        assert (plan[f"{block}.up"].forward, plan[f"{block}.up"].backward) == (
            "all-gather of x",
            "reduce-scatter of dx",
        )
        assert plan[f"{block}.down"].style == Row(scatter_unit=1)
        assert plan[f"{block}.up"].wire_bytes == plan[f"{block}.down"].wire_bytes == int(2 * 4 * width * rows * sent)
        assert plan[f"{block}.mixer.conv"].style == Sliced((("bias", 0), ("weight", 0)))
        assert plan[block].style == Sliced((("scale", 0),))
        read = (width, tuple(chunk_sizes(width, world)))
        assert plan.attributes.get(f"{block}.mixer.in_channels") == (None if how == "scaled" else read)
        assert how == "bare" or isinstance(plan[f"{block}.first"].style, PartNorm)
    assert "; gathers what it takes of a stream" in plan["one.up"].reason
    assert "; scatters the sum to a stream" in plan["one.down"].reason
    within = tuple((f"{block}.up", f"{block}.down") for block in ("one", "two", "three"))
    assert plan.random == (within if how == "noise within" else ())
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    plan.validate(Codec(how, narrow))
    alone = tpk.make_plan(Codec(how, narrow), world, example_inputs=X, overrides=dict.fromkeys(BETWEEN, "channels"))
    assert plan.wire_bytes < alone.wire_bytes


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["softmax", "mean", "noise", "gated", "packed", "parallel"])
def test_a_stream_that_code_between_needs_all_of_stays_whole(how: str) -> None:
    plan = planned(how, 2)
    assert is_cut(plan) == [False, False]
    assert isinstance(plan["stem"].style, Channels) and plan["stem"].style.gather_output
    said = {
        "softmax": "works along the dimension that is cut", "mean": "takes sums over what it would cut",
        "noise": "random numbers",
    }  # fmt: skip
    assert said.get(how, "is cut with others") in plan["between"].reason, plan["between"].reason


@pytest.mark.cpu
def test_norms_that_send_more_than_convolutions_save_leave_a_stream_whole() -> None:
    """With 3 channels the norms of two blocks sum as many squares as the channels of the first convolution."""
    plan = planned("", 3, 3)
    assert is_cut(plan) == [False, True], "the norms of one block send less than the convolutions around it save"
    assert is_cut(planned("bare", 3, 3)) == [True, True]
    alone = tpk.make_plan(Codec("", 3), 3, example_inputs=X, overrides=dict.fromkeys(BETWEEN, "channels"))
    assert plan.wire_bytes < alone.wire_bytes


@pytest.mark.cpu
def test_a_stream_that_leaves_the_model_is_whole_where_gathering_it_sends_as_much() -> None:
    plan = planned("returned", 2)
    assert plan.cut_results == () and is_cut(plan) == [False, True]
    assert "with the result of the model that it would gather" in plan["stem"].reason


@pytest.mark.cpu
def test_what_only_a_proof_can_say_is_refused_by_hand() -> None:
    with pytest.raises(ValueError, match="asks for a column that takes parts, which only the data flow can prove"):
        tpk.make_plan(Codec(), 2, example_inputs=X, overrides={"one.up": Column(gather_input=True)})
    plan = tpk.make_plan(Codec(), 2, example_inputs=X, overrides={"one.up": Column(implementation="unfused")})
    assert is_cut(plan) == [False, True], "a layer that is asked for is in no stream"
    for options in ({"sequence_parallel": True}, {"gather_output": True}, {"save_gathered": True},
                    {"segments": (1, 1)}, {"summed_gradient": True}, {"sum_input_gradient": False}):  # fmt: skip
        with pytest.raises(ValueError, match="gather_input is of a column that takes this rank's features"):
            Column(gather_input=True, **options)  # type: ignore[arg-type]


@pytest.mark.cpu
def test_features_of_a_stream_are_in_no_blocks() -> None:
    plan = tpk.make_plan(Codec(), 2, example_inputs=X, same_bits=2)
    assert is_cut(plan) == [False, False]
    with pytest.raises(ValueError, match="gathers this rank's features of what it takes, which are in no blocks"):
        check_styles({"up": Column(gather_input=True)}, 2)


@pytest.mark.cpu
def test_a_verification_finds_the_features_that_each_rank_takes() -> None:
    numbers = torch.arange(14.0).view(2, 7)
    for rank, mine in enumerate(([0, 1, 2, 3], [4, 5, 6])):
        found = part_at(numbers[:, mine], numbers, Column(gather_input=True), leaves=False, rank=rank, world_size=2)
        assert found is not None and isinstance(found[1], torch.Tensor) and found[1].tolist() == mine
    assert part_at(numbers[:, :4], numbers, Column(), leaves=False, rank=0, world_size=2) is None


def by_value() -> list[str]:
    """Streams of as many channels as divide, and of others; the first call is followed with rules for these layouts."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)
        for how, channels in (("", 18), ("layer", 48), ("dropped", 18), ("scaled", 18), ("bare", 7)):
            torch.manual_seed(0)
            x = torch.randn(2, 3, LENGTH).double()
            found += problems(how, Codec(how, channels), x, "one.down")
            found += (
                []
                if is_cut(tpk.make_plan(Codec(how, channels).double(), tp_mesh().size(), example_inputs=x))[0]
                else [how]
            )
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow("on three ranks"))])
def test_they_compute_and_train_as_the_unsharded_model(ranks: Pools, world: int) -> None:
    assert ranks(world).run(by_value, timeout=LIMIT_S) == [[]] * world


def with_a_cache() -> list[str]:
    """A call that the plan is not proven for, whose cache is of as many channels as the code around reads."""
    torch.manual_seed(0)
    plain = Codec().double()
    model = tpk.parallelize(copy.deepcopy(plain), tp_mesh(), tpk.make_plan(plain, tp_mesh(), example_inputs=X.double()))
    found, caches = [], (Cache(), Cache())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for x in torch.randn(3, 2, 3, LENGTH, dtype=torch.float64):
            ys = [net(x, cache) for net, cache in zip((model, plain), caches, strict=True)]
            found += [why] if (why := differs(*ys, LIMIT)) else []
    said = " ".join(str(one.message) for one in told if issubclass(one.category, UnprovenCallWarning))
    found += [] if "one.up" in said or tp_mesh().get_local_rank() else [f"nothing is said of one.up: {said}"]
    return found


@pytest.mark.gloo
def test_a_cache_of_what_is_padded_is_of_the_channels_of_a_rank(ranks: Pools) -> None:
    for world in (2, 3):
        assert ranks(world).run(with_a_cache, timeout=LIMIT_S) == [[]] * world


def alone(features: int, unit: int, bias: bool, activation: str | None) -> None:
    """Such a column in plain torch; x is this rank's features, and so is the gradient that arrives."""
    torch.manual_seed(0)
    mesh, out = tp_mesh(), 5 * unit
    rank, world = mesh.get_local_rank(), mesh.size()
    plain = nn.Linear(features, out, bias, dtype=torch.float64)
    layer = ColumnParallelLinear.from_linear(plain, mesh, gather_input=True, unit=unit, activation=activation)
    x, g = torch.randn(2, 3, features, dtype=torch.float64), torch.randn(2, 3, out, dtype=torch.float64)
    taken, given = (chunk_sizes(features, world), chunk_sizes(out, world, unit))
    own, mine = (slice(offsets(some)[rank], offsets(some)[rank] + some[rank]) for some in (taken, given))
    x_r, x = x[..., own].clone().requires_grad_(), x.requires_grad_()
    expected = plain(x) if activation is None else nn.functional.silu(plain(x))
    y = layer(x_r)
    close(y, expected[..., mine], "y")
    y.backward(g[..., mine])
    expected.backward(g)
    assert x_r.grad is not None and x.grad is not None
    close(x_r.grad, x.grad[..., own], "dx")
    close(whole(layer.weight.grad).view_as(plain.weight), plain.weight.grad, "dw")
    if bias:
        close(whole(layer.bias.grad).view_as(plain.bias), plain.bias.grad, "db")
    one = torch.ones(features, dtype=torch.float64)
    wanted = plain(one) if activation is None else nn.functional.silu(plain(one))
    close(layer(one[own]), wanted[mine], "one row")
    with torch.autocast("cpu", torch.bfloat16):
        y, z = layer.float()(x_r.float()), plain.float()(x.float())
    assert y.dtype == z.dtype == torch.bfloat16 or activation is not None
    assert f"takes={'/'.join(map(str, taken))}" in repr(layer), repr(layer)


@pytest.mark.gloo
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_column_gathers_the_features_that_it_takes(ranks: Pools, world: int) -> None:
    for features, unit, bias, activation in ((6, 1, True, None), (7, 3, False, "silu"), (4, 2, True, None)):
        ranks(world).run(alone, features, unit, bias, activation, timeout=LIMIT_S)


def refused() -> list[str]:
    said = []
    for options in ({"sequence_parallel": True}, {"gather_output": True}, {"save_gathered": True}):
        try:
            ColumnParallelLinear(8, 6, tp_mesh(), gather_input=True, **options)
        except ValueError as error:
            said.append(str(error))
    try:
        ColumnParallelLinear(8, 6, tp_mesh(), gather_input=True)(torch.zeros(2, 8))
    except ValueError as error:
        said.append(str(error))
    return said


@pytest.mark.gloo
def test_options_that_contradict_a_gathered_input_are_refused(ranks: Pools) -> None:
    for said in ranks(2).run(refused, timeout=LIMIT_S):
        assert ["goes with none of" in one for one in said] == [True, True, True, False]
        assert "takes 4 features on rank" in said[-1] and "this rank's part of them" in said[-1]
