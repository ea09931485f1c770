"""Convolutions that are cut by their output channels, against torch's in fp64: values, gradients, bytes, refusals."""

from __future__ import annotations

import copy
import re
from math import prod
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.conv import _ConvNd

import tpkernels as tpk
from tests.kept_mesh import once_per_pool
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.ops.same_bits import assert_same
from tpkernels.nn.convolution import channel_dims, cut_channels, why_not_cut
from tpkernels.partition import chunk_sizes, offsets
from tpkernels.planning.alone.convolutions import check_channels
from tpkernels.sharding import Channels, Replicate, Sliced
from tpkernels.testing.numeric import assert_within_bound
from tpkernels.testing.spawn import Pools

EPS = torch.finfo(torch.float32).eps
weight_norm: Any = nn.utils.parametrizations.weight_norm
Case = tuple[nn.Module, tuple[int, ...], dict[str, Any]]


def cases(world: int, full: bool) -> list[Case]:
    """Convolutions, the shape of x, and arguments of the call; uneven channels but where there are groups."""
    g = world
    few: list[Case] = [
        (nn.Conv2d(3, 7, (2, 3), stride=(2, 3)), (2, 3, 4, 6), {}),
        (nn.Conv1d(4 * g, 6 * g, 3, padding=2, dilation=2, groups=2 * g, padding_mode="circular"), (2, 4 * g, 5), {}),
        (nn.ConvTranspose2d(4, 5, 3, stride=2, bias=False), (2, 4, 3, 2), {"output_size": [8, 6]}),
        (Causal(3, 7, 2), (2, 3, 4), {}),
    ]
    if not full:
        return few
    return [
        *few,
        (nn.Conv3d(3, 5, 3, padding="same"), (3, 3, 2, 4), {}),
        (nn.Conv1d(4, 8, 3, padding=1, padding_mode="reflect"), (4, 6), {}),
        (nn.Conv2d(2 * g, 4 * g, 3, groups=2 * g), (2, 2 * g, 5, 4), {}),
        (nn.Conv2d(4, 5, 1), (0, 4, 2, 2), {}),
        (nn.ConvTranspose1d(2 * g, 4 * g, 3, stride=2, padding=1, output_padding=1, groups=g), (2, 2 * g, 5), {}),
        (nn.ConvTranspose3d(2, 5, 2), (1, 2, 2, 3, 2), {}),
        (nn.Conv2d(3, 7, 3).to(memory_format=torch.channels_last), (2, 3, 5, 4), {}),  # type: ignore[call-overload]
    ]


class Causal(nn.Conv1d):
    """As in transformers' Moonshine and Voxtral: code of its own around torch's."""

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        return super().forward(nn.functional.pad(x, (1, 0))) + shift


def computed(module: nn.Module, x: Tensor, dy: Tensor | None, call: dict[str, Any]) -> dict[str, Tensor]:
    x = x.detach().clone().requires_grad_()
    y = module(x, **call)
    y.backward(torch.ones_like(y) if dy is None else dy)
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad} | {f"d{name}": p.grad for name, p in module.named_parameters()}  # type: ignore[dict-item]


def compare(number: int, plain: nn.Module, shape: tuple[int, ...], call: dict[str, Any]) -> None:
    """fp32 against fp64, each element within what its products and the roundings of sums over ranks may lose."""
    mesh, conv = tp_mesh(), cast(_ConvNd, plain)
    cut = cut_channels(copy.deepcopy(plain), mesh)
    assert isinstance(cut, type(plain))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    dy = torch.randn(plain(x, **call).shape, generator=torch.Generator().manual_seed(number))
    exact, sizes = copy.deepcopy(plain).double(), copy.deepcopy(plain).double()
    with torch.no_grad():
        for parameter in sizes.parameters():
            parameter.abs_()
    found = computed(cut, x, dy, call)
    expected = computed(exact, x.double(), dy.double(), call)
    products = computed(sizes, x.double().abs(), dy.double().abs(), call)
    kernel, positions = prod(conv.kernel_size), dy.numel() // conv.out_channels
    counts = {"y": conv.in_channels * kernel, "dx": conv.out_channels * kernel}
    for name, value in expected.items():
        actual: Any = found[name]
        size = products[name]
        if isinstance(actual, DTensor):
            dim, rank = channel_dims(plain)[name[1:]], mesh.get_local_rank()
            parts = chunk_sizes(value.shape[dim], mesh.size())
            assert actual.shape == value.shape and actual.placements[0].is_shard(dim)
            actual = actual.to_local()
            value, size = (one.narrow(dim, offsets(parts)[rank], parts[rank]) for one in (value, size))
        rounded = 0.5 * EPS * (value.abs() + (size if name == "dx" else 0))
        bound = rounded + counts.get(name, positions) ** 0.5 * EPS * size
        assert_within_bound(actual, value, bound, f"{name} of case {number}")


