"""How many blocks of a kernel may wait on a GPU at once: the rest of its SMs is for whatever they wait for.

A block that waits keeps its registers.  If blocks that wait fill a GPU, the kernels that would end the waiting find no
room, on this GPU or, by way of a peer that waits for this one, on another.  So every grid that waits is cut here, and
only here, by SMs: wherever the hardware puts n blocks, they touch at most n SMs, and all others stay free.  Which
kernels that leaves room for is worked out in csrc/cuda/README.md, and held by tests/cuda/test_residency.py for the
registers and the shared memory that the compiler has given each kernel.
"""

from __future__ import annotations

__all__ = ["NCCL_CTAS", "gemm_programs", "waiting_blocks"]

NCCL_CTAS = 32
"""As many as NCCL takes; each has nearly all registers of an SM, so none fits beside a block that sums."""
_LEFT_BY_BLOCKS = NCCL_CTAS + 4  # four SMs for kernels of others, which may want whole ones, too
_LEFT_BY_GEMM = 2  # for kernels of one warp; with one SM, a single CTA of NCCL could take their room


def waiting_blocks(num_sms: int) -> int:
    """The most blocks of a reducer, or of a call in one kernel, on a GPU, or a share of one, that has so many SMs."""
    return max(1, num_sms - min(_LEFT_BY_BLOCKS, num_sms // 2))


def gemm_programs(num_sms: int, *, waits: bool) -> int:
    """The most CTAs of a persistent GEMM.

    waits: for chunks that come.  One that announces chunks ends by itself, and leaves an SM so that they may go.
    """
    return max(1, num_sms - (_LEFT_BY_GEMM if waits else 1))
