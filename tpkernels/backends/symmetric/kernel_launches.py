"""GEMM kernels of ``symmetric``, ready to be enqueued: configurations, tables on the device, and a rehearsal of each.

What a launch needs beside the call's own tensors is made at the first call of its kind and remembered by the channel;
after that nothing is uploaded, so that calls can be captured, and nothing is checked or specialised anew: of Triton
only its launcher is left (`tpkernels/kernels/known_launches.py`).  Triton is imported when the first call needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.backends.row_gemms import Epilogue
from tpkernels.backends.symmetric.channels import Channel
from tpkernels.backends.symmetric.copy_engine_traffic import Matrix
from tpkernels.backends.symmetric.cuda_native import MAX_CHUNKS
from tpkernels.backends.symmetric.tuning import gemm_of, tiles_of_blocks
from tpkernels.gemm.fp8 import Operand, Scaled
from tpkernels.gemm.widened import MatrixOperand, Widened
from tpkernels.kernels.config import GemmConfig
from tpkernels.ops.contract import AllGatherMatmul, Context, MatmulReduceScatter
from tpkernels.partition import Layout

if TYPE_CHECKING:
    from tpkernels.kernels.known_launches import KnownLaunch

__all__ = [
    "Launch",
    "Prepared",
    "alike",
    "all_or_none",
    "gather_launches",
    "of_kind",
    "own_rows",
    "rehearse",
    "scatter_launch",
    "table_of",
    "with_known",
]

Launch = Callable[[], None]


def gather_launches(
    context: Context, channel: Channel, call: AllGatherMatmul, layout: Layout, operand: Operand, epilogue: Epilogue
) -> tuple[list[Launch], int]:
    """The GEMMs of one gather, one per output, and the number of chunks that they expect of every shard.

    operand: the gathered rows; layout: by whom they are brought, see :func:`own_rows`.
    """
    found = [_gather_launch(context, channel, call, layout, operand, epilogue, i) for i in range(len(epilogue.outs))]
    return [launch for launch, _ in found], found[0][1]


def own_rows(channel: Channel, rows: int) -> Layout:
    """All of them this rank's own, for which no kernel waits."""
    return Layout(1, tuple(rows if rank == channel.rank else 0 for rank in range(channel.size)), 1)


def _gather_launch(
    context: Context, channel: Channel, call: AllGatherMatmul, layout: Layout, operand: Operand, epilogue: Epilogue,
    output: int,
) -> tuple[Launch, int]:  # fmt: skip
    from tpkernels.kernels import all_gather_matmul as kernel

    x, scale_x = _numbers(operand)
    out, parts = epilogue.outs[output], (0, 1) if call.gated else (output,)
    operands = [_numbers(call.matrices[part]) for part in parts]
    weights = alike([numbers.t() for numbers, _ in operands])
    biases = all_or_none([call.biases[part] for part in parts])
    settings: dict[str, Any] = {
        "activation": call.activation or "none",
        "scale_whole": scale_x,
        "weight_up": weights[1] if call.gated else None,
    }
    for suffix, part, bias, (_, scale) in zip(("", "_up"), parts, biases, operands, strict=False):
        settings[f"bias{suffix}"], settings[f"scale_weight{suffix}"] = bias, scale
        settings[f"preactivation{suffix}"] = epilogue.preactivations[part] if epilogue.preactivations else None
    tensors = [x, weights[0], out, *(value for value in settings.values() if not isinstance(value, str))]

    def launch_of(arrivals: kernel.Arrivals, config: GemmConfig) -> Callable[..., KnownLaunch | None]:
        return partial(kernel.all_gather_matmul, x, weights[0], out, arrivals, config, **settings)

    def prepare() -> Prepared:
        cut = _num_chunks(context, channel)
        config = _config(context, channel, weights, x, cut)
        arrivals = kernel.Arrivals(
            order=_order(channel, "all_gather_order", layout, config), signals=channel.flags,
            group=table_of(channel), op=channel.op("all_gather_matmul"),
        )  # fmt: skip
        return Prepared(config, arrivals, cut, rehearse(launch_of(arrivals, config)))

    kind = ("gather", layout, settings["activation"], call.out_dtype)
    config, arrivals, num_chunks, known = of_kind(channel, context, kind, tensors, prepare)
    return with_known(known, launch_of(arrivals, config)), num_chunks


