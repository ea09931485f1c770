# mypy: disable-error-code="untyped-decorator"
"""What every GEMM kernel shares: which tile comes next, its product, and what happens to it before it is stored.

A kernel is a persistent loop of a few lines around these functions: CTA p takes tiles p, p + num_programs, ... in the
order of a table of row tiles (schedule.py), grouped so that neighbouring CTAs read the same columns of the weight.

The loop is *flat* or *nested* (`config.LOOPS`). Flat is one loop over tiles and steps along K, which Triton pipelines
as a whole: loads of the next tile are on their way while this one is stored, and the pipeline is never empty. Nested is
a loop over steps in a loop over tiles: with each tile the pipeline drains, its barriers are taken down and set up, and
it fills again. Both make the same products in the same order. On an H200 flat was faster for every bf16 shape that was
measured, by 0 to 5 %, and nested for fp8, by 1 to 3 % (the sets `core` and `tiles` of benchmarks/one_gpu.py). Nested is
left for two weights at once on sm_90 and for operands that are read a number at a time (`operands.loop_of`). (Two
weights in a flat loop on sm_90: the assembler waits for each product, 12 barriers a step where one weight takes 4, in
Triton 3.6.0 and 3.7.1 alike. `tests/kernels/resources.json` has both.)

What keeps a loop flat and pipelined in Triton 3.7.1: it is written out (`tl.range(..., flatten=True)` fails on these
kernels with "region branch point has 1 operands, but region successor needs 2 inputs", or pipelines nothing); no
tl.debug_barrier stands in it; no branch goes around the stores and drops sums; and its parts are functions, because a
name that is assigned in a branch is carried from step to step.

Warp specialisation (`tl.range(..., warp_specialize=True)`) is not offered. Triton 3.6.0 and 3.7.1 were tried, flat and
nested. On sm_90 both take the option and give the same machine code as without it. On sm_100 neither compiles the
gather: TritonGPUPartitionScheduling fails ("cast<Ty>() argument of incompatible type" in 3.6, "dyn_cast on a
non-existent value" in 3.7) at the branch that waits. The scatter compiles there, but for the nested loop of 3.6
(NVWSInsertAref fails), at 255 registers and without spills; but its barriers (signals.py) wait for all warps of a CTA,
of which the loading ones never come, and with Triton's own barrier the loop would not be pipelined where it is not
specialised. A GEMM in Gluon, which says itself what each warp does, would be another kernel; there is none.

Products accumulate in fp32 over K in one fixed order, whatever the chunk, the arrival order or the row's place in M:
tile sizes alone decide, so equal tile sizes give equal bits. fp32 operands multiply in full precision unless asked
otherwise (`PRECISION`), fp8 products leave the tensor core's short accumulator after every BLOCK_K.

Rows past a tile's end are read as its first row and never stored, so a tile reads no row of a chunk that has not
arrived (descriptors do, and drop it: rows do not mix). Any M, N, K >= 0; row offsets are 64 bit.

Descriptors (sm_90 and later) ask for rows and bases that are multiples of 16 bytes, and for K contiguous in both
operands; a weight of 16-bit numbers may be contiguous along N instead, as it is in gradients with respect to x. Other
operands are read through pointers, with any strides.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpkernels.kernels.config import STORED_COLUMNS
from tpkernels.kernels.schedule import FIELDS as _FIELDS
from tpkernels.kernels.signals import INTERPRETED

__all__ = [
    "ACTIVATIONS",
    "FINISH_COLUMNS",
    "GATED",
    "activate",
    "first_places",
    "halves",
    "is_gated",
    "load_tile",
    "multiply_step",
    "next_places",
    "no_sums",
    "scaled",
    "store_described",
    "store_tile",
    "tile_entry",
    "tile_position",
    "with_bias",
]

GATED = ("swiglu", "geglu", "clamped_swiglu")
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", *GATED)

FIELDS = tl.constexpr(_FIELDS)
# With a whole tile of 256 columns at a time, GELU with a bias spilled 168 bytes on sm_90 (Triton 3.7.1).
FINISH_COLUMNS = tl.constexpr(STORED_COLUMNS)
_MINUS_TWO_SQRT_2_OVER_PI = tl.constexpr(-1.5957691216057308)
_CLAMP, _SHARPNESS = tl.constexpr(7.0), tl.constexpr(1.702)


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
def first_places(  # type: ignore[no-untyped-def]
    a,
    b,
    b_up,
    row,
    rows,
    first_column,
    n,
    stride_a,
    stride_bn,
    stride_bk,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DUAL: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Where a tile's operands begin, in A, B and B_up: coordinates for descriptors, else addresses of all elements."""
    if DESCRIPTORS:
        return row, first_column, first_column
    else:
        m_offsets, n_offsets, k_offsets = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        m_offsets = (row + tl.where(m_offsets < rows, m_offsets, 0)).to(tl.int64)
        n_offsets = first_column + n_offsets
        n_offsets = tl.where(n_offsets < n, n_offsets, 0).to(tl.int64)
        a_places = a + m_offsets[:, None] * stride_a + k_offsets[None, :]
        b_offsets = n_offsets[:, None] * stride_bn + k_offsets[None, :].to(tl.int64) * stride_bk
        if DUAL:
            return a_places, b + b_offsets, b_up + b_offsets
        else:
            return a_places, b + b_offsets, 0


