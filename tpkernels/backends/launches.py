"""GEMM kernels of ``symmetric``, ready to be enqueued: configurations, tables on the device, and a rehearsal of each.

What a launch needs beside the call's own tensors is made at the first call of its kind and remembered by the channel;
after that nothing is uploaded, so that calls can be captured.  Triton is imported here, when the first call needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpkernels.backends.blocks import Epilogue
from tpkernels.backends.moves import Matrix
from tpkernels.backends.tuning import gemm_of
from tpkernels.comm.cuda_native import MAX_CHUNKS
from tpkernels.comm.symmetric_channels import Channel
from tpkernels.fp8 import Operand, Scaled
from tpkernels.kernels.config import GemmConfig
from tpkernels.ops.contract import AllGatherMatmul, Context, MatmulReduceScatter
from tpkernels.partition import Layout

__all__ = ["Launch", "gather_launches", "scatter_launch"]

Launch = Callable[[], None]


def gather_launches(
    context: Context, channel: Channel, call: AllGatherMatmul, whole: Tensor, epilogue: Epilogue
) -> tuple[list[Launch], int]:
    """The GEMMs of one gather, one per weight, and the number of chunks that they expect of every shard."""
    from tpkernels.kernels import all_gather_matmul as kernel

    x, scale_x = _numbers(call.operand(whole))
    num_chunks = _num_chunks(context, channel)
    launches: list[Launch] = []
    for i, matrix in enumerate(call.matrices):
        numbers, scale_weight = _numbers(matrix)
        weight, out, bias = numbers.t(), epilogue.outs[i], call.biases[i]
        config = _config(context, channel, weight, x, num_chunks)
        arrivals = kernel.Arrivals(
            order=_order(channel, "all_gather_order", call.layout, config), signals=channel.flags,
            group=_table(channel), op=channel.op("all_gather_matmul"),
        )  # fmt: skip
        settings: dict[str, Any] = {
            "activation": call.activation or "none",
            "bias": None if bias is None else bias.contiguous(),
            "preactivation": epilogue.preactivations[i] if epilogue.preactivations else None,
            "scale_whole": scale_x,
            "scale_weight": scale_weight,
        }
        launch = partial(kernel.all_gather_matmul, x, weight, out, arrivals, config, **settings)
        operands = (x, weight, settings["bias"], settings["preactivation"], scale_weight)
        _rehearse(channel, ("gather", config, settings["activation"]), operands, launch)
        launches.append(launch)
    return launches, num_chunks


def scatter_launch(
    context: Context, channel: Channel, call: MatmulReduceScatter, addend: Tensor | None, parts: Sequence[Matrix]
) -> tuple[Launch, int]:
    """The GEMM of a reduce-scatter's last product, into ``parts`` by owner, and the number of chunks of every shard.

    Chunk c of owner o raises local flag o * chunks + c.
    """
    from tpkernels.kernels import matmul_reduce_scatter as kernel

    (x, scale_x), (matrix, scale_weight), device = _numbers(call.xs[-1]), _numbers(call.matrices[-1]), channel.device
    weight = matrix.t()
    num_chunks = _num_chunks(context, channel)
    config = _config(context, channel, weight, x, num_chunks)
    starts = [part.address - parts[0].address for part in parts]
    offsets = channel.remember(("starts", *starts), lambda: device.upload(starts, torch.int64))
    flags = [channel.flag(owner * num_chunks) for owner in range(channel.size)]
    departures = kernel.Departures(
        order=_order(channel, "reduce_scatter_order", call.layout, config),
        staging=offsets + parts[0].address,  # on the device: nothing is uploaded for a call whose kind is known
        signals=channel.remember(("flags", num_chunks), lambda: device.upload(flags, torch.int64)),
        counters=channel.counters, group=_table(channel), staging_dtype=call.like.dtype, staging_stride=call.columns,
    )  # fmt: skip
    launch = partial(
        kernel.matmul_reduce_scatter, x, weight, departures, config, addend=addend, scale_x=scale_x,
        scale_weight=scale_weight,
    )  # fmt: skip
    _rehearse(channel, ("scatter", config, call.out_dtype), (x, weight, addend, scale_x, scale_weight), launch)
    return launch, num_chunks


def _numbers(operand: Operand) -> tuple[Tensor, Tensor | None]:
    """What tensor cores multiply, and its scales."""
    return (operand.numbers, operand.scale) if isinstance(operand, Scaled) else (operand, None)


def _num_chunks(context: Context, channel: Channel) -> int:
    """Chunks per shard: from facts that are equal on all ranks, because signals count them."""
    if context.forced_chunks:
        return min(MAX_CHUNKS, context.num_chunks)
    config = gemm_of(context.problem).configure(channel.device, tiles=context.agreed)
    return min(context.num_chunks, config.num_chunks) if context.problem.m else 1


def _config(context: Context, channel: Channel, weight: Tensor, x: Tensor, num_chunks: int) -> GemmConfig:
    """Tiles for this rank's operands, which may lie otherwise than its peers' do.

    Measured tiles are for the GEMM of the whole problem; they serve where the pure function takes the two for alike.
    """
    from tpkernels.kernels.operands import descriptors_fit, weight_descriptor_fits

    device, usual = channel.device, gemm_of(context.problem)
    own = replace(usual, n=weight.shape[0], k=x.shape[1], dtype=x.dtype)
    pointers = not (descriptors_fit(x) and weight_descriptor_fits(weight))
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


def _table(channel: Channel) -> Tensor:
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


def _rehearse(
    channel: Channel, kind: tuple[Any, ...], operands: Sequence[Tensor | None], launch: Callable[..., None]
) -> None:
    """Load a kernel before the first call that waits in it: loading may wait for kernels that wait for this rank."""
    facts = [None if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in operands]

    def rehearse() -> bool:
        launch(rehearsal=True)
        return True

    channel.remember((*kind, *facts), rehearse)
