"""Experts cut over the ranks: trained beside the unsharded module, with a replicated router, made from all layouts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, TOLERANCE, mine, part_of, sequence_sizes, tp_mesh
from tpkernels.nn import ParallelExperts
from tpkernels.ops.contract import GATED, activation_forward
from tpkernels.testing.numeric import gate as gate_of
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

EXPERTS, H, TOP_K = 5, 6, 2


class Mixture(nn.Module):
    """A router and experts in plain torch, expert by expert."""

    def __init__(self, d_ff: int, activation: str | None, bias: bool) -> None:
        super().__init__()
        wide = d_ff * (2 if activation in GATED else 1)
        self.activation = activation
        self.router = nn.Linear(H, EXPERTS)
        self.up, self.down = (nn.Parameter(0.4 * torch.randn(EXPERTS, *shape)) for shape in ((wide, H), (H, d_ff)))
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, wide)) if bias else None
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, H)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, H)
        experts, weights = route(self.router, tokens)
        y = torch.zeros_like(tokens)
        for e in range(EXPERTS):
            places, slots = (experts == e).nonzero(as_tuple=True)
            z = F.linear(tokens[places], self.up[e], None if self.up_bias is None else self.up_bias[e])
            if self.activation in GATED:
                gate, up = z.chunk(2, -1)
                h = gate_of(self.activation or "", gate, up)
            else:
                h = activation_forward(self.activation, z)
            out = F.linear(h, self.down[e], None if self.down_bias is None else self.down_bias[e])
            y = y.index_add(0, places, out * weights[places, slots].unsqueeze(1))
        return y.view(x.shape)

    def cut(self, mesh: Any, sequence_parallel: bool, **options: Any) -> ParallelExperts:
        return ParallelExperts.from_parameters(
            self.up, self.down, mesh, up_bias=self.up_bias, down_bias=self.down_bias, activation=self.activation,
            sequence_parallel=sequence_parallel, **options,
        )  # fmt: skip


def route(router: nn.Module, tokens: Tensor) -> tpk.Routing:
    weights, experts = router(tokens).softmax(-1).topk(TOP_K)
    return tpk.Routing(experts, weights / weights.sum(-1, keepdim=True))


def close(actual: Tensor, expected: Tensor, what: str) -> None:
    """Every element within a few roundings of itself or of 1, whichever is larger."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, what
    over = (actual.detach() - expected).abs() / (TOLERANCE[expected.dtype] * (1 + expected.abs()))
    assert over.numel() == 0 or float(over.max()) <= 1, f"{what}: {float(over.max()):.3g} times what is expected"


def parts_of(whole: Mixture, experts: ParallelExperts, name: str) -> Tensor:
    """The value or gradient of the unsharded parameter that this one is a part of."""
    names = {"gate": "up", "gate_bias": "up_bias"}
    tensor = cast(Tensor, getattr(whole, names.get(name, name)))
    if whole.activation in GATED and name != "down" and name != "down_bias":
        return tensor.chunk(2, 1)[0 if name.startswith("gate") else 1]
    return tensor


def trained(
    d_ff: int,
    activation: str | None,
    bias: bool,
    sequence_parallel: bool,
    tokens: int,
    dtype: Any,
    layout: str = "features",
    sums: bool = True,
) -> None:
    """Three steps of both; outputs, gradients of x and all parameters after each."""
    torch.manual_seed(3)
    mesh = tp_mesh()
    whole = Mixture(d_ff, activation, bias).to(dtype)
    experts = whole.cut(mesh, sequence_parallel, layout=layout, save_gathered=bias)
    router = tpk.nn.replicate_parameters(
        copy.deepcopy(whole.router), mesh, sequence_parallel=sequence_parallel and sums
    )
    ours = torch.optim.SGD([*experts.parameters(), *router.parameters()], lr=0.01, momentum=0.9)
    theirs = torch.optim.SGD(whole.parameters(), lr=0.01, momentum=0.9)
    what = f"{d_ff=}, {activation=}, {bias=}, {sequence_parallel=}, {tokens=}, {dtype}, {layout=}"
    for step in range(3):
        x = torch.randn(tokens, H, dtype=dtype, requires_grad=True)
        dy = torch.randn(tokens, H, dtype=dtype)
        own = mine(x, 0) if sequence_parallel else x.detach().clone().requires_grad_()
        sizes = sequence_sizes(tokens) if sequence_parallel else None
        expected = whole(x)
        y = experts(own, route(router, own), shard_sizes=sizes)
        of_own = (lambda t: mine(t, 0)) if sequence_parallel else (lambda t: t)
        close(y, of_own(expected.detach()), f"{what}: y of step {step}")
        expected.backward(dy)
        y.backward(of_own(dy).detach())
        assert x.grad is not None and own.grad is not None
        close(own.grad, of_own(x.grad), f"{what}: dx of step {step}")
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
        for name, parameter in experts.named_parameters():
            assert isinstance(parameter, DTensor)
            same = part_of(parts_of(whole, experts, name).detach(), parameter)
            close(parameter.to_local().detach(), same, f"{what}: {name} after step {step}")
        for (name, parameter), of_whole in zip(router.named_parameters(), whole.router.parameters(), strict=True):
            close(cast(DTensor, parameter).to_local().detach(), of_whole.detach(), f"{what}: router {name}, {step}")


