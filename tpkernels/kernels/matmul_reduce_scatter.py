# mypy: disable-error-code="untyped-decorator"
"""GEMM of a reduce-scatter: remote owners' rows first, each chunk announced as soon as its last tile is stored.

    partial = scale * (x @ weight^T) + addends[0] + addends[1] + ...            x [M, K], weight [N, K]

Rows of owner r go to `staging[r]`, a base address in a table: this rank's slot in the owner's memory (push over
NVLink), or a slot of this rank from which copy engines carry finished chunks. When all tiles of chunk c of owner r are
stored, `signals[r]`[c] is set to the call, visible to the whole system. The reducer of the owner sums over ranks in
rank order in fp32, adds the bias and rounds once; with fp32 staging nothing is rounded before.

`addend` makes sums of several products (one launch each, the last one into staging); several of them, which are added
in their order, make sums in a tree. The kernel never waits.

Partials are stored by threads, not through descriptors. A descriptor would have to be made in the kernel for every
owner. Above all its stores are asynchronous, and Triton 3.6 and 3.7 wait only until their source has been read
(`cp.async.bulk.wait_group.read 0`, before the next store): a tile that is counted after that may not be in memory yet.
To count it safely, each tile would have to wait for its stores to complete and order the asynchronous proxy before the
release, which no test without a GPU shows to be right; and a tile that waits is what the flat loop is there to avoid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels.config import MAX_REGISTERS, GemmConfig
from tpkernels.kernels.known_launches import KnownLaunch, known_launch
from tpkernels.kernels.operands import (
    ScaleKind,
    check_operands,
    is_transposed,
    loop_of,
    operand,
    row_stride,
    scale_kind,
)
from tpkernels.kernels.signals import announce, count_tile, current_call, has_failed
from tpkernels.kernels.tiles import (
    FINISH_COLUMNS,
    first_places,
    halves,
    load_tile,
    multiply_step,
    next_places,
    no_sums,
    scaled,
    store_tile,
    tile_entry,
    tile_position,
)

__all__ = ["STAGING", "Departures", "fuses", "matmul_reduce_scatter", "matmul_reduce_scatter_kernel"]


@triton.jit(do_not_specialize=["num_row_tiles"])
def matmul_reduce_scatter_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    addend,
    scale_x,
    scale_weight,
    order,
    staging,
    signals,
    counters,
    group,
    num_row_tiles,
    n,
    k,
    stride_x,
    stride_wn,
    stride_wk,
    stride_addend,
    addend_rows,
    stride_staging,
    stride_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGING: tl.constexpr,
    SIGNAL: tl.constexpr,
    ADDENDS: tl.constexpr,
    SCALE: tl.constexpr,
    LOOP: tl.constexpr,
):
    current = current_call(group, SIGNAL)
    num_column_tiles = tl.cdiv(n, BLOCK_N)
    num_tiles = num_row_tiles * num_column_tiles * (1 - has_failed(group).to(tl.int32))
    programs = tl.num_programs(0)
    if LOOP == "nested":
        for tile in tl.range(tl.program_id(0), num_tiles, programs):
            a_places, b_places, b_up_places = _begin(
                tile, x, weight, order, num_row_tiles, num_column_tiles, n, stride_x, stride_wn, stride_wk,
                BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, DESCRIPTORS,
            )  # fmt: skip
            acc, acc_up = no_sums(BLOCK_M, BLOCK_N, False)
            for step in tl.range(0, tl.cdiv(k, BLOCK_K)):
                acc, acc_up = multiply_step(
                    acc, acc_up, x, weight, weight, a_places, b_places, b_up_places, step * BLOCK_K, k,
                    BLOCK_K, EVEN_K, False, DESCRIPTORS, TRANSPOSED, PRECISION,
                )  # fmt: skip
                a_places, b_places, b_up_places = next_places(
                    a_places, b_places, b_up_places, stride_wk, BLOCK_K, False, DESCRIPTORS
                )
            _end(
                tile, acc, current, order, staging, signals, counters, num_row_tiles, num_column_tiles, n,
                addend, scale_x, scale_weight, stride_addend, addend_rows, stride_staging, stride_scale,
                BLOCK_M, BLOCK_N, GROUP_M, STAGING, SIGNAL, ADDENDS, SCALE,
            )  # fmt: skip
    else:
        num_steps = tl.maximum(1, tl.cdiv(k, BLOCK_K))
        tile = tl.program_id(0) - programs
        done, step = tile, num_steps - 1
        a_places, b_places, b_up_places = first_places(
            x, weight, weight, 0, 0, 0, n, stride_x, stride_wn, stride_wk, BLOCK_M, BLOCK_N, BLOCK_K, False, DESCRIPTORS
        )
        acc, acc_up = no_sums(BLOCK_M, BLOCK_N, False)
        for _ in tl.range(0, tl.cdiv(num_tiles - tl.program_id(0), programs) * num_steps):
            step = tl.where(step == num_steps - 1, 0, step + 1)
            if step == 0:
                tile += programs
                a_places, b_places, b_up_places = _begin(
                    tile, x, weight, order, num_row_tiles, num_column_tiles, n, stride_x, stride_wn, stride_wk,
                    BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, DESCRIPTORS,
                )  # fmt: skip
            acc, acc_up = multiply_step(
                acc, acc_up, x, weight, weight, a_places, b_places, b_up_places, step * BLOCK_K, k,
                BLOCK_K, EVEN_K, False, DESCRIPTORS, TRANSPOSED, PRECISION,
            )  # fmt: skip
            a_places, b_places, b_up_places = next_places(
                a_places, b_places, b_up_places, stride_wk, BLOCK_K, False, DESCRIPTORS
            )
            if step == num_steps - 1:
                done += programs
                _end(
                    done, acc, current, order, staging, signals, counters, num_row_tiles, num_column_tiles, n,
                    addend, scale_x, scale_weight, stride_addend, addend_rows, stride_staging, stride_scale,
                    BLOCK_M, BLOCK_N, GROUP_M, STAGING, SIGNAL, ADDENDS, SCALE,
                )  # fmt: skip
                acc, acc_up = no_sums(BLOCK_M, BLOCK_N, False)


@triton.jit
def _begin(  # type: ignore[no-untyped-def]
    tile,
    x,
    weight,
    order,
    num_row_tiles,
    num_column_tiles,
    n,
    stride_x,
    stride_wn,
    stride_wk,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Where a tile's operands begin."""
    row_tile, column = tile_position(tile, num_row_tiles, num_column_tiles, GROUP_M)
    row, rows, _, _, _, _, _ = tile_entry(order, row_tile)
    return first_places(
        x, weight, weight, row, rows, column * BLOCK_N, n, stride_x, stride_wn, stride_wk,
        BLOCK_M, BLOCK_N, BLOCK_K, False, DESCRIPTORS,
    )  # fmt: skip


