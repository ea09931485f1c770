"""What a small call of ``symmetric`` costs on a group's GPUs: one that copies, and one in one kernel.

Calls are made one behind the other, as in a model, and waited for together: the time of each is that of the host, which
enqueues it, or of the device, whichever is longer.  Collective.  The caller agrees on the results with the other ranks.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable

import torch

from tpkernels.backends.symmetric.channels import Channel, SymmetricChannels
from tpkernels.backends.symmetric.cuda_native import Chunk, Dtype, Steps
from tpkernels.errors import UnsupportedProblem

__all__ = ["call_costs"]

_NAME = "calibration"
_BYTES = 4 * 1024
_CALLS, _TURNS = 8, 4


def call_costs(channels: SymmetricChannels) -> dict[str, float]:
    """As :class:`tpkernels.dispatch.Costs` has them; nothing where a rank has no memory left for slots.

    Raises:
        TransportFailure: a peer did not come.
    """
    channel = channels.main
    try:
        channel.reserve(channel.size * _BYTES)
    except UnsupportedProblem:  # on every rank; a call that needs slots will say so
        return {}
    x = channel.device.zeros((_BYTES // 4,), torch.float32)
    whole = channel.device.zeros((channel.size * _BYTES // 4,), torch.float32)
    in_order = [lambda: _gather(channel, x, whole), lambda: _sum(channel, x)]
    best = [float("inf")] * len(in_order)
    with channel.device.current():
        channel.device.order()
        for turn in range(_TURNS + 1):
            for i, call in enumerate(in_order):
                took = _time(channel, call)
                if turn > 0:  # the first one makes what later ones find
                    best[i] = min(best[i], took)
    channels.check()
    return {"symmetric_call_us": best[0], "symmetric_kernel_us": best[1]}


def _time(channel: Channel, call: Callable[[], None]) -> float:
    """Microseconds of one."""
    channel.device.synchronize()
    start = time.perf_counter()
    for _ in range(_CALLS):
        call()
    channel.device.synchronize()
    return 1e6 * (time.perf_counter() - start) / _CALLS


def _gather(channel: Channel, x: torch.Tensor, whole: torch.Tensor) -> None:
    """Every step of a gather, without a GEMM."""
    channel.prepare(_BYTES, zlib.crc32(_NAME.encode()), _NAME)
    slots, rank, peers = channel.addresses(), channel.rank, range(channel.size)

    def chunk(target: int, source: int, **fields: int) -> Chunk:
        return Chunk(target=target, source=source, rows=1, row_bytes=_BYTES, **fields)

    def chunks() -> list[Chunk]:
        stage = chunk(slots[rank], x.data_ptr(), signal_peers=channel.group.others)
        return [stage] + [
            chunk(whole.data_ptr() + peer * _BYTES, slots[peer], wait_peers=1 << peer, lane=peer % channel.num_lanes)
            for peer in peers
            if peer != rank
        ]

    key = (_NAME, whole.data_ptr(), *slots)
    call = channel.remember(key, lambda: channel.planned(_NAME, chunks(), 0), on_device=False)
    try:
        channel.run(call, Steps.BEGIN | Steps.MOVE | Steps.JOIN | Steps.END)
    finally:
        channel.settle()


def _sum(channel: Channel, x: torch.Tensor) -> None:
    part = channel.device.library.one_shot_slot_bytes(_BYTES)
    channel.prepare(channel.size * part, zlib.crc32(_NAME.encode()) + 1, _NAME)
    channel.group.all_reduce(
        channel.one_shot(_NAME), dtype=Dtype.F32, x=x.data_ptr(), out=x.data_ptr(), rows=1, columns=x.numel(),
        stream=channel.device.stream(),
    )  # fmt: skip
