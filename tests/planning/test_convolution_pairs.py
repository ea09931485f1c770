"""Convolutions that are cut in pairs: what a plan proves, and values, gradients and buffers against the whole model."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.paired_convolutions import CUT, WHOLE, inputs, made
from tpkernels.errors import UnprovenCallWarning
from tpkernels.nn.gathering import gathered
from tpkernels.nn.paired_convolution import why_not_paired
from tpkernels.planning.styles import Channels, PartNorm, Replicate, Row, Sliced
from tpkernels.sharding.same_bits import check_styles
from tpkernels.testing.spawn import Pools

GIVES, TAKES = Channels(gather_output=False), Channels(inputs=True)
LIMIT = 1e-12
PAIRS = {
    "two": ("0 2", ""), "basic": ("0.layers.0 0.layers.3 1.layers.0 1.layers.3", "0.layers.1 1.layers.1"),
    "bottleneck": ("layers.0 layers.3 layers.6", "layers.1 layers.4"),
    "halves of both": ("values gates gated added", ""),
    "halves of both, normed": ("values gates gated added", "norm"),
    "dense": ("stem joined last layers.0 layers.1.0", "layers.1.1"),
    "decoder": (
        "1 3 4.layers.1 4.layers.3 6 7.layers.1 7.layers.3 8",
        "2 4.layers.0 4.layers.2 5 7.layers.0 7.layers.2",
    ),
    "backbone": (
        "stem blocks.0.layers.0 blocks.0.layers.2 blocks.0.layers.4 "
        "blocks.1.layers.0 blocks.1.layers.2 blocks.1.layers.4",
        "norm",
    ),
    "wider than dense": ("stem joined last layers.0 layers.1.0", "layers.1.1"),
    "stream": (
        "0 2.layers.0 2.layers.3 2.layers.6 3.layers.0 3.layers.3 3.layers.6 3.beside 4",
        "1 2.layers.1 2.layers.4 2.layers.7 3.layers.1 3.layers.4 3.layers.7",
    ), "grouped": ("0 7", "1 3"), "gated behind another": ("0 2", ""), "transposed": ("0 3", "1"),
    "squeezed": ("expand reduce gate project", "depthwise norms.0 norms.1"), "one dimension": ("1 4", "2"),
    "three dimensions": ("1 4", "2"), "head": ("0", "1"),
    "conformer": ("1.expand 1.project 2.expand 2.project", "1.depthwise 1.norm 2.depthwise 2.norm"),
    "layer norm": ("1.expand 1.project", "1.depthwise"), "in three": ("first second", ""),
    "gated stream": ("stem inner last", ""),
    "gated rows": ("0 2", ""),
    "frozen": ("0 3", "1"), "own code": ("first second", "depthwise"),
    "own code of halves": ("first second", "depthwise"),
    "slope": ("0 2", ""),
    "snake": ("2.layers.1 2.layers.3 3.layers.1 3.layers.3", "2.layers.2 3.layers.2"),
}  # fmt: skip
"""By model: the convolutions that are cut in pairs, and what is cut between them."""


def planned(name: str, world: int, **options: Any) -> tpk.ShardingPlan:
    return tpk.make_plan(made(name), world, example_inputs=inputs(name), **options)


def paired(plan: tpk.ShardingPlan) -> str:
    return " ".join(e.path for e in plan.entries if isinstance(e.style, Channels) and e.style.paired)


@pytest.mark.cpu
@pytest.mark.parametrize("name", CUT)
def test_a_convolution_gives_its_channels_to_one_that_sums_them(name: str) -> None:
    for world in (2, 3):
        plan = planned(name, world)
        assert (paired(plan), " ".join(e.path for e in plan.entries if isinstance(e.style, Sliced))) == PAIRS[name]
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    if name == "squeezed":
        assert plan.attributes == {"depthwise.groups": (13, (5, 5, 3))}
        assert plan["depthwise"].parameters[0].local_shapes == ((5, 1, 3, 3), (5, 1, 3, 3), (3, 1, 3, 3))
    if name == "dense":
        assert plan["joined"].style == Channels(inputs=True, gather_output=False, taken=(7, 5, 5))
        weight, bias = plan["joined"].parameters
        assert weight.local_shapes == ((7, 7, 3, 3), (7, 7, 3, 3), (7, 3, 3, 3))
        assert bias.local_shapes == ((3,), (3,), (1,))
    if name == "wider than dense":
        assert plan["joined"].style == Channels(inputs=True, gather_output=False, taken=(7, 5, 5), gather_input=True)
        weight, bias = plan["joined"].parameters
        assert weight.local_shapes == ((7, 17, 3, 3), (7, 17, 3, 3), (5, 17, 3, 3)), "it takes all, in their order"
        assert bias.local_shapes == ((7,), (7,), (5,))
    if name == "conformer":
        assert plan["1.expand"].style == Channels(gather_output=False, segments=(3, 3))
    if name == "layer norm":
        assert plan["1.norm"].style == PartNorm(1e-5, centred=True)
    if name == "snake":
        assert plan["2.layers.2"].style == Sliced((("alpha", 1),))
        assert (
            plan["1"].reason == "by its output channels, gathered (not in a pair: with the result of the model that it "
            "would gather, a pair would send as much)"
        )
    if name == "head":
        assert plan["5"].style == Row()
    if name == "basic":
        assert plan["0.layers.3"].parameters[0].local_shapes[2] == (5, 1, 3, 3), "its weight has a rank's inputs"
        assert plan["0.layers.4"].style == Replicate(), "what goes into it is whole"


@pytest.mark.cpu
@pytest.mark.parametrize("name", WHOLE)
def test_what_only_looks_like_a_pair_is_gathered(name: str) -> None:
    plan = planned(name, 2)
    assert paired(plan) == "" and not any(isinstance(entry.style, Sliced) for entry in plan.entries)


@pytest.mark.cpu
def test_a_plan_says_why_a_convolution_is_in_no_pair() -> None:
    for name, convolution, why in (
        ("literal sizes", "first", "with one rank's sizes the model raises RuntimeError: split_with_sizes"),
        ("halves of halves", "3", "aten.glu: [0:6] of a dimension cut as [12] is not a number of parts"),
        ("wide", "2", "a pair would send more than its layers do without it"),
    ):
        reason = planned(name, 2)[convolution].reason  # of a group that was tried
        assert reason.startswith(f"by its output channels, gathered (not in a pair: {why}"), name


class Alone(nn.Module):
    """Convolutions that are in no group at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.grouped, self.unused = nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1, groups=2), nn.Conv1d(4, 4, 1)
        self.middle, self.last, self.named = nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        given, x = x, self.grouped(self.first(self.named(input=x)).mean((1, 2), keepdim=True) + x)
        y: Tensor = self.last(self.middle(x.transpose(1, 2)).transpose(1, 2) + x + given)
        return y