@triton.jit
def _end(  # type: ignore[no-untyped-def]
    tile,
    acc,
    current,
    order,
    staging,
    signals,
    counters,
    num_row_tiles,
    num_column_tiles,
    n,
    addend,
    scale_x,
    scale_weight,
    stride_addend,
    addend_rows,
    stride_staging,
    stride_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGING: tl.constexpr,
    SIGNAL: tl.constexpr,
    ADDENDS: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Store a tile, and announce its chunk if it was the last one of it."""
    row_tile, column = tile_position(tile, num_row_tiles, num_column_tiles, GROUP_M)
    row, rows, owner, chunk, slot, offset, chunk_tiles = tile_entry(order, row_tile)
    # The compiler knows nothing of an address from a table; that it is aligned makes 16-byte stores.
    base = tl.multiple_of(tl.load(staging + owner).to(tl.pointer_type(STAGING)), 16)
    _finish(
        acc, column * BLOCK_N, row, rows, offset, n, base, addend, scale_x, scale_weight, stride_addend, addend_rows,
        stride_staging, stride_scale,
        BLOCK_M, BLOCK_N, ADDENDS, SCALE,
    )  # fmt: skip
    if count_tile(counters + slot, chunk_tiles * num_column_tiles) != 0:
        announce(tl.load(signals + owner).to(tl.pointer_type(SIGNAL)) + chunk, current)


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    acc,
    first_column,
    row,
    rows,
    offset,
    n,
    base,
    addend,
    scale_x,
    scale_weight,
    stride_addend,
    addend_rows,
    stride_staging,
    stride_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ADDENDS: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Scale, addends and store, for at most FINISH_COLUMNS columns at a time."""
    if BLOCK_N > FINISH_COLUMNS:
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        for half in tl.static_range(2):
            _finish(
                left if half == 0 else right, first_column + half * (BLOCK_N // 2), row, rows, offset, n,
                base, addend, scale_x, scale_weight, stride_addend, addend_rows, stride_staging, stride_scale,
                BLOCK_M, BLOCK_N // 2, ADDENDS, SCALE,
            )  # fmt: skip
    else:
        acc = scaled(acc, scale_x, scale_weight, stride_scale, row, rows, first_column, n, SCALE, BLOCK_M, BLOCK_N)
        for i in tl.static_range(ADDENDS):
            acc += load_tile(addend, row + i * addend_rows, rows, first_column, n, stride_addend, BLOCK_M, BLOCK_N)
        store_tile(base, acc, offset, rows, first_column, n, stride_staging, BLOCK_M, BLOCK_N)


@dataclass(frozen=True)
class Departures:
    """Where partial rows go; all tensors on the launching device.

    order: int32 [row tiles, FIELDS], `schedule.as_table(schedule.reduce_scatter_order(...))` with the launch's
    tile height. staging: int64 [world size], base addresses of [shard rows of the owner, N] in `staging_dtype`,
    multiples of 16, rows `staging_stride` elements apart. signals: int64 [world size], addresses of one signal per
    chunk: int32 local flags, or with `signal_pads` int64 words of this rank in the owner's pad, which also carry the
    call's fingerprint. counters: int32 [world size * chunks per shard], zeros before the first call. group: int64,
    `signals.group_table`.
    """

    order: Tensor
    staging: Tensor
    signals: Tensor
    counters: Tensor
    group: Tensor
    staging_dtype: torch.dtype
    staging_stride: int
    signal_pads: bool = False


def fuses(scale: ScaleKind, addends: int) -> bool:
    """Whether the compiler may make one operation of a product and a sum.

    Not of a scale and an addend: the scaled product would be rounded where it is stored, and not where a sum is, and
    which blocks of a contraction are stored by themselves depends on the number of ranks.
    """
    return scale == "none" or addends == 0


STAGING = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    departures: Departures,
    config: GemmConfig,
    *,
    addend: Tensor | None = None,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None,
    rehearsal: bool = False,
    known: KnownLaunch | None = None,
) -> KnownLaunch | None:
    """Launch on the current stream. x [M, K], its K contiguous; weight [N, K] with any strides; addend [M, N].

    Or addend [count, M or more, N], contiguous: so many of them, added one after the other.

    Nothing is announced for chunks without elements (no rows, or N = 0): their owner must not wait for them. A
    rehearsal compiles and loads the kernel and does nothing: loading one while others spin may wait for them. What it
    returns may be given as `known` to launches on the current device that differ in the addresses of the operands and
    of the table `staging` alone, and spares them checks and most of the launch.

    Raises:
        ValueError: operands that do not fit together, or that the kernel cannot take.
    """
    if known is not None:
        known(x, weight, addend, scale_x, scale_weight, departures.order, departures.staging)
        return known
    if addend is not None and addend.dim() == 3 and not (len(addend) and addend.is_contiguous()):
        raise ValueError(f"addends {tuple(addend.shape)} with strides {addend.stride()} must be some, and contiguous")
    addends = 0 if addend is None else len(addend) if addend.dim() == 3 else 1
    first = addend[0, : x.shape[0]] if addend is not None and addend.dim() == 3 else addend
    (m, k), n = check_operands(x, weight, first, config, "none"), weight.shape[0]
    if departures.staging_dtype not in STAGING:
        raise ValueError(f"staging_dtype ({departures.staging_dtype}) must be one of {', '.join(map(str, STAGING))}")
    scale = scale_kind(scale_x, scale_weight, m, n)
    if (m == 0 or n == 0) and not rehearsal:
        return None
    num_row_tiles = departures.order.shape[0]
    programs = min(max(1, num_row_tiles * triton.cdiv(n, config.block_n)), config.num_programs)
    operands = (
        operand(x, config.block_m, config),
        operand(weight, config.block_n, config, is_transposed(weight, config)),
        addend, scale_x, scale_weight, departures.order, departures.staging,
    )  # fmt: skip
    tables = (departures.signals, departures.counters, departures.group)
    numbers = (
        n, k, x.stride(0), weight.stride(0), weight.stride(1), 0 if addend is None else addend.stride(-2),
        0 if addend is None else addend.shape[-2], departures.staging_stride, row_stride(scale_x, scale),
    )  # fmt: skip
    constants = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        "EVEN_K": k > 0 and k % config.block_k == 0, "DESCRIPTORS": config.descriptors,
        "TRANSPOSED": is_transposed(weight, config), "PRECISION": config.precision,
        "STAGING": STAGING[departures.staging_dtype], "SIGNAL": tl.int64 if departures.signal_pads else tl.int32,
        "ADDENDS": addends, "SCALE": scale, "LOOP": loop_of(x, weight, config),
    }  # fmt: skip
    kernel: Any = matmul_reduce_scatter_kernel
    with torch.cuda.device_of(x):
        compiled = kernel[(1 if rehearsal else programs,)](
            *operands, *tables, 0 if rehearsal else num_row_tiles, *numbers, **constants,
            num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=MAX_REGISTERS,
            enable_fp_fusion=fuses(scale, addends),
        )  # fmt: skip
    if m == 0 or n == 0:
        return None
    return known_launch(compiled, programs, operands, (*tables, num_row_tiles, *numbers, *constants.values()))
