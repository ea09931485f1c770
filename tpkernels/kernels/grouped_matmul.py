# mypy: disable-error-code="untyped-decorator"
"""Grouped GEMM of a mixture of experts: each tile has the weight of its expert, [E, N, K].

    out[i] = act(x[source of i] @ weight[expert of i]^T + bias[expert of i] + addend[i])          out [rows, N]

and of fp8 operands the product times the scale of the source, and those of the expert's rows of the weight.

The rows of `out` are sorted by expert (`tpkernels/gemm/grouped.py`), a tile has rows of one expert and one chunk, and
which ones says a table that is made from the routing of each call (`schedule.grouped_table`). Its first entry is the
number of tiles, so that launches of a kind differ in tensors alone. One kernel serves both halves of an expert's MLP:

Gathering, `x` is the gathered buffer [tokens, K], the source of a row is its token (`tokens`), and a tile waits for its
chunk as in all_gather_matmul.py, own tokens first. `x` may also have the rows of `out` (no `tokens`), all of them
there: a product to which a later launch adds another one.

Combining (`combine`), `x` has the rows of `out`, remote owners' tokens come first, and products are rounded to `out`, a
buffer of this rank. The CTA that finishes the last product of a chunk in its columns sums them there, token by token:

    staging[owner][t] = token_addend[t] + sum over the rows i of t of row_weights[i] * out[i]

in fp32, in the order of the experts, rounded once, whoever comes last. The CTA that finishes the last columns of a
chunk announces it, as in matmul_reduce_scatter.py. Nobody waits for anybody, so any number of CTAs may run at once.

The loop is nested (tiles.py), because a tile that ends with a loop of its own leaves no flat one to pipeline, and
operands are read through pointers: rows of tokens lie anywhere, and no descriptor of Hopper's gathers rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels.all_gather_matmul import Arrivals, check_pairs, finish
from tpkernels.kernels.config import MAX_REGISTERS, GemmConfig
from tpkernels.kernels.known_launches import KnownLaunch, known_launch
from tpkernels.kernels.matmul_reduce_scatter import STAGING
from tpkernels.kernels.operands import check_operands
from tpkernels.kernels.schedule import FIELDS as _FIELDS
from tpkernels.kernels.signals import announce, behind, count_tile, current_call, has_failed, own_rank, wait_at_least
from tpkernels.kernels.tiles import (
    first_places,
    is_gated,
    load_tile,
    multiply_step,
    next_places,
    no_sums,
    store_tile,
    tile_entry,
    tile_position,
)

__all__ = ["CHUNK_FIELDS", "Combination", "grouped_matmul", "grouped_matmul_kernel"]

FIELDS = tl.constexpr(_FIELDS)
CHUNK_FIELDS = 4  # of a chunk that is combined: owner, first token, tokens, first row in the shard of its owner
_CHUNK_FIELDS = tl.constexpr(CHUNK_FIELDS)
_TOKENS_AT_ONCE = tl.constexpr(32)  # that are summed; loads of all their rows of one expert are on their way together


@triton.jit(do_not_specialize=["op"])
def grouped_matmul_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    weight_up,
    out,
    preactivation,
    preactivation_up,
    bias,
    bias_up,
    addend,
    scale_x,
    scale_weight,
    scale_weight_up,
    tokens,
    order,
    staging,
    token_addend,
    row_weights,
    rows_of_tokens,
    chunks,
    signals,
    group,
    op,
    flags,
    counters,
    num_slots,
    n,
    k,
    stride_x,
    stride_we,
    stride_wn,
    stride_wk,
    stride_out,
    stride_staging,
    stride_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TOP_K: tl.constexpr,
    STAGING_DTYPE: tl.constexpr,
):
    DUAL: tl.constexpr = is_gated(ACTIVATION)
    COMBINES: tl.constexpr = TOP_K > 0
    epoch = current_call(group, tl.int32)
    rank = own_rank(group)
    num_row_tiles = tl.load(order)
    order += FIELDS
    num_column_tiles = tl.cdiv(n, BLOCK_N)
    num_tiles = num_row_tiles * num_column_tiles * (1 - has_failed(group).to(tl.int32))
    ready, arrived = -1, 1
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row_tile, column = tile_position(tile, num_row_tiles, num_column_tiles, GROUP_M)
        row, rows, source, chunk, slot, _, chunk_tiles = tile_entry(order, row_tile)
        expert = tl.load(order + row_tile * FIELDS + 7)
        if tokens is not None:
            if (source != rank) & (slot != ready) & (arrived != 0):
                arrived = wait_at_least(signals + slot, epoch, group, op, source, chunk)
                ready = slot
        # Before the branch, in which the compiler knows what `arrived` is: there nothing would depend on the wait.
        first_column = column * BLOCK_N
        of_expert = expert.to(tl.int64) * stride_we
        x_places, w_places, w_up_places = first_places(
            x, weight + of_expert, None if weight_up is None else weight_up + of_expert,
            behind(arrived, row), behind(arrived, rows), first_column, n, stride_x, stride_wn, stride_wk,
            BLOCK_M, BLOCK_N, BLOCK_K, DUAL, False,
        )  # fmt: skip
        if tokens is not None:
            x_places = _token_places(x, tokens, arrived, row, rows, stride_x, BLOCK_M, BLOCK_K)
        if arrived != 0:
            acc, acc_up = no_sums(BLOCK_M, BLOCK_N, DUAL)
            if addend is not None:
                acc += load_tile(addend, row, rows, first_column, n, stride_out, BLOCK_M, BLOCK_N)
            for step in tl.range(0, tl.cdiv(k, BLOCK_K)):
                acc, acc_up = multiply_step(
                    acc, acc_up, x, weight, weight_up, x_places, w_places, w_up_places, step * BLOCK_K, k,
                    BLOCK_K, EVEN_K, DUAL, False, False, PRECISION,
                )  # fmt: skip
                x_places, w_places, w_up_places = next_places(
                    x_places, w_places, w_up_places, stride_wk, BLOCK_K, DUAL, False
                )
            of_rows = None
            if scale_x is not None:
                of_rows = _row_scales(scale_x, tokens, behind(arrived, row), rows, stride_scale, BLOCK_M)
            finish(
                acc, acc_up, first_column, row, rows, n, out, None, preactivation, preactivation_up,
                None if bias is None else bias + expert * n, None if bias_up is None else bias_up + expert * n,
                of_rows, None if scale_weight is None else scale_weight + expert * n,
                None if scale_weight_up is None else scale_weight_up + expert * n, stride_out, 0,
                BLOCK_M, BLOCK_N, ACTIVATION, bias is not None, "none" if scale_x is None else "given",
                preactivation is not None,
            )  # fmt: skip
            if COMBINES:
                if count_tile(counters + num_slots + slot * num_column_tiles + column, chunk_tiles) != 0:
                    _combine(
                        chunks + slot * _CHUNK_FIELDS, out, staging, token_addend, row_weights, rows_of_tokens,
                        first_column, n, stride_out, stride_staging, BLOCK_N, TOP_K, STAGING_DTYPE,
                    )  # fmt: skip
                    if flags is not None:
                        if count_tile(counters + slot, num_column_tiles) != 0:
                            announce(tl.load(flags + slot).to(tl.pointer_type(tl.int32)), epoch)


@triton.jit
def _token_places(x, tokens, arrived, row, rows, stride_x, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the tokens of a tile's rows begin; rows past its end are its first one."""
    m_offsets, k_offsets = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    token = behind(arrived, tl.load(tokens + row + tl.where(m_offsets < rows, m_offsets, 0)))
    return x + token.to(tl.int64)[:, None] * stride_x + k_offsets[None, :]


