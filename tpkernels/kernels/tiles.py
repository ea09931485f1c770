# mypy: disable-error-code="untyped-decorator"
"""What every GEMM kernel shares: which tile comes next, its product, and what happens to it before it is stored.

A kernel is a persistent loop of a few lines around these functions: CTA p takes tiles p, p + num_programs, ... in the
order of a table of row tiles (schedule.py), grouped so that neighbouring CTAs read the same columns of the weight.

Products accumulate in fp32 over K in one fixed order, whatever the chunk, the arrival order or the row's place in M:
tile sizes alone decide, so equal tile sizes give equal bits. fp32 operands multiply in full precision unless asked
otherwise (`PRECISION`), fp8 products leave the tensor core's short accumulator after every BLOCK_K.

Rows past a tile's end are read as its first row and never stored, so a tile reads no row of a chunk that has not
arrived (descriptors do, and drop it: rows do not mix). Any M, N, K >= 0; row offsets are 64 bit.

Descriptors (sm_90 and later) ask for rows and bases that are multiples of 16 bytes, and for K contiguous in both
operands; a weight of 16-bit numbers may be contiguous along N instead, as it is in gradients with respect to x. Else
pointers with any strides.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpkernels.kernels.schedule import FIELDS as _FIELDS
from tpkernels.kernels.signals import INTERPRETED

__all__ = [
    "ACTIVATIONS",
    "FINISH_COLUMNS",
    "GATED",
    "activate",
    "halves",
    "is_gated",
    "load_tile",
    "product",
    "scaled",
    "store_tile",
    "tile_entry",
    "tile_position",
    "with_bias",
]

GATED = ("swiglu", "geglu")
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", *GATED)

FIELDS = tl.constexpr(_FIELDS)
# What follows the product (addresses, masks, bias, scales) needs registers beside the accumulator; with a whole tile of
# 256 columns at a time, GELU with a bias spilled 168 bytes on sm_90 (Triton 3.7.1).
FINISH_COLUMNS = tl.constexpr(64)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_MINUS_TWO_SQRT_2_OVER_PI = tl.constexpr(-1.5957691216057308)


@triton.jit
def tile_position(tile, num_row_tiles, num_column_tiles, GROUP_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """(row tile, column tile). GROUP_M row tiles share a column before the next column comes, then the next group."""
    per_group = GROUP_M * num_column_tiles
    first = (tile // per_group) * GROUP_M
    size = tl.minimum(num_row_tiles - first, GROUP_M)
    within = tile % per_group
    return first + within % size, within // size


@triton.jit
def tile_entry(order, row_tile):  # type: ignore[no-untyped-def]
    """(row, rows, rank, chunk, slot, offset, chunk_tiles) of a row tile, see `schedule.RowTile`."""
    entry = order + row_tile * FIELDS
    row, rows, rank = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    chunk, slot, offset, chunk_tiles = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6)
    return row, rows, rank, chunk, slot, offset, chunk_tiles


@triton.jit
def product(  # type: ignore[no-untyped-def]
    acc,
    acc_up,
    a,
    b,
    b_up,
    row,
    rows,
    first_column,
    n,
    k,
    stride_a,
    stride_bn,
    stride_bk,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    DUAL: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc + A[rows] B[columns]^T, and with DUAL acc_up + A[rows] B_up[columns]^T from the same loads of A."""
    if DESCRIPTORS:
        for step in tl.range(0, tl.cdiv(k, BLOCK_K)):
            x = a.load([row, step * BLOCK_K])
            acc = _multiply(x, _described(b, first_column, step * BLOCK_K, TRANSPOSED), acc, PRECISION)
            if DUAL:
                acc_up = _multiply(x, _described(b_up, first_column, step * BLOCK_K, TRANSPOSED), acc_up, PRECISION)
    else:
        m_offsets, n_offsets, k_offsets = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        m_offsets = (row + tl.where(m_offsets < rows, m_offsets, 0)).to(tl.int64)
        n_offsets = first_column + n_offsets
        n_offsets = tl.where(n_offsets < n, n_offsets, 0).to(tl.int64)
        a_places = a + m_offsets[:, None] * stride_a + k_offsets[None, :]
        b_offsets = n_offsets[:, None] * stride_bn + k_offsets[None, :].to(tl.int64) * stride_bk
        b_places = b + b_offsets
        if DUAL:
            b_up_places = b_up + b_offsets
        b_step = tl.cast(stride_bk, tl.int64) * BLOCK_K
        for step in tl.range(0, tl.cdiv(k, BLOCK_K)):
            if EVEN_K:
                x = tl.load(a_places)
                acc = _multiply(x, tl.load(b_places), acc, PRECISION)
                if DUAL:
                    acc_up = _multiply(x, tl.load(b_up_places), acc_up, PRECISION)
            else:
                inside = k_offsets[None, :] < k - step * BLOCK_K
                x = tl.load(a_places, mask=inside, other=0.0)
                acc = _multiply(x, tl.load(b_places, mask=inside, other=0.0), acc, PRECISION)
                if DUAL:
                    acc_up = _multiply(x, tl.load(b_up_places, mask=inside, other=0.0), acc_up, PRECISION)
            a_places += BLOCK_K
            b_places += b_step
            if DUAL:
                b_up_places += b_step
    return acc, acc_up