@pytest.mark.cpu
def test_a_plan_says_why_a_convolution_is_in_no_group_at_all() -> None:
    plan = tpk.make_plan(Alone().double(), 2, example_inputs=torch.zeros(2, 4, 4).double())
    for name, why in (
        ("named", "it is called with more than a tensor, or inside of a module that needs values"),
        ("unused", "it is not called by the example"),
        ("grouped", "it has groups of channels, hooks, or a weight that is made of other parameters"),
        ("last", "last also takes what no layer gives"),
    ):
        assert plan[name].reason == f"by its output channels, gathered (not in a pair: {why})", plan[name].reason


@pytest.mark.cpu
def test_a_pair_sends_one_sum_and_never_more_than_two_gathers() -> None:
    plan, x = planned("basic", 2), 8 * 2 * 5 * 8 * 6
    first, second = plan["1.layers.0"], plan["1.layers.3"]
    assert (first.forward, first.backward, first.wire_bytes) == ("-", "all-reduce of dx", x)
    assert (second.forward, second.backward, second.wire_bytes) == ("all-reduce of y", "-", x)
    for name in (*CUT, "wide"):
        model = made(name)
        convolutions = {n: m for n, m in model.named_modules() if isinstance(m, nn.modules.conv._ConvNd)}
        styles = {n: "replicate" if m.groups > 1 else "channels" for n, m in convolutions.items()}
        alone = planned(name, 2, overrides=styles)
        assert planned(name, 2).wire_bytes <= alone.wire_bytes, name


