"""An elementwise fp64 bound on what an op may return: the judge of every numeric test.

Owns: `Bounded`, a fp64 reference value with an elementwise limit on the error of a computed result, and the checks of
results against it. Comparisons that a correct low-precision result can fail, or a wrong one can pass (allclose,
relative norms), are not offered. `payload.py` makes inputs, `expected.py` knows the fused ops.

Assumes: round to nearest, and accumulation over K and over ranks in fp32 (fp64 for fp64), which is what the project
promises. A sum of K products is allowed `sqrt(K) * eps_acc * |A||B|`: for K <= 4 that covers the worst case, above
it the roundings' random signs (a chain of dependent roundings of one sign would need all of K, and no GEMM has it).

Refuses: to compare NaN with numbers. NaN and Inf must stand exactly where the reference has them.

Error algebra. A computed x^ with |x^ - x| <= E stays a `Bounded(x, E)` through the following steps, u = eps/2 of the
dtype that is rounded to and eta its smallest subnormal number:

    rounding to a dtype      E' = E + u (|x| + E) + eta/2
    sum_r A_r B_r^T          E' = sum_r [ Ea |B|^T + (|A| + Ea) Eb^T ] + sqrt(K) eps_acc sum_r (|A| + Ea)(|B| + Eb)^T
      partials rounded       each partial p_r takes one rounding step before the sum
    x y                      E' = Ex (|y| + Ey) + (|x| + Ex) Ey
    f(x)                     E' = L1 E + 4 eps_acc (|x| + E)                     L1 = max |f'|
    dy f'(x)                 E' = Edy L1 + (|dy| + Edy) (min(L2 E, 2 L1) + 8 eps_acc)   L2 = max |f''|

For exact inputs, rounded partials and one final rounding this is, to first order, the bound
`u |ref| + (1 + u) u sum_r |p_r| + sqrt(K) eps32 |A||B|`; `SLACK` covers the second order.

fp8 on tensor cores. From sm_89 to sm_90 they align the 32 products of a step and the running sum to the largest of them
and keep 14 bits (DeepSeek-V3 report, section 3.3.2); ours, and torch's without fast accumulation, go on in fp32 after a
block of at most 256 products. A model of that in the tests loses up to 1.0 * 2^-13 |A||B| (2.0 with 13 bits), most for
K of one block. `FP8_SUM_LOSS` allows four times 2^-13; `Bounded.scaled(..., sums_lose=...)` charges it to an operand.
Later GPUs keep all of fp32. The tests that use it passed on an H200 (2026-11-26).

The reference is computed in fp64 and not exact either: the same K term with eps64 stands for it, which matters
for fp64 results only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "ACTIVATIONS",
    "CLAMPED",
    "FP8_SUM_LOSS",
    "GATED",
    "SLACK",
    "BoundExceeded",
    "Bounded",
    "activate",
    "assert_bitwise_equal",
    "assert_within_bound",
    "gate",
]

SLACK = 1.01
FP8_SUM_LOSS = 4 * 2.0**-13
"""Of |A||B|: what a tensor core that keeps 14 bits may lose of a sum of fp8 products."""
_EPS64 = torch.finfo(torch.float64).eps

ActivationName = Literal["relu", "gelu", "gelu_tanh", "silu"]


@dataclass(frozen=True)
class ActivationBounds:
    """Largest |f'| and |f''| over the reals (a test samples both). relu has no f'': its kink is handled apart."""

    first: float
    second: float | None


ACTIVATIONS: dict[str, ActivationBounds] = {
    "relu": ActivationBounds(1.0, None),
    "gelu": ActivationBounds(1.129, 0.798),  # f' = Phi + x phi, largest at sqrt(2); f'' = (2 - x^2) phi, at 0
    "gelu_tanh": ActivationBounds(1.130, 0.798),
    "silu": ActivationBounds(1.100, 0.5),
}


