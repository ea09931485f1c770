"""What the module tests share: the mesh of a rank pool, sequence shards, comparisons with nn.Linear."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import tpkernels as tpk
from tests.kept_mesh import KeptMesh
from tpkernels.backends.shared_memory.segments import SharedMemory
from tpkernels.comm.groups import Group
from tpkernels.partition import array_split_sizes, chunk_sizes, offsets

LIMIT_S = 180.0
"""For one call of all ranks; the first one of a pool imports torch._dynamo, a minute of work under load."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


tp_mesh = KeptMesh(lambda: tpk.init()["tp"])


def plan_once(model: nn.Module, mesh: DeviceMesh, **options: Any) -> tpk.ShardingPlan:
    """``tpk.make_plan`` by the mesh's first rank, for all: else most of what the ranks compute is the same plan."""
    mesh = mesh["tp"] if mesh.ndim > 1 else mesh
    group = mesh.get_group()
    said = [tpk.make_plan(model, mesh.size(), **options).to_json() if mesh.get_local_rank() == 0 else ""]
    dist.broadcast_object_list(said, group=group, group_src=0)
    return tpk.ShardingPlan.from_json(said[0])


def half(cases: list[Any]) -> list[Any]:
    """Of pairs of cases the first and the second in turn: a sample of two that are combined."""
    return [case for number, case in enumerate(cases) if number % 4 in (0, 3)]


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


def part_of(whole: Tensor, like: DTensor) -> Tensor:
    """What this rank should hold of ``whole``, worked out from the placement alone; nothing is sent."""
    (placement,) = like.placements
    if placement.is_replicate():
        return whole
    assert isinstance(placement, Shard), placement
    dim, rank, world = placement.dim, like.device_mesh.get_local_rank(), like.device_mesh.size()
    sizes = chunk_sizes(whole.shape[dim], world)
    return whole.narrow(dim, offsets(sizes)[rank], sizes[rank])


def close_parameters(parallel: nn.Module, reference: nn.Module) -> None:
    """This rank's part of the values and gradients of all parameters, by name."""
    expected = dict(reference.named_parameters())
    actual = dict(parallel.named_parameters())
    assert actual.keys() == expected.keys()
    for name, parameter in actual.items():
        assert isinstance(parameter, DTensor), name
        assert parameter.shape == expected[name].shape, name
        close(parameter.to_local(), part_of(expected[name], parameter), name)
        grad = expected[name].grad
        if grad is None:
            assert parameter.grad is None, name
        else:
            assert isinstance(parameter.grad, DTensor), f"{name} has gradient {parameter.grad!r}"
            assert parameter.grad.placements == parameter.placements, name
            close(parameter.grad.to_local(), part_of(grad, parameter), f"gradient of {name}")


def close_replicas(parallel: nn.Module) -> None:
    """What is called replicated is equal bit for bit on all ranks, values and gradients."""
    mine = {}
    for name, parameter in parallel.named_parameters():
        assert isinstance(parameter, DTensor), name
        if parameter.placements[0].is_replicate():
            grad = parameter.grad
            mine[name] = parameter.to_local().detach(), None if grad is None else cast(DTensor, grad).to_local()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for other in everyone:
        for name, (value, grad) in other.items():
            assert torch.equal(value, mine[name][0]), f"{name}: replicas differ"
            assert (grad is None) == (mine[name][1] is None), f"{name}: only some ranks have a gradient"
            assert grad is None or torch.equal(grad, mine[name][1]), f"{name}: gradients of replicas differ"


def without_shared_memory(state: Group, reason: str) -> None:
    """As where the ranks have none: calls that are agreed on from now on travel as messages."""
    memory: SharedMemory = state.resources.setdefault(SharedMemory.name, SharedMemory())
    memory.segments, memory.no_memory = None, reason