@pytest.mark.cpu
def test_overrides_keep_a_pair_apart_and_cannot_ask_for_half_of_one() -> None:
    for name in ("0.layers.0", "0.layers.1"):
        plan = planned("basic", 2, overrides={name: "replicate"})
        assert paired(plan) == "1.layers.0 1.layers.3" and plan[name].style == Replicate()
    with pytest.raises(ValueError, match="asks for one convolution of a pair, which only the data flow can prove"):
        planned("basic", 2, overrides={"0.layers.0": GIVES})
    with pytest.raises(ValueError, match="segments are taken by a convolution that takes this rank's channels"):
        Channels(taken=(3, 3))
    with pytest.raises(ValueError, match="segments are of a convolution that takes whole tensors and gives"):
        Channels(segments=(3, 3))
    for module, options, why in (
        (nn.Conv1d(4, 6, 3, groups=2), {"inputs": True}, r"too few groups of channels \(2\) for 3 ranks"),
        (nn.Conv1d(6, 6, 3, groups=3), {"inputs": True, "taken": (3, 3)}, "has 3 groups of channels, which are in no"),
        (nn.Conv1d(6, 2, 3), {"inputs": True, "outputs": True}, r"has too few channels \(2\) for 3 ranks"),
        (nn.Conv1d(2, 6, 3), {"inputs": True}, r"takes too few channels \(2\) for 3 ranks"),
        (nn.Conv1d(6, 2, 3), {"inputs": False}, r"has too few channels \(2\) for 3 ranks"),
        (nn.Conv1d(6, 6, 3), {"inputs": False, "segments": (3, 4)}, r"segments \[3, 4\] do not make up"),
        (nn.Conv1d(6, 6, 3), {"inputs": True, "taken": (3, 4)}, r"input channels, which segments \[3, 4\] do not"),
        (nn.Conv1d(6, 6, 3), {"inputs": True, "taken": (2, 4)}, r"too few channels in one of its segments \[2, 4\]"),
        (
            nn.Conv1d(6, 6, 3),
            {"inputs": False, "segments": (2, 4)},
            r"too few channels in one of its segments \[2, 4\]",
        ),
    ):
        assert re.search(
            why, why_not_paired(module, 3, **{"outputs": not options["inputs"]} | options) or "it can be cut"
        ), why


@pytest.mark.cpu
def test_with_same_bits_nothing_is_cut_in_pairs() -> None:
    """Also what stands between linear layers, where a norm would be cut."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 16),
                          nn.BatchNorm1d(16), nn.Linear(16, 8))  # fmt: skip
    x = torch.zeros(2, 4, 6, 6)
    for options in ({}, {"same_bits": 4}):
        plan = tpk.make_plan(model, 2, example_inputs=x, **options)  # type: ignore[arg-type]
        assert (paired(plan) == "") == isinstance(plan["5"].style, Replicate) == bool(options)
    check_styles(plan.styles, 4)
    for style in (GIVES, TAKES):
        with pytest.raises(ValueError, match="is a convolution of a pair, whose bits depend on the number"):
            check_styles({"0": style}, 4)


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """One step of training, and what comes of it: outputs in training and evaluation, gradients, buffers."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model.train()(x)
    y.backward(torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(7)))
    assert x.grad is not None
    found = {"y": y.detach(), "dx": x.grad}
    found |= joined(model, {f"d{name}": gathered(p.grad) for name, p in model.named_parameters() if p.grad is not None})
    with torch.no_grad():
        found["later"] = model.eval()(x)
    return found | joined(model, {name: gathered(buffer) for name, buffer in model.named_buffers()}, "")


def joined(model: nn.Module, gradients: dict[str, Tensor], before: str = "d") -> dict[str, Tensor]:
    """Gradients of packed parameters under the name of the whole one; ``before``: what all names begin with."""
    for path, module in model.named_modules():
        tell = getattr(module, "packed_parameters", None)
        for name, (dim, parts) in tell().items() if tell is not None else ():
            keys = [f"{before}{path}.{part}" for part in parts]
            if keys[0] in gradients:
                gradients[f"{before}{path}.{name}"] = torch.cat([gradients.pop(key) for key in keys], dim)
    return gradients