def all_trained() -> int:
    cases: list[tuple[Any, ...]] = [
        (10, "swiglu", False, True, 7, torch.float64),
        (10, "swiglu", True, False, 7, torch.float64),
        (9, "geglu", True, True, 12, torch.float64),
        (2, "gelu", True, True, 3, torch.float64),  # on three ranks the last has no features
        (8, None, False, False, 5, torch.float64),
        (12, "swiglu", True, True, 1, torch.float64),  # ranks without tokens
        (16, "clamped_swiglu", True, True, 24, torch.float32),
        (10, "swiglu", True, True, 7, torch.float64, "experts"),
        (9, "gelu", True, False, 7, torch.float64, "experts"),
        (10, "clamped_swiglu", False, True, 1, torch.float32, "experts"),  # ranks without tokens
    ]
    for case in cases:
        trained(*case)
    return len(cases)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [3, 2, 1])
def test_training_beside_the_unsharded_module(ranks: Pools, world: int) -> None:
    assert min(ranks(world).run(all_trained, timeout=LIMIT_S)) == 10


def router_without_sums() -> str:
    try:
        trained(10, "swiglu", False, True, 7, torch.float64, sums=False)
    except AssertionError as error:
        return str(error)
    return "not caught"


def test_a_router_whose_gradients_were_not_summed_is_caught(ranks: Pools) -> None:
    for said in ranks(2).run(router_without_sums, timeout=LIMIT_S):
        assert "router weight, 0" in said, said


def on_a_mesh(own_tokens: bool) -> None:
    """Experts over one axis, their features over the other: values, and gradients of x, routing and parameters."""
    torch.manual_seed(6)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    rank, tokens, coordinate = dist.get_rank(), 9, mesh.get_coordinate()
    whole = Mixture(7, "swiglu", True).double()
    experts = whole.cut(mesh, own_tokens, layout="experts")
    x, dy = torch.randn(2, tokens, H, dtype=torch.float64)
    x.requires_grad_()
    with torch.no_grad():
        chosen, weights = route(whole.router, x)
    sizes = [3, 0, 4, 2]
    start = sum(sizes[:rank])
    of_own = slice(start, start + sizes[rank]) if own_tokens else slice(None)
    routing_weights = weights.clone().requires_grad_()
    with mock.patch(f"{__name__}.route", lambda router, tokens: tpk.Routing(chosen, routing_weights)):
        expected = whole(x)
    expected.backward(dy)
    own_x, own_weights = (t.detach()[of_own].clone().requires_grad_() for t in (x, weights))
    y = experts(own_x, tpk.Routing(chosen[of_own], own_weights), shard_sizes=sizes if own_tokens else None)
    close(y, expected.detach()[of_own], f"y, {own_tokens=}")
    y.backward(dy[of_own])
    for name, mine_of, of_whole in (("x", own_x, x), ("routing", own_weights, routing_weights)):
        close(cast(Tensor, mine_of.grad), cast(Tensor, of_whole.grad)[of_own], f"d {name}, {own_tokens=}")
    for name, parameter in experts.named_parameters():
        gradient = cast(Tensor, getattr(whole, {"gate": "up", "gate_bias": "up_bias"}.get(name, name)).grad)
        if name not in ("down", "down_bias"):
            gradient = gradient.chunk(2, 1)[0 if name.startswith("gate") else 1]
        grad = cast(DTensor, parameter.grad)
        assert isinstance(parameter, DTensor) and grad.placements == parameter.placements, name
        for axis, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                gradient = gradient.chunk(2, placement.dim)[coordinate[axis]]
        close(grad.to_local(), gradient, f"d {name}, {own_tokens=}")


