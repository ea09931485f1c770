"""Which backend of a process group serves the tensors of a device.

A group has one backend per device type.  ``init_process_group()`` without a name takes the machine's own (NCCL for CUDA
tensors where there is a GPU, else gloo), ``"cpu:gloo,cuda:nccl"`` names two, and ``"gloo"`` is one for both.
``dist.get_backend`` says "undefined" of the first and the whole text of the second; so nobody but this file asks c10d,
and everybody else asks here for the device of a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig

__all__ = ["DeviceBackends"]

_HOST = torch.device("cpu")
_IN_STREAM_ORDER = frozenset({"nccl"})
"""Backends whose waits order the device's streams and return, and whose messages find each other by their order."""


@dataclass(frozen=True)
class DeviceBackends:
    """The backends of one group, the same on all of its ranks: ``{"cpu": "gloo", "cuda": "nccl"}``."""

    by_device: Mapping[str, str]

    @classmethod
    def of(cls, pg: dist.ProcessGroup) -> DeviceBackends:
        """Those of a c10d group.

        Raises:
            ValueError: the group was destroyed.
        """
        dist.get_backend(pg)  # for its error: of a destroyed group the next call says nothing that helps
        return cls.parse(dist.get_backend_config(pg))

    @classmethod
    def parse(cls, config: str) -> DeviceBackends:
        """Those that c10d makes of a ``backend`` argument."""
        return cls({device: str(name) for device, name in BackendConfig(Backend(config)).device_backend_map.items()})

    def __str__(self) -> str:
        return ",".join(f"{device}:{name}" for device, name in self.by_device.items())

    def serving(self, device: str) -> str | None:
        """The backend of tensors on ``device``, a ``torch.device.type``; None if there is none."""
        return self.by_device.get(device)

    @property
    def own_device(self) -> str:
        """Where this group's tensors are if nobody says: on GPUs, if those have a backend of their own.

        gloo serves CUDA tensors as well, by way of host memory: a group of gloo alone is one for CPUs.
        """
        return "cuda" if self.serving("cuda") not in (None, self.serving("cpu")) else "cpu"

    @property
    def match_by_order(self) -> bool:
        """Whether messages find each other by their order alone: NCCL has tags in its interface, and ignores them."""
        return not _IN_STREAM_ORDER.isdisjoint(self.by_device.values())

    def waits_in_streams(self, device: str) -> bool:
        """Whether to wait for a transfer of tensors on ``device`` does not hold the host up: who reads them does."""
        return self.serving(device) in _IN_STREAM_ORDER

    def why_not(self, device: str) -> str | None:
        """Why tensors on ``device`` cannot be sent; None if they can."""
        needed = device if self.serving(device) is None else self.wire_device(torch.device(device)).type
        if self.serving(needed) is not None:
            return None
        return (
            f"its backends ({self}) serve no tensors on {needed}, which a call on {device} needs: move the tensors, or "
            'name a backend for each device when you make the group, as in "cpu:gloo,cuda:nccl"'
        )

    def wire_device(self, device: torch.device) -> torch.device:
        """Where a tensor on ``device`` must be to be sent: gloo knows host memory only, NCCL device memory only."""
        name = self.serving(device.type)
        if name == "gloo" or (name is None and self.own_device == "cpu"):
            return _HOST
        return device if name is not None else torch.device("cuda", torch.cuda.current_device())

    def meeting_device(self, device: torch.device = _HOST) -> torch.device:
        """Where ranks exchange words, whatever device each has its tensors on: host memory, if that is served."""
        return self.wire_device(device if self.serving("cpu") is None else _HOST)
