"""The judge of whole models in fp32 and bf16: how far from fp64 may a parallelized model be?

As far as the unsharded model is, times ``FACTOR``, element by element.  A single error of the unsharded model is luck,
so that its size is taken from the element's row and column, and half from the whole tensor where those are small::

    |y - ref64| <= FACTOR * ( s + u (|ref64| + rms of ref64) )
    s = max(row_rms * column_rms / rms, sqrt(row_rms * column_rms))    of plain - ref64; 0 where a row has no error

``ref64`` is the unsharded model in fp64 on the same weights, ``plain`` the unsharded model in the dtype of the test, u
half of that dtype's eps: what one rounding of a result costs.  The idea of taking a bound from the baseline's own error
is that of Dao-AILab/gemm-cublas.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FACTOR", "allowed", "worst_ratio"]

FACTOR = 8.0
"""The largest of a million normal deviations is 5 times their root mean square; ranks round their partial sums, too."""


def allowed(plain: Tensor, exact: Tensor) -> Tensor:
    """What ``FACTOR`` is to be multiplied with, for each element."""
    error, exact = (plain.detach().double() - exact.detach()), exact.detach()
    unit = torch.finfo(plain.dtype).eps / 2
    spread = _rms(error)
    if error.dim() > 1 and spread > 0:
        rows = error.square().mean(-1, keepdim=True).sqrt()
        columns = error.flatten(0, -2).square().mean(0).sqrt()
        smooth = torch.maximum(rows * columns / spread, (rows * columns).sqrt())
    else:
        smooth = spread.expand(error.shape)
    return smooth + unit * (exact.abs() + _rms(exact))


def worst_ratio(actual: Tensor, exact: Tensor, size: Tensor) -> float:
    """The largest error in units of what :func:`allowed` gives; infinite for NaN and wrong shapes."""
    if actual.shape != exact.shape:
        return float("inf")
    if not actual.numel():
        return 0.0
    error = (actual.detach().double() - exact).abs()
    ratio = torch.where(error == 0, 0.0, error / size)
    return float(ratio.nan_to_num(nan=float("inf")).max())


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
