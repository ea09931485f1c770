"""What ranks tell each other before they compute together: facts of every rank, tensors of the first.

Owns: exchanges over several groups (the axes of a mesh) of a few bytes or of any facts, and a broadcast from the rank
that is first in all of them.  All are calls like those of the ops: bounded, watched, and failing on every rank.

Assumes that all ranks of the groups call alike, with tensors of equal shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.comm import agreement, monitor, transport
from tpkernels.comm.groups import Group
from tpkernels.ops.agreed_call import _guarded, exchange

__all__ = ["broadcast", "exchange_bytes", "exchange_over"]


def exchange_over(groups: Sequence[Group], what: str, facts: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The ``facts`` of every rank that the groups, one per axis of a mesh, lead to, by global rank in rank order."""
    known: dict[str, Mapping[str, Any]] = {str(dist.get_rank()): facts}
    for group in groups:
        rows = exchange(group, what, known)
        known = {rank: one for row in rows for rank, one in row.items()}
    return {int(rank): known[rank] for rank in sorted(known, key=int)}


def exchange_bytes(groups: Sequence[Group], what: str, mine: bytes) -> list[bytes]:
    """The bytes of every rank that the groups lead to, as many on each, in the order of the last group's ranks.

    On the data path: a tenth of :func:`exchange_over`'s time.
    """
    rows = [mine]
    for group in groups:
        if group.size > 1:
            gathered = _gather(group, what, b"".join(rows))
            rows = [row[at : at + len(mine)] for row in gathered for at in range(0, len(row), len(mine))]
    return rows


def _gather(group: Group, what: str, mine: bytes) -> list[bytes]:
    device = group.backends.meeting_device()

    def work(call: int) -> list[bytes]:
        monitor.ensure_running()
        agreement.meet(group, call, device)
        group.enter(call, what)
        card = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
        others = [rank for rank in range(group.size) if rank != group.rank]
        cards = {rank: torch.empty_like(card) for rank in others}
        tag = transport.call_tag(call)
        sent, received = transport.exchange(
            group, tag, 0, [(rank, card) for rank in others], [(rank, cards[rank]) for rank in others]
        )
        transport.wait_all(received)
        transport.wait_all(sent)
        cards[group.rank] = card
        return [bytes(cards[rank].tolist()) for rank in range(group.size)]

    return _guarded(group, what, work)


def broadcast(groups: Sequence[Group], what: str, data: Tensor) -> None:
    """Write into ``data``, contiguous bytes, what the first rank of all ``groups`` has there.

    Raises:
        PeerLost, CollectiveTimeout: a rank is gone or did not come; the group is poisoned.
    """
    for group in groups:
        if group.size > 1 and data.numel():
            _broadcast(group, what, data)


def _broadcast(group: Group, what: str, data: Tensor) -> None:
    device = group.backends.wire_device(data.device)

    def work(call: int) -> None:
        monitor.ensure_running()
        agreement.meet(group, call, device)
        group.enter(call, what)
        wire = data.to(device)
        try:
            transport.watch(group, device, dist.broadcast(wire, group=group.pg, group_src=0, async_op=True)).wait()
        except RuntimeError as error:
            raise transport.TransportFailure(f"the broadcast of {data.numel()} bytes: {error}") from error
        if wire is not data:
            data.copy_(wire)

    _guarded(group, what, work)
