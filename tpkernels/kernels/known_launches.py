"""Launches like an earlier one, without what Triton and we would do once more.

Triton's own launch specialises on every argument anew, and ours checks operands and describes them.  Where a caller
knows that nothing has changed but the operands' addresses, what is left is to put those in and to call the launcher.
That leaves a known call of 8 ranks 50 of 105 us of the host's time for an all-gather with its GEMM, and 61 of 110 for
a GEMM with its reduce-scatter, of which 30 and 43 are not the launch's.  (Medians of 40 interleaved rounds, quartiles
within 4 us; one core of a busy Intel Xeon, Triton 3.7.1, 2026-11-23; the driver was a stand-in that does nothing.)

Assumes of Triton (3.6, 3.7) that `CompiledKernel[grid]` launches with the arguments of the kernel's signature, in its
order, and that its launcher reads of a descriptor what a `TensorDescriptor` has: tests/kernels/test_known_launches.py
compares what reaches the launcher with what Triton's own launch gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["KnownLaunch", "known_launch"]


_AS_IT_IS = object()
_Likes = tuple[TensorDescriptor | object | None, ...]


@dataclass(frozen=True)
class KnownLaunch:
    """A kernel with all but its operands; on the current device and stream.

    likes: of each operand, None where the kernel has none, a descriptor without its tensor, or that it is a tensor.
    """

    run: Callable[..., None]
    likes: _Likes
    others: tuple[Any, ...]

    def __call__(self, *operands: Tensor | None) -> None:
        """With operands of the same dtypes, shapes, strides and alignments to 16 bytes, in the kernel's order."""
        given = [
            tensor if like is _AS_IT_IS else None if like is None else _described(like, tensor)
            for like, tensor in zip(self.likes, operands, strict=True)
        ]
        self.run(*given, *self.others)


def known_launch(compiled: Any, programs: int, operands: Sequence[Any], others: Sequence[Any]) -> KnownLaunch | None:
    """From what Triton's launch has returned: None where it interprets kernels.

    operands: as they were given, the kernel's first arguments; others: all arguments behind them.
    """
    if compiled is None:
        return None
    likes = tuple(
        _described(one, None) if isinstance(one, TensorDescriptor) else None if one is None else _AS_IT_IS
        for one in operands
    )
    return KnownLaunch(compiled.__getitem__((programs, 1, 1)), likes, tuple(others))


def _described(like: Any, tensor: Tensor | None) -> TensorDescriptor:
    """The same of another tensor: its checks would find the same."""
    made = object.__new__(TensorDescriptor)
    vars(made).update(vars(like), base=tensor)
    return made
