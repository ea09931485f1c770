# mypy: disable-error-code="untyped-decorator"
"""GEMM of an all-gather: starts on this rank's shard while the peers' chunks are still being copied.

    out = act(scale * (whole @ weight^T) + bias)        whole [M, K], weight [N, K], out [M, N]

`whole` is the gathered buffer. Before the launch, on the same stream: this rank's rows are in place, and the call has
begun (`tpk_begin`). During it: somebody (copy engines) fills the peers' rows chunk by chunk, as
`partition.chunk_ranges` cuts them, and then sets `signals[slot]` to the epoch. The kernel visits row tiles in the order
of `schedule.all_gather_order`, and waits before the first tile of a remote chunk; chunks may arrive in any order, and
results do not depend on it.

In the flat loop (tiles.py) a CTA waits for its next tile's chunk while its last steps of the present tile are still to
be done, because that tile's loads start under them. Nobody can be waiting for that: this kernel announces nothing, what
raises the flags are copies on other streams, and peers publish their shards before their own kernels begin. What it
costs where a chunk is late is the end of one tile, once a wait.

Several weights on one gather are several launches: later ones find every signal set, and one kernel per shape keeps its
own tile sizes. The two of a gated activation share the loads of `whole` in one launch (`weight_up`), and only their one
output is stored, unless gradients need what both were:

    out = act(whole @ weight^T + bias) * (whole @ weight_up^T + bias_up)            "swiglu": silu, "geglu": gelu

A chunk that does not arrive in time is reported (signals.py); the kernel then stores nothing more and ends, and `out`
is void. A flat loop goes through its other tiles all the same: milliseconds.
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
    result_descriptor,
    row_stride,
    scale_kind,
)
from tpkernels.kernels.signals import (
    behind,
    current_call,
    has_failed,
    order_descriptor_loads,
    own_rank,
    wait_at_least,
)
from tpkernels.kernels.tiles import (
    FINISH_COLUMNS,
    GATED,
    activate,
    first_places,
    halves,
    is_gated,
    multiply_step,
    next_places,
    no_sums,
    scaled,
    store_described,
    store_tile,
    tile_entry,
    tile_position,
    with_bias,
)

__all__ = ["Arrivals", "all_gather_matmul", "all_gather_matmul_kernel", "check_pairs", "finish"]


@triton.jit(do_not_specialize=["num_row_tiles", "op"])
def all_gather_matmul_kernel(  # type: ignore[no-untyped-def]
    whole,
    weight,
    weight_up,
    out,
    out_descriptor,
    preactivation,
    preactivation_up,
    bias,
    bias_up,
    scale_whole,
    scale_weight,
    scale_weight_up,
    order,
    signals,
    group,
    op,
    num_row_tiles,
    n,
    k,
    stride_whole,
    stride_wn,
    stride_wk,
    stride_out,
    stride_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    KEEP_PREACTIVATION: tl.constexpr,
    LOOP: tl.constexpr,
):
    DUAL: tl.constexpr = is_gated(ACTIVATION)
    epoch = current_call(group, tl.int32)
    rank = own_rank(group)
    num_column_tiles = tl.cdiv(n, BLOCK_N)
    num_tiles = num_row_tiles * num_column_tiles * (1 - has_failed(group).to(tl.int32))
    programs = tl.num_programs(0)
    ready, arrived = -1, 1
    if LOOP == "nested":
        for tile in tl.range(tl.program_id(0), num_tiles, programs):
            a_places, b_places, b_up_places, ready, arrived = _begin(
                tile, ready, arrived, whole, weight, weight_up, rank, epoch, order, signals, group, op,
                num_row_tiles, num_column_tiles, n, stride_whole, stride_wn, stride_wk,
                BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, DUAL, DESCRIPTORS,
            )  # fmt: skip
            if arrived != 0:
                acc, acc_up = no_sums(BLOCK_M, BLOCK_N, DUAL)
                for step in tl.range(0, tl.cdiv(k, BLOCK_K)):
                    acc, acc_up = multiply_step(
                        acc, acc_up, whole, weight, weight_up, a_places, b_places, b_up_places, step * BLOCK_K, k,
                        BLOCK_K, EVEN_K, DUAL, DESCRIPTORS, TRANSPOSED, PRECISION,
                    )  # fmt: skip
                    a_places, b_places, b_up_places = next_places(
                        a_places, b_places, b_up_places, stride_wk, BLOCK_K, DUAL, DESCRIPTORS
                    )
                _end(
                    tile, arrived, acc, acc_up, order, num_row_tiles, num_column_tiles, n,
                    out, out_descriptor, preactivation, preactivation_up,
                    bias, bias_up, scale_whole, scale_weight, scale_weight_up, stride_out, stride_scale,
                    BLOCK_M, BLOCK_N, GROUP_M, ACTIVATION, HAS_BIAS, SCALE, KEEP_PREACTIVATION,
                )  # fmt: skip
    else:
        num_steps = tl.maximum(1, tl.cdiv(k, BLOCK_K))
        tile = tl.program_id(0) - programs
        done, step = tile, num_steps - 1
        a_places, b_places, b_up_places = first_places(
            whole, weight, weight_up, 0, 0, 0, n, stride_whole, stride_wn, stride_wk,
            BLOCK_M, BLOCK_N, BLOCK_K, DUAL, DESCRIPTORS,
        )  # fmt: skip
        acc, acc_up = no_sums(BLOCK_M, BLOCK_N, DUAL)
        for _ in tl.range(0, tl.cdiv(num_tiles - tl.program_id(0), programs) * num_steps):
            step = tl.where(step == num_steps - 1, 0, step + 1)
            if step == 0:
                tile += programs
                a_places, b_places, b_up_places, ready, arrived = _begin(
                    tile, ready, arrived, whole, weight, weight_up, rank, epoch, order, signals, group, op,
                    num_row_tiles, num_column_tiles, n, stride_whole, stride_wn, stride_wk,
                    BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, DUAL, DESCRIPTORS,
                )  # fmt: skip
            acc, acc_up = multiply_step(
                acc, acc_up, whole, weight, weight_up, a_places, b_places, b_up_places, step * BLOCK_K, k,
                BLOCK_K, EVEN_K, DUAL, DESCRIPTORS, TRANSPOSED, PRECISION,
            )  # fmt: skip
            a_places, b_places, b_up_places = next_places(
                a_places, b_places, b_up_places, stride_wk, BLOCK_K, DUAL, DESCRIPTORS
            )
            if step == num_steps - 1:
                done += programs
                _end(
                    done, arrived, acc, acc_up, order, num_row_tiles, num_column_tiles, n,
                    out, out_descriptor, preactivation, preactivation_up,
                    bias, bias_up, scale_whole, scale_weight, scale_weight_up, stride_out, stride_scale,
                    BLOCK_M, BLOCK_N, GROUP_M, ACTIVATION, HAS_BIAS, SCALE, KEEP_PREACTIVATION,
                )  # fmt: skip
                acc, acc_up = no_sums(BLOCK_M, BLOCK_N, DUAL)


@triton.jit
def _begin(  # type: ignore[no-untyped-def]
    tile,
    ready,
    arrived,
    whole,
    weight,
    weight_up,
    rank,
    epoch,
    order,
    signals,
    group,
    op,
    num_row_tiles,
    num_column_tiles,
    n,
    stride_whole,
    stride_wn,
    stride_wk,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    DUAL: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Wait for a tile's chunk, unless it is known to be there, and say where the tile's operands begin."""
    row_tile, column = tile_position(tile, num_row_tiles, num_column_tiles, GROUP_M)
    row, rows, source, chunk, slot, _, _ = tile_entry(order, row_tile)
    if (source != rank) & (slot != ready) & (arrived != 0):
        arrived = wait_at_least(signals + slot, epoch, group, op, source, chunk)
        ready = slot
        if DESCRIPTORS:
            order_descriptor_loads()
    row, rows = behind(arrived, row), behind(arrived, rows)
    a_places, b_places, b_up_places = first_places(
        whole, weight, weight_up, row, rows, column * BLOCK_N, n, stride_whole, stride_wn, stride_wk,
        BLOCK_M, BLOCK_N, BLOCK_K, DUAL, DESCRIPTORS,
    )  # fmt: skip
    return a_places, b_places, b_up_places, ready, arrived


