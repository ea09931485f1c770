"""How far the kernels' activations are from the truth; runs in a worker of the interpreter, or on a GPU."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.kernels.interpreter import PACKAGE, load

BLOCK = 4096


@triton.jit
def _gelu_kernel(x, out, count, ACTIVATE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(x + places, mask=places < count, other=0.0)
    tl.store(out + places, ACTIVATE(z, z, "gelu"), mask=places < count)


def gelu(x: Tensor, package: str = PACKAGE, folder: str | None = None) -> Tensor:
    out, activate = torch.empty_like(x), load(package, "tiles", folder).activate
    _gelu_kernel[(triton.cdiv(len(x), BLOCK),)](x, out, len(x), ACTIVATE=activate, BLOCK=BLOCK)
    return out


def every_bf16(device: str) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(torch.bfloat16).float()


def dense(device: str) -> Tensor:
    """About 400,000 numbers: evenly spaced, and towards 0 by their exponents."""
    even = torch.linspace(-10, 10, 200_001, device=device)
    small = torch.logspace(-30, 1, 100_000, device=device)
    return torch.cat([even, small, -small])


def gelu_errors(package: str = PACKAGE, folder: str | None = None, device: str = "cpu") -> list[dict[str, float]]:
    """Against fp64, for every bf16 and for many fp32; torch's own in fp32 beside it.

    absolute: where |z| <= 10; relative: where z > 0; tail: relative, where -5.5 < z < 0; far: absolute, below that.
    """
    found = []
    for x in (every_bf16(device), dense(device)):
        x = x[x.abs() < 1e30]
        true = x.double() * 0.5 * torch.special.erfc(-x.double() / math.sqrt(2))
        normal = true.abs() > 1e-37  # below, fp32 itself has no digits left
        errors = {}
        for name, y in (("", gelu(x, package, folder)), ("torch ", torch.nn.functional.gelu(x))):
            error = (y.double() - true).abs()
            relative = error / true.abs()
            errors |= {
                f"{name}absolute": float(error[x.abs() <= 10].max()),
                f"{name}relative": float(relative[(x > 0) & normal].max()),
                f"{name}tail": float(relative[(x < 0) & (x > -5.5) & normal].max()),
                f"{name}far": float(error[x < -5.5].max()),
            }
        found.append(errors)
    return found


def special_values(device: str = "cpu") -> list[float]:
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 3e38, -3e38, -40.0], device=device)
    values: list[float] = gelu(x).tolist()
    return values
