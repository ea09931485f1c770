"""The feed-forward block, norms and replicated parameters equal their torch counterparts, gradients included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.nn.reference import LIMIT_S, close, close_parameters, close_replicas, mine, sequence_sizes, tp_mesh
from tpkernels.nn import LayerNorm, ParallelMLP, RMSNorm, replicate_parameters
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

WORLDS = (1, 2, 3)
WIDTH, HIDDEN, LENGTH = 6, 13, 7


class PlainMLP(nn.Module):
    """The names of ParallelMLP, made in its order."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = activation
        if activation == "swiglu":
            self.gate_up = nn.ModuleDict({name: nn.Linear(WIDTH, HIDDEN) for name in ("gate", "up")})
        else:
            self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.activation == "swiglu":
            hidden = F.silu(self.gate_up["gate"](x)) * self.gate_up["up"](x)
        else:
            hidden = F.gelu(self.up(x))
        y: Tensor = self.down(hidden)
        return y


class NormThenMLP(nn.Module):
    """A block as transformers have it: the norm works on shards under sequence parallelism."""

    def __init__(self, norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = norm, mlp

    def forward(self, x: Tensor, **options: object) -> Tensor:
        y: Tensor = x + self.mlp(self.norm(x), **options)
        return y


def block_equals_torch(activation: str, norm: str, sequence_parallel: bool) -> None:
    mesh = tp_mesh()
    torch.manual_seed(3)
    plain_norm = nn.LayerNorm(WIDTH) if norm == "layer" else nn.RMSNorm(WIDTH)
    with torch.no_grad():
        for parameter in plain_norm.parameters():
            parameter.normal_()
    plain = NormThenMLP(plain_norm.double(), PlainMLP(activation))
    torch.manual_seed(3)
    torch.randn(sum(p.numel() for p in plain_norm.parameters()))  # the norm's draws
    if isinstance(plain.norm, nn.LayerNorm):
        parallel_norm: nn.Module = LayerNorm.from_norm(plain.norm, mesh, sequence_parallel=sequence_parallel)
    else:
        assert isinstance(plain.norm, nn.RMSNorm)
        parallel_norm = RMSNorm.from_norm(plain.norm, mesh, sequence_parallel=sequence_parallel)
    assert isinstance(plain.mlp, PlainMLP)
    gated = activation == "swiglu"
    linears = dict(plain.mlp.gate_up.items()) if gated else {"up": plain.mlp.up}
    assert all(isinstance(linear, nn.Linear) for linear in linears.values())
    mlp = ParallelMLP.from_linears(
        down=plain.mlp.down, group=mesh, activation=activation, sequence_parallel=sequence_parallel, **linears
    )
    parallel = NormThenMLP(parallel_norm, mlp)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    g = torch.randn_like(x)
    expected = plain(x)
    expected.backward(g)
    assert x.grad is not None
    if sequence_parallel:
        x_r = mine(x, 1)
        y = parallel(x_r, shard_sizes=sequence_sizes(LENGTH))
        y.backward(mine(g, 1))
    else:
        x_r = x.detach().clone().requires_grad_()
        y = parallel(x_r)
        y.backward(g)
    assert x_r.grad is not None
    close(y, mine(expected, 1) if sequence_parallel else expected, "y")
    close(x_r.grad, mine(x.grad, 1) if sequence_parallel else x.grad, "dx")
    close_parameters(parallel, plain)
    close_replicas(parallel)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("activation", "norm"), [("gelu", "layer"), ("swiglu", "rms")])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_block_of_norm_and_mlp_equals_torch(
    ranks: Pools, world: int, activation: str, norm: str, sequence_parallel: bool
) -> None:
    ranks(world).run(block_equals_torch, activation, norm, sequence_parallel, timeout=LIMIT_S)


def new_modules_equal_torch_under_one_seed() -> None:
    mesh = tp_mesh()
    for activation in ("gelu", "swiglu"):
        torch.manual_seed(5)
        plain = PlainMLP(activation).float()
        torch.manual_seed(5)
        parallel = ParallelMLP(WIDTH, HIDDEN, mesh, activation=activation)
        close_parameters(parallel, plain)
        torch.manual_seed(5)
        for module in parallel.modules():
            if reset := getattr(module, "reset_parameters", None):
                reset()
        close_parameters(parallel, plain)
    close_parameters(LayerNorm(WIDTH, mesh), nn.LayerNorm(WIDTH))
    close_parameters(RMSNorm(WIDTH, mesh), nn.RMSNorm(WIDTH))
    assert not list(LayerNorm(WIDTH, mesh, elementwise_affine=False).parameters())
    x = torch.randn(3, WIDTH)
    assert torch.equal(LayerNorm(WIDTH, mesh, bias=False)(x), F.layer_norm(x, (WIDTH,)))


