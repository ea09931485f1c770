"""Launches of the grouped kernel: what all calls of a kind have in common, and the tables of one call's routing.

Kernels are compiled, loaded and remembered before a call begins, for as many rows as the problem may have; which tiles
there are is known when the routing is, and then uploaded (`tpkernels/kernels/schedule.py`).  Where experts are dealt
out, the routing also says how many rows there are, and how many tokens a chunk has.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.backends.symmetric.channels import Channel
from tpkernels.backends.symmetric.copy_engine_traffic import Matrix
from tpkernels.backends.symmetric.cuda_native import MAX_CHUNKS
from tpkernels.backends.symmetric.kernel_launches import (
    Launch,
    Prepared,
    alike,
    all_or_none,
    of_kind,
    rehearse,
    table_of,
    with_known,
)
from tpkernels.backends.symmetric.residency import gemm_programs
from tpkernels.gemm import fp8
from tpkernels.gemm.dealt import DealtRows
from tpkernels.gemm.fp8 import ExpertMatrices, Operand, Scaled, ScaledExperts
from tpkernels.gemm.grouped import TokenRows
from tpkernels.kernels.config import SMALLEST_BLOCK, GemmConfig, Tiles, configure_grouped
from tpkernels.ops.contract import GATED, AllGatherGroupedMatmul, Context, GroupedMatmulAllReduce
from tpkernels.partition import Layout, chunk_ranges, offsets

if TYPE_CHECKING:
    from tpkernels.kernels.grouped_matmul import Combination
    from tpkernels.kernels.known_launches import KnownLaunch

__all__ = ["Outputs", "chunks_of", "combining_launches", "cut_of", "gather_launches", "tile_table"]


class Outputs(NamedTuple):
    """Of a gather: one per weight or gated pair, and the products of all weights if they are kept."""

    outs: list[Tensor]
    preactivations: list[Tensor]


@dataclass(frozen=True)
class Cut:
    """Tokens cut into chunks, and the order of these.

    bounds: token numbers, ascending.  ranges: of every rank's chunks, places in bounds.  turns: (rank, chunk).
    """

    bounds: tuple[int, ...]
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    turns: tuple[tuple[int, int], ...]

    @property
    def num_chunks(self) -> int:
        return len(self.ranges[0])

    @property
    def num_parts(self) -> int:
        """Ranks whose chunks these are."""
        return len(self.turns) // self.num_chunks


@lru_cache(maxsize=256)
def cut_of(layout: Layout, num_chunks: int, rank: int, gathers: bool) -> Cut:
    """Of tokens by the rank that they come from (or go to), as this rank multiplies them."""
    from tpkernels.kernels.schedule import arrivals, departures

    tokens = [
        [(first + start, first + stop) for start, stop in chunk_ranges(size, num_chunks)]
        for first, size in zip(offsets(layout.sizes), layout.sizes, strict=False)
    ]
    bounds = sorted({bound for chunks in tokens for chunk in chunks for bound in chunk})
    places = {bound: place for place, bound in enumerate(bounds)}
    ranges = tuple(tuple((places[start], places[stop]) for start, stop in chunks) for chunks in tokens)
    turns = (arrivals if gathers else departures)(len(layout.sizes), num_chunks, rank)
    return Cut(tuple(bounds), ranges, tuple(turns))


def _weights(matrices: ExpertMatrices) -> tuple[Tensor, Tensor | None]:
    """``[E, N, K]``, and the scales of fp8 ones."""
    if isinstance(matrices, ScaledExperts):
        return matrices.weights, matrices.scales
    return matrices.transpose(1, 2), None


def _rows(operand: Operand) -> tuple[Tensor, Tensor | None]:
    """What is multiplied, and the scales of fp8 rows."""
    return (operand.numbers, operand.scale) if isinstance(operand, Scaled) else (operand, None)


def _undivided(layout: Layout) -> Layout:
    """All tokens as one chunk of one rank."""
    return Layout(1, (layout.total_rows,), 1)


def tile_table(rows: TokenRows, cut: Cut, config: GemmConfig, device: torch.device) -> Tensor:
    """What a launch reads of one call's routing."""
    from tpkernels.kernels.schedule import grouped_table

    return grouped_table(rows.first_rows(cut.bounds), cut.ranges, cut.turns, config.block_m).to(device)