@pytest.mark.parametrize("own_tokens", [True, False])
@pytest.mark.slow("4 s: four ranks")
def test_experts_over_one_axis_and_their_features_over_another(ranks: Pools, own_tokens: bool) -> None:
    ranks(4).run(on_a_mesh, own_tokens, timeout=LIMIT_S)


def added_to_main_grad(sequence_parallel: bool) -> None:
    """Two micro-batches; the marks say that the GEMMs have added the weights' gradients."""
    torch.manual_seed(4)
    mesh, tokens = tp_mesh(), 7
    whole = Mixture(10, "swiglu", True).double()
    experts = tpk.nn.use_main_grads(whole.cut(mesh, sequence_parallel), dtype=torch.float64)
    for parameter in experts.parameters():
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    sizes = sequence_sizes(tokens) if sequence_parallel else None
    for _ in range(2):
        x, dy = torch.randn(2, tokens, H, dtype=torch.float64)
        whole(x).backward(dy)
        with torch.no_grad():
            routing = route(whole.router, x)
        own = (lambda t: mine(t, 0)) if sequence_parallel else (lambda t: t)
        experts(own(x), tpk.Routing(*map(own, routing)), shard_sizes=sizes).backward(own(dy))
    for name, parameter in experts.named_parameters():
        of_whole = cast(Tensor, getattr(whole, {"gate": "up", "gate_bias": "up_bias"}.get(name, name)).grad)
        if name not in ("down", "down_bias"):
            of_whole = of_whole.chunk(2, 1)[0 if name.startswith("gate") else 1]
        main_grad = parameter.main_grad  # type: ignore[attr-defined]
        close(main_grad.to_local(), part_of(of_whole, cast(DTensor, parameter)), f"main_grad of {name}")
        assert parameter.grad is None, name
        assert parameter.grad_added_to_main_grad is not name.endswith("bias"), name  # type: ignore[attr-defined]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_of_experts_reach_main_grad(ranks: Pools, sequence_parallel: bool) -> None:
    ranks(2).run(added_to_main_grad, sequence_parallel, timeout=LIMIT_S)


