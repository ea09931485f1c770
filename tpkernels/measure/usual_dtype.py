"""The dtype that a tool measures in where nobody names one: bf16, or fp32 where that is faster.

Cores without bf16 units (AVX2 alone) multiply bf16 at a fraction of fp32's rate. Nobody would compute so there, and a
suite in bf16 takes minutes to say it.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tpkernels.comm.groups import resolve
from tpkernels.ops.agreed_call import exchange

__all__ = ["AUTO", "usual_dtype"]

AUTO = "auto"
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_ROWS, _FEATURES = 128, 1024
_REPEATS = 3


def usual_dtype(device: str, group: dist.ProcessGroup) -> tuple[str, str | None]:
    """Its name, and a sentence where it is not bf16; the same on all ranks of ``group`` (gloo), which call together.

    The first rank multiplies a small matrix in both while the others wait.
    """
    if device != "cpu":
        return "bf16", None
    mine: tuple[str, str | None] = "bf16", None
    if group.rank() == 0:
        mine = _choice({name: _gemm_seconds(dtype) for name, dtype in _DTYPES.items()})
    name, why = exchange(resolve(group), "usual_dtype", {"answer": mine})[0]["answer"]
    return name, why


def _choice(seconds: dict[str, float]) -> tuple[str, str | None]:
    if seconds["bf16"] <= seconds["fp32"]:
        return "bf16", None
    flop = 2 * _ROWS * _FEATURES**2
    rates = {name: f"{flop / taken / 1e9:.0f} GFLOP/s" for name, taken in seconds.items()}
    return "fp32", (
        f"in fp32, because these cores multiply bf16 at {rates['bf16']} and fp32 at {rates['fp32']} "
        "(--dtype bf16 measures in bf16 all the same)"
    )


def _gemm_seconds(dtype: torch.dtype) -> float:
    """The fastest of a few calls, after one that is not counted."""
    x, weight = torch.ones(_ROWS, _FEATURES, dtype=dtype), torch.ones(_FEATURES, _FEATURES, dtype=dtype)
    taken = []
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        F.linear(x, weight)
        taken.append(time.perf_counter() - start)
    return min(taken[1:])
