"""What a card should do, before it is asked: the numbers that stand beside the measured ones.

All of it is modelled: data sheets, the shares of them that large problems are known to reach, and an estimate of our
GEMM's loop from its machine code. Nothing here was measured by us. Pure functions; times in seconds.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

# Shares of the data sheet: a large bf16 GEMM of a library (the power limit takes the rest), and a copy in memory.
LIBRARY_SHARE, MEMORY_SHARE = 0.72, 0.90
# What a kernel lasts that does nothing, a driver call, a small operation of torch's, a launch by Triton, and one like
# an earlier one (tpkernels/kernels/known_launches.py).
KERNEL_S, DRIVER_CALL_S, TORCH_CALL_S, TRITON_LAUNCH_S, KNOWN_LAUNCH_S = 4e-6, 2.5e-6, 5e-6, 32e-6, 9e-6
# One look at a flag that is up. A tile begins with one.
POLL_S = 0.7e-6
# Our loop beside the library's: its arithmetic takes a share, and each tile ends with work that no product hides, as if
# K were longer by so many bytes of a row (about one and a half steps). In a nested loop the pipeline drains and fills
# again, too (two and a half more).
LOOP_SHARE, TILE_BYTES, DRAIN_BYTES = 0.93, 190, 350


@dataclass(frozen=True)
class Card:
    """tflops: dense, bf16 with sums in fp32; fp8_tflops: 0 where it has none; pcie_gbps: one way, what copies reach."""

    name: str
    sms: int
    tflops: float
    fp8_tflops: float
    memory_gbps: float
    pcie_gbps: float

    def library_gemm_s(self, m: int, n: int, k: int, itemsize: int = 2, experts: int = 1) -> float:
        """Grouped: m rows of all experts, each with a weight of its own."""
        peak = self.fp8_tflops if itemsize == 1 and self.fp8_tflops else self.tflops
        moved = itemsize * (m * k + experts * n * k) + 2 * m * n
        return KERNEL_S + max(2.0 * m * n * k / (LIBRARY_SHARE * 1e12 * peak), self._memory_s(moved))

    def our_gemm_s(self, m: int, n: int, k: int, itemsize: int = 2, drains: bool = False) -> float:
        return self.library_gemm_s(m, n, k, itemsize) / loop_share(k, itemsize, drains)

    def copy_s(self, num_bytes: float) -> float:
        """Within the device: each byte is read and written."""
        return KERNEL_S + self._memory_s(2 * num_bytes)

    def reduce_s(self, parts: int, num_bytes: float) -> float:
        """`parts` times `num_bytes` are read, and once written; each block of the kernel begins with waits."""
        return KERNEL_S + POLL_S * parts + self._memory_s((parts + 1) * num_bytes)

    def pcie_s(self, num_bytes: float) -> float:
        return KERNEL_S + num_bytes / (1e9 * self.pcie_gbps)

    def _memory_s(self, num_bytes: float) -> float:
        return num_bytes / (MEMORY_SHARE * 1e9 * self.memory_gbps)


def loop_share(k: int, itemsize: int = 2, drains: bool = False) -> float:
    """Our GEMM's speed over the library's, by K: of bf16 0.92 at 8192, 0.91 at 4096, 0.88 at 1792; with a loop that
    drains 0.90, 0.87, 0.81."""
    return LOOP_SHARE * k * itemsize / (k * itemsize + TILE_BYTES + (DRAIN_BYTES if drains else 0))


def waiting_share(m: int, n: int, block_m: int, block_n: int, programs: int, gemm_s: float) -> float:
    """A GEMM that looks at a flag before each tile, over one that does not."""
    tiles = math.ceil(m / block_m) * math.ceil(n / block_n)
    return 1 + POLL_S * math.ceil(tiles / programs) / gemm_s


def overlapped_s(gemm_s: float, transfer_s: float, chunks: int) -> float:
    """Chunks of a transfer beside a GEMM: the longer of the two, and one chunk of the shorter that nothing hides."""
    return max(gemm_s, transfer_s) + min(gemm_s, transfer_s) / chunks


def efficiency(unfused_s: float, fused_s: float, gemm_s: float, transfer_s: float) -> float:
    """Of what overlap could win, the share that it wins; 0 where there is nothing to win."""
    could_win = unfused_s - max(gemm_s, transfer_s)
    return (unfused_s - fused_s) / could_win if could_win > 0 else 0.0


# --- the cards --------------------------------------------------------------------------------------------------------

# From the data sheets, by what the driver calls them; the first that matches counts.
_CARDS = (
    (r"A100.*PCI", Card("A100 PCIe", 108, 312, 0, 1935, 25)),
    (r"\bA100.*40GB", Card("A100 SXM, 40 GB", 108, 312, 0, 1555, 25)),
    (r"\bA100", Card("A100 SXM", 108, 312, 0, 2039, 25)),
    (r"\bA40\b", Card("A40", 84, 150, 0, 696, 25)),
    (r"\bL40S\b", Card("L40S", 142, 362, 733, 864, 25)),
    (r"\b4090\b", Card("RTX 4090", 128, 165, 330, 1008, 25)),
    (r"\bH20\b", Card("H20", 78, 148, 296, 4000, 50)),
    (r"\bH100 PCIe", Card("H100 PCIe", 114, 756, 1513, 2000, 50)),
    (r"\bH100", Card("H100 SXM", 132, 989, 1979, 3350, 50)),
    (r"\bH200", Card("H200", 132, 989, 1979, 4800, 50)),
    (r"\bB200", Card("B200", 148, 2250, 4500, 8000, 50)),
)
_OF_GENERATION = {8: "A100 SXM", 9: "H100 SXM", 10: "B200"}


def card_of(name: str, capability: int, sms: int) -> Card:
    """The card that the driver calls `name`; an unknown one is taken for a larger or smaller one of its generation."""
    for pattern, card in _CARDS:
        if re.search(pattern, name):
            return card
    like = _OF_GENERATION.get(capability // 10, "B200")
    model = next(card for _, card in _CARDS if card.name == like)
    part = sms / model.sms
    return replace(
        model, name=f"{name}, taken for {part:.2f} times {like}", sms=sms, tflops=part * model.tflops,
        fp8_tflops=part * model.fp8_tflops, memory_gbps=part * model.memory_gbps,
    )  # fmt: skip
