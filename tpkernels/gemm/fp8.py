"""fp8: e4m3 numbers with fp32 scales; how they are made, multiplied, and carried from rank to rank.

Owns :class:`Scaled`, which stands for a tensor in the GEMMs of backends, and the rows of bytes in which the scales of
gathered rows travel: behind each row's numbers, in the same chunk and slot.

    y = (x * scale_x) @ (w * scale_w)^T      products exact, summed and scaled in fp32, rounded once

Assumes ``torch.float8_e4m3fn``, and scales per tensor or per row, which leave the sum over K.  Where torch has no fp8
GEMM for the operands (a CPU; on CUDA most shapes and dtypes) a wider one computes the same products: every e4m3 number
is one of bf16 and fp32.  Tensor cores keep fewer bits of fp8 sums than fp32 has.

On a CPU fp8 saves bytes on the wire, and no time in the GEMM: operands are widened to fp32 at each call, and take 4
bytes per element beside their own until it ends.  Packing a shard's rows costs one extra copy; in return every backend
moves them as it moves any shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "DTYPE",
    "ExpertMatrices",
    "Operand",
    "Scaled",
    "ScaledExperts",
    "multiply",
    "pack",
    "packed_bytes",
    "quantize_fp8",
    "scale_rows",
    "split",
    "unpack",
    "unpack_alike",
]

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
_SCALE_BYTES = 4
# Of packed rows: tensor descriptors ask for 16 bytes, and a GPU fetches memory in sectors of 32.
_ROW_ALIGNMENT = 32
_WIDENED_AT_ONCE = 256 * 1024


def quantize_fp8(x: Tensor, *, per: str = "tensor") -> tuple[Tensor, Tensor]:
    """The nearest e4m3 numbers and their scale, for the fp8 operands of the ops: ``x ~ numbers * scale``.

    ``scale = max |x| / 448`` in fp32, over the whole tensor (shape ``()``), over each row, which is the last dimension
    (``per="row"``, shape ``[..., 1]``), or over each matrix, as those of experts, which is the last two (``"matrix"``,
    shape ``[..., 1, 1]``); 1 where all is zero.  NaN stays NaN, and infinity becomes it.

    Examples:
        >>> numbers, scale = tpk.quantize_fp8(torch.tensor([1.0, -896.0]))
        >>> numbers.dtype, scale
        (torch.float8_e4m3fn, tensor(2.))

    Raises:
        ValueError: ``per`` is none of these, or x has no such dimensions.
    """
    if per not in ("tensor", "row", "matrix"):
        raise ValueError(f"per must be 'tensor', 'row' or 'matrix', got {per!r}")
    dims = {"tensor": 0, "row": 1, "matrix": 2}[per]
    if x.dim() < dims:
        raise ValueError(f"per={per!r} needs a tensor of at least {dims} dimensions, got shape {tuple(x.shape)}")
    wide = x.detach().float()
    if dims:
        over, kept = tuple(range(-dims, 0)), x.shape[: x.dim() - dims]
        empty = not x.shape[-dims:].numel()
        largest = wide.new_zeros(*kept, *[1] * dims) if empty else wide.abs().amax(over, keepdim=True)
    else:
        largest = wide.abs().amax() if x.numel() else wide.new_zeros(())
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    return (wide / scale).clamp(-LARGEST, LARGEST).to(DTYPE), scale


class Scaled:
    """``numbers * scale`` in the place of a matrix: of x with ``scale`` [rows, 1], of a weight^T with [1, columns].

    ``numbers`` are e4m3, or fp32 where no fp8 GEMM can take them.
    """

    __slots__ = ("_wide", "numbers", "scale")

    def __init__(self, numbers: Tensor, scale: Tensor, wide: Tensor | None = None) -> None:
        self.numbers, self.scale, self._wide = numbers, scale, wide

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    def like(self, dtype: torch.dtype | None) -> Tensor:
        """An empty tensor of this dtype, where the numbers are."""
        return torch.empty(0, dtype=dtype, device=self.numbers.device)

    def __getitem__(self, index: slice | tuple[slice, slice]) -> Scaled:
        """Rows of an x, or columns of a weight^T; what was made of the whole serves the part."""
        if isinstance(index, tuple) and not self.numbers.is_cuda:
            self.wide()
        return Scaled(self.numbers[index], self.scale[index], None if self._wide is None else self._wide[index])

    def block(self, rows: slice, columns: slice) -> Scaled:
        """A block of either factor, also of its contraction, for all of which a row or column has one scale."""
        ranges = zip((rows, columns), self.scale.shape, strict=True)
        of_scale = tuple(part if size > 1 else slice(None) for part, size in ranges)
        return Scaled(self.numbers[rows, columns], self.scale[of_scale])

    def index_select(self, dim: int, index: Tensor) -> Scaled:
        numbers = self.numbers.view(torch.uint8).index_select(dim, index).view(DTYPE)  # bytes: for want of fp8 kernels
        return Scaled(numbers, self.scale.index_select(dim, index))

    def wide(self) -> Tensor:
        """``numbers`` in fp32, made once: a weight is multiplied once per chunk. 4 bytes each, until the call ends."""
        if self._wide is None:
            self._wide = _widened(self.numbers)
        return self._wide


class ScaledExperts:
    """Weights of experts, ``[E, columns, contraction]``, as their matrices ``[E, contraction, columns]`` in fp8.

    ``scale`` has an element per row of the weights, per expert, or one for all.  What a GEMM makes of a matrix is made
    once, and only of experts that are used; it is kept until the call ends.
    """

    __slots__ = ("_matrices", "_scale", "weights")

    def __init__(self, weights: Tensor, scale: Tensor) -> None:
        per_row = (*weights.shape[:2], 1)
        self.weights = weights
        self._scale = (scale.reshape(1, 1, 1) if scale.numel() == 1 else scale).expand(per_row)
        self._matrices: dict[int, Scaled] = {}

    @property
    def shape(self) -> torch.Size:
        experts, columns, contraction = self.weights.shape
        return torch.Size((experts, contraction, columns))

    def block(self, panel: slice) -> ScaledExperts:
        """A block of the contraction, for all of which a row of the weights has one scale."""
        return ScaledExperts(self.weights[:, :, panel], self._scale)

    @property
    def scales(self) -> Tensor:
        """One per row of the weights, ``[E, columns]``, contiguous."""
        return self._scale.squeeze(-1).contiguous()

    def __getitem__(self, expert: int) -> Scaled:
        found = self._matrices.get(expert)
        if found is None:
            found = self._matrices[expert] = Scaled(self.weights[expert].t(), self._scale[expert].t())
        return found


Operand = Tensor | Scaled
ExpertMatrices = Tensor | ScaledExperts
"""``[E, contraction, columns]``."""


def scale_rows(scale: Tensor, rows: int) -> Tensor:
    """One scale per row, ``[rows, 1]``, of a scale per row or per tensor."""
    return scale.reshape(-1, 1).expand(rows, 1).contiguous()


def multiply(x: Scaled, matrix: Scaled, out: Tensor, bias: Tensor | None = None) -> None:
    """out = x @ matrix + bias, rounded once; ``bias`` is one row or a matrix of the shape of ``out``."""
    if _has_kernel(x, matrix, out, bias):
        torch._scaled_mm(
            x.numbers, matrix.numbers, scale_a=x.scale.contiguous(), scale_b=matrix.scale.contiguous(), bias=bias,
            out_dtype=out.dtype, use_fast_accum=False, out=out,
        )  # fmt: skip
        return
    total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    if x.numbers.is_cuda and x.numbers.dtype == DTYPE:
        product: Any = torch.ops.aten.mm.dtype_out
        product(x.numbers.bfloat16(), matrix.numbers.bfloat16(), torch.float32, out=total)
    else:
        torch.mm(x.wide(), matrix.wide(), out=total)
    total.mul_(x.scale).mul_(matrix.scale)
    if bias is not None:
        total.add_(bias)
    if total is not out:
        out.copy_(total)


def _has_kernel(x: Scaled, matrix: Scaled, out: Tensor, bias: Tensor | None) -> bool:
    """Whether torch multiplies these with a scale per row: cuBLASLt and CUTLASS do on sm_90 and later, into bf16."""
    if not x.numbers.is_cuda or x.numbers.dtype != DTYPE or out.dtype != torch.bfloat16 or out.numel() == 0:
        return False
    k, n = matrix.shape
    fits = k > 0 and k % 16 == 0 and n % 16 == 0 and matrix.numbers.stride(0) == 1 and (bias is None or bias.dim() == 1)
    return fits and out.is_contiguous() and torch.cuda.get_device_capability(x.device) >= (9, 0)


def _widened(numbers: Tensor) -> Tensor:
    """e4m3 to fp32.

    On the CPU by way of fp16, which has the same fields, with three bits more: torch converts element by element, 14 ms
    for 2048 x 2048 on one core where this takes 3 (AMD EPYC, torch 2.13, 2026-11-21).  A block at a time, so that
    beside the result there are 2 bytes per element of a block, not of the whole.
    """
    if numbers.dtype != DTYPE or numbers.is_cuda:
        return numbers.float()
    wide = torch.empty_like(numbers, dtype=torch.float32)
    outer = max(range(numbers.dim()), key=numbers.stride)  # a weight comes transposed
    step = max(1, _WIDENED_AT_ONCE * numbers.shape[outer] // max(1, numbers.numel()))
    for source, target in zip(numbers.split(step, outer), wide.split(step, outer), strict=True):
        bits = source.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        target.copy_(bits.view(torch.float16)).mul_(256.0)  # 2 ** (15 - 7), the difference of the exponents' biases
        if target.numel():
            low, high = target.aminmax()
            if high > LARGEST or low < -LARGEST:  # NaN is the code above the largest number
                target.masked_fill_(target.abs() > LARGEST, float("nan"))
    return wide


# --- rows that travel with their scale --------------------------------------------------------------------------------


def packed_bytes(k: int) -> int:
    """Of a row of ``k`` numbers and its scale."""
    return -(-(k + _SCALE_BYTES) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


def pack(x: Tensor, scale: Tensor) -> Tensor:
    """Rows of bytes: the numbers, zeros, and in the last four bytes the scale."""
    rows, k = x.shape
    packed = torch.empty(rows, packed_bytes(k), dtype=torch.uint8, device=x.device)
    packed[:, :k] = x.view(torch.uint8)
    packed[:, k:-_SCALE_BYTES] = 0
    packed[:, -_SCALE_BYTES:].view(torch.float32).copy_(scale)
    return packed


def split(packed: Tensor, sizes: Sequence[int]) -> list[Scaled]:
    """Of rows made by :func:`pack`, side by side where ranks hold features: each rank's part, a view."""
    parts, start = [], 0
    for k in sizes:
        stop = start + packed_bytes(k)
        scale = packed[:, stop - _SCALE_BYTES : stop].view(torch.float32)
        parts.append(Scaled(packed[:, start : start + k].view(DTYPE), scale))
        start = stop
    return parts


def unpack(packed: Tensor, sizes: Sequence[int]) -> Scaled:
    """The operand of a GEMM.  A row with several scales has none that leaves the sum: its numbers become fp32."""
    parts = split(packed, sizes)
    if len(parts) == 1:
        return parts[0]
    numbers = torch.cat([part.wide() * part.scale for part in parts], 1)
    return Scaled(numbers, numbers.new_ones(numbers.shape[0], 1), numbers)


def unpack_alike(packed: Tensor, sizes: Sequence[int]) -> Scaled:
    """:func:`unpack` of rows whose parts all have one scale, which leaves the sum."""
    parts = split(packed, sizes)
    if len(parts) == 1:
        return parts[0]
    return Scaled(torch.cat([part.numbers.view(torch.uint8) for part in parts], 1).view(DTYPE), parts[0].scale)
