"""``symmetric`` where experts are dealt out: tokens go to the ranks that have their experts, and sums come back.

Dispatch: each rank puts the rows of its tokens into its slot, sorted by the rank that they go to, and signals once; the
others fetch theirs chunk by chunk, each followed by a local flag, and the grouped kernel begins with this rank's own
tokens.  Combination: the kernel computes the tokens of other ranks first, sums the rows of each token in fp32, and
announces finished chunks, which are pushed into the slots of their owners; these add the ranks' sums up, in fp32 and in
the order of the ranks.  Where tokens are few, nothing goes on beside the GEMM.

How many rows two ranks exchange is a number of the routing, which all ranks know.  So every rank knows where in a slot
each other rank's rows lie, and slots grow to the largest that one of them needs, in powers of two, so that they seldom
grow.  Lists of copies are made anew for each call, and not remembered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpkernels.backends.dealt_sums import sum_returned
from tpkernels.backends.symmetric import implementations as dense
from tpkernels.backends.symmetric.channels import Channel
from tpkernels.backends.symmetric.copy_engine_traffic import aligned, fetch, matrices_of, push, staged
from tpkernels.backends.symmetric.cuda_native import Steps
from tpkernels.backends.symmetric.grouped import is_cut, outputs_of, partial_sums, register
from tpkernels.backends.symmetric.grouped_launches import chunks_of, combining_launches, gather_launches
from tpkernels.backends.symmetric.resource import channels_of
from tpkernels.gemm.dealt import DealtRows
from tpkernels.ops.contract import Context, DispatchGroupedMatmul, Gathered, GroupedMatmulCombine
from tpkernels.partition import Layout

__all__ = ["dispatch_grouped_matmul", "grouped_matmul_combine"]


@dataclass(frozen=True)
class _Slots:
    """Where rows lie in the slots of one call: in that of the rank whose tokens they are, by the rank of the experts.

    counts: ``DealtRows.counts``.
    """

    counts: Sequence[Sequence[int]]
    row_bytes: int

    def place(self, owner: int, other: int) -> int:
        """Of the rows that ``other`` multiplies, in bytes from the beginning of the slot of ``owner``."""
        before = (rows for rank, rows in enumerate(self.counts[owner][:other]) if rank != owner)
        return sum(aligned(rows * self.row_bytes) for rows in before)

    @property
    def num_bytes(self) -> int:
        """Of the largest one, rounded up to a power of two; the same on every rank."""
        size = len(self.counts)
        largest = max(self.place(owner, size) for owner in range(size))
        return 1 << max(0, largest - 1).bit_length()

    def rows(self, channel: Channel, other: int, like: Tensor) -> Tensor:
        """Those of this rank's tokens that ``other`` multiplies, in this rank's slot."""
        start, count = self.place(channel.rank, other), self.counts[channel.rank][other]
        columns = self.row_bytes // like.element_size()
        found = channel.own_slot()[start : start + count * self.row_bytes]
        return found.view(like.dtype).view(count, columns)


def dispatch_grouped_matmul(context: Context, call: DispatchGroupedMatmul) -> Gathered:
    channel, rows, x, op = channels_of(context.group).main, call.rows(), call.x, context.problem.op
    rank, sources = channel.rank, _sources(rows)
    slots = _Slots(rows.counts, x.shape[1] * x.element_size())
    received, outputs = x.new_empty(rows.num_tokens, x.shape[1]), outputs_of(call, rows.count)
    num_chunks = chunks_of(context, channel) if is_cut(context, call.layout) else 0
    launches = gather_launches(context, channel, call, sources, received, outputs, num_chunks)(rows)
    channel.prepare(slots.num_bytes, context.fingerprint, context.text)
    try:
        places = [slots.place(owner, rank) for owner in range(channel.size)]
        fetched = fetch(channel, op, sources.sizes, places, slots.row_bytes, max(1, num_chunks), num_chunks > 0)
        channel.run(fetched, Steps.BEGIN)
        for other, picked in enumerate(rows.picks):
            out = received[slice(*rows.sources[rank])] if other == rank else slots.rows(channel, other, x)
            torch.index_select(x, 0, picked, out=out)
        channel.group.signal(chunk=0, peers=channel.group.others, stream=channel.device.stream())
        channel.run(fetched, Steps.MOVE, 0, received.data_ptr())
        if num_chunks:
            for launch in launches:
                channel.device.launch(launch)
        channel.run(fetched, dense.FINISH)
    finally:
        channel.settle()
    if not num_chunks:
        for launch in launches:
            launch()
    return Gathered(outputs.outs, outputs.preactivations, received if call.keep_whole else None)


def grouped_matmul_combine(context: Context, call: GroupedMatmulCombine) -> Tensor:
    channel, rows, op = channels_of(context.group).main, call.rows, context.problem.op
    itemsize, columns, owners = call.like.element_size(), call.columns, _sources(rows)
    slots, flags = _Slots(rows.counts, columns * itemsize), is_cut(context, call.layout)
    if flags:
        parts, num_bytes = staged(owners, columns, itemsize)
        staging = channel.device.empty((num_bytes,), torch.uint8)
        launches, num_chunks = combining_launches(context, channel, call, owners, parts, staging)
    else:
        parts, launches, num_chunks = matrices_of(owners, rows.num_tokens, columns, itemsize), [], 1
        staging = partial_sums(channel, context, call).view(-1).view(torch.uint8)
    places = [slots.place(owner, channel.rank) for owner in range(channel.size)]
    channel.prepare(slots.num_bytes, context.fingerprint, context.text)
    try:
        sent = push(channel, op, staging, parts, itemsize, num_chunks, flags, Steps.BEGIN, places)
        for launch in launches:
            channel.device.launch(launch)
        channel.run(sent, Steps.MOVE, staging.data_ptr())
        call.meanwhile()
        # Chunks of a rank leave one after the other.
        last, stream = num_chunks - 1, channel.device.stream()
        channel.group.wait(op=channel.op(op), chunk=last, peers=channel.group.others, stream=stream)
        own = parts[channel.rank]
        here = staging[own.address : own.address + own.rows * slots.row_bytes].view(call.like.dtype)

        def by_rank() -> Iterator[Tensor]:
            for other in range(channel.size):
                yield here.view(own.rows, columns) if other == channel.rank else slots.rows(channel, other, call.like)

        out = sum_returned(call, by_rank())
        channel.run(sent, dense.FINISH)
    finally:
        channel.settle()
    return out


def _sources(rows: DealtRows) -> Layout:
    """The received tokens, by the rank that they come from."""
    return Layout(1, tuple(stop - start for start, stop in rows.sources), 1)


register("dispatch_grouped_matmul", dispatch_grouped_matmul)
register("grouped_matmul_combine", grouped_matmul_combine)
