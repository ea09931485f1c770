"""One mesh of a rank pool for many tests: every group costs threads, one of which wakes a hundred times a second."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.comm.groups import resolve


class KeptMesh:
    """``mesh()`` makes one, and keeps it as long as the default group is the same and the tp axis is healthy.

    A pool whose call failed has another default group.  The old one is not held: its threads would go on.
    """

    def __init__(self, make: Callable[[], DeviceMesh]) -> None:
        self._make = make
        self._kept: tuple[weakref.ref[object], DeviceMesh] | None = None

    def __call__(self) -> DeviceMesh:
        world = dist.group.WORLD
        if self._kept is None or self._kept[0]() is not world or _is_poisoned(self._kept[1]):
            self._kept = weakref.ref(world), self._make()
        return self._kept[1]


def _is_poisoned(mesh: DeviceMesh) -> bool:
    return resolve(mesh["tp"] if mesh.ndim > 1 else mesh).poison is not None