def differing(what: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    if found.keys() != expected.keys():
        return [f"{what}: {sorted(found.keys() ^ expected.keys())}"]
    off = {key: float((found[key] - value).abs().max()) for key, value in expected.items()}
    return [f"{what}: {key} by {off[key]}" for key, value in expected.items()
            if not off[key] <= LIMIT * max(1.0, float(value.abs().max()))]  # fmt: skip


def compare(names: list[str]) -> list[str]:
    wrong = []
    for name in names:
        plain, x = made(name), inputs(name)
        plan = tpk.make_plan(plain, tp_mesh(), example_inputs=x)
        model = copy.deepcopy(tpk.parallelize(copy.deepcopy(plain), tp_mesh(), plan))
        assert paired(plan) == PAIRS[name][0]
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnprovenCallWarning)
            wrong += differing(name, step(model, x), step(plain, x))
        wrong += differing(f"state of {name}", tpk.full_state_dict(model), plain.state_dict())
        meta = tpk.parallelize(made(name).to("meta"), tp_mesh(), plan)
        tpk.load_full_state_dict(meta, plain.state_dict())
        wrong += differing(f"{name} from the meta device", step(meta, x), step(plain, x))
        first = made(name)
        model.load_state_dict(first.state_dict())
        meta.load_state_dict({key: one.clone() for key, one in first.state_dict().items()}, assign=True)
        expected = step(first, x)
        wrong += differing(f"{name} loaded", step(model, x), expected)
        wrong += differing(f"{name} assigned", step(meta, x), expected)
    return wrong


def by_hand() -> list[str]:
    plain, x = made("two"), inputs("two")
    model = tpk.parallelize(copy.deepcopy(plain), tp_mesh(), {"0": GIVES, "2": TAKES})
    for module, fresh in ((model[0], plain[0]), (model[2], plain[2])):  # type: ignore[index]
        for one in (module, fresh):
            torch.manual_seed(4)
            one.reset_parameters()
    with pytest.raises(ValueError, match="whose own code around torch's forward would meet one rank's part"):
        tpk.parallelize(made("own code"), tp_mesh(), {"first": GIVES, "second": TAKES})
    assert "shards=" in repr(model[0]) and "shards=" in repr(model[2])  # type: ignore[index]
    with pytest.raises(ValueError, match="spatial dimensions behind"):
        model[2](torch.zeros(2, 7, 8, 8).double())  # type: ignore[index]
    return differing("by hand", step(model, x), step(plain, x)) + gated_by_hand()


def gated_by_hand() -> list[str]:
    """A first one of two segments, whose parts are initialised anew and read as one weight."""
    torch.manual_seed(3)
    plain: Any = nn.Sequential(nn.ConvTranspose1d(3, 10, 2), nn.GLU(1), nn.Conv1d(5, 2, 1)).double()
    model: Any = tpk.parallelize(
        copy.deepcopy(plain), tp_mesh(), {"0": Channels(gather_output=False, segments=(5, 5)), "2": TAKES}
    )
    for one in (model, plain):
        torch.manual_seed(4)
        one[0].reset_parameters()
    assert "segments=5/5" in repr(model[0]) and isinstance(model[0], nn.ConvTranspose1d)
    first: Any = model[0]
    assert first.weight.shape == (3, 10, 2) and first.bias.shape == (10,)
    x = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    wrong = differing("gated by hand", step(model, x), step(plain, x))
    return wrong + differing("state of it", tpk.full_state_dict(model), plain.state_dict()) + joined_by_hand()


