"""Layers made by hand of weights that differ between ranks: rank 0's are taken, or all ranks raise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tpkernels as tpk
from tests.nn.reference import tp_mesh
from tpkernels.nn.digests import bytes_of, fingerprint
from tpkernels.testing.spawn import Pools

N = tpk.nn
Make = Callable[[DeviceMesh], nn.Module]


def linear(*sizes: int) -> nn.Linear:
    return nn.Linear(*sizes)


FRESH: dict[str, Make] = {
    "column": lambda mesh: N.ColumnParallelLinear(6, 10, mesh),
    "columns": lambda mesh: N.ColumnParallelLinears(6, {"a": 4, "b": 5}, mesh),
    "row": lambda mesh: N.RowParallelLinear(10, 6, mesh),
    "embedding": lambda mesh: N.VocabParallelEmbedding(7, 4, mesh),
    "attention": lambda mesh: N.ParallelAttention(8, 4, mesh),
    "mlp": lambda mesh: N.ParallelMLP(6, 10, mesh, activation="swiglu"),
}
TAKEN: dict[str, Make] = {
    "column": lambda mesh: N.ColumnParallelLinear.from_linear(linear(6, 10), mesh),
    "packed": lambda mesh: N.PackedColumnParallelLinear.from_linear(linear(6, 10), mesh, segments=(4, 6)),
    "row": lambda mesh: N.RowParallelLinear.from_linear(linear(10, 6), mesh, unit=5),
    "copied heads": lambda mesh: N.CopiedHeadsLinear.from_linear(linear(6, 4), mesh, heads=1, copies=2),
    "embedding": lambda mesh: N.VocabParallelEmbedding.from_embedding(nn.Embedding(7, 4), mesh),
    "features": lambda mesh: N.FeatureParallelEmbedding.from_embedding(nn.Embedding(7, 4), mesh),
    "multihead": lambda mesh: N.ParallelMultiheadAttention.from_attention(nn.MultiheadAttention(8, 2), mesh),
    "norm": lambda mesh: N.LayerNorm.from_norm(norm(), mesh),
    "replicated": lambda mesh: N.replicate_parameters(linear(3, 4), mesh),
}


def norm() -> nn.LayerNorm:
    made = nn.LayerNorm(6)
    nn.init.normal_(made.weight)
    nn.init.normal_(made.bias)
    return made


def wholes(module: nn.Module) -> list[Tensor]:
    return [parameter.full_tensor() for parameter in module.parameters()]


def agree(module: nn.Module, expected: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(wholes(module), wholes(expected), strict=True))


def every_layer_has_rank_0s_weights() -> None:
    rank, mesh = dist.get_rank(), tp_mesh()
    for name, make in [*FRESH.items(), *TAKEN.items()]:
        torch.manual_seed(0)
        with N.init_weights("same"):
            expected = make(mesh)
        torch.manual_seed(rank)
        module = make(mesh)
        assert agree(module, expected), name
        N.check_rng(mesh)
        torch.manual_seed(rank)
        with N.init_weights("same"), pytest.raises(ValueError, match=r"hold other values|random generators"):
            make(mesh)
    layer = N.ColumnParallelLinear(6, 10, mesh)
    torch.manual_seed(rank + 1)
    layer.reset_parameters()
    torch.manual_seed(1)
    assert torch.equal(layer.weight.full_tensor(), nn.Linear(6, 10).weight)


def what_is_given_stays() -> None:
    torch.manual_seed(dist.get_rank())
    given = linear(6, 10)
    before = given.weight.detach().clone()
    layer = N.ColumnParallelLinear.from_linear(given, tp_mesh())
    assert torch.equal(given.weight, before)
    every = [torch.empty_like(before) for _ in range(dist.get_world_size())]
    dist.all_gather(every, before)
    assert torch.equal(layer.weight.full_tensor(), every[0]) and not torch.equal(every[0], every[1])
    with pytest.raises(ValueError, match=r"a weight is float32 \[5, 6\].* on rank.*\[4, 6\]"):
        N.RowParallelLinear.from_linear(linear(6, 5 - (dist.get_rank() == 1)), tp_mesh())
    with N.init_weights("same"), pytest.raises(ValueError, match="init_weights must be one of"):
        with N.init_weights("rank 1"):
            pass


def both_axes_of_a_mesh_agree() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("y", "x"))
    torch.manual_seed(0)
    with N.init_weights("same"):
        expected = N.MeshMLP2D(4, 6, mesh, activation="swiglu")
    for seed in (rank, rank // 2, rank % 2):
        torch.manual_seed(seed)
        module = N.MeshMLP2D(4, 6, mesh, activation="swiglu")
        assert agree(module, expected), seed
    torch.manual_seed(rank // 2)
    with N.init_weights("same"), pytest.raises(ValueError, match="hold other values"):
        N.MeshMLP2D(4, 6, mesh)


@pytest.mark.gloo
def test_every_layer_has_rank_0s_weights(ranks: Pools) -> None:
    for check in (every_layer_has_rank_0s_weights, what_is_given_stays):
        ranks(2).run(check)


@pytest.mark.gloo
def test_both_axes_of_a_mesh_agree(ranks: Pools) -> None:
    ranks(4).run(both_axes_of_a_mesh_agree)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_a_fingerprint_tells_any_changed_element(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((), (1,), (3, 5), (130, 70), (40, 1, 600)):
        base = torch.randint(0, 2, shape, generator=generator).to(dtype)
        seen = {fingerprint(base)}
        for position in {0, base.numel() // 2, base.numel() - 1}:
            other = base.clone()
            changed = bytes_of(other)
            changed[position * base.element_size()] ^= 1
            seen.add(fingerprint(other))
        assert len(seen) == len({0, base.numel() // 2, base.numel() - 1}) + 1, shape
        if base.dim() == 2:
            assert fingerprint(base.t().contiguous().t()) == fingerprint(base), "strides do not count"
            assert fingerprint(torch.cat([base[:1], base])[1:]) == fingerprint(base), "nor offsets"


@pytest.mark.cpu
def test_an_expanded_tensor_has_the_bytes_of_what_was_expanded() -> None:
    row = torch.rand(1, 4)
    assert bytes_of(row.expand(100, 4)).numel() == 16
    assert fingerprint(row.expand(100, 4)) == fingerprint(row)
