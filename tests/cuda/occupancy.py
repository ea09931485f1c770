"""What can be resident on an SM, and on a GPU, at once: registers, threads, blocks and shared memory; pure arithmetic.

For one kernel it is NVIDIA's own (`cuda_occupancy.h`; test_residency.py compares them), here for several on one SM.
What hardware does not promise is taken at its worst: where blocks are put. What it is not known to do otherwise is
taken as usual: the warps of a block go to the quarters of the SM that have most registers left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

QUARTERS = 4  # each has registers and warps of its own
REGISTER_UNIT, SHARED_UNIT, RESERVED_SHARED = 256, 128, 1024  # registers of a warp; bytes of a block, and its own


@dataclass(frozen=True)
class Limits:
    """Of one SM: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""

    threads: int
    blocks: int
    shared_kib: int
    registers: int = 65536


LIMITS = {
    80: Limits(threads=2048, blocks=32, shared_kib=164),
    86: Limits(threads=1536, blocks=16, shared_kib=100),
    89: Limits(threads=1536, blocks=24, shared_kib=100),
    90: Limits(threads=2048, blocks=32, shared_kib=228),
    100: Limits(threads=2048, blocks=32, shared_kib=228),
}


@dataclass(frozen=True)
class Gpu:
    name: str = field(compare=False)
    capability: int
    num_sms: int
    source: str = field(compare=False)
    """Of the number of SMs."""

    @property
    def limits(self) -> Limits:
        return LIMITS[self.capability]


@dataclass(frozen=True)
class Kernel:
    """One block of it. registers: of a thread. shared: bytes, static and dynamic."""

    name: str = field(compare=False)
    threads: int
    registers: int
    shared: int = 0

    @property
    def warps(self) -> int:
        return math.ceil(self.threads / 32)

    @property
    def warp_registers(self) -> int:
        return _up(32 * self.registers, REGISTER_UNIT)

    @property
    def shared_bytes(self) -> int:
        return _up(self.shared + RESERVED_SHARED, SHARED_UNIT)


class _Sm:
    """What is left of an SM."""

    def __init__(self, limits: Limits) -> None:
        self.blocks, self.shared = limits.blocks, 1024 * limits.shared_kib
        self.registers = [limits.registers // QUARTERS] * QUARTERS
        self.warps = [limits.threads // 32 // QUARTERS] * QUARTERS

    def take(self, kernel: Kernel) -> bool:
        """Whether there was room for a block; if not, what is left is nobody's business any more."""
        self.blocks, self.shared = self.blocks - 1, self.shared - kernel.shared_bytes
        for _ in range(kernel.warps):
            quarter = max(range(QUARTERS), key=lambda q: (self.warps[q] > 0, self.registers[q]))
            self.warps[quarter] -= 1
            self.registers[quarter] -= kernel.warp_registers
        return min(self.blocks, self.shared, *self.registers, *self.warps) >= 0


def room(limits: Limits, residents: Sequence[Kernel], kernel: Kernel) -> int:
    """Blocks of a kernel that fit an SM beside one block of each of the residents."""
    sm = _Sm(limits)
    if not all(sm.take(resident) for resident in residents):
        return 0
    count = 0
    while sm.take(kernel):
        count += 1
    return count


@cache
def least_room(gpu: Gpu, waiting: Kernel, blocks: int, kernel: Kernel) -> int:
    """Blocks of `kernel` that find room on a GPU while as many of `blocks` wait as can, wherever those were put."""
    most = room(gpu.limits, [], waiting)
    left = [room(gpu.limits, [waiting] * count, kernel) for count in range(most + 1)]
    least = torch.full((min(blocks, most * gpu.num_sms) + 1,), math.inf)  # by how many have been put
    least[0] = 0
    for _ in range(gpu.num_sms):
        before, least = least, least + left[0]
        for count in range(1, min(most + 1, len(least))):
            torch.minimum(least[count:], before[:-count] + left[count], out=least[count:])
    return int(least[-1])


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
