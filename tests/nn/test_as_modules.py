"""What people do with modules: copy, save, load, convert, optimise, clip, checkpoint, compile, autocast."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, close, close_parameters, close_replicas, sequence_sizes, tp_mesh, whole
from tpkernels.nn import ColumnParallelLinear, LayerNorm, ParallelMLP
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

WIDTH, HIDDEN, LENGTH = 6, 13, 7


class Plain(nn.Module):
    """A norm, a feed-forward block and a head of five outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"up": nn.Linear(WIDTH, HIDDEN), "down": nn.Linear(HIDDEN, WIDTH)})
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp["down"](nn.functional.gelu(self.mlp["up"](self.norm(x))))
        y: Tensor = self.head(x)
        return y


class Parallel(nn.Module):
    """The same; takes the whole sequence, works on this rank's part of it, returns the whole."""

    def __init__(self) -> None:
        super().__init__()
        mesh = tp_mesh()
        self.norm = LayerNorm(WIDTH, mesh, sequence_parallel=True)
        self.mlp = ParallelMLP(WIDTH, HIDDEN, mesh, sequence_parallel=True)
        self.head = ColumnParallelLinear(WIDTH, 5, mesh, sequence_parallel=True, gather_output=True)

    def forward(self, x: Tensor) -> Tensor:
        sizes = sequence_sizes(x.shape[-2])
        x = tpk.shard(x, self.head.mesh, dim=-2, shard_sizes=sizes)
        x = x + self.mlp(self.norm(x), shard_sizes=sizes)
        y: Tensor = self.head(x, shard_sizes=sizes)
        return y


def pair(dtype: torch.dtype = torch.float64) -> tuple[Plain, Parallel, Tensor]:
    torch.manual_seed(11)
    plain = Plain().to(dtype)
    torch.manual_seed(11)
    parallel = Parallel().to(dtype)
    return plain, parallel, torch.randn(2, LENGTH, WIDTH, dtype=dtype)


def train_alike(fused: bool, max_norm: float) -> None:
    plain, parallel, x = pair()
    optimizers = [
        torch.optim.AdamW(model.parameters(), 0.05, fused=fused, foreach=not fused) for model in (plain, parallel)
    ]
    for step in range(4):
        norms = []
        for model, optimizer in zip((plain, parallel), optimizers, strict=True):
            optimizer.zero_grad()
            model(x + step).square().mean().backward()
            norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
            optimizer.step()
        close(norms[1], norms[0], f"norm of step {step}")
        close_parameters(parallel, plain)
    close_replicas(parallel)


@pytest.mark.sample(3)
@pytest.mark.parametrize("world", [3, 1, 2])
@pytest.mark.parametrize(("fused", "max_norm"), [(True, 0.1), (False, 100.0)])
def test_adamw_and_gradient_clipping_equal_those_of_one_process(
    ranks: Pools, world: int, fused: bool, max_norm: float
) -> None:
    """``max_norm`` 0.1 clips and 100 does not; 13 and 5 features leave parts of unequal size, one of them empty."""
    ranks(world).run(train_alike, fused, max_norm, timeout=LIMIT_S)


def copies_and_state(folder: Path) -> None:
    plain, parallel, x = pair()
    expected = plain(x)
    twin = copy.deepcopy(parallel)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    close(parallel(x), expected, "after its copy was changed")
    assert not torch.allclose(twin(x), expected)
    for name, parameter in parallel.named_parameters():
        assert torch.equal(whole(parameter), dict(plain.named_parameters())[name]), f"full_tensor of {name}"

    twin.load_state_dict(parallel.state_dict())
    close(twin(x), expected, "after load_state_dict")

    file = io.BytesIO()
    torch.save(parallel.state_dict(), file)
    file.seek(0)
    other = Parallel().double()
    other.load_state_dict(torch.load(file, weights_only=True))
    close(other(x), expected, "after torch.save and torch.load")

    dcp.save({"model": parallel.state_dict()}, checkpoint_id=folder)
    other = Parallel().double()
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    close(other(x), expected, "after a distributed checkpoint")


def load_elsewhere(folder: Path) -> None:
    plain, _, x = pair()
    other = Parallel().double()
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    close(other(x), plain(x), "after another number of ranks")


def test_copies_state_dicts_and_checkpoints_keep_a_model(ranks: Pools, tmp_path: Path) -> None:
    """The checkpoint of three ranks is read by two, and by one."""
    ranks(3).run(copies_and_state, tmp_path, timeout=LIMIT_S)
    ranks(2).run(load_elsewhere, tmp_path, timeout=LIMIT_S)
    ranks(1).run(load_elsewhere, tmp_path, timeout=LIMIT_S)


