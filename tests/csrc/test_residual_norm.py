"""The compiled residual norm against its equation: every rounding where it is written, on every instruction set.

csrc/cpu/residual_norm*.cpp are called through the module that torch's tensors use, and driven by
residual_norm_exercise.cpp under the sanitizers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.csrc.exercises import DTYPES, run
from tpkernels.gemm import residual_norm
from tpkernels.gemm.native import native, why_not

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(native() is None, reason=why_not())]

EPS = 1e-6
SHAPES = ((1, 1), (3, 15), (2, 16), (3, 37), (2, 4096))


def tensors(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(shape[1])
    y, residual = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return y, residual, torch.randn(shape[1], generator=generator, dtype=torch.float64).to(dtype)


def normalised(y: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(sums, normed, scales), with no memory that is not written."""
    sums, wide = y.clone(), residual_norm.of_scales(y.dtype)
    normed, scales = torch.full_like(y, float("nan")), torch.full((y.shape[0],), float("nan"), dtype=wide)
    residual_norm.forward(sums, residual, weight, EPS, normed, scales)
    return sums, normed, scales


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_line_of_the_equation_is_rounded_once(isa: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        y, residual, weight = tensors(shape, dtype)
        sums, normed, scales = normalised(y, residual, weight)
        assert torch.equal(sums, y + residual), shape
        exact = (sums.double().square().mean(1) + EPS).rsqrt()
        steps = shape[1] / 16 + 8  # of a lane, then of the tree, the division, the root
        assert ((scales.double() - exact).abs() <= steps * torch.finfo(scales.dtype).eps * exact).all(), shape
        expected = (sums.to(scales.dtype) * scales[:, None] * weight.to(scales.dtype)).to(dtype)
        assert torch.equal(normed, expected), shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_sixteen_bits_is_read_and_written(isa: str, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 1)
    zeros, one = torch.zeros_like(every), torch.ones(1, dtype=dtype)
    sums, normed, scales = normalised(every, zeros, one)
    torch.testing.assert_close(sums, every + zeros, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(normed, (sums.float() * scales[:, None]).to(dtype), rtol=0, atol=0, equal_nan=True)
    assert int(sums.isnan().sum()) == int(every.isnan().sum()) > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", ["both", "normed", "sums"])
def test_gradients_are_those_of_the_equation(isa: str, dtype: torch.dtype, given: str) -> None:
    for shape in SHAPES:
        y, residual, weight = tensors(shape, dtype)
        sums, _, scales = normalised(y, residual, weight)
        dn, dr, _ = tensors(shape, dtype)
        of_n, of_r = (None if given == "sums" else dn), (None if given == "normed" else dr)
        d, dweight = residual_norm.backward(of_n, of_r, sums, scales, weight)
        x, w = sums.double().requires_grad_(), weight.double().requires_grad_()
        normed = torch.nn.functional.rms_norm(x, (shape[1],), w, EPS)
        loss = 0 * normed.sum() + 0 * x.sum()
        if of_n is not None:
            loss = loss + (normed * of_n.double()).sum()
        if of_r is not None:
            loss = loss + (x * of_r.double()).sum()
        loss.backward()
        assert x.grad is not None and w.grad is not None
        # The terms that are added up, with the roundings of the sums; then one of the result.
        size = float((dn.double() * weight.double()).abs().max() * scales.max() * (1 + normed.detach().abs().max()))
        slack = (shape[1] / 16 + 16) * torch.finfo(scales.dtype).eps * size
        assert ((d.double() - x.grad).abs() <= torch.finfo(dtype).eps * x.grad.abs() + slack).all(), shape
        terms = (dn.double() * x * scales[:, None]).abs().sum(0).detach()
        bound = (shape[0] + 16 + shape[1] / 16) * torch.finfo(scales.dtype).eps * terms
        assert ((dweight.double() - w.grad).abs() <= bound).all(), shape


def test_torch_computes_the_same_where_there_is_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    y, residual, weight = tensors((5, 48), torch.float64)
    core = [*normalised(y, residual, weight), *residual_norm.backward(y, residual, *_saved(y, residual, weight))]
    monkeypatch.setattr(residual_norm, "native", lambda: None)
    assert residual_norm.who(y.device) == "torch"
    plain = [*normalised(y, residual, weight), *residual_norm.backward(y, residual, *_saved(y, residual, weight))]
    for one, other in zip(core, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
    only_one = residual_norm.backward(None, residual, *_saved(y, residual, weight))
    assert torch.equal(only_one[0], residual) and not only_one[1].any()


def _saved(y: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sums, _, scales = normalised(y, residual, weight)
    return sums, scales, weight


def test_sizes_that_are_none_are_refused() -> None:
    module: Any = native()
    with pytest.raises(ValueError, match="rows must be at least 0, got -1"):
        module.residual_norm(module.Dtype.float32, -1, 4, 0, EPS, 0, 0, 0, 0, 0)


@pytest.mark.slow("25 s: compiles the kernels with sanitizers")
def test_random_cases_are_clean_under_address_and_undefined_behaviour_sanitizers(exercise: Path, full: bool) -> None:
    """Each instruction set's bits are the portable one's, too."""
    done = run([str(exercise), "20000" if full else "1000", "residual_norm"], ASAN_OPTIONS="detect_leaks=0")
    assert done.returncode == 0, done.stdout + done.stderr
