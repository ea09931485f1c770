"""GEMM kernels of ``symmetric``, ready to be enqueued: tile sizes, tables on the device, and a rehearsal of each.

What a launch needs beside the call's own tensors is made at the first call of its kind and remembered by the channel;
after that nothing is uploaded, so that calls can be captured.  Triton is imported here, when the first call needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from tpkernels.backends.blocks import Epilogue
from tpkernels.backends.moves import Matrix
from tpkernels.comm.cuda_native import MAX_CHUNKS
from tpkernels.comm.symmetric_channels import Channel
from tpkernels.ops.contract import AllGatherMatmul, Context, MatmulReduceScatter
from tpkernels.partition import Layout

__all__ = ["Launch", "gather_launches", "scatter_launch"]

# SMs that the GEMM leaves to the kernels of one warp that wait and signal on side streams.
RESERVED_SMS = 1

Launch = Callable[[], None]


def gather_launches(
    context: Context, channel: Channel, call: AllGatherMatmul, whole: Tensor, epilogue: Epilogue
) -> tuple[list[Launch], int]:
    """The GEMMs of one gather, one per weight, and the number of chunks that they expect of every shard."""
    from tpkernels.kernels import all_gather_matmul as kernel

    columns = sum(matrix.shape[1] for matrix in call.matrices)
    num_chunks = _num_chunks(context, channel, columns, whole.shape[1], whole.shape[1])
    launches: list[Launch] = []
    for i, matrix in enumerate(call.matrices):
        weight, out, bias = matrix.t(), epilogue.outs[i], call.biases[i]
        config = _config(channel, call.layout, weight, whole, whole.shape[1], num_chunks)
        arrivals = kernel.Arrivals(
            order=_order(channel, "all_gather_order", call.layout, config), signals=channel.flags,
            group=_table(channel), op=channel.op("all_gather_matmul"),
        )  # fmt: skip
        settings: dict[str, Any] = {
            "activation": call.activation or "none",
            "bias": None if bias is None else bias.contiguous(),
            "preactivation": epilogue.preactivations[i] if epilogue.preactivations else None,
        }
        launch = partial(kernel.all_gather_matmul, whole, weight, out, arrivals, config, **settings)
        operands = (whole, weight, settings["bias"], settings["preactivation"])
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

    x, weight, device = call.xs[-1], call.matrices[-1].t(), channel.device
    k = -(-context.problem.k // channel.size)
    num_chunks = _num_chunks(context, channel, call.columns, k, call.columns)
    config = _config(channel, call.layout, weight, x, call.columns, num_chunks)
    starts = [part.address - parts[0].address for part in parts]
    offsets = channel.remember(("starts", *starts), lambda: device.upload(starts, torch.int64))
    flags = [channel.flag(owner * num_chunks) for owner in range(channel.size)]
    departures = kernel.Departures(
        order=_order(channel, "reduce_scatter_order", call.layout, config),
        staging=offsets + parts[0].address,  # on the device: nothing is uploaded for a call whose kind is known
        signals=channel.remember(("flags", num_chunks), lambda: device.upload(flags, torch.int64)),
        counters=channel.counters, group=_table(channel), staging_dtype=x.dtype, staging_stride=call.columns,
    )  # fmt: skip
    launch = partial(kernel.matmul_reduce_scatter, x, weight, departures, config, addend=addend)
    _rehearse(channel, ("scatter", config), (x, weight, addend), launch)
    return launch, num_chunks


def _num_chunks(context: Context, channel: Channel, n: int, k: int, moved_columns: int) -> int:
    """Chunks per shard: from facts that are equal on all ranks, because signals count them."""
    if context.forced_chunks:
        return min(MAX_CHUNKS, context.num_chunks)
    problem, device = context.problem, channel.device
    n, k = (problem.n // channel.size, problem.k) if problem.op == "all_gather_matmul" else (n, k)
    config = _configure(
        device.capability, device.num_sms, problem.m, n, k, problem.dtype, channel.size,
        moved_columns * problem.dtype.itemsize, False,
    )  # fmt: skip
    return min(context.num_chunks, int(config.num_chunks)) if problem.m else 1


def _config(channel: Channel, layout: Layout, weight: Tensor, x: Tensor, moved_columns: int, num_chunks: int) -> Any:
    """Tiles for this rank's operands, which may lie otherwise than its peers' do."""
    from tpkernels.kernels.operands import descriptors_fit, weight_descriptor_fits

    device, itemsize = channel.device, x.element_size()
    pointers = not (descriptors_fit(x) and weight_descriptor_fits(weight))
    found = _configure(
        device.capability, device.num_sms, layout.total_rows, weight.shape[0], x.shape[1], x.dtype, channel.size,
        moved_columns * itemsize, pointers,
    )  # fmt: skip
    return replace(found, num_chunks=num_chunks)


@lru_cache(maxsize=1024)
def _configure(
    capability: int, num_sms: int, m: int, n: int, k: int, dtype: torch.dtype, size: int, row_bytes: int, pointers: bool
) -> Any:
    from tpkernels.kernels.config import configure

    return configure(
        capability=capability, num_sms=num_sms, m=m, n=n, k=k, dtype=str(dtype).removeprefix("torch."),
        world_size=size, moved_row_bytes=row_bytes, pointers=pointers,
        allow_tf32=torch.get_float32_matmul_precision() != "highest", reserved_sms=min(RESERVED_SMS, num_sms - 1),
    )  # fmt: skip


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
