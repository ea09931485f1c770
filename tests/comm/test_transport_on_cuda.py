"""How CUDA chunks are posted, seen by a group that takes notes: grouping, order, one wait per chunk, host memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tpkernels.comm import transport
from tpkernels.comm.device_backends import DeviceBackends
from tpkernels.comm.transport import TransportFailure, exchange, wait_all

pytestmark = pytest.mark.cpu

CUDA = torch.device("cuda", 0)


class Notes:
    """The part of a Group, and of its ProcessGroup, that transport uses."""

    backends = DeviceBackends.parse("cpu:gloo,cuda:nccl")
    works = None

    def __init__(self, broken: bool = False) -> None:
        self.pg = self
        self.said: list[Any] = []
        self._broken = broken

    def _start_coalescing(self, device: torch.device) -> None:
        self.said.append("start")

    def _end_coalescing(self, device: torch.device) -> Any:
        self.said.append("end")
        return SimpleNamespace(wait=self._wait)

    def _wait(self) -> None:
        if self._broken:
            raise RuntimeError("NCCL was aborted")
        self.said.append("wait")

    def send(self, tensors: list[Any], peer: int, tag: int) -> None:
        self.said.append(("send", peer))

    def recv(self, tensors: list[Any], peer: int, tag: int) -> None:
        self.said.append(("recv", peer))


def tensor(elements: int = 4) -> Any:
    """As much of a CUDA tensor as transport looks at; there is no GPU here."""
    return SimpleNamespace(device=CUDA, numel=lambda: elements)


def test_a_chunk_is_one_group_without_empty_tensors_and_is_waited_for_once() -> None:
    group: Any = Notes()
    sends = [(1, tensor()), (2, tensor(0)), (3, tensor())]
    sent, received = exchange(group, transport.call_tag(1), 0, sends, [(3, tensor()), (1, tensor())])
    assert group.said == ["start", ("send", 1), ("send", 3), ("recv", 3), ("recv", 1), "end"]
    received[0].wait()
    assert group.said[-1] == "wait"
    wait_all([*sent, *received])
    assert group.said.count("wait") == 1


def test_nothing_to_move_posts_nothing() -> None:
    group: Any = Notes()
    assert exchange(group, transport.call_tag(1), 0, [(1, tensor(0))], []) == ([], [])
    assert group.said == []


def test_a_failed_wait_fails_again_for_every_transfer() -> None:
    group: Any = Notes(broken=True)
    sent, received = exchange(group, transport.call_tag(1), 3, [(1, tensor())], [(2, tensor())])
    for transfer in (*received, *sent):
        with pytest.raises(TransportFailure, match=f"{transfer.kind} of chunk 3, peer rank {transfer.peer}: NCCL was"):
            transfer.wait()


class OverGloo(Notes):
    timeout = 30.0
    backends = DeviceBackends.parse("gloo")

    def send(self, tensors: list[Any], peer: int, tag: int) -> Any:
        self.said.append(("send", peer, tensors[0].device.type, tensors[0].tolist()))
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensors: list[Any], peer: int, tag: int) -> Any:
        return SimpleNamespace(wait=lambda: tensors[0].fill_(7.0))


def test_cuda_tensors_cross_gloo_through_host_memory() -> None:
    """Stands for CUDA tensors: one that says it is on a GPU, and lies here."""
    arrived: list[Any] = []
    there = SimpleNamespace(device=CUDA, numel=lambda: 2, cpu=lambda: torch.tensor([1.0, 2.0]))
    here = SimpleNamespace(device=CUDA, numel=lambda: 2, shape=(2,), dtype=torch.float32, copy_=arrived.append)
    group: Any = OverGloo()
    sent, received = exchange(group, transport.call_tag(1), 0, [(1, there)], [(1, here)])  # type: ignore[list-item]
    assert group.said == [("send", 1, "cpu", [1.0, 2.0])] and not arrived
    wait_all([*received, *sent, *received])
    assert [host.tolist() for host in arrived] == [[7.0, 7.0]]
