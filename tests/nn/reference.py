"""What the module tests share: the mesh of a rank pool, sequence shards, comparisons with nn.Linear."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import tpkernels as tpk
from tpkernels.partition import array_split_sizes

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def tp_mesh() -> DeviceMesh:
    return tpk.init()["tp"]


def sequence_sizes(total: int) -> list[int]:
    return list(array_split_sizes(total, dist.get_world_size()))


def mine(x: Tensor, dim: int) -> Tensor:
    """This rank's shard of a sequence, as a leaf."""
    part = tpk.array_split(x.detach(), dist.get_world_size(), dim)[dist.get_rank()]
    return part.clone().requires_grad_(x.requires_grad)


def whole(parameter: Tensor | None) -> Tensor:
    assert parameter is not None
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def close(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal shape and dtype, and a largest difference of a few roundings of the largest value."""
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} instead of {expected.dtype}"
    if actual.numel() == 0:
        return
    limit = TOLERANCE[expected.dtype] * (1 + float(expected.detach().abs().max()))
    difference = float((actual.detach() - expected.detach()).abs().max())
    assert difference <= limit, f"{what}: differs by {difference:.3e}, at most {limit:.3e} expected"


def close_parameters(parallel: nn.Module, reference: nn.Module) -> None:
    """Values and gradients of all parameters, by name."""
    expected = dict(reference.named_parameters())
    actual = dict(parallel.named_parameters())
    assert actual.keys() == expected.keys()
    for name, parameter in actual.items():
        assert isinstance(parameter, DTensor), name
        close(parameter.full_tensor(), expected[name], name)
        grad = expected[name].grad
        if grad is None:
            assert parameter.grad is None, name
        else:
            assert isinstance(parameter.grad, DTensor), f"{name} has gradient {parameter.grad!r}"
            assert parameter.grad.placements == parameter.placements, name
            close(parameter.grad.full_tensor(), grad, f"gradient of {name}")
            close_replicas(parameter.grad, name)


def close_replicas(tensor: DTensor, name: str) -> None:
    """What is called replicated is equal bit for bit on all ranks."""
    if not tensor.placements[0].is_replicate():
        return
    mine = tensor.to_local().detach()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine.contiguous())
    assert all(torch.equal(mine, other) for other in everyone), f"{name}: replicas differ"