CLAMPED = "clamped_swiglu"
GATED: dict[str, str | None] = {"swiglu": "silu", "geglu": "gelu", CLAMPED: None}
"""Of two inputs, gate and up: f(gate) up, and which f that is; or another function of the two."""
CLAMP, SHARPNESS = 7.0, 1.702


class BoundExceeded(AssertionError):
    """A result left its bound. `index` is the worst element, `count` how many, `box` the index range that holds all."""

    def __init__(self, message: str, *, index: tuple[int, ...], count: int, box: tuple[tuple[int, int], ...]) -> None:
        super().__init__(message)
        self.index = index
        self.count = count
        self.box = box


@dataclass(frozen=True)
class Bounded:
    """A fp64 reference `value`, and `error`: how far from it a correct computation may end, element by element."""

    value: Tensor
    error: Tensor

    @staticmethod
    def exact(x: Tensor | Bounded) -> Bounded:
        """Inputs are what they are: a low-precision tensor converts to fp64 without error."""
        if isinstance(x, Bounded):
            return x
        value = x.detach().double()
        return Bounded(value, torch.zeros_like(value))

    @staticmethod
    def scaled(numbers: Tensor, scale: Tensor, *, sums_lose: float = 0.0) -> Bounded:
        """fp8 numbers and their scale, per row ([..., 1]) or of one element, which may be applied in fp32 once.

        sums_lose: what sums of products with this operand lose of |A||B|; `FP8_SUM_LOSS` on GPUs of sm_89 and sm_90.
        """
        value = numbers.detach().double() * scale.detach().double()
        return Bounded(value, (_unit_roundoff(torch.float32) + sums_lose) * value.abs())

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    def dim(self) -> int:
        return self.value.dim()

    @property
    def largest(self) -> Tensor:
        """How large the computed value can be in magnitude."""
        return self.value.abs() + self.error

    def rounded(self, dtype: torch.dtype) -> Bounded:
        unit, subnormal = _unit_roundoff(dtype), _smallest_subnormal(dtype)
        return Bounded(self.value, self.error + unit * self.largest + subnormal / 2)

    def plus(self, other: Tensor | Bounded) -> Bounded:
        """Sum in the accumulation dtype; its rounding is part of the K term (a bias is one more product with 1)."""
        term = Bounded.exact(other)
        return Bounded(self.value + term.value, self.error + term.error)

    def times(self, other: Tensor | Bounded) -> Bounded:
        """Product element by element, before its rounding."""
        factor = Bounded.exact(other)
        return Bounded(self.value * factor.value, self.error * factor.largest + self.largest * factor.error)

    def __getitem__(self, index: int | Tensor) -> Bounded:
        return Bounded(self.value[index], self.error[index])

    def narrow(self, dim: int, start: int, length: int) -> Bounded:
        return Bounded(self.value.narrow(dim, start, length), self.error.narrow(dim, start, length))

    def transposed(self) -> Bounded:
        return Bounded(self.value.transpose(-1, -2), self.error.transpose(-1, -2))

    def rows(self) -> Bounded:
        """The 2-D view of all leading dimensions against the last."""
        shape = math.prod(self.value.shape[:-1]), self.value.shape[-1]
        return Bounded(self.value.reshape(shape), self.error.reshape(shape))

    @staticmethod
    def sum_of_products(
        a_parts: Sequence[Tensor | Bounded],
        b_parts: Sequence[Tensor | Bounded],
        *,
        bias: Tensor | Bounded | None = None,
        dtype: torch.dtype,
        partials_rounded: bool = False,
    ) -> Bounded:
        """sum_r a_r b_r^T + bias before its final rounding: a_r [..., K_r], b_r [N, K_r].

        dtype: of the operands and result; it decides what accumulates (fp64 for fp64, else fp32) and what partials
        are rounded to with `partials_rounded`. For a weight gradient pass dy^T and x^T: K is then the rows.
        """
        if len(a_parts) != len(b_parts) or not a_parts:
            raise ValueError(f"a_parts ({len(a_parts)}) and b_parts ({len(b_parts)}) must pair up, one per rank")
        total: Bounded | None = None
        magnitude: Tensor | None = None
        contracted = 0 if bias is None else 1
        for a_part, b_part in zip(a_parts, b_parts, strict=True):
            a, b = Bounded.exact(a_part), Bounded.exact(b_part)
            if a.value.shape[-1] != b.value.shape[-1]:
                shapes = f"a_part {tuple(a.value.shape)} and b_part {tuple(b.value.shape)}"
                raise ValueError(f"{shapes} must have the same last dim, the contracted one")
            contracted += a.value.shape[-1]
            partial = Bounded.exact(a.value @ b.value.T)
            if isinstance(a_part, Bounded) or isinstance(b_part, Bounded):  # two GEMMs less for exact inputs
                partial = Bounded(partial.value, a.error @ b.value.abs().T + a.largest @ b.error.T)
            if partials_rounded:
                partial = partial.rounded(dtype)
            total = partial if total is None else total.plus(partial)
            products = a.largest @ b.largest.T
            magnitude = products if magnitude is None else magnitude + products
        assert total is not None and magnitude is not None
        if bias is not None:
            total = total.plus(bias)
            magnitude = magnitude + Bounded.exact(bias).largest
        gemm = math.sqrt(max(contracted, len(a_parts))) * (_accumulation_eps(dtype) + _EPS64) * magnitude
        return Bounded(total.value, total.error + gemm)

    def activation(self, name: str | None, *, dtype: torch.dtype, input_rounded: bool = True) -> Bounded:
        """f(x), not yet rounded; with `input_rounded` x may have been rounded to `dtype`, as the unfused op does."""
        if name is None:
            return self
        first = _activation_bounds(name).first
        if name == "relu":  # rounding before or after it is the same, so the caller's rounding is the only one
            return Bounded(activate(self.value, name), first * self.error)
        x = self.rounded(dtype) if input_rounded else self
        return Bounded(activate(x.value, name), first * x.error + 4 * _accumulation_eps(dtype) * x.largest)

    def gated(self, name: str, up: Bounded, *, dtype: torch.dtype, input_rounded: bool = True) -> Bounded:
        """f(x) up, see `GATED`, for the gate x that this is; with `input_rounded` every step rounds to `dtype`."""
        if name == CLAMPED:  # rounds once, at the end
            gate, up = (one.rounded(dtype) if input_rounded else one for one in (self, up))
            return _Clamped(gate, up, dtype).value.rounded(torch.float64 if dtype == torch.float64 else torch.float32)
        gate = self.activation(GATED[name], dtype=dtype, input_rounded=input_rounded)
        if input_rounded:
            gate, up = gate.rounded(dtype), up.rounded(dtype)
        return gate.times(up).rounded(torch.float64 if dtype == torch.float64 else torch.float32)

    def activation_gradient(self, name: str | None, dy: Tensor | Bounded, *, dtype: torch.dtype) -> Bounded:
        """dy * f'(x), not yet rounded, for the x that this is; x may have been rounded to `dtype` in between."""
        upstream = Bounded.exact(dy)
        if name is None:
            return upstream
        x, limits = self.rounded(dtype), _activation_bounds(name)
        with torch.enable_grad():
            leaf = x.value.clone().requires_grad_()
            (slope,) = torch.autograd.grad(activate(leaf, name).sum(), leaf)
        if limits.second is None:  # relu: the slope is exact, unless x may lie on the other side of the kink
            slope_error = (x.value.abs() <= x.error).double()
        else:
            slope_error = (limits.second * x.error).clamp(max=2 * limits.first) + 8 * _accumulation_eps(dtype)
        return Bounded(upstream.value * slope, upstream.error * limits.first + upstream.largest * slope_error)

    def gated_gradient(
        self, name: str, up: Bounded, dy: Tensor | Bounded, *, dtype: torch.dtype
    ) -> tuple[Bounded, Bounded]:
        """Gradients of the gate x that this is and of up, each rounded to `dtype`, as are the steps on the way."""
        dy, kept, kept_up = Bounded.exact(dy), self.rounded(dtype), up.rounded(dtype)
        if name == CLAMPED:
            slope, slope_of_up = _Clamped(kept, kept_up, dtype).slopes
            return dy.times(slope).rounded(dtype), dy.times(slope_of_up).rounded(dtype)
        of_gate = self.activation_gradient(GATED[name], dy.times(kept_up).rounded(dtype), dtype=dtype)
        of_up = dy.times(kept.activation(GATED[name], dtype=dtype, input_rounded=False).rounded(dtype))
        return of_gate.rounded(dtype), of_up.rounded(dtype)

    def check(self, actual: Tensor, what: str = "result") -> None:
        """Raise `BoundExceeded` unless `actual`, whose dtype is the one rounded to, is within the bound everywhere."""
        assert_within_bound(actual, self.value, self.error, what)

    def worst_ratio(self, actual: Tensor) -> float:
        """The largest |actual - value| / (1.01 error) of all elements; `check` passes up to 1."""
        if actual.shape != self.value.shape:
            return math.inf
        if actual.numel() == 0:
            return 0.0
        value, limit = actual.detach().double().cpu(), SLACK * self.error.cpu()
        return float(_ratios(value, self.value.cpu(), limit, torch.finfo(actual.dtype).max).max())


