"""Checks of what a GEMM launch is given, and tensors turned into what a kernel takes."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tpkernels.kernels.config import DTYPES, GemmConfig
from tpkernels.kernels.tiles import ACTIVATIONS, FINISH_COLUMNS

__all__ = [
    "ScaleKind",
    "check_operands",
    "descriptors_fit",
    "is_transposed",
    "loop_of",
    "operand",
    "result_descriptor",
    "row_stride",
    "scale_kind",
    "weight_descriptor_fits",
]

ScaleKind = Literal["none", "tensor", "row"]


def check_operands(a: Tensor, b: Tensor, out: Tensor | None, config: GemmConfig, activation: str) -> tuple[int, int]:
    """(M, K) of a [M, K], b [N, K], out [M, N]; ValueError where they do not fit."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"operands {tuple(a.shape)} and {tuple(b.shape)} must be [M, K] and [N, K]")
    if out is not None and tuple(out.shape) != (a.shape[0], b.shape[0]):
        raise ValueError(f"out {tuple(out.shape)} must be [M, N] = {(a.shape[0], b.shape[0])}")
    name = str(a.dtype).removeprefix("torch.")
    if a.dtype != b.dtype or name not in DTYPES:
        raise ValueError(f"operands of dtype {a.dtype} and {b.dtype} must both be one of {', '.join(DTYPES)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation ({activation!r}) must be one of {', '.join(map(repr, ACTIVATIONS))}")
    for what, tensor in (("a", a), ("out", out)):
        if tensor is not None and len(tensor) and tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise ValueError(f"{what} with strides {tensor.stride()} must be contiguous along its last dim")
    if config.descriptors and not (descriptors_fit(a) and weight_descriptor_fits(b)):
        raise ValueError(
            f"descriptors need K contiguous (in a weight of 16 bits: or N), rows of a multiple of 16 bytes and aligned "
            f"bases; operands have strides "
            f"{a.stride()} and {b.stride()} in {a.dtype}: configure(pointers=True)"
        )
    return a.shape[0], a.shape[1]


def descriptors_fit(x: Tensor) -> bool:
    """Whether a tensor descriptor can describe x."""
    row_bytes = x.stride(0) * x.element_size()
    return x.numel() > 0 and x.stride(1) == 1 and row_bytes % 16 == 0 and x.data_ptr() % 16 == 0


def weight_descriptor_fits(weight: Tensor) -> bool:
    """The same for a weight [N, K], which may be contiguous along N if tensor cores take such operands: of 16 bits."""
    return descriptors_fit(weight) or (weight.element_size() == 2 and descriptors_fit(weight.T))


def is_transposed(weight: Tensor, config: GemmConfig) -> bool:
    """Whether the weight's descriptor is that of [K, N]."""
    return config.descriptors and not descriptors_fit(weight)


def operand(x: Tensor | None, block_rows: int, config: GemmConfig, transposed: bool = False) -> Any:
    """The tensor, for a pointer, or its host-side descriptor; None stays None."""
    if x is None or not config.descriptors:
        return x
    if transposed:
        return TensorDescriptor(x.T, list(x.T.shape), list(x.T.stride()), [config.block_k, block_rows])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [block_rows, config.block_k])


def loop_of(x: Tensor, weight: Tensor, config: GemmConfig) -> str:
    """The configuration's loop, where registers can carry it.

    Without descriptors, operands that the compiler does not know to lie in runs of 16 bytes are read a number at a
    time, each from an address of its own. A flat loop keeps them all from step to step, and spills. Results have the
    same bits in all loops.
    """
    in_runs = weight.stride(1) == 1 and not any(
        number % 16 for operand in (x, weight) for number in (operand.data_ptr(), operand.stride(0), operand.shape[1])
    )
    return config.loop if config.descriptors or in_runs else "nested"


def result_descriptor(out: Tensor, config: GemmConfig) -> TensorDescriptor | None:
    """Of the part of a tile that is stored at a time, for a flat loop, if `out` has 16 bits and a descriptor can be.

    The copy engine of tiles writes whole runs of 16 bytes: a row that ends within one would spoil what lies behind it
    (seen on an H200: 250 columns of bf16, and columns 250 to 255 of a wider tensor were overwritten).
    """
    if not config.descriptors or config.loop != "flat" or out.element_size() != 2 or not descriptors_fit(out):
        return None
    if out.shape[1] * out.element_size() % 16 != 0:
        return None
    columns = min(config.block_n, FINISH_COLUMNS.value)
    return TensorDescriptor(out, list(out.shape), list(out.stride()), [config.block_m, columns])


def row_stride(scale: Tensor | None, kind: ScaleKind) -> int:
    """Elements from one row's scale to the next one's."""
    return scale.stride(0) if scale is not None and kind == "row" else 0


def scale_kind(scale_a: Tensor | None, scale_b: Tensor | None, m: int, n: int) -> ScaleKind:
    if scale_a is None and scale_b is None:
        return "none"
    if scale_a is not None and scale_b is not None:
        # First, so that a part of one column is scaled as the whole is: one by one, and not by the scales' product.
        if scale_a.dim() == scale_b.dim() == 2 and (len(scale_a), scale_b.numel()) == (m, n):
            return "row"
        if scale_a.numel() == 1 and scale_b.numel() == 1:
            return "tensor"
        if scale_a.numel() == m and scale_b.numel() == n:
            return "row"
    given = [None if scale is None else tuple(scale.shape) for scale in (scale_a, scale_b)]
    raise ValueError(f"scales {given[0]} and {given[1]} must both have one element, or {m} and {n}")