def conversions() -> None:
    plain, parallel, x = pair(torch.float32)
    parallel.to(torch.bfloat16)
    assert all(isinstance(p, DTensor) and p.dtype == torch.bfloat16 for p in parallel.parameters())
    assert parallel(x.bfloat16()).dtype == torch.bfloat16
    parallel.double()
    assert torch.allclose(parallel(x.double()), plain.double()(x.double()), atol=0.05)
    with torch.device("meta"):
        empty = Parallel()
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.to_empty(device="cpu")
    torch.manual_seed(11)
    for module in empty.modules():
        if reset := getattr(module, "reset_parameters", None):
            reset()
    fresh = pair(torch.float32)[0]
    close(empty.head.weight.full_tensor(), fresh.head.weight, "after to_empty and reset_parameters")  # type: ignore[attr-defined]


def test_dtype_and_device_conversions_keep_parameters_distributed(ranks: Pools) -> None:
    ranks(2).run(conversions, timeout=LIMIT_S)


def compiled() -> None:
    plain, parallel, x = pair()
    plain(x).square().mean().backward()
    fast = torch.compile(parallel, fullgraph=True, backend="aot_eager")
    fast(x).square().mean().backward()
    close(fast(x), plain(x), "y")
    close_parameters(parallel, plain)


def test_a_model_compiles_as_one_graph(ranks: Pools) -> None:
    ranks(2).run(compiled, timeout=LIMIT_S)


def checkpointed() -> None:
    plain, parallel, x = pair()
    x.requires_grad_()
    plain(x).square().mean().backward()
    assert x.grad is not None
    expected, x.grad = x.grad, None
    y = checkpoint(parallel, x, use_reentrant=False)
    assert isinstance(y, Tensor)
    y.square().mean().backward()
    assert x.grad is not None
    close(x.grad, expected, "dx")
    close_parameters(parallel, plain)


def test_activation_checkpointing_keeps_the_gradients(ranks: Pools) -> None:
    ranks(2).run(checkpointed, timeout=LIMIT_S)


def under_autocast() -> None:
    plain, parallel, x = pair(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected, y = plain(x), parallel(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    assert torch.allclose(y, expected, atol=0.05, rtol=0.05)
    y.float().square().mean().backward()
    for parameter in parallel.parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32


def test_autocast_gives_the_dtypes_of_torch(ranks: Pools) -> None:
    ranks(2).run(under_autocast, timeout=LIMIT_S)


def with_fsdp() -> None:
    """Two data-parallel replicas of two tensor-parallel ranks each."""
    mesh = tpk.init(tp=2, dp=2)
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)).double()
    parallel = ParallelMLP.from_linears(plain[0], plain[2], mesh)  # type: ignore[arg-type]
    fully_shard(parallel, mesh=mesh["dp"])
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    plain(x).square().mean().backward()
    replica = mesh["dp"].get_local_rank()
    parallel(x[2 * replica : 2 * replica + 2]).square().mean().backward()
    expected = {"up.weight": plain[0].weight, "down.weight": plain[2].weight, "down.bias": plain[2].bias}
    for name, parameter in parallel.named_parameters():
        if name in expected:
            assert isinstance(parameter.grad, DTensor)
            close(parameter.grad.full_tensor(), expected[name].grad, f"gradient of {name}")  # type: ignore[arg-type]


def test_fsdp2_shards_the_parameters_of_tensor_parallel_modules(ranks: Pools) -> None:
    ranks(4).run(with_fsdp, timeout=LIMIT_S)


def clip_locally(faulty: bool) -> Tensor:
    """The norm; the fault: each rank takes the norm of its own parts."""
    plain, parallel, x = pair()
    for model in (plain, parallel):
        model(x).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    grads = [parameter.grad for parameter in parallel.parameters()]
    if faulty:
        norm = nn.utils.get_total_norm([grad.to_local() for grad in grads if isinstance(grad, DTensor)])
    else:
        norm = whole(nn.utils.get_total_norm([grad for grad in grads if grad is not None]))
    close(norm, expected, "norm")
    return norm


def test_the_comparison_catches_a_norm_of_local_parts(ranks: Pools) -> None:
    ranks(2).run(clip_locally, False, timeout=LIMIT_S)
    error = ranks(2).run(clip_locally, True, return_exceptions=True, timeout=LIMIT_S)[0]
    assert isinstance(error, AssertionError)
    assert "norm: differs by" in str(error)


def describe() -> str:
    assert dist.get_world_size() == 3
    return repr(Parallel())


def test_a_printed_model_shows_how_it_is_cut(ranks: Pools) -> None:
    text = ranks(3).run(describe, timeout=LIMIT_S)[0]
    assert "in_features=6, out_features=13, bias=True, shards=5/5/3, sequence_parallel=True, activation='gelu'" in text
    assert "in_features=13, out_features=6, bias=True, shards=5/5/3, sequence_parallel=True)" in text
    assert "shards=2/2/1, sequence_parallel=True, gather_output=True" in text
    assert "LayerNorm((6,), eps=1e-05, elementwise_affine=True" in text
