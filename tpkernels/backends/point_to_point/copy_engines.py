"""Buffers from which NCCL can move chunks with copy engines, so that transfers take no SM from the GEMM.

NCCL 2.28 and later hands all-gathers and all-to-alls to copy engines if the communicator's CTA policy is zero
(``TPKERNELS_NCCL_ZERO_CTA=1``, see :func:`tpkernels.init`), all ranks are on one host, and both ends lie in
memory that was registered as a symmetric window; otherwise it runs the same collective with kernels.  Owns that memory.

Assumes that all ranks of a group ask for the same sizes in the same order, because registering is collective, and that
the calls of a group are made on streams that are ordered after each other, because the memory is used again by each.
Not run yet: it takes several GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpkernels import config
from tpkernels.backends.pools import outside_of_pools
from tpkernels.comm.resources import Resource
from tpkernels.errors import UnsupportedProblem

if TYPE_CHECKING:
    from tpkernels.comm.groups import Group

__all__ = ["Buffers", "CopyEngines", "buffers", "wanted"]

_GROW_STEP = 2 * 1024 * 1024


def wanted(group: Group, device: str) -> bool:
    """Whether chunks of tensors on ``device`` are to be moved by collectives on registered memory."""
    return group.backends.serving(device) == "nccl" and config.load().nccl_zero_cta


def buffers(group: Group, device: torch.device) -> Buffers:
    """Those of the group, made when first asked for."""
    owned: CopyEngines = group.resources[CopyEngines.name]
    if owned.buffers is None:
        owned.buffers = Buffers(group, device)
    return owned.buffers


class CopyEngines(Resource):
    """The group's buffers, which are made at the first call that moves chunks from them: nothing is set up before."""

    name = "copy_engines"

    def __init__(self) -> None:
        self.buffers: Buffers | None = None
        self._wanted: dict[str, bool] = {}

    @classmethod
    def settings(cls) -> dict[str, Any]:
        return {"TPKERNELS_NCCL_ZERO_CTA": config.load().nccl_zero_cta}

    def ensure(self, group: Group, call: int, device: torch.device) -> None:
        self._wanted[device.type] = wanted(group, device.type)

    def refusal(self, device: str) -> str | None:
        return None if self._wanted.get(device) else "chunks go by copy engines over NCCL, if they are asked to"


class Buffers:
    """What a rank sends from and receives into; the same sizes on every rank."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._backend: Any = group.pg._get_backend(device)
        self._device = device
        self._pool: Any = None
        self._pair: tuple[Tensor, Tensor] | None = None
        self._is_baked = False
        self._baked: list[tuple[Any, Any]] = []
        """Pools and buffers that captured graphs go on using: kept for good."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(outgoing, incoming), uninitialised, of ``shape`` each; those of the call before, if they are large enough.

        Collective when they have to grow, which waits for the device.

        Raises:
            UnsupportedProblem: they would have to grow while a CUDA graph is captured; nothing was sent.
        """
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self._pair is None or self._pair[0].numel() < num_bytes:
            if capturing:
                raise UnsupportedProblem(
                    f"registered memory for {num_bytes} bytes cannot be made while a CUDA graph is captured: make this "
                    "call once before the capture, on every rank"
                )
            self._grow(-(-num_bytes // _GROW_STEP) * _GROW_STEP)
        assert self._pair is not None
        self._is_baked |= capturing
        outgoing, incoming = (whole[:num_bytes].view(dtype).view(shape) for whole in self._pair)
        return outgoing, incoming

    def _grow(self, num_bytes: int) -> None:
        torch.cuda.synchronize(self._device)
        if self._is_baked:
            self._baked.append((self._pool, self._pair))
            self._is_baked = False
        elif self._pool is not None:
            self._backend.deregister_mem_pool(self._pool)
        self._pair = None
        pool = self._pool = torch.cuda.MemPool(self._backend.mem_allocator)

        def allocate() -> tuple[Tensor, Tensor]:
            with torch.cuda.device(self._device), torch.cuda.use_mem_pool(pool):
                return self._bytes(num_bytes), self._bytes(num_bytes)

        self._pair = outside_of_pools(allocate)  # a pool that is open here, a graph's, might be asked first
        # After the allocations: segments that a pool gets later are not registered as windows in every version.
        self._backend.register_mem_pool(self._pool, symm=True)

    def _bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._device)
