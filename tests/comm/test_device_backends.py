"""Groups whose backend is unnamed or mixed: every question about it is one about the device of a tensor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers "fake", a backend for CUDA tensors

import tpkernels as tpk
from tests.nn.stand_in_gpu import stand_in_gpu
from tpkernels.comm.device_backends import DeviceBackends
from tpkernels.comm.groups import resolve
from tpkernels.errors import GroupMismatch

CPU, CUDA, CURRENT = torch.device("cpu"), torch.device("cuda", 1), torch.device("cuda", 3)
UNNAMED, MIXED = None, "cpu:gloo,cuda:fake"
LIMIT_S = 20.0


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("config", "cpu", "cuda", "own", "cpu_travels", "cuda_travels", "meeting"),
    [
        ("gloo", "gloo", "gloo", "cpu", CPU, CPU, CPU),
        ("cpu:gloo", "gloo", None, "cpu", CPU, CPU, CPU),
        ("nccl", None, "nccl", "cuda", CURRENT, CUDA, CUDA),
        ("cuda:nccl", None, "nccl", "cuda", CURRENT, CUDA, CUDA),
        ("cpu:gloo,cuda:nccl", "gloo", "nccl", "cuda", CPU, CUDA, CPU),
        ("cuda:nccl,cpu:gloo", "gloo", "nccl", "cuda", CPU, CUDA, CPU),
    ],
)
def test_a_backend_is_that_of_a_device(
    config: str,
    cpu: str | None,
    cuda: str | None,
    own: str,
    cpu_travels: torch.device,
    cuda_travels: torch.device,
    meeting: torch.device,
) -> None:
    backends = DeviceBackends.parse(config)
    assert (backends.serving("cpu"), backends.serving("cuda"), backends.own_device) == (cpu, cuda, own)
    with mock.patch.object(torch.cuda, "current_device", lambda: CURRENT.index):
        assert backends.wire_device(CPU) == cpu_travels
        assert backends.wire_device(CUDA) == cuda_travels
        assert backends.meeting_device(CUDA) == meeting
        assert backends.meeting_device() == (CPU if cpu else CURRENT)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("config", "device", "missing"),
    [("gloo", "cuda", None), ("cpu:gloo", "cuda", "cuda"), ("nccl", "cpu", "cpu"), ("cuda:gloo", "cuda", "cpu")],
)
def test_a_device_that_a_group_does_not_serve_is_named_with_the_way_out(
    config: str, device: str, missing: str | None
) -> None:
    reason = DeviceBackends.parse(config).why_not(device)
    if missing is None:
        assert reason is None
    else:
        assert reason is not None
        assert f"serve no tensors on {missing}, which a call on {device} needs" in reason
        assert 'as in "cpu:gloo,cuda:nccl"' in reason


# groups of real ranks


def _job(backend: str | None, work: Callable[[], Any]) -> Any:
    options = {} if backend is None else {"backend": backend}
    dist.init_process_group(timeout=timedelta(seconds=LIMIT_S), **options)
    assert dist.get_backend() not in ("gloo", "nccl"), "otherwise this test shows nothing"
    try:
        return work()
    finally:
        dist.destroy_process_group()


def _everything_on_cpu() -> None:
    group = dist.group.WORLD
    assert group is not None
    rank, world = dist.get_rank(), dist.get_world_size()
    state = resolve(group)
    assert state.timeout == LIMIT_S
    shards = [torch.arange(48.0).view(6, 8) % (5 + peer) for peer in range(world)]  # integers: every sum is exact
    w = torch.arange(40.0).view(5, 8) % (7 + rank)
    for implementation in ("chunked", "unfused", "shared_memory", "auto"):
        y = tpk.all_gather_matmul(shards[rank], w, group, implementation=implementation)
        assert torch.equal(y, F.linear(torch.cat(shards), w)), implementation
    assert set(state.costs) == {("cpu", torch.float32, False)}
    said = tpk.explain("all_gather_matmul", m=12, n=10, k=8, dtype=torch.float32, group=group, device="cpu")
    assert (said.problem.device, said.problem.backend) == ("cpu", "gloo")
    assert said.costs.measured
    able = {candidate.name for candidate in said.candidates if candidate.refusal is None}
    assert able == {"unfused", "chunked", "shared_memory"}
    with stand_in_gpu() if state.backends.own_device == "cuda" else nullcontext():  # its generator is compared, too
        layer = tpk.nn.ColumnParallelLinear.from_linear(torch.nn.Linear(8, 6), group)
    assert (layer.weight.device_mesh.device_type, layer.weight.to_local().device) == ("cpu", CPU)


def _cuda_is_not_served() -> str:
    """What both ranks hear; the group goes on."""
    group = dist.group.WORLD
    assert group is not None
    question = {"m": 12, "n": 10, "k": 8, "dtype": torch.float32, "group": group}
    with pytest.raises(ValueError, match="serve no tensors on cuda") as caught:
        tpk.explain("all_gather_matmul", **question, device="cuda")
    assert tpk.explain("all_gather_matmul", **question).problem.device == "cpu"
    return str(caught.value)


def _a_cuda_question() -> tuple[str, str]:
    """What `explain` asks about if nobody names a device, and the mesh for weights on a GPU."""
    group = dist.group.WORLD
    assert group is not None
    gpu = mock.patch.object(torch.cuda, "current_device", lambda: 0)
    with gpu, mock.patch.dict(os.environ, TPKERNELS_CALIBRATE="0"):
        said = tpk.explain("all_gather_matmul", m=12, n=10, k=8, dtype=torch.float32, group=group)
    mesh = tpk.nn.parameters.tp_mesh
    assert mesh(group, "cuda").device_type == mesh(group, "meta").device_type == "cuda"
    assert mesh(group, torch.nn.Linear(2, 2)).device_type == "cpu"
    return said.problem.device, said.problem.backend


def _two_known_calls_in_another_order() -> str:
    group = dist.group.WORLD
    assert group is not None

    def call(rows: int) -> None:
        tpk.matmul_all_reduce(torch.ones(rows, 2), torch.ones(3, 2), group, implementation="chunked")

    for rows in (4, 8):
        call(rows)
    start = time.monotonic()
    with pytest.raises(GroupMismatch) as caught:
        call(4 if dist.get_rank() == 0 else 8)
    assert time.monotonic() - start < LIMIT_S / 2, "it ended by its time-out, not because the monitor ended it"
    return str(caught.value)


@pytest.mark.gloo
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("backend", [UNNAMED, "cpu:gloo", MIXED])
def test_cpu_tensors_find_gloo_in_every_group(backend: str | None) -> None:
    tpk.launch(_job, 2, backend, _everything_on_cpu, timeout=60)


@pytest.mark.gloo
@pytest.mark.usefixtures("forked")
def test_tensors_that_a_group_does_not_serve_are_refused_before_anything_is_sent() -> None:
    said = tpk.launch(_job, 2, UNNAMED, _cuda_is_not_served, timeout=60)
    assert all("(cpu:gloo)" in text and "explain(all_gather_matmul, m=12" in text for text in said)


@pytest.mark.gloo
@pytest.mark.usefixtures("forked")
def test_a_mixed_group_is_asked_about_the_gpu_unless_a_device_is_named() -> None:
    assert tpk.launch(_job, 2, MIXED, _a_cuda_question, timeout=60) == [("cuda", "fake")] * 2


@pytest.mark.gloo
@pytest.mark.usefixtures("forked")
def test_a_stuck_call_of_a_mixed_group_is_ended_on_the_backend_that_it_waits_for() -> None:
    for text in tpk.launch(_job, 2, MIXED, _two_known_calls_in_another_order, timeout=60):
        assert "the ranks made different calls" in text