@triton.jit
def next_places(  # type: ignore[no-untyped-def]
    a_places, b_places, b_up_places, stride_bk, BLOCK_K: tl.constexpr, DUAL: tl.constexpr, DESCRIPTORS: tl.constexpr
):
    """One step along K."""
    if DESCRIPTORS:
        return a_places, b_places, b_up_places
    else:
        b_step = tl.cast(stride_bk, tl.int64) * BLOCK_K
        if DUAL:
            return a_places + BLOCK_K, b_places + b_step, b_up_places + b_step
        else:
            return a_places + BLOCK_K, b_places + b_step, b_up_places


@triton.jit
def no_sums(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DUAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """(acc, acc_up) to begin with; without DUAL the second is a number that nobody looks at."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if DUAL:
        return acc, acc
    else:
        return acc, 0


@triton.jit
def multiply_step(  # type: ignore[no-untyped-def]
    acc,
    acc_up,
    a,
    b,
    b_up,
    a_places,
    b_places,
    b_up_places,
    first_k,
    k,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    DUAL: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc + A[rows] B[columns]^T over BLOCK_K of K, and with DUAL acc_up + A[rows] B_up[columns]^T from the same A."""
    if DESCRIPTORS:
        x = a.load([a_places, first_k])
        acc = _multiply(x, _described(b, b_places, first_k, TRANSPOSED), acc, PRECISION)
        if DUAL:
            acc_up = _multiply(x, _described(b_up, b_up_places, first_k, TRANSPOSED), acc_up, PRECISION)
    elif EVEN_K:
        x = tl.load(a_places)
        acc = _multiply(x, tl.load(b_places), acc, PRECISION)
        if DUAL:
            acc_up = _multiply(x, tl.load(b_up_places), acc_up, PRECISION)
    else:
        inside = tl.arange(0, BLOCK_K)[None, :] < k - first_k
        x = tl.load(a_places, mask=inside, other=0.0)
        acc = _multiply(x, tl.load(b_places, mask=inside, other=0.0), acc, PRECISION)
        if DUAL:
            acc_up = _multiply(x, tl.load(b_up_places, mask=inside, other=0.0), acc_up, PRECISION)
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

    Those of A lie `stride_scale` apart, because gathered rows bring theirs along. "given": `scale_a` are the tile's.
    """
    if SCALE == "tensor":
        acc = acc * (tl.load(scale_a) * tl.load(scale_b))
    if SCALE == "row" or SCALE == "given":
        m_offsets, n_offsets = tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
        if SCALE == "given":
            of_rows = scale_a
        else:
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
    return activation in ("swiglu", "geglu", "clamped_swiglu")


@triton.jit
def _normal_cdf(z):  # type: ignore[no-untyped-def]
    """Phi(z) = (1 + erf(z / sqrt 2)) / 2, in 13 instructions instead of the 33 that the library's erf takes.

    log2 Phi(-t) = -1 + t (c1 + c2 t + ...), fitted for 0 <= t <= 5.8; it falls for all larger t. Interpreted, against
    fp64 (tests/kernels/activations.py): GELU of every bf16 and of 400,000 fp32 up to 10 is off by 3.9e-7 at most, above
    0 by 2.1e-7 of its value (torch's in fp32: 3.5e-7), between -5.5 and 0 by 2.9e-6 of it (torch's: by all of it).
    """
    t = tl.abs(z)
    exponent = t * -1.82014475e-08 + 5.82918233e-07
    exponent = exponent * t - 7.9798865e-06
    exponent = exponent * t + 5.89585288e-05
    exponent = exponent * t - 0.000219526439
    exponent = exponent * t - 0.000123096717
    exponent = exponent * t + 0.00709273107
    exponent = exponent * t - 0.0525340959
    exponent = exponent * t - 0.459193468
    exponent = exponent * t - 1.15110683
    tail = tl.exp2(exponent * t - 1.0)
    return tl.where(z < 0.0, tail, 1.0 - tail)


@triton.jit
def activate(z, up, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """f(z) in fp32; "swiglu" is silu(z) * up, "geglu" gelu(z) * up. All equations: `tpkernels/ops/activations.py`."""
    if ACTIVATION == "relu":
        z = tl.where(z < 0.0, 0.0, z)  # not a maximum, which would turn NaN into 0
    if ACTIVATION == "gelu" or ACTIVATION == "geglu":
        z = z * _normal_cdf(z)
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u
        z = z / (1.0 + tl.exp((z + 0.044715 * z * z * z) * _MINUS_TWO_SQRT_2_OVER_PI))
    if ACTIVATION == "silu" or ACTIVATION == "swiglu":
        z = z / (1.0 + tl.exp(-z))
    if ACTIVATION == "swiglu" or ACTIVATION == "geglu":
        z = z * up
    if ACTIVATION == "clamped_swiglu":  # comparisons, which keep NaN, where a minimum may not
        z = tl.where(z > _CLAMP, _CLAMP, z)
        up = tl.where(up > _CLAMP, _CLAMP, tl.where(up < -_CLAMP, -_CLAMP, up))
        z = z / (1.0 + tl.exp(z * -_SHARPNESS)) * (up + 1.0)
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
def store_described(  # type: ignore[no-untyped-def]
    base, descriptor, value, row, rows, first_column, n, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The same through a descriptor of `base`, if there is one and the tile is full: else it would write other rows."""
    if descriptor is None:
        store_tile(base, value, row, rows, first_column, n, stride, BLOCK_M, BLOCK_N)
    else:
        if rows == BLOCK_M:
            descriptor.store([row, first_column], _rounded(value, base.dtype.element_ty))
        else:
            store_tile(base, value, row, rows, first_column, n, stride, BLOCK_M, BLOCK_N)


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