class Joined(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self[2](self[1](torch.cat((self[0](x), self[0](-x)), 1)))
        return y


def joined_by_hand() -> list[str]:
    """One that takes parts of two segments, and scatters its sum, with a bias."""
    torch.manual_seed(3)
    plain: Any = Joined(nn.Conv1d(3, 5, 2), nn.ConvTranspose1d(10, 5, 2), nn.Conv1d(5, 2, 1)).double()
    styles = {"0": GIVES, "1": Channels(gather_output=False, inputs=True, taken=(5, 5)), "2": TAKES}
    model: Any = tpk.parallelize(copy.deepcopy(plain), tp_mesh(), styles)
    for one in (model, plain):
        torch.manual_seed(4)
        one[1].reset_parameters()
    assert "segments=5/5" in repr(model[1]) and model[1].weight.shape == (10, 5, 2) and model[1].bias.shape == (5,)
    x = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    wrong = differing("joined by hand", step(model, x), step(plain, x))
    return wrong + differing("state of it", tpk.full_state_dict(model), plain.state_dict())


@pytest.mark.gloo
@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [3, 2])
def test_values_gradients_and_buffers_are_those_of_the_whole_model(ranks: Pools, world: int, full: bool) -> None:
    names = (
        list(CUT)
        if full
        else [
            "basic",
            "stream",
            "dense",
            "backbone",
            "decoder",
            "wider than dense",
            "halves of both",
            "squeezed",
            "one dimension",
            "head",
            "conformer",
            "snake",
            "frozen",
            "own code",
            "own code of halves",
            "slope",
        ]
    )
    assert ranks(world).run(compare, names, timeout=LIMIT_S) == [[]] * world
    assert ranks(world).run(by_hand, timeout=LIMIT_S) == [[]] * world


def goes_another_way() -> list[str]:
    """What is told of a call in which a rank's channels change places before they are summed."""
    plain, x = made("own code"), inputs("own code")
    model = tpk.parallelize(plain, tp_mesh(), tpk.make_plan(plain, tp_mesh(), example_inputs=x))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UnprovenCallWarning)
        model(x, turned=True)
    return [str(one.message) for one in told if one.category is UnprovenCallWarning]


@pytest.mark.gloo
def test_a_call_goes_another_way_to_a_convolution_within_code_of_its_own(ranks: Pools) -> None:
    (told,), others = ranks(2).run(goes_another_way, timeout=LIMIT_S)
    assert "whether the inputs of second in this call are cut as their weights are" in told and not others


def drops() -> dict[str, Any]:
    """What dropout leaves out between a pair, and what comes of it behind another one, of whole tensors."""
    torch.manual_seed(3)
    layers = [nn.Conv2d(3, 64, 1), nn.Dropout(0.5), nn.Conv2d(64, 4, 1), nn.Dropout(0.5)]
    model = nn.Sequential(*layers).double()
    x = inputs("two")
    plan = tpk.make_plan(model, tp_mesh(), example_inputs=x)
    tpk.parallelize(model, tp_mesh(), tpk.ShardingPlan.from_json(plan.to_json())).train()
    found: dict[str, Any] = {"plan": (paired(plan), plan.random)}

    def dropped(module: nn.Module, args: Any, output: Tensor) -> None:
        found["mask"] = output.detach() == 0

    dropped.takes_parts = True  # type: ignore[attr-defined]
    model[1].register_forward_hook(dropped)
    torch.manual_seed(7)
    return found | {"y": model(x).detach(), "next": torch.rand(())}


@pytest.mark.gloo
def test_dropout_between_a_pair_differs_on_the_channels_of_each_rank(ranks: Pools) -> None:
    one, other = ranks(2).run(drops, timeout=LIMIT_S)
    assert one["plan"] == other["plan"] == ("0 2", (("0", "2"),))
    assert torch.equal(one["y"], other["y"]) and torch.equal(one["next"], other["next"])
    assert 0.4 < (one["mask"] == other["mask"]).double().mean() < 0.6, "independent masks agree on half of them"


def over_replicas() -> list[str]:
    """Two replicas of two ranks, which share the parameters and have the same batch."""
    mesh, wrong = tpk.init(dp=2, tp=2), []
    for name in ("basic", "squeezed", "conformer", "snake", "stream", "dense"):
        plain, x = made(name), inputs(name)
        model = tpk.parallelize(copy.deepcopy(plain), mesh, example_inputs=x)
        units = [one for one in model.children() if not isinstance(one, nn.ModuleList)]
        wrong += differing(name, step(tpk.data_parallel(model, mesh, shard=True, units=units), x), step(plain, x))
    return wrong


@pytest.mark.gloo
@pytest.mark.slow("4 ranks")
def test_pairs_are_right_where_replicas_share_their_parameters(ranks: Pools) -> None:
    assert ranks(4).run(over_replicas, timeout=LIMIT_S) == [[]] * 4
