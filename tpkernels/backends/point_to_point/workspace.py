"""Reusable CPU buffers for chunks that only live during a call.

A fresh large tensor costs a page fault per 4 KiB, about 5 ms per 8 MiB on the machine of our results (AMD EPYC,
2026-11-20): 1.5 % of a 350 ms GEMM for each buffer.  Buffers that were given back are taken again by later calls of the
process; CUDA has a caching allocator for that, so there this hands out plain tensors.

Assumes that whoever gives a buffer back has finished with it, transfers included.  A call that fails simply does not
give back.
"""

from __future__ import annotations

import threading
from math import prod

import torch
from torch import Tensor

__all__ = ["MAX_IDLE_BYTES", "Workspace", "shared"]

MAX_IDLE_BYTES = 256 * 1024 * 1024
# Below this, malloc reuses memory by itself.
MIN_BYTES = 128 * 1024


class Workspace:
    """A pool of byte buffers, at most ``max_idle_bytes`` of which wait for their next use."""

    def __init__(self, max_idle_bytes: int = MAX_IDLE_BYTES) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._idle: list[Tensor] = []
        self._lock = threading.Lock()

    @property
    def idle_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._idle)

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised contiguous tensor of ``shape`` with dtype and device of ``like``."""
        num_bytes = prod(shape) * like.element_size()
        if like.device.type != "cpu" or num_bytes < MIN_BYTES:
            return like.new_empty(shape)
        with self._lock:
            # Twice too large is too large: a small chunk must not occupy the buffer of the largest layer.
            fits = [buffer for buffer in self._idle if num_bytes <= buffer.numel() <= 2 * num_bytes]
            buffer = min(fits, key=Tensor.numel) if fits else None
            if buffer is not None:
                self._idle = [other for other in self._idle if other is not buffer]
        if buffer is None:
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return buffer[:num_bytes].view(like.dtype).view(shape)

    def give(self, tensor: Tensor) -> None:
        """Give a tensor of :meth:`take` back; the oldest idle buffers go when there are too many."""
        if tensor.device.type != "cpu" or tensor.numel() * tensor.element_size() < MIN_BYTES:
            return
        buffer = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        with self._lock:
            self._idle.append(buffer)
            while self.idle_bytes > self._max_idle_bytes:
                self._idle.pop(0)


shared = Workspace()
