"""Masks drawn on a GPU: a shard's differ between ranks and a replica's do not, whatever the group's backend."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers "fake", a backend for CUDA tensors

import tpkernels as tpk
from tests.nn.stand_in_gpu import stand_in_gpu
from tpkernels.comm.device_backends import DeviceBackends
from tpkernels.nn import same_weights, sharded_rng
from tpkernels.nn.same_weights import equal_on_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("forked")]

# How the job's group is made, and whether CUDA tensors have a backend of their own in it.
UNNAMED, GLOO, MIXED = "unnamed", "gloo", "cpu:gloo,cuda:fake"
Masks = tuple[list[bool], ...]


def _job(backend: str, fault: str = "") -> Masks:
    """(a replica's mask, a shard's, a shard's next one, a replica's next one) of this rank."""
    _make_group(backend)
    # With a backend for GPUs the group alone says that there is one; with gloo only its use does.
    with stand_in_gpu(in_use=backend == GLOO) as gpu, mock.patch.multiple(DeviceBackends, **_seeded(fault)):
        return _draw(gpu), _draw_sharded(gpu), _draw_sharded(gpu), _draw(gpu)


def _make_group(backend: str) -> None:
    machine = mock.patch.object(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
    theirs = mock.patch.dict(dist.Backend.default_device_backend_map, cuda="fake")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options: dict[str, Any] = {} if backend == UNNAMED else {"backend": backend}
    with machine, theirs:
        dist.init_process_group(rank=rank, world_size=world, timeout=timedelta(seconds=20), **options)


def _seeded(fault: str) -> dict[str, Any]:
    """What ``get_backend(group) == "nccl"`` made of unnamed and mixed groups: all of them were for CPUs."""
    return {"own_device": "cpu"} if fault else {"own_device": DeviceBackends.own_device}


def _draw(gpu: torch.Generator) -> list[bool]:
    return (torch.rand(64, generator=gpu) < 0.5).tolist()


def _draw_sharded(gpu: torch.Generator) -> list[bool]:
    assert dist.group.WORLD is not None
    with sharded_rng(dist.group.WORLD):
        return _draw(gpu)


def _wrong(ranks: list[Masks]) -> list[str]:
    """What is not as it must be in the masks of two ranks."""
    (before, first, second, after), (also_before, also_first, also_second, also_after) = ranks
    rules = {
        "replicas have one mask": before == also_before and after == also_after,
        "shards have masks of their own": first != also_first and second != also_second,
        "and others each time": first != second and before != after,
    }
    return [rule for rule, holds in rules.items() if not holds]


@pytest.mark.parametrize("backend", [UNNAMED, GLOO, MIXED])
def test_masks_of_shards_differ_between_ranks_on_a_gpu(backend: str) -> None:
    assert _wrong(tpk.launch(_job, 2, backend, timeout=60)) == []


@pytest.mark.parametrize("backend", [UNNAMED, MIXED])
def test_a_group_that_is_taken_for_one_of_cpus_is_caught(backend: str) -> None:
    assert _wrong(tpk.launch(_job, 2, backend, "misread", timeout=60)) == ["shards have masks of their own"]


def _out_of_step(backend: str, weights_on_gpu: bool) -> tuple[list[bool], list[bool]]:
    """Masks of a replica before and after weights were compared on a group whose GPUs' generators alone differ."""
    _make_group(backend)
    group = dist.group.WORLD
    with stand_in_gpu() as gpu, mock.patch.object(same_weights, "_is_on_gpu", lambda tensor: weights_on_gpu):
        gpu.manual_seed(dist.get_rank())
        before = _draw(gpu)
        equal_on_ranks(torch.ones(3), tpk.nn.parameters.tp_mesh(group, "cpu"))
        return before, _draw(gpu)


@pytest.mark.parametrize(
    ("backend", "weights_on_gpu", "in_step"), [(MIXED, False, True), (GLOO, True, True), (GLOO, False, False)]
)
def test_generators_of_gpus_are_put_in_step_where_masks_are_drawn_there(
    backend: str, weights_on_gpu: bool, in_step: bool
) -> None:
    """gloo serves CUDA tensors: there the weights tell."""
    (before, after), (also_before, also_after) = tpk.launch(_out_of_step, 2, backend, weights_on_gpu, timeout=60)
    assert before != also_before, "otherwise this test shows nothing"
    assert (after == also_after) == in_step