def normed_cases(world: int) -> list[tuple[_ConvNd, int]]:
    """Norms of each channel, of each place of the kernel over all channels, and of each input channel."""
    grouped = nn.Conv1d(2 * world, 4 * world, 3, groups=world)
    return [(nn.Conv1d(4, 7, 3), 0), (grouped, 2), (nn.ConvTranspose1d(4, 7, 3), 0)]


def compare_normed(number: int, conv: _ConvNd, dim: int) -> None:
    """The same for weights that a norm makes; their gradients are bounded by those of the weight, through the norm."""
    plain, sizes = weight_norm(copy.deepcopy(conv), dim=dim), copy.deepcopy(conv).double()
    cut, exact = cut_channels(copy.deepcopy(plain), tp_mesh()), copy.deepcopy(plain).double()
    x = torch.randn(2, conv.in_channels, 5, generator=torch.Generator().manual_seed(number))
    with torch.no_grad():
        for parameter in sizes.parameters():
            parameter.abs_()
    found = computed(cut, x, None, {})
    expected, products = computed(exact, x.double(), None, {}), computed(sizes, x.double().abs(), None, {})
    inner = exact.parametrizations["weight"]
    g, v = inner.original0.detach().abs(), inner.original1.detach().abs()
    norm, dw = torch.norm_except_dim(v, 2, dim), products.pop("dweight")
    along = (v * dw).sum([other for other in range(3) if other != dim], keepdim=True)
    key = "dparametrizations.weight.original"
    products |= {f"{key}0": along / norm, f"{key}1": g / norm * (dw + v * along / norm**2)}
    count = max(conv.in_channels, conv.out_channels) * conv.kernel_size[0] + expected["y"].numel()
    for name, value in expected.items():
        actual: Any = found[name]
        if isinstance(actual, DTensor):
            actual = actual.full_tensor()
        assert_within_bound(actual, value, (count**0.5 + 8) * EPS * products[name], f"{name} of normed case {number}")


def values(full: bool) -> None:
    torch.manual_seed(5)
    for number, (conv, dim) in enumerate(normed_cases(tp_mesh().size())):
        compare_normed(number, conv, dim)
    for number, (plain, shape, call) in enumerate(cases(tp_mesh().size(), full)):
        compare(number, plain, shape, call)
    x = torch.zeros(2, 3, 4, 4)
    cut = cut_channels(nn.Conv2d(3, 7, 2), tp_mesh())
    with torch.no_grad():
        first = cut(x).clone()
    torch.manual_seed(11)
    cut.reset_parameters()  # type: ignore[operator]
    torch.manual_seed(11)
    fresh = nn.Conv2d(3, 7, 2)
    assert torch.equal(tpk.full_state_dict(cut)["weight"], fresh.weight) and not torch.equal(first, cut(x))
    with pytest.raises(ValueError, match=r"takes x of 2 spatial dimensions behind 3 channels, got \(2, 4, 4, 4\)"):
        cut(torch.zeros(2, 4, 4, 4))
    assert "shards=" in repr(cut) and cut(x).shape == fresh(x).shape, "the group goes on after a call that it refused"


@pytest.mark.gloo
@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [3, 2, 1])
def test_values_and_gradients_are_those_of_all_channels(ranks: Pools, world: int, full: bool) -> None:
    ranks(world).run(values, full, timeout=LIMIT_S)