def layouts() -> None:
    """All ways to make the module give the same one; a seed gives one model on any number of ranks."""
    torch.manual_seed(5)
    mesh, d_ff = tp_mesh(), 10
    whole = Mixture(d_ff, "swiglu", True)
    plain = whole.cut(mesh, False)
    turned = ParallelExperts.from_parameters(
        whole.up.transpose(1, 2).contiguous(), whole.down.transpose(1, 2).contiguous(), mesh, up_bias=whole.up_bias,
        down_bias=whole.down_bias, transposed=True,
    )  # fmt: skip
    mlps = nn.ModuleList(
        nn.ModuleDict({"w1": nn.Linear(H, d_ff), "w3": nn.Linear(H, d_ff), "w2": nn.Linear(d_ff, H)})
        for _ in range(EXPERTS)
    )
    assert whole.up_bias is not None and whole.down_bias is not None
    with torch.no_grad():
        for e, mlp in enumerate(mlps):
            w1, w3, w2 = (cast(nn.Linear, cast(nn.ModuleDict, mlp)[name]) for name in ("w1", "w3", "w2"))
            for linear, weight, bias in (
                (w1, whole.up[e, :d_ff], whole.up_bias[e, :d_ff]),
                (w3, whole.up[e, d_ff:], whole.up_bias[e, d_ff:]),
                (w2, whole.down[e], whole.down_bias[e]),
            ):
                linear.weight.copy_(weight)
                linear.bias.copy_(bias)
    listed = ParallelExperts.from_mlps(list(mlps), mesh, gate="w1", up="w3", down="w2")
    assert list(dict(plain.named_parameters())) == ["gate", "up", "down", "gate_bias", "up_bias", "down_bias"]
    in_turn = ParallelExperts.from_parameters(
        torch.stack(whole.up.chunk(2, 1), 2).flatten(1, 2), whole.down, mesh, interleaved=True,
        up_bias=torch.stack(whole.up_bias.chunk(2, 1), 2).flatten(1), down_bias=whole.down_bias,
    )  # fmt: skip
    for other in (turned, listed, in_turn):
        for (name, one), same in zip(plain.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(cast(DTensor, one).to_local(), cast(DTensor, same).to_local()), name
            assert same.requires_grad and one.shape == same.shape
    torch.manual_seed(7)
    new = ParallelExperts(EXPERTS, H, d_ff, mesh, bias=True, activation="geglu")
    torch.manual_seed(7)
    limit = H**-0.5
    gate = torch.empty(EXPERTS, d_ff, H).uniform_(-limit, limit)
    assert torch.equal(cast(DTensor, new.gate).to_local(), part_of(gate, cast(DTensor, new.gate)))
    assert "num_experts=5, d_model=6, d_ff=10, activation='geglu', bias=True" in repr(new)
    x = torch.randn(2, 3, H)
    routing = route(whole.router, x)
    flat = tpk.Routing(*(one.view(6, -1) for one in routing))
    assert torch.equal(plain(x, routing), plain(x.view(6, H), flat).view(x.shape))
    same = copy.deepcopy(plain)
    same.load_state_dict(plain.state_dict())
    assert torch.equal(same(x, routing), plain(x, routing))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(x, routing).dtype == torch.bfloat16
    same.to(torch.float64)
    assert same(x.double(), routing).dtype == torch.float64  # the routing's weights may have another dtype
    frozen = ParallelExperts.from_parameters(whole.up.detach(), whole.down.detach(), mesh)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


def test_every_layout_makes_the_same_module(ranks: Pools) -> None:
    ranks(3).run(layouts, timeout=LIMIT_S)


def refused() -> list[str]:
    mesh, said = tp_mesh(), []
    up, down = torch.ones(EXPERTS, 20, H), torch.ones(EXPERTS, H, 10)
    linear = nn.ModuleDict({"up": nn.Linear(H, 4), "down": nn.Linear(4, H, bias=False), "other": nn.ReLU()})
    longer = nn.ModuleDict({"up": nn.Linear(H, 5), "down": nn.Linear(5, H)})
    names = {"gate": None, "up": "up", "down": "down", "activation": None}
    experts = ParallelExperts.from_parameters(up, down, mesh)
    routing = tpk.Routing(torch.zeros(3, 1).long(), torch.ones(3, 1))
    calls: list[Callable[[], Any]] = [
        lambda: ParallelExperts(0, H, 4, mesh),
        lambda: ParallelExperts(2, H, 4, mesh, activation="tanh"),
        lambda: ParallelExperts(2, H, 4, mesh, implementation="fast"),
        lambda: ParallelExperts(2, H, 4, mesh, layout="tokens"),
        lambda: ParallelExperts.from_parameters(up, down[0], mesh),
        lambda: ParallelExperts.from_parameters(up, down, mesh, activation="silu"),
        lambda: ParallelExperts.from_parameters(up, down, mesh, transposed=True),
        lambda: ParallelExperts.from_parameters(up, down, mesh, up_bias=torch.ones(EXPERTS, 10)),
        lambda: ParallelExperts.from_parameters(up, down, mesh, down_bias=torch.ones(H)),
        lambda: ParallelExperts.from_parameters(cast(DTensor, experts.up), down, mesh),
        lambda: ParallelExperts.from_mlps([], mesh),
        lambda: ParallelExperts.from_mlps([linear], mesh, gate=None, up="up", down="down"),
        lambda: ParallelExperts.from_mlps([linear, longer], mesh, **names),
        lambda: ParallelExperts.from_mlps([linear], mesh, **(names | {"down": "other"})),
        lambda: experts(torch.ones(3, H), routing, shard_sizes=[3]),
        lambda: experts(torch.ones(3, H + 1), routing),
        lambda: experts(torch.ones(3, H), routing.experts),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"must|needs|is a DTensor") as caught:
            call()
        said.append(str(caught.value))
    return said


def test_bad_arguments_are_refused_with_names_and_values(ranks: Pools) -> None:
    for said in ranks(2).run(refused, timeout=LIMIT_S):
        assert len(said) == 17
        assert "num_experts must be at least 1, got 0" in said[0]
        assert "up ((5, 20, 6)) must be (5, 10, 6) for down of (5, 6, 10) and activation 'silu'" in said[5]