@triton.jit
def _end(  # type: ignore[no-untyped-def]
    tile,
    arrived,
    acc,
    acc_up,
    order,
    num_row_tiles,
    num_column_tiles,
    n,
    out,
    out_descriptor,
    preactivation,
    preactivation_up,
    bias,
    bias_up,
    scale_whole,
    scale_weight,
    scale_weight_up,
    stride_out,
    stride_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    KEEP_PREACTIVATION: tl.constexpr,
):
    """Store a tile; nothing of it if its rows have not arrived. No branch: sums that tensor cores are still adding to
    must not be needed on one way and dropped on another, or the assembler waits for them after every step (sm_90)."""
    row_tile, column = tile_position(tile, num_row_tiles, num_column_tiles, GROUP_M)
    row, rows, _, _, _, _, _ = tile_entry(order, row_tile)
    finish(
        acc, acc_up, column * BLOCK_N, row, rows * arrived, n,
        out, out_descriptor, preactivation, preactivation_up, bias, bias_up,
        scale_whole, scale_weight, scale_weight_up, stride_out, stride_scale,
        BLOCK_M, BLOCK_N, ACTIVATION, HAS_BIAS, SCALE, KEEP_PREACTIVATION,
    )  # fmt: skip


@triton.jit
def finish(  # type: ignore[no-untyped-def]
    acc,
    acc_up,
    first_column,
    row,
    rows,
    n,
    out,
    out_descriptor,
    preactivation,
    preactivation_up,
    bias,
    bias_up,
    scale_whole,
    scale_weight,
    scale_weight_up,
    stride_out,
    stride_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    KEEP_PREACTIVATION: tl.constexpr,
):
    """Scale, bias, activation and store, for at most FINISH_COLUMNS columns at a time."""
    DUAL: tl.constexpr = is_gated(ACTIVATION)
    if BLOCK_N > FINISH_COLUMNS:
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        left_up, right_up = left, right
        if DUAL:
            left_up, right_up = halves(acc_up, BLOCK_M, BLOCK_N)
        for half in tl.static_range(2):
            finish(
                left if half == 0 else right, left_up if half == 0 else right_up,
                first_column + half * (BLOCK_N // 2), row, rows, n,
                out, out_descriptor, preactivation, preactivation_up,
                bias, bias_up, scale_whole, scale_weight, scale_weight_up,
                stride_out, stride_scale,
                BLOCK_M, BLOCK_N // 2, ACTIVATION, HAS_BIAS, SCALE, KEEP_PREACTIVATION,
            )  # fmt: skip
    else:
        acc = scaled(acc, scale_whole, scale_weight, stride_scale, row, rows, first_column, n, SCALE, BLOCK_M, BLOCK_N)
        if DUAL:
            acc_up = scaled(
                acc_up, scale_whole, scale_weight_up, stride_scale, row, rows, first_column, n, SCALE, BLOCK_M, BLOCK_N
            )
        if HAS_BIAS:
            acc = with_bias(acc, bias, first_column, n, BLOCK_N)
            if DUAL:
                acc_up = with_bias(acc_up, bias_up, first_column, n, BLOCK_N)
        if KEEP_PREACTIVATION:
            store_tile(preactivation, acc, row, rows, first_column, n, stride_out, BLOCK_M, BLOCK_N)
            if DUAL:
                store_tile(preactivation_up, acc_up, row, rows, first_column, n, stride_out, BLOCK_M, BLOCK_N)
        acc = activate(acc, acc_up, ACTIVATION)
        store_described(out, out_descriptor, acc, row, rows, first_column, n, stride_out, BLOCK_M, BLOCK_N)


@dataclass(frozen=True)
class Arrivals:
    """What a launch needs to know of the transfers; all tensors on the launching device, or mapped into it.

    order: int32 [row tiles, FIELDS], `schedule.as_table(schedule.all_gather_order(...))` with the launch's
    tile height. signals: int32 [world size * chunks per shard], by slot (rank * chunks per shard + chunk), this rank's
    own. group: int64, `signals.group_table`. op: named in errors.
    """

    order: Tensor
    signals: Tensor
    group: Tensor
    op: int


def all_gather_matmul(
    whole: Tensor,
    weight: Tensor,
    out: Tensor,
    arrivals: Arrivals,
    config: GemmConfig,
    *,
    activation: str = "none",
    bias: Tensor | None = None,
    weight_up: Tensor | None = None,
    bias_up: Tensor | None = None,
    scale_whole: Tensor | None = None,
    scale_weight: Tensor | None = None,
    scale_weight_up: Tensor | None = None,
    preactivation: Tensor | None = None,
    preactivation_up: Tensor | None = None,
    rehearsal: bool = False,
    known: KnownLaunch | None = None,
) -> KnownLaunch | None:
    """Launch on the current stream, into `out` [M, N] (and `preactivation`, and `..._up`, laid out alike).

    whole [M, K] and weight [N, K] have any strides along M and N; whole's K is contiguous, weight's where it can be.
    weight_up has the strides of weight.
    Scales (fp8 operands) are fp32: one element each, or one per row of whole (any stride) and of weight.

    A rehearsal compiles and loads the kernel and does nothing: loading one while others spin may wait for them. What it
    returns may be given as `known` to launches on the current device that differ in the operands' addresses alone, and
    spares them checks and most of the launch.

    Raises:
        ValueError: operands that do not fit together, or that the kernel cannot take.
    """
    if known is not None:
        known(
            whole, weight, weight_up, out, out, preactivation, preactivation_up, bias, bias_up, scale_whole,
            scale_weight, scale_weight_up,
        )  # fmt: skip
        return known
    check_pairs(
        activation, weight_up=(weight, weight_up), preactivation_up=(preactivation, preactivation_up),
        bias_up=(bias, bias_up), scale_weight_up=(scale_weight, scale_weight_up),
    )  # fmt: skip
    (m, k), n = check_operands(whole, weight, out, config, activation), weight.shape[0]
    if weight_up is not None:
        check_operands(whole, weight_up, out, config, activation)
    for name, other in (
        ("weight_up", weight_up), ("preactivation", preactivation), ("preactivation_up", preactivation_up),
    ):  # fmt: skip
        like = weight if name == "weight_up" else out
        if other is not None and (other.shape != like.shape or other.stride() != like.stride()):
            raise ValueError(f"{name} {tuple(other.shape)} strides {other.stride()} must be laid out like its pair")
    scale: ScaleKind = scale_kind(scale_whole, scale_weight, m, n)
    if (m == 0 or n == 0) and not rehearsal:
        return None
    num_row_tiles = arrivals.order.shape[0]
    programs = min(max(1, num_row_tiles * triton.cdiv(n, config.block_n)), config.num_programs)
    operands = (
        operand(whole, config.block_m, config),
        operand(weight, config.block_n, config, is_transposed(weight, config)),
        operand(weight_up, config.block_n, config, is_transposed(weight, config)),
        out, result_descriptor(out, config), preactivation, preactivation_up, bias, bias_up,
        scale_whole, scale_weight, scale_weight_up,
    )  # fmt: skip
    tables = (arrivals.order, arrivals.signals, arrivals.group, arrivals.op)
    numbers = (
        n, k, whole.stride(0), weight.stride(0), weight.stride(1), out.stride(0), row_stride(scale_whole, scale),
    )  # fmt: skip
    constants = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        "EVEN_K": k > 0 and k % config.block_k == 0, "DESCRIPTORS": config.descriptors,
        "TRANSPOSED": is_transposed(weight, config), "PRECISION": config.precision,
        "ACTIVATION": activation, "HAS_BIAS": bias is not None, "SCALE": scale,
        "KEEP_PREACTIVATION": preactivation is not None, "LOOP": loop_of(whole, weight, config),
    }  # fmt: skip
    kernel: Any = all_gather_matmul_kernel
    with torch.cuda.device_of(whole):
        compiled = kernel[(1 if rehearsal else programs,)](
            *operands, *tables, 0 if rehearsal else num_row_tiles, *numbers, **constants,
            num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
    if m == 0 or n == 0:
        return None
    return known_launch(compiled, programs, operands, (*tables, num_row_tiles, *numbers, *constants.values()))


def check_pairs(activation: str, **pairs: tuple[Tensor | None, Tensor | None]) -> None:
    """A gated activation takes two of everything that is there; others take one. Names are those of the second."""
    for name, (first, second) in pairs.items():
        if (second is not None) != (activation in GATED and first is not None):
            raise ValueError(
                f"{name} goes with a gated activation ({', '.join(GATED)}) and with {name[:-3]}, and only with both; "
                f"activation is {activation!r}, {name} is {'missing' if second is None else 'given'}"
            )