class _Clamped:
    """g sigmoid(1.702 g) (u + 1) of g = min(gate, 7), u = max(-7, min(up, 7)), computed in the accumulation dtype."""

    def __init__(self, gate: Bounded, up: Bounded, dtype: torch.dtype) -> None:
        self._gate, self._up, self._eps = gate, up, _accumulation_eps(dtype)
        # g sigmoid(s g) is silu(s g) / s: the bounds of silu's slopes, the second one times s.
        silu = ACTIVATIONS["silu"]
        self._first, self._second = silu.first, SHARPNESS * cast(float, silu.second)
        g = gate.value.clamp(max=CLAMP)
        part = torch.sigmoid(SHARPNESS * g)
        self._silu = Bounded(g * part, self._first * gate.error + 8 * self._eps * (g.abs() + gate.error))
        self._slope = part + SHARPNESS * g * part * (1 - part)
        shifted = up.value.clamp(-CLAMP, CLAMP) + 1
        self._shifted = Bounded(shifted, up.error + 2 * self._eps * (shifted.abs() + 1 + up.error))

    @property
    def value(self) -> Bounded:
        return self._silu.times(self._shifted)

    @property
    def slopes(self) -> tuple[Bounded, Bounded]:
        """Of the value by gate and by up; where the input may lie on the other side of a clamp, 0 is as good."""
        gate, up = self._gate, self._up
        inside = (gate.value <= CLAMP).double()
        off = (self._second * gate.error).clamp(max=2 * self._first) + 16 * self._eps
        off += self._first * ((gate.value - CLAMP).abs() <= gate.error)
        of_gate = Bounded(self._slope * inside, off).times(self._shifted)
        within = (up.value.abs() <= CLAMP).double()
        at_the_edge = ((up.value.abs() - CLAMP).abs() <= up.error).double()
        return of_gate, self._silu.times(Bounded(within, at_the_edge))