def chunks_of(context: Context, channel: Channel) -> int:
    """Chunks per shard: from facts that are equal on all ranks, because signals count them."""
    if context.forced_chunks:
        return min(MAX_CHUNKS, context.num_chunks)
    return min(context.num_chunks, _config(context, channel, None, parts=context.problem.world_size).num_chunks)


def _config(context: Context, channel: Channel, shape: tuple[int, int] | None, parts: int) -> GemmConfig:
    """shape: N and K of this rank's weights; by default of a typical one.  parts: ranks whose chunks there are."""
    problem, device = context.problem, channel.device
    gathers, gated = problem.facts.gathers, problem.activation in GATED

    def typical(ranks: int) -> tuple[int, int]:
        size = 1 if problem.facts.dealt else ranks  # parts of a weight
        return (problem.n // size // (2 if gated else 1), problem.k) if gathers else (problem.n, problem.k // size)

    def configured(shape: tuple[int, int], parts: int, tiles: Tiles | None) -> GemmConfig:
        return configure_grouped(
            capability=device.capability, num_sms=device.num_sms, tokens=problem.m, top_k=problem.top_k,
            experts=problem.experts, n=shape[0], k=shape[1], dtype=str(problem.dtype).removeprefix("torch."),
            world_size=parts, moved_row_bytes=problem.row_bytes, dual=gated,
            allow_tf32=problem.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest",
            reserved_sms=device.num_sms - gemm_programs(device.num_sms, waits=gathers), tiles=tiles,
        )  # fmt: skip

    shape, tiles = shape or typical(problem.world_size), None
    if problem.same_bits:  # those of a rank of the largest degree, at every degree
        tiles = configured(typical(problem.same_bits), problem.same_bits, None).tiles
    return configured(shape, parts, tiles)


def _most_rows(context: Context) -> int:
    """Of a rank; experts that are dealt out may leave it fewer."""
    return context.problem.m * context.problem.top_k


def _nothing_to_do(channel: Channel) -> Tensor:
    """A table without tiles, for rehearsals."""
    from tpkernels.kernels.schedule import FIELDS

    empty: Tensor = channel.remember("no tiles", lambda: channel.device.zeros((1, FIELDS), torch.int32))
    return empty


def gather_launches(
    context: Context, channel: Channel, call: AllGatherGroupedMatmul, layout: Layout, whole: Tensor, outputs: Outputs,
    num_chunks: int,
) -> Callable[[TokenRows], list[Launch]]:  # fmt: skip
    """The GEMMs of one gather, one per output, once the routing is known.

    layout: of the tokens of ``whole`` by the rank that they come from.  num_chunks: 0 where all of them are there.
    """
    if not call.matrices[0].shape[0]:  # of experts that are dealt out there may be none here
        return lambda _: []
    rank, layout = (channel.rank, layout) if num_chunks else (0, _undivided(layout))
    cut = cut_of(layout, max(1, num_chunks), rank, True)
    if not num_chunks:  # nobody else's
        cut = replace(cut, turns=((channel.rank, 0),), ranges=cut.ranges * channel.size)
    prepared = [_gather_launch(context, channel, call, whole, outputs, i, cut) for i in range(len(outputs.outs))]

    def launches(rows: TokenRows) -> list[Launch]:
        tokens, tables = rows.tokens.to(torch.int32), {}
        for config, _ in prepared:
            if config.block_m not in tables:
                tables[config.block_m] = tile_table(rows, cut, config, whole.device)
        return [launch(tokens, tables[config.block_m]) for config, launch in prepared]

    return launches


def _gather_launch(
    context: Context, channel: Channel, call: AllGatherGroupedMatmul, whole: Tensor, outputs: Outputs, output: int,
    cut: Cut,
) -> tuple[GemmConfig, Callable[[Tensor, Tensor], Launch]]:  # fmt: skip
    from tpkernels.kernels import grouped_matmul as kernel
    from tpkernels.kernels.all_gather_matmul import Arrivals

    gated, out = call.activation in GATED, outputs.outs[output]
    parts = (0, 1) if gated else (output,)
    given = [_weights(call.matrices[part]) for part in parts]
    weights, scales = alike([weight for weight, _ in given]), [scale for _, scale in given]
    x, scale_x = _rows(fp8.unpack(whole, call.packed) if call.packed else whole)
    biases = all_or_none([call.biases[part] for part in parts])
    kept = [outputs.preactivations[part] for part in parts] if outputs.preactivations else []
    settings: dict[str, Any] = {"activation": call.activation or "none", "scale_x": scale_x}
    named = (("weight", weights[1:]), ("bias", biases), ("preactivation", kept), ("scale_weight", scales))
    for name, values in named:
        suffixes = ("_up",) if name == "weight" else ("", "_up")
        settings |= {f"{name}{suffix}": value for suffix, value in zip(suffixes, values, strict=False)}

    def launch_of(arrivals: Arrivals, config: GemmConfig, tokens: Tensor) -> Callable[..., KnownLaunch | None]:
        return partial(
            kernel.grouped_matmul, x, weights[0], out, arrivals, config, tokens=tokens,
            most_rows=_most_rows(context), **settings,
        )  # fmt: skip

    def prepare() -> Prepared:
        config = _config(context, channel, (weights[0].shape[1], x.shape[1]), cut.num_parts)
        arrivals = Arrivals(_nothing_to_do(channel), channel.flags, table_of(channel), channel.op(context.problem.op))
        tokens = whole.new_empty(out.shape[0], dtype=torch.int32)
        return Prepared(config, arrivals, cut.num_chunks, rehearse(launch_of(arrivals, config, tokens)))

    kind = ("grouped gather", settings["activation"], cut.num_chunks, len(cut.turns))
    of_experts = ("weight_up", "bias", "bias_up", "scale_weight", "scale_weight_up")
    fixed = [weights[0], *(settings.get(name) for name in of_experts)]
    by_row = [x, out, scale_x, *(settings.get(name) for name in ("preactivation", "preactivation_up"))]
    config, arrivals, _, known = of_kind(channel, context, kind, fixed, prepare, by_row)

    def launch(tokens: Tensor, order: Tensor) -> Launch:
        return with_known(known, launch_of(replace(arrivals, order=order), config, tokens))

    return config, launch


def combining_launches(
    context: Context, channel: Channel, call: GroupedMatmulAllReduce, layout: Layout | None, parts: Sequence[Matrix],
    staging: Tensor, dtype: torch.dtype | None = None,
) -> tuple[list[Launch], int]:  # fmt: skip
    """The GEMMs that put the sums of tokens into ``parts`` by owner, and the number of chunks of every shard.

    ``parts`` begin at addresses relative to ``staging``.  Chunk c of owner o raises local flag o * chunks + c.  Without
    a layout (of the tokens by owner) all tokens are one chunk of one owner, and no flag is raised.  ``dtype``: of the
    sums, by default that of the result; products of fp8 operands then have it, too.
    """
    announces = layout is not None
    layout = _undivided(Layout(1, (call.rows.num_tokens,), 1)) if layout is None else layout
    num_chunks = chunks_of(context, channel) if announces else 1
    cut = cut_of(layout, num_chunks, channel.rank if announces else 0, False)
    of_products = call.like.dtype if call.out_dtype is None or dtype is None else dtype
    products = call.like.new_empty(call.rows.count, call.columns, dtype=of_products)
    launches: list[Launch] = []
    if not call.matrices[0].shape[0]:  # of experts that are dealt out there may be none here
        return launches, num_chunks
    for i in range(len(call.xs)):
        is_last = i == len(call.xs) - 1
        sums = dtype or call.like.dtype
        combination = _combination(channel, call, cut, parts, staging, announces, sums) if is_last else None
        launches.append(_product_launch(context, channel, call, i, products, cut, combination))
    return launches, num_chunks


def _product_launch(
    context: Context, channel: Channel, call: GroupedMatmulAllReduce, i: int, products: Tensor, cut: Cut,
    combination: Combination | None,
) -> Launch:  # fmt: skip
    """``products`` of ``xs[i]``, to which those before are added."""
    from tpkernels.kernels import grouped_matmul as kernel
    from tpkernels.kernels.all_gather_matmul import Arrivals

    (x, scale_x), (weight, scale_weight) = _rows(call.xs[i]), _weights(call.matrices[i])
    bias = None if call.expert_biases is None else call.expert_biases.contiguous()
    addend = products if i else None

    def launch_of(arrivals: Arrivals, config: GemmConfig) -> Callable[..., KnownLaunch | None]:
        return partial(
            kernel.grouped_matmul, x, weight, products, arrivals, config, bias=bias, addend=addend, scale_x=scale_x,
            scale_weight=scale_weight, combination=combination, most_rows=_most_rows(context),
        )  # fmt: skip

    def prepare() -> Prepared:
        config = _config(context, channel, (weight.shape[1], weight.shape[2]), cut.num_parts)
        arrivals = Arrivals(_nothing_to_do(channel), channel.flags, table_of(channel), channel.op(context.problem.op))
        return Prepared(config, arrivals, cut.num_chunks, rehearse(launch_of(arrivals, config)))

    announces = combination is not None and combination.flags is not None
    sums = None if combination is None else combination.staging_dtype
    kind = ("grouped product", cut.num_chunks, len(cut.turns), i, sums, announces)
    optional = () if combination is None else (combination.row_weights, combination.token_addend)
    by_row = (x, products, addend, scale_x, *optional)
    config, arrivals, _, known = of_kind(channel, context, kind, (weight, bias, scale_weight), prepare, by_row)
    order = tile_table(call.rows, cut, config, x.device)
    return with_known(known, launch_of(replace(arrivals, order=order), config))


def _combination(
    channel: Channel, call: GroupedMatmulAllReduce, cut: Cut, parts: Sequence[Matrix], staging: Tensor, announces: bool,
    dtype: torch.dtype,
) -> Combination:  # fmt: skip
    from tpkernels.kernels.grouped_matmul import Combination

    device, starts = channel.device, [part.address for part in parts]

    def uploaded(key: Hashable, values: list[Any], dtype: torch.dtype) -> Tensor:
        """What the routing has made may never come again."""
        if isinstance(call.rows, DealtRows):
            return device.upload(values, dtype)
        kept: Tensor = channel.remember(key, lambda: device.upload(values, dtype))
        return kept

    chunks = []
    for owner, ranges in enumerate(cut.ranges):
        first = cut.bounds[ranges[0][0]]
        for start, stop in ((cut.bounds[low], cut.bounds[high]) for low, high in ranges):
            chunks.append([owner, start, stop - start, start - first])
    flags = [channel.flag(slot) for slot in range(len(chunks))]
    num_counters = len(chunks) * (1 + -(-call.columns // SMALLEST_BLOCK))
    return Combination(
        staging=uploaded(("starts", *starts), starts, torch.int64) + staging.data_ptr(),
        rows_of_tokens=call.rows.of_tokens().to(torch.int32),
        chunks=uploaded(("combined chunks", cut), chunks, torch.int32),
        flags=channel.remember(("chunk flags", len(chunks)), lambda: device.upload(flags, torch.int64))
        if announces
        else None,
        counters=channel.remember(("counters", num_counters), lambda: device.zeros((num_counters,), torch.int32)),
        staging_dtype=dtype,
        staging_stride=call.columns,
        row_weights=call.weights,
        token_addend=None if call.addend is None else call.addend.contiguous(),
    )