class Prepared(NamedTuple):
    """What the launches of a kind have in common.

    tables: on the device.  num_chunks: of every shard.  known: where Triton compiles.
    """

    config: GemmConfig
    tables: Any
    num_chunks: int
    known: KnownLaunch | None


def with_known(known: KnownLaunch | None, launch: Callable[..., object]) -> Launch:
    def run() -> None:
        launch(known=known)

    return run


def of_kind(
    channel: Channel, context: Context, kind: tuple[Any, ...], operands: Sequence[Tensor | None],
    prepare: Callable[[], Prepared], by_row: Sequence[Tensor | None] = (),
) -> Prepared:  # fmt: skip
    """What was prepared at the first launch of the kind; pure functions choose it from what the key says.

    by_row: operands of which the number of rows differs from call to call, and does not matter.
    """
    chosen_by = context.problem, context.num_chunks, context.forced_chunks, context.agreed
    made: Prepared = channel.remember(("launch", *kind, *chosen_by, *_facts(operands), *_facts(by_row, 1)), prepare)
    return made


def _facts(operands: Sequence[Tensor | None], from_dim: int = 0) -> list[Any]:
    """Of operands, what a kernel is compiled for."""
    return [None if t is None else (t.dtype, t.shape[from_dim:], t.stride(), t.data_ptr() % 16) for t in operands]


def alike(weights: Sequence[Tensor]) -> list[Tensor]:
    """With equal strides, because one kernel walks gate and up: those of parameters are; others are copied."""
    alike = len({weight.stride() for weight in weights}) == 1
    return [weight if alike else weight.contiguous() for weight in weights]