def assert_within_bound(actual: Tensor, reference64: Tensor, bound: Tensor, what: str = "result") -> None:
    """Raise `BoundExceeded` unless |actual - reference64| <= 1.01 bound everywhere, NaN and Inf in the same places.

    Where the bound reaches over the largest finite number of actual's dtype, Inf passes as well.
    The message names the worst element, the number of violations and the index range that holds them all.
    """
    if actual.shape != reference64.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)}, expected {tuple(reference64.shape)}")
    if actual.numel() == 0:
        return
    value, reference, limit = actual.detach().double().cpu(), reference64.cpu(), SLACK * bound.cpu()
    ratios = _ratios(value, reference, limit, torch.finfo(actual.dtype).max)
    wrong = ratios > 1
    if not wrong.any():
        return
    index = tuple(int(i) for i in torch.unravel_index(ratios.argmax(), wrong.shape))
    places = wrong.nonzero()
    box = tuple((int(low), int(high) + 1) for low, high in zip(places.amin(0), places.amax(0), strict=True))
    raise BoundExceeded(
        f"{what}: {len(places)} of {wrong.numel()} elements ({len(places) / wrong.numel():.2%}) exceed the bound, "
        f"all within [{', '.join(f'{low}:{high}' for low, high in box)}]; worst at {list(index)}: "
        f"actual {float(value[index])!r}, reference {float(reference[index])!r}, "
        f"|difference| {float((value - reference)[index].abs()):.3e}, bound {float(limit[index]):.3e}, "
        f"ratio {float(ratios[index]):.3g} ({actual.dtype}, shape {tuple(actual.shape)})",
        index=index,
        count=len(places),
        box=box,
    )