@triton.jit
def _row_scales(scale_x, tokens, row, rows, stride_scale, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the tokens of a tile's rows, or of the rows themselves; gathered tokens bring theirs along."""
    m_offsets = tl.arange(0, BLOCK_M)
    sources = row + tl.where(m_offsets < rows, m_offsets, 0)
    if tokens is not None:
        sources = tl.load(tokens + sources)
    return tl.load(scale_x + sources.to(tl.int64) * stride_scale)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    entry,
    products,
    staging,
    token_addend,
    row_weights,
    rows_of_tokens,
    first_column,
    n,
    stride_out,
    stride_staging,
    BLOCK_N: tl.constexpr,
    TOP_K: tl.constexpr,
    STAGING_DTYPE: tl.constexpr,
):
    """Weighted sums of a chunk's tokens, in some columns."""
    owner, first_token, num_tokens, first_row = (
        tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    )  # fmt: skip
    base = tl.multiple_of(tl.load(staging + owner).to(tl.pointer_type(STAGING_DTYPE)), 16)
    offsets, n_offsets = tl.arange(0, _TOKENS_AT_ONCE), first_column + tl.arange(0, BLOCK_N)
    for start in tl.range(0, num_tokens, _TOKENS_AT_ONCE):
        count = tl.minimum(num_tokens - start, _TOKENS_AT_ONCE)
        token = first_token + start + offsets
        acc = tl.zeros((_TOKENS_AT_ONCE, BLOCK_N), tl.float32)
        if token_addend is not None:
            acc += load_tile(
                token_addend, first_token + start, count, first_column, n, stride_staging, _TOKENS_AT_ONCE, BLOCK_N
            )
        for place in tl.static_range(TOP_K):
            row = tl.load(rows_of_tokens + token.to(tl.int64) * TOP_K + place, mask=offsets < count, other=-1)
            places = products + row.to(tl.int64)[:, None] * stride_out + n_offsets[None, :]
            inside = (row[:, None] >= 0) & (n_offsets[None, :] < n)
            product = tl.load(places, mask=inside, other=0.0).to(tl.float32)
            if row_weights is not None:
                product = product * tl.load(row_weights + row, mask=row >= 0, other=0.0)[:, None]
            acc += product
        store_tile(base, acc, first_row + start, count, first_column, n, stride_staging, _TOKENS_AT_ONCE, BLOCK_N)