def test_new_modules_equal_torch_under_one_seed(ranks: Pools) -> None:
    ranks(2).run(new_modules_equal_torch_under_one_seed, timeout=LIMIT_S)


def missing_gradient_sum() -> None:
    """The fault: a norm on a shard of the sequence that does not sum its gradients."""
    mesh = tp_mesh()
    plain = nn.LayerNorm(WIDTH).double()
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    plain(x).square().sum().backward()
    for sums in (True, False):
        norm = LayerNorm.from_norm(plain, mesh, sequence_parallel=sums)
        norm(mine(x, 1)).square().sum().backward()
        close_parameters(norm, plain)


def test_the_comparison_catches_gradients_of_a_norm_that_were_not_summed(ranks: Pools) -> None:
    errors = ranks(2).run(missing_gradient_sum, return_exceptions=True, timeout=LIMIT_S)
    assert all(isinstance(error, AssertionError) and "gradient of weight: differs by" in str(error) for error in errors)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_parameter("absent", None)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.embedding(tokens)) * self.scale
        return y


def replicated_parameters_work_like_plain_ones() -> None:
    mesh = tp_mesh()
    torch.manual_seed(0)
    plain = Tied()
    torch.manual_seed(0)
    model = Tied()
    assert replicate_parameters(model, mesh) is model
    assert isinstance(model, Tied)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert model.head._parameters["weight"] is model.embedding._parameters["weight"]
    assert not isinstance(model.head.weight, DTensor)
    assert torch.equal(model.head.weight, plain.head.weight)
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(tokens), plain(tokens))
    plain(tokens).sum().backward()
    model(tokens).sum().backward()
    close_parameters(model, plain)
    plain.load_state_dict({name: tensor + 1 for name, tensor in plain.state_dict().items()})
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    assert torch.equal(model(tokens), plain(tokens))
    assert set(model.state_dict()) == set(plain.state_dict())
    replicate_parameters(model, mesh)  # nothing is left to do
    assert torch.equal(model.double()(tokens), plain.double()(tokens))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(tokens), plain(tokens))


def test_replicated_parameters_work_like_plain_ones(ranks: Pools) -> None:
    ranks(2).run(replicated_parameters_work_like_plain_ones, timeout=LIMIT_S)


def gradients_of_a_shard_are_summed() -> None:
    mesh = tp_mesh()
    torch.manual_seed(0)
    plain = nn.Linear(WIDTH, WIDTH).double()
    torch.manual_seed(0)
    model = replicate_parameters(nn.Linear(WIDTH, WIDTH).double(), mesh, sequence_parallel=True)
    x = torch.randn(LENGTH, WIDTH, dtype=torch.float64)
    plain(x).square().sum().backward()
    model(mine(x, 0)).square().sum().backward()
    close_parameters(model, plain)
    close_replicas(model)


def test_replicated_parameters_of_a_sequence_shard_sum_their_gradients(ranks: Pools) -> None:
    ranks(3).run(gradients_of_a_shard_are_summed, timeout=LIMIT_S)


def mlp_errors(what: str) -> None:
    mesh = tp_mesh()
    up, down = nn.Linear(4, 8), nn.Linear(8, 4)
    if what == "activation":
        ParallelMLP(4, 8, mesh, activation="tanh")
    elif what == "no gate":
        ParallelMLP.from_linears(up, down, mesh, activation="swiglu")
    elif what == "gate":
        ParallelMLP.from_linears(up, down, mesh, gate=up)
    elif what == "fit":
        ParallelMLP.from_linears(up, up, mesh)
    elif what == "gate size":
        ParallelMLP.from_linears(up, down, mesh, gate=nn.Linear(4, 7), activation="geglu")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("activation", "activation must be None or one of .*'swiglu'.*got 'tanh'"),
        ("no gate", "activation 'swiglu' needs a gate"),
        ("gate", "activation 'gelu' has no gate"),
        ("fit", r"up \(4 -> 8\) and down \(4 -> 8\) do not fit"),
        ("gate size", "gate has 7 output features, up has 8"),
    ],
)
def test_an_mlp_of_parts_that_do_not_fit_is_refused(ranks: Pools, what: str, message: str) -> None:
    for error in ranks(2).run(mlp_errors, what, return_exceptions=True, timeout=LIMIT_S):
        with pytest.raises(ValueError, match=message):
            raise error