def all_or_none(biases: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Of gate and up: zeros stand for one that is missing."""
    given = next((bias for bias in biases if bias is not None), None)
    if given is None:
        return list(biases)
    return [torch.zeros_like(given) if bias is None else bias.contiguous() for bias in biases]


def scatter_launch(
    context: Context, channel: Channel, call: MatmulReduceScatter, addend: Tensor | None, parts: Sequence[Matrix],
    staging: Tensor, dtype: torch.dtype,
) -> tuple[Launch, int]:  # fmt: skip
    """The GEMM of a reduce-scatter's last product, into ``parts`` by owner, and the number of chunks of every shard.

    ``parts`` begin at addresses relative to ``staging``, and are of ``dtype``.  ``addend``: as of the kernel.

    Chunk c of owner o raises local flag o * chunks + c.
    """
    from tpkernels.kernels import matmul_reduce_scatter as kernel

    (x, scale_x), (matrix, scale_weight), device = _numbers(call.xs[-1]), _numbers(call.matrices[-1]), channel.device
    weight = matrix.t()
    operands, starts = (x, weight, addend, scale_x, scale_weight), [part.address for part in parts]

    def launch_of(departures: kernel.Departures, config: GemmConfig) -> Callable[..., KnownLaunch | None]:
        return partial(
            kernel.matmul_reduce_scatter, x, weight, departures, config, addend=addend, scale_x=scale_x,
            scale_weight=scale_weight,
        )  # fmt: skip

    def prepare() -> Prepared:
        cut = _num_chunks(context, channel)
        config = _config(context, channel, (weight,), x, cut)
        flags = [channel.flag(owner * cut) for owner in range(channel.size)]
        departures = kernel.Departures(
            order=_order(channel, "reduce_scatter_order", call.layout, config),
            staging=channel.remember(("starts", *starts), lambda: device.upload(starts, torch.int64)),
            signals=channel.remember(("flags", cut), lambda: device.upload(flags, torch.int64)),
            counters=channel.counters, group=table_of(channel), staging_dtype=dtype,
            staging_stride=call.columns,
        )  # fmt: skip
        return Prepared(config, departures, cut, rehearse(launch_of(departures, config)))

    config, departures, num_chunks, known = of_kind(
        channel, context, ("scatter", call.layout, dtype, call.columns, call.out_dtype, *starts), operands, prepare
    )
    # Added on the device: nothing is uploaded for a call whose kind is known.
    placed = replace(departures, staging=departures.staging + staging.data_ptr())
    return with_known(known, launch_of(placed, config)), num_chunks


def _numbers(operand: MatrixOperand) -> tuple[Tensor, Tensor | None]:
    """What tensor cores multiply, and its scales."""
    assert not isinstance(operand, Widened), "a GPU multiplies bf16 itself"
    return (operand.numbers, operand.scale) if isinstance(operand, Scaled) else (operand, None)


def _num_chunks(context: Context, channel: Channel) -> int:
    """Chunks per shard: from facts that are equal on all ranks, because signals count them."""
    if context.forced_chunks:
        return min(MAX_CHUNKS, context.num_chunks)
    problem, device = context.problem, channel.device
    tiles = tiles_of_blocks(problem, device) if problem.same_bits else context.agreed
    config = gemm_of(problem).configure(device, tiles=tiles)
    return min(context.num_chunks, config.num_chunks) if context.problem.m else 1


def _config(context: Context, channel: Channel, weights: Sequence[Tensor], x: Tensor, num_chunks: int) -> GemmConfig:
    """Tiles for this rank's operands, which may lie otherwise than its peers' do.

    Measured tiles are for the GEMM of the whole problem; they serve where the pure function takes the two for alike.
    """
    from tpkernels.kernels.operands import descriptors_fit, weight_descriptor_fits

    device, usual = channel.device, gemm_of(context.problem)
    own = replace(usual, n=weights[0].shape[0], k=x.shape[1], dtype=x.dtype)
    if context.problem.same_bits:
        blocks = tiles_of_blocks(context.problem, device)
        return replace(own.configure(device, pointers=True, tiles=blocks), num_chunks=num_chunks)
    pointers = not (descriptors_fit(x) and all(map(weight_descriptor_fits, weights)))
    found = own.configure(device, pointers=pointers)
    if context.agreed is not None and found.tiles == usual.configure(device).tiles:
        found = own.configure(device, pointers=pointers, tiles=context.agreed)
    return replace(found, num_chunks=num_chunks)


def _order(channel: Channel, name: str, layout: Layout, config: Any) -> Tensor:
    """The table of row tiles of a launch, on the device."""
    from tpkernels.kernels import schedule

    def make() -> Tensor:
        tiles = getattr(schedule, name)(layout, config.num_chunks, config.block_m, channel.rank)
        return channel.device.upload(schedule.as_table(tiles), torch.int32).reshape(-1, schedule.FIELDS)

    table: Tensor = channel.remember((name, layout, config.num_chunks, config.block_m), make)
    return table


def table_of(channel: Channel) -> Tensor:
    """What kernels know of the group."""
    from tpkernels.kernels.signals import group_table

    group, device = channel.group, channel.device

    def make() -> Tensor:
        values = group_table(
            state=group.state, failure=group.failure_on_device, timeout_ns=device.patience(channel.timeout_s),
            rank=channel.rank, pads=channel.pads,
        )  # fmt: skip
        return device.upload(values, torch.int64)

    table: Tensor = channel.remember("group table", make)
    return table


def rehearse(launch: Callable[..., KnownLaunch | None]) -> KnownLaunch | None:
    """Load a kernel before the first call that waits in it: loading may wait for kernels that wait for this rank."""
    return launch(rehearsal=True)
