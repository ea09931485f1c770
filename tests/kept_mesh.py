"""Meshes and groups of a rank pool for many tests: every group costs threads, one of which wakes often.

A pool whose call failed, or whose calls left many groups, has another default group.  What was made beside the old one
is made anew, and the old one is not held: its threads would go on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.comm.groups import resolve

F = TypeVar("F", bound=Callable[..., Any])


def once_per_pool(make: F) -> F:
    """What the function makes for its arguments, once for each default group."""
    kept: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()

    @wraps(make)
    def made(*args: Hashable) -> Any:
        of_world = kept.setdefault(dist.group.WORLD, {})
        if args not in of_world:
            of_world[args] = make(*args)
        return of_world[args]

    return made  # type: ignore[return-value]


class KeptMesh:
    """``mesh()`` makes one, and keeps it as long as the default group is the same and the tp axis is healthy."""

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
