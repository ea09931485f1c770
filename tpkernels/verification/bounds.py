"""The judge of whole models: how far from fp64 may a parallelized model be?

As far as the unsharded model is, times ``FACTOR``, element by element.  A single error of the unsharded model is luck,
so that its size is taken from the element's row and column, and half from the whole tensor where those are small::

    |y - ref64| <= FACTOR * ( s + u (|ref64| + rms of ref64) )
    s = max(row_rms * column_rms / rms, sqrt(row_rms * column_rms))    of plain - ref64; 0 where a row has no error

``ref64`` is the unsharded model in fp64 on the same weights, ``plain`` the unsharded model in the dtype of the test, u
half of that dtype's eps: what one rounding of a result costs.  The idea of taking a bound from the baseline's own error
is that of Dao-AILab/gemm-cublas.

A few elements are too few to tell the size of an error from: where a tensor, a row or a column has less than ``FEW``,
:func:`bounds_of` takes what is usual for the model's tensors, or for this tensor, into account.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["FACTOR", "Bound", "allowed", "bounds_of", "worst_ratio"]

FACTOR = 8.0
"""The largest of a million normal deviations is 5 times their root mean square; ranks round their partial sums, too."""


def allowed(plain: Tensor, exact: Tensor) -> Tensor:
    """The error of each element that, times ``FACTOR``, is allowed."""
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
    return float(ratio.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


@dataclass(frozen=True)
class Bound:
    """The exact values of a tensor, what each element's error is counted in, and the dtype that is expected.

    Without ``size`` (whole numbers) values must be equal, where the unsharded model's are: ``known``.
    """

    exact: Tensor
    size: Tensor | None
    dtype: torch.dtype
    known: Tensor | None = None

    def ratio(self, actual: Tensor, place: tuple[slice, ...] | Tensor | None = None) -> float:
        """The worst of ``actual``, which is the whole or, at ``place`` (slices, or indices of the last dimension), a
        part."""
        actual = _real(actual.detach())
        exact, size, known = (self._at(tensor, place) for tensor in (self.exact, self.size, self.known))
        assert exact is not None
        if actual.shape != exact.shape:
            return float("inf")
        if size is None:
            assert known is not None
            return float("inf") if bool(((actual != exact) & known).any()) else 0.0
        same = (actual == exact) | (actual.isnan() & exact.isnan())  # infinities, too
        return worst_ratio(torch.where(same, 0.0, actual.double()), torch.where(same, 0.0, exact.double()), size)

    def widened(self, other: Bound) -> Bound:
        """What either of two passes of the unsharded model allows."""
        if self.size is None or other.size is None:
            known = self.known if self.known is None or other.known is None else self.known & other.known
            return replace(self, known=known)
        return replace(self, size=torch.maximum(self.size, other.size))

    def _at(self, tensor: Tensor | None, place: tuple[slice, ...] | Tensor | None) -> Tensor | None:
        if tensor is None or place is None:
            return tensor
        return tensor.index_select(-1, place) if isinstance(place, Tensor) else tensor[place]


FEW = 16


def bounds_of(pairs: Mapping[str, tuple[Tensor, Tensor]], dtypes: Mapping[str, torch.dtype]) -> dict[str, Bound]:
    """Bounds of tensors of one kind (all gradients, say) from the exact and the plain ones; ``dtypes``: what is
    expected, where that is not the plain one's."""
    usual = _usual_error(pairs)
    found = {}
    for name, (exact, plain) in pairs.items():
        dtype = dtypes.get(name, plain.dtype)
        exact, plain = _real(exact.detach()), _real(plain.detach())
        if exact.shape != plain.shape:
            raise ValueError(f"{name} of the unsharded model has another shape in fp64: {exact.shape}, {plain.shape}")
        if not exact.is_floating_point():
            found[name] = Bound(exact, None, dtype, exact == plain)
            continue
        finite = exact.isfinite() & plain.isfinite()
        clean, rough = torch.where(finite, exact, 0.0), torch.where(finite, plain, 0.0)
        found[name] = Bound(exact, _size(clean, rough, usual), dtype)
    return found


def _size(exact: Tensor, plain: Tensor, usual: float) -> Tensor:
    size = allowed(plain, exact)
    if not exact.numel():
        return size
    if exact.numel() < FEW:
        return size + usual * _rms(exact)
    if exact.dim() > 1 and min(exact.shape[-1], exact.numel() // exact.shape[-1]) < FEW:
        error = plain.double() - exact
        touched = error.ne(0).any(-1, keepdim=True) & error.flatten(0, -2).ne(0).any(0)
        return torch.maximum(size, torch.where(touched, _rms(error), 0.0))
    return size


def _usual_error(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> float:
    """The median of the tensors' relative errors."""
    found = []
    for exact, plain in pairs.values():
        if exact.is_floating_point() and exact.numel() and exact.shape == plain.shape:
            norm = float(_rms(exact.detach().double()))
            error = float(_rms(plain.detach().double() - exact.detach()))
            if 0 < norm < float("inf") and error < float("inf"):
                found.append((exact.numel() >= FEW, error / norm))
    telling = sorted(error for enough, error in found if enough) or sorted(error for _, error in found)
    return telling[len(telling) // 2] if telling else 0.0


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