class Vision(nn.Module):
    """Patches, then stages of other kinds: transposed, of each channel by itself, in groups, and read by weight."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 10, 4, stride=4)
        self.up = nn.ConvTranspose2d(10, 12, 2, stride=2)
        self.depthwise = nn.Conv2d(12, 12, 3, groups=12)
        self.grouped = nn.Conv2d(12, 12, 1, groups=6)
        self.read = nn.Conv2d(12, 4, 1)
        self.idle = nn.Conv2d(4, 4, 1)
        self.unseen = nn.Conv2d(4, 4, 1)
        self.later = False
        self.own = Standardized(12, 8, 1)
        self.causal = Causal(4, 4, 2)
        self.normed = weight_norm(nn.Conv1d(4, 4, 3, padding=1), dim=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.grouped(self.depthwise(self.up(self.patches(x).tanh())))
        out: Tensor = self.own(y).sum() + self.read(y) * nn.functional.conv2d(y, self.read.weight)
        out = self.normed(self.causal(out.flatten(2), 0.5)).view(out.shape)
        return nn.functional.conv2d(out, self.unseen.weight) if self.later else out


class Standardized(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return nn.functional.conv2d(input, weight, self.bias)


@pytest.mark.cpu
def test_the_plan_says_which_convolutions_are_cut_and_what_they_send() -> None:
    plan = tpk.make_plan(Vision(), 2, example_inputs=torch.zeros(2, 3, 8, 8))
    assert plan["patches"].style == Channels()
    assert (plan["up"].style, plan["grouped"].style) == (Channels(gather_output=False), Channels(inputs=True))
    assert plan["depthwise"].style == Sliced((("bias", 0), ("weight", 0)))
    assert plan["idle"].style == Channels() and plan["idle"].wire_bytes is None, "nobody reads its weight"
    assert plan["causal"].style == Channels(gather_output=False)
    assert plan["normed"].style == plan["normed.parametrizations.weight"].style == Channels(inputs=True)
    norm = plan["normed.parametrizations.weight"]
    assert [part.local_shapes[0] for part in norm.parameters] == [(1, 1, 3), (4, 2, 3)]
    assert norm.forward == "all-reduce of sums of squares" and norm.wire_bytes == 2 * 3 * 3 * 4 // 2
    assert plan["patches"].parameters[0].local_shapes == ((5, 3, 4, 4), (5, 3, 4, 4))
    assert plan["up"].parameters[0].local_shapes == ((10, 6, 2, 2), (10, 6, 2, 2))
    assert plan["patches"].wire_bytes == 4 * (2 * 10 * 2 * 2) // 2 and plan["patches"].backward == "-"
    assert plan["up"].wire_bytes == 4 * (2 * 2 * 10 * 2 * 2) // 2, "a sum of its input's gradient"
    assert plan["grouped"].wire_bytes == 4 * (2 * 12 * 2 * 2) // 2, "its output, gathered"
    for name, why in (
        ("read", "without calling the module"),
        ("unseen", "may use without calling"),
        ("own", "code of its own that may use the weight"),
    ):
        assert plan[name].style == Replicate() and why in plan[name].reason, name
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan


def parallel() -> list[str]:
    torch.manual_seed(3)
    plain = Vision().double()
    model, x = copy.deepcopy(plain), torch.randn(2, 3, 8, 8).double()
    tpk.parallelize(model, tp_mesh(), example_inputs=x, verify=True)
    state = tpk.full_state_dict(model)
    tied = nn.Sequential(nn.Conv1d(6, 6, 1), nn.Conv1d(6, 6, 1))
    tied[1].weight = tied[0].weight
    for net, plan, why in (
        (tied, {"0": "channels"}, "tied to another module's"),
        (nn.Sequential(nn.Linear(4, 4)), {"0": "channels"}, "is a Linear that cannot be cut by channels"),
        (nn.Sequential(nn.Conv1d(8, 8, 1, groups=4)), {"0": "channels"}, "too few groups of channels"),
    ):
        if "groups" not in why or tp_mesh().size() == 3:
            with pytest.raises(ValueError, match=why):
                tpk.parallelize(net, tp_mesh(), plan)
    return [name for name, value in plain.state_dict().items() if not torch.equal(state[name], value)]


@pytest.mark.gloo
@pytest.mark.sample(1)
@pytest.mark.slow("2 s: verifies a model")
@pytest.mark.parametrize("world", [3, 2])
def test_a_model_with_convolutions_is_right_and_keeps_its_state(ranks: Pools, world: int) -> None:
    assert ranks(world).run(parallel, timeout=LIMIT_S) == [[]] * world


def with_an_adapter() -> tuple[Tensor, Tensor, Any]:
    """As PEFT adds it: by calling the class of the layer."""
    torch.manual_seed(5)
    plain, x = Causal(3, 8, 2), torch.randn(2, 3, 6)
    cut: Any = cut_channels(copy.deepcopy(plain), tp_mesh())
    half = type(cut)(3, 4, kernel_size=2, bias=False)
    assert type(half) is Causal and type(copy.deepcopy(cut)) is type(cut) and type(cut) is not Causal
    y, delta = cut(x), half(x)
    (y.sum() + delta.sum()).backward()
    return y.detach(), plain(x).detach(), half.weight.grad


@pytest.mark.gloo
def test_the_class_of_a_cut_convolution_makes_whole_ones(ranks: Pools) -> None:
    for y, expected, grad in ranks(2).run(with_an_adapter, timeout=LIMIT_S):
        assert y.shape == expected.shape and float((y - expected).abs().max()) < 1e-5 and grad is not None


@once_per_pool
def own_group() -> Any:
    return dist.new_group()


def trained() -> dict[str, Tensor]:
    torch.manual_seed(4)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.SiLU(), nn.ConvTranspose2d(16, 8, 2), nn.Conv2d(8, 8, 1, groups=8))
    x = torch.randn(2, 3, 7, 7)
    plan = {str(place): "channels" for place in (0, 2, 3)}
    model = tpk.parallelize(net, own_group(), plan, same_bits=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = {}
    for step in range(2):
        loss = model(x).square().mean()
        loss.backward()
        found |= {f"loss {step}": loss.detach(), f"norm {step}": tpk.clip_grad_norm_(model.parameters(), 0.1)}
        optimizer.step()
        optimizer.zero_grad()
    return found | tpk.full_state_dict(model)


@pytest.mark.gloo
@pytest.mark.slow("2 s: pools of one and of two ranks")
def test_with_same_bits_all_channels_are_computed_on_every_rank(ranks: Pools) -> None:
    (expected,) = ranks(1).run(trained, timeout=LIMIT_S)
    for found in ranks(2).run(trained, timeout=LIMIT_S):
        for name, value in expected.items():
            assert_same(found[name], value, name)


@pytest.mark.cpu
def test_what_is_no_convolution_of_torchs_is_not_cut() -> None:
    spectral = nn.utils.parametrizations.spectral_norm(nn.Conv1d(4, 6, 3))
    replaced: Any = nn.Conv1d(4, 6, 3)
    replaced.forward = lambda x: x
    for module, world, why in (
        (spectral, 2, "code, hooks or parameters"),
        (replaced, 2, "code, hooks or parameters"),
        (nn.Linear(4, 6), 2, "code, hooks or parameters"),
        (nn.LazyConv1d(6, 3), 2, "have no shape yet"),
        (nn.Conv1d(4, 6, 3, dtype=torch.complex64), 2, "has weights of torch.complex64"),
        (nn.Conv1d(4, 4, 3), 3, r"too few channels \(4\) for 3 ranks"),
        (nn.Conv1d(4, 12, 3, groups=2), 3, r"too few groups of channels \(2\)"),
        (nn.Conv1d(20, 20, 3, groups=5), 3, "5 groups of channels, which do not divide"),
    ):
        assert re.search(why, why_not_cut(module, world) or "it can be cut"), why
    assert why_not_cut(nn.Conv1d(4, 12, 3), 2, 8) == "has 12 channels, no multiple of same_bits (8)"
    assert "a norm makes" in str(why_not_cut(weight_norm(nn.Conv1d(4, 8, 3)), 2, 8))
    assert why_not_cut(nn.Conv1d(4, 6, 3), 2) is why_not_cut(weight_norm(nn.Conv1d(4, 6, 3)), 2) is None
    with pytest.raises(ValueError, match="code of its own that may use the weight"):
        check_channels("own", Standardized(4, 6, 1), 2)