def _ratios(value: Tensor, reference: Tensor, limit: Tensor, largest: float) -> Tensor:
    """|value - reference| / limit; 0 where both are the same NaN or Inf, Inf where one of them alone is not finite."""
    error = (value - reference).abs()
    # Inf - Inf and an infinite bound must not make a non-finite place pass: those are compared for equality alone.
    within = (error <= limit) & reference.isfinite() & value.isfinite()
    same_nonfinite = (value.isnan() & reference.isnan()) | (value.isinf() & (value == reference))
    overflowed = value.isinf() & (value.sign() == reference.sign()) & reference.isfinite()
    overflowed &= reference.abs() + limit > largest
    ratios = error / limit
    wrong = ratios.nan_to_num(nan=math.inf, posinf=math.inf)
    wrong = torch.where(wrong > 1, wrong, math.inf)  # not within for another reason
    ratios = torch.where(within, ratios.nan_to_num(nan=0.0), wrong)  # 0 / 0: exactly right, and required to be
    return torch.where(same_nonfinite | overflowed, 0.0, ratios)


def assert_bitwise_equal(actual: Tensor, expected: Tensor, what: str = "result", *, either_zero: bool = False) -> None:
    """Raise `BoundExceeded` unless dtype, shape and every bit agree. either_zero: let -0.0 pass for 0.0."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise AssertionError(
            f"{what}: {actual.dtype} {tuple(actual.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
        )
    if actual.numel() == 0:
        return
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    wrong = _bits(actual) != _bits(expected)
    if either_zero:
        wrong &= ~((actual == 0) & (expected == 0))
    if not wrong.any():
        return
    places = wrong.nonzero()
    index = tuple(int(i) for i in places[0])
    box = tuple((int(low), int(high) + 1) for low, high in zip(places.amin(0), places.amax(0), strict=True))
    raise BoundExceeded(
        f"{what}: {len(places)} of {wrong.numel()} elements differ in their bits, "
        f"all within [{', '.join(f'{low}:{high}' for low, high in box)}]; first at {list(index)}: "
        f"actual {actual[index].item()!r}, expected {expected[index].item()!r} "
        f"({actual.dtype}, shape {tuple(actual.shape)})",
        index=index,
        count=len(places),
        box=box,
    )


def _bits(x: Tensor) -> Tensor:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(integers[x.element_size()]) if x.is_floating_point() else x


def _unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _smallest_subnormal(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def _accumulation_eps(dtype: torch.dtype) -> float:
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def _activation_bounds(name: str) -> ActivationBounds:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation ({name!r}) must be None or one of {', '.join(map(repr, ACTIVATIONS))}")
    return ACTIVATIONS[name]


def activate(x: Tensor, name: str) -> Tensor:
    if name == "relu":
        return F.relu(x)
    if name == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def gate(name: str, of_gate: Tensor, of_up: Tensor) -> Tensor:
    """What a gated activation gives, in differentiable torch."""
    act = GATED[name]
    if act is not None:
        return activate(of_gate, act) * of_up
    clamped = of_gate.clamp(max=CLAMP)
    return clamped * torch.sigmoid(SHARPNESS * clamped) * (of_up.clamp(-CLAMP, CLAMP) + 1)