@triton.jit
def _described(b, first_column, first_k, TRANSPOSED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile [columns, K] of a weight from its descriptor, which with TRANSPOSED is that of [K, N]."""
    if TRANSPOSED:
        return b.load([first_k, first_column]).T
    else:
        return b.load([first_column, first_k])


@triton.jit
def _multiply(x, w, acc, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc + x w^T. The interpreter's bf16 product is silently wrong, so it multiplies in fp32, which is exact."""
    if INTERPRETED:
        return tl.dot(x.to(tl.float32), w.to(tl.float32).T, acc, input_precision="ieee")
    if x.dtype.is_fp8():
        return tl.dot(x, w.T, acc, max_num_imprecise_acc=x.shape[1])
    return tl.dot(x, w.T, acc, input_precision=PRECISION)


@triton.jit
def halves(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Left and right half of the columns: what follows then needs registers for half a tile at a time."""
    return tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@triton.jit
def scaled(  # type: ignore[no-untyped-def]
    acc,
    scale_a,
    scale_b,
    stride_scale,
    row,
    rows,
    first_column,
    n,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """acc times the operands' scales. SCALE: "none", "tensor" (one fp32 each), "row" (one per row of A and of B).

    Those of A lie `stride_scale` apart, because gathered rows bring theirs along.
    """
    if SCALE == "tensor":
        acc = acc * (tl.load(scale_a) * tl.load(scale_b))
    if SCALE == "row":
        m_offsets, n_offsets = tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
        places = scale_a + (row + m_offsets).to(tl.int64) * stride_scale
        of_rows = tl.load(places, mask=m_offsets < rows, other=0.0)
        of_columns = tl.load(scale_b + n_offsets, mask=n_offsets < n, other=0.0)
        acc = acc * of_rows[:, None] * of_columns[None, :]
    return acc


@triton.jit
def with_bias(acc, bias, first_column, n, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    n_offsets = first_column + tl.arange(0, BLOCK_N)
    return acc + tl.load(bias + n_offsets, mask=n_offsets < n, other=0.0).to(tl.float32)[None, :]


@triton.constexpr_function
def is_gated(activation):  # type: ignore[no-untyped-def]
    """Whether it takes two products, as those of GATED do."""
    return activation in ("swiglu", "geglu")


@triton.jit
def activate(z, up, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """f(z) in fp32; "swiglu" is silu(z) * up, "geglu" gelu(z) * up."""
    if ACTIVATION == "relu":
        z = tl.where(z < 0.0, 0.0, z)  # not a maximum, which would turn NaN into 0
    if ACTIVATION == "gelu" or ACTIVATION == "geglu":
        z = z * (0.5 + 0.5 * tl.erf(z * _SQRT_HALF))
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u
        z = z / (1.0 + tl.exp((z + 0.044715 * z * z * z) * _MINUS_TWO_SQRT_2_OVER_PI))
    if ACTIVATION == "silu" or ACTIVATION == "swiglu":
        z = z / (1.0 + tl.exp(-z))
    if ACTIVATION == "swiglu" or ACTIVATION == "geglu":
        z = z * up
    return z


@triton.jit
def store_tile(  # type: ignore[no-untyped-def]
    base, value, row, rows, first_column, n, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Round once to the dtype of `base` [.., n] and store rows `row` to `row + rows`."""
    m_offsets, n_offsets = tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    places = base + (row + m_offsets).to(tl.int64)[:, None] * stride + n_offsets[None, :]
    inside = (m_offsets[:, None] < rows) & (n_offsets[None, :] < n)
    tl.store(places, _rounded(value, base.dtype.element_ty), mask=inside)


@triton.jit
def load_tile(base, row, rows, first_column, n, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    m_offsets, n_offsets = tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    places = base + (row + m_offsets).to(tl.int64)[:, None] * stride + n_offsets[None, :]
    inside = (m_offsets[:, None] < rows) & (n_offsets[None, :] < n)
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _rounded(value, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """To nearest even. The interpreter truncates to bf16, so there the discarded bits are rounded away before."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        value = tl.where(value == value, (bits & -65536).to(tl.float32, bitcast=True), value)
    return value.to(dtype)