@dataclass(frozen=True)
class Combination:
    """Where the sums of tokens go; all tensors on the launching device.

    staging: int64 [owners], base addresses of [shard rows of the owner, N] in `staging_dtype`, multiples of 16, rows
    `staging_stride` elements apart. rows_of_tokens: int32 [tokens, top k], `TokenRows.of_tokens`, -1 for no row.
    chunks: int32 [slots, CHUNK_FIELDS]. flags: int64 [slots], addresses of one int32 signal per chunk, or nobody is
    told. counters: int32 [slots * (1 + column tiles)], zeros before the first call. row_weights: fp32 [rows], or all
    are 1. token_addend: [tokens, N], as far apart as rows of staging.
    """

    staging: Tensor
    rows_of_tokens: Tensor
    chunks: Tensor
    flags: Tensor | None
    counters: Tensor
    staging_dtype: torch.dtype
    staging_stride: int
    row_weights: Tensor | None = None
    token_addend: Tensor | None = None


def grouped_matmul(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    arrivals: Arrivals,
    config: GemmConfig,
    *,
    tokens: Tensor | None = None,
    activation: str = "none",
    bias: Tensor | None = None,
    weight_up: Tensor | None = None,
    bias_up: Tensor | None = None,
    addend: Tensor | None = None,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None,
    scale_weight_up: Tensor | None = None,
    preactivation: Tensor | None = None,
    preactivation_up: Tensor | None = None,
    combination: Combination | None = None,
    most_rows: int | None = None,
    rehearsal: bool = False,
    known: KnownLaunch | None = None,
) -> KnownLaunch | None:
    """Launch on the current stream, into `out` [rows, N] (and `preactivation`, `..._up`, laid out alike).

    x [tokens or rows, K], its K contiguous; weight [E, N, K], with any strides, and weight_up with the same; biases
    [E, N], contiguous; tokens int32 [rows]. Scales of fp8 operands are fp32: scale_x [tokens or rows, 1], scale_weight
    [E, N], contiguous. `arrivals.order` is a `schedule.grouped_table` made with this tile height;
    there `rank` is this one for rows that are there, or combined, of the owner. In a combination, whose products `out`
    are no result, `arrivals.signals` is not read. most_rows: that a launch which is known from this one may have, where
    they differ from call to call.

    A rehearsal, and what is `known` from one: as in `all_gather_matmul.all_gather_matmul`.

    Raises:
        ValueError: operands that do not fit together, or that the kernel cannot take.
    """
    changing = (
        (None, None, None, None, None)
        if combination is None
        else (
            combination.staging, combination.token_addend, combination.row_weights, combination.rows_of_tokens,
            combination.chunks,
        )
    )  # fmt: skip
    operands = (
        x, weight, weight_up, out, preactivation, preactivation_up, bias, bias_up, addend, scale_x, scale_weight,
        scale_weight_up, tokens, arrivals.order,
        *changing,
    )  # fmt: skip
    if known is not None:
        known(*operands)
        return known
    check_pairs(
        activation, weight_up=(weight, weight_up), preactivation_up=(preactivation, preactivation_up),
        bias_up=(bias, bias_up), scale_weight_up=(scale_weight, scale_weight_up),
    )  # fmt: skip
    if (scale_x is None) != (scale_weight is None) or (scale_x is not None and addend is not None):
        raise ValueError("scale_x and scale_weight go together, and not with an addend")
    up = weight if weight_up is None else weight_up
    if weight.dim() != 3 or (up.shape, up.stride()) != (weight.shape, weight.stride()):
        raise ValueError(f"weight {tuple(weight.shape)} must be [E, N, K], and weight_up must be laid out like it")
    if config.descriptors or config.loop != "nested":
        raise ValueError("a grouped GEMM has a nested loop and pointers to its operands: config.configure_grouped")
    (_, k), n = check_operands(x, weight[0], None, config, activation), weight.shape[1]
    rows = len(tokens) if tokens is not None else len(x)
    like_out = {"out": out, "addend": addend, "preactivation": preactivation, "preactivation_up": preactivation_up}
    for name, other in like_out.items():
        if other is not None and (tuple(other.shape), other.stride()) != ((rows, n), (out.stride(0), 1)):
            raise ValueError(f"{name} {tuple(other.shape)} strides {other.stride()} must be [{rows}, {n}], like out")
    if (rows == 0 or n == 0) and not rehearsal:
        return None
    # Rows are cut into tiles anew in every call: this many at most, with one that is not full per expert and chunk.
    most_rows = rows if most_rows is None else most_rows
    row_tiles = triton.cdiv(most_rows, config.block_m) + len(arrivals.signals) * len(weight)
    programs = min(max(1, row_tiles * triton.cdiv(n, config.block_n)), config.num_programs)
    tables: tuple[Any, ...] = (arrivals.signals, arrivals.group, arrivals.op)
    if combination is None:
        tables += (None, None, 0)
    else:
        tables += (combination.flags, combination.counters, len(combination.chunks))
    numbers = (
        n, k, x.stride(0), *weight.stride(), out.stride(0), 0 if combination is None else combination.staging_stride,
        0 if scale_x is None else scale_x.stride(0),
    )  # fmt: skip
    constants = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        "EVEN_K": k > 0 and k % config.block_k == 0, "PRECISION": config.precision, "ACTIVATION": activation,
        "TOP_K": 0 if combination is None else combination.rows_of_tokens.shape[1],
        "STAGING_DTYPE": None if combination is None else STAGING[combination.staging_dtype],
    }  # fmt: skip
    kernel: Any = grouped_matmul_kernel
    with torch.cuda.device_of(x):
        compiled = kernel[(1 if rehearsal else programs,)](
            *operands, *tables, *numbers, **constants,
            num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
    if most_rows == 0 or n == 0:
        return None
    return known_launch(compiled, programs, operands, (*tables, *numbers, *constants.values()))
