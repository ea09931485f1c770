"""What follows a row layer in most models, add the residual and normalise by the root mean square, and its gradient.

::

    sums   = round(y + residual)
    normed = round(sums * scale * weight),   scale = 1 / sqrt(mean over columns of sums^2 + eps)

The compiled core does either direction in one pass over the rows (``csrc/cpu/residual_norm.h``).  1024 rows of 4096
bf16 numbers take 1.6 ms forward, where ``F.rms_norm(y + residual)`` of torch 2.13 takes 14.8 (one core of an Intel Xeon
with AMX, a busy machine, one run, 2026-11-23).  Tensors on a GPU, and a machine without the core, take torch's ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.gemm.native import native, native_dtype

__all__ = ["backward", "forward", "of_scales", "who"]


def of_scales(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scales and of sums over rows."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def who(device: torch.device) -> str:
    """Who computes it; where ranks differ in that, their results would differ in the last bits."""
    return "torch" if device.type != "cpu" or native() is None else "core"


def forward(y: Tensor, residual: Tensor, weight: Tensor, eps: float, normed: Tensor, scales: Tensor) -> None:
    """``y`` becomes the sums; ``normed`` and ``scales``, one per row, are filled.  Contiguous ``[rows, columns]``."""
    if who(y.device) == "core":
        module: Any = native()
        module.residual_norm(
            native_dtype(y.dtype), y.shape[0], y.shape[1], weight.data_ptr(), eps, y.data_ptr(), residual.data_ptr(),
            y.data_ptr(), normed.data_ptr(), scales.data_ptr(),
        )  # fmt: skip
        return
    y.add_(residual)
    result, rstd = torch.ops.aten._fused_rms_norm(y, [y.shape[1]], weight, eps)
    normed.copy_(result)
    scales.copy_(rstd.view(-1))


def backward(
    dn: Tensor | None, dr: Tensor | None, sums: Tensor, scales: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of y, which is the residual's too, and that of the weight, in the dtype of the scales.

    From the gradients of the normed rows and of the sums; None is zeros.  All are contiguous ``[rows, columns]``.
    """
    if who(sums.device) == "core":
        module: Any = native()
        d, dweight = torch.empty_like(sums), weight.new_empty(weight.shape, dtype=scales.dtype)
        module.residual_norm_backward(
            native_dtype(sums.dtype), sums.shape[0], sums.shape[1], weight.data_ptr(), _address(dn), _address(dr),
            sums.data_ptr(), scales.data_ptr(), d.data_ptr(), dweight.data_ptr(),
        )  # fmt: skip
        return d, dweight
    wide = scales.dtype
    total = torch.zeros_like(sums, dtype=wide) if dr is None else dr.to(wide)
    if dn is None:
        return total.to(sums.dtype), weight.new_zeros(weight.shape, dtype=wide)
    g, of_n = sums.to(wide) * scales[:, None], dn.to(wide)
    h = of_n * weight.to(wide)
    total = total + scales[:, None] * (h - g * (h * g).mean(1, keepdim=True))
    return total.to(sums.dtype), (of_n * g).sum(0)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
