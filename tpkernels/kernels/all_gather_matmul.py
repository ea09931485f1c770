# mypy: disable-error-code="untyped-decorator"
"""GEMM of an all-gather: starts on this rank's shard while the peers' chunks are still being copied.

    out = act(scale * (whole @ weight^T) + bias)        whole [M, K], weight [N, K], out [M, N]

`whole` is the gathered buffer. Before the launch, on the same stream: this rank's rows are in place, and the call has
begun (`tpk_begin`). During it: somebody (copy engines) fills the peers' rows chunk by chunk, as
`partition.chunk_ranges` cuts them, and then sets `signals[slot]` to the epoch. The kernel visits row tiles in the order
of `schedule.all_gather_order`, and waits before the first tile of a remote chunk; chunks may arrive in any order, and
results do not depend on it.

Several weights on one gather are several launches: later ones find every signal set, and one kernel per shape keeps its
own tile sizes. The two of a gated activation share the loads of `whole` in one launch (`weight_up`), and only their one
output is stored, unless gradients need what both were:

    out = act(whole @ weight^T + bias) * (whole @ weight_up^T + bias_up)            "swiglu": silu, "geglu": gelu

A chunk that does not arrive in time is reported (signals.py); the kernel then ends, and `out` is void.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels.config import MAX_REGISTERS, GemmConfig
from tpkernels.kernels.operands import ScaleKind, check_operands, is_transposed, operand, row_stride, scale_kind
from tpkernels.kernels.signals import current_call, has_failed, order_descriptor_loads, own_rank, wait_at_least
from tpkernels.kernels.tiles import (
    FINISH_COLUMNS,
    GATED,
    activate,
    halves,
    is_gated,
    product,
    scaled,
    store_tile,
    tile_entry,
    tile_position,
    with_bias,
)

__all__ = ["Arrivals", "all_gather_matmul", "all_gather_matmul_kernel"]


@triton.jit(do_not_specialize=["num_row_tiles", "op"])
def all_gather_matmul_kernel(  # type: ignore[no-untyped-def]
    whole,
    weight,
    weight_up,
    out,
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
):
    DUAL: tl.constexpr = is_gated(ACTIVATION)
    num_column_tiles = tl.cdiv(n, BLOCK_N)
    epoch = current_call(group, tl.int32)
    rank = own_rank(group)
    ready = -1
    arrived = 1 - has_failed(group).to(tl.int32)
    for tile in tl.range(tl.program_id(0), num_row_tiles * num_column_tiles, tl.num_programs(0)):
        row_tile, column = tile_position(tile, num_row_tiles, num_column_tiles, GROUP_M)
        first_column = column * BLOCK_N
        row, rows, source, chunk, slot, _, _ = tile_entry(order, row_tile)
        if (source != rank) & (slot != ready) & (arrived != 0):
            arrived = wait_at_least(signals + slot, epoch, group, op, source, chunk)
            ready = slot
            if DESCRIPTORS:
                order_descriptor_loads()
        if arrived != 0:
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            acc_up = acc
            acc, acc_up = product(
                acc, acc_up, whole, weight, weight_up, row, rows, first_column, n, k,
                stride_whole, stride_wn, stride_wk,
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, DUAL, DESCRIPTORS, TRANSPOSED, PRECISION,
            )  # fmt: skip
            _finish(
                acc, acc_up, first_column, row, rows, n,
                out, preactivation, preactivation_up, bias, bias_up, scale_whole, scale_weight, scale_weight_up,
                stride_out, stride_scale,
                BLOCK_M, BLOCK_N, ACTIVATION, HAS_BIAS, SCALE, KEEP_PREACTIVATION,
            )  # fmt: skip


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    acc,
    acc_up,
    first_column,
    row,
    rows,
    n,
    out,
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
            _finish(
                left if half == 0 else right, left_up if half == 0 else right_up,
                first_column + half * (BLOCK_N // 2), row, rows, n,
                out, preactivation, preactivation_up, bias, bias_up, scale_whole, scale_weight, scale_weight_up,
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
        store_tile(out, acc, row, rows, first_column, n, stride_out, BLOCK_M, BLOCK_N)


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
) -> None:
    """Launch on the current stream, into `out` [M, N] (and `preactivation`, and `..._up`, laid out alike).

    whole [M, K] and weight [N, K] have any strides along M and N; whole's K is contiguous, weight's where it can be.
    weight_up has the strides of weight.
    Scales (fp8 operands) are fp32: one element each, or one per row of whole (any stride) and of weight.

    A rehearsal compiles and loads the kernel and does nothing: loading one while others spin may wait for them.

    Raises:
        ValueError: operands that do not fit together, or that the kernel cannot take.
    """
    gated = activation in GATED
    up = {"weight_up": weight_up is not None, "preactivation_up": preactivation_up is not None,
          "bias_up": bias_up is not None, "scale_weight_up": scale_weight_up is not None}  # fmt: skip
    pairs = {"weight_up": True, "preactivation_up": preactivation is not None, "bias_up": bias is not None,
             "scale_weight_up": scale_weight is not None}  # fmt: skip
    for name, given in up.items():
        if given != (gated and pairs[name]):
            raise ValueError(
                f"{name} goes with a gated activation ({', '.join(GATED)}) and with {name[:-3]}, and only with both; "
                f"activation is {activation!r}, {name} is {'given' if given else 'missing'}"
            )
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
        return
    num_row_tiles = 0 if rehearsal else arrivals.order.shape[0]
    tiles = max(1, num_row_tiles * triton.cdiv(n, config.block_n))
    kernel: Any = all_gather_matmul_kernel
    with torch.cuda.device_of(whole):
        kernel[(min(tiles, config.num_programs),)](
            operand(whole, config.block_m, config),
            operand(weight, config.block_n, config, is_transposed(weight, config)),
            operand(weight_up, config.block_n, config, is_transposed(weight, config)),
            out, preactivation, preactivation_up, bias, bias_up, scale_whole, scale_weight, scale_weight_up,
            arrivals.order, arrivals.signals, arrivals.group, arrivals.op,
            num_row_tiles, n, k, whole.stride(0), weight.stride(0), weight.stride(1), out.stride(0),
            row_stride(scale_whole, scale),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
            EVEN_K=k % config.block_k == 0, DESCRIPTORS=config.descriptors,
            TRANSPOSED=is_transposed(weight, config), PRECISION=config.precision,
            ACTIVATION=activation, HAS_BIAS=bias is not None, SCALE=scale,
            KEEP_PREACTIVATION=preactivation is not None,
            num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
