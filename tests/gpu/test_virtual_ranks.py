"""The CUDA kernels on one GPU: W virtual ranks, a stream each, on one another's memory through pointer tables.

What this shows and what it can not is in csrc/cuda/README.md. All blocks that wait for each other fit on one GPU at
once: at most 3 ranks of MAX_BLOCKS.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tpkernels import partition
from tpkernels.backends.symmetric import cuda_native
from tpkernels.backends.symmetric.cuda_group import Call, Group, OneShot, Pipeline
from tpkernels.backends.symmetric.cuda_native import Chunk, Dtype, Kind, Library, Raise, Steps

pytestmark = pytest.mark.gpu

# Streams that share a hardware queue wait for each other where nobody told them to. Counts from the first use of CUDA.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.F16}
TIMEOUT_S = 20.0
SLOT_BYTES = 1 << 20
MAX_BLOCKS = 16


class VirtualRanks:
    """`size` ends of one group on the current device, with pads, slots and flags."""

    def __init__(self, cuda: Library, size: int, timeout_s: float = TIMEOUT_S) -> None:
        def zeros(num_bytes: int) -> list[torch.Tensor]:
            return [torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(size)]

        self.size = size
        self.pads, self.states = zeros(cuda_native.PAD_BYTES), zeros(cuda_native.STATE_BYTES)
        self.slots = [zeros(SLOT_BYTES) for _ in range(cuda_native.SLOTS)]
        self.flags = zeros(4 * size * cuda_native.MAX_CHUNKS)
        torch.cuda.synchronize()
        pads = [pad.data_ptr() for pad in self.pads]
        self.groups = [
            Group(cuda, rank=rank, pads=pads, state=state.data_ptr(), timeout_s=timeout_s, max_blocks=MAX_BLOCKS)
            for rank, state in enumerate(self.states)
        ]
        self.streams = [torch.cuda.Stream() for _ in range(size)]

    def each(self, work: Callable[[int, Group, int], None]) -> None:
        """Enqueue `work(rank, group, stream)` of every rank, and wait for all of it."""
        torch.cuda.synchronize()
        with ThreadPoolExecutor(self.size) as pool:
            enqueue = [
                pool.submit(work, rank, self.groups[rank], self.streams[rank].cuda_stream) for rank in range(self.size)
            ]
            for done in enqueue:
                done.result()
        torch.cuda.synchronize()

    def slot_addresses(self, slot: int) -> list[int]:
        return [memory.data_ptr() for memory in self.slots[slot]]

    def check_healthy(self) -> None:
        assert [group.failure() for group in self.groups] == [None] * self.size

    def close(self) -> None:
        torch.cuda.synchronize()
        for group in self.groups:
            group.close()


@pytest.fixture(params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest, library: Library) -> Iterator[VirtualRanks]:
    made = VirtualRanks(library, request.param)
    yield made
    made.close()


def expected_sum(parts: list[torch.Tensor], bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return (total if bias is None else total + bias.float()).to(dtype)


def check_all_reduce(
    ranks: VirtualRanks, dtype: torch.dtype, call: int, rows: int, columns: int, two_steps: bool
) -> None:
    slot = 0 if call % 3 == 2 else call % 2  # not always the other one
    inputs = [torch.randn(rows, columns, device="cuda").to(dtype) for _ in range(ranks.size)]
    outputs = [torch.full_like(x, torch.nan) for x in inputs]
    bias = torch.randn(columns, device="cuda").to(dtype) if call % 2 else None

    def work(rank: int, group: Group, stream: int) -> None:
        group.all_reduce(
            OneShot(1, slot, fingerprint=call, slots=ranks.slot_addresses(slot)), dtype=DTYPES[dtype],
            x=inputs[rank].data_ptr(), out=outputs[rank].data_ptr(), rows=rows, columns=columns, stream=stream,
            bias=0 if bias is None else bias.data_ptr(), two_steps=two_steps,
        )  # fmt: skip

    ranks.each(work)
    ranks.check_healthy()
    for output in outputs:
        assert torch.equal(output, expected_sum(inputs, bias, dtype)), (call, rows, columns)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("two_steps", [False, True], ids=["in one step", "in two"])
def test_an_all_reduce_in_one_kernel_sums_in_rank_order_and_rounds_once(
    ranks: VirtualRanks, dtype: torch.dtype, two_steps: bool
) -> None:
    for call, (rows, columns) in enumerate([(1, 8), (3, 7), (128, 512), (0, 4), (5, 4096), (17, 1001)]):
        check_all_reduce(ranks, dtype, call, rows, columns, two_steps)


def check_all_gather(ranks: VirtualRanks, dtype: torch.dtype, call: int, columns: int) -> None:
    shards = [torch.randn(3 + rank, columns, device="cuda").to(dtype) for rank in range(ranks.size)]
    outputs = [torch.cat(shards).fill_(torch.nan) for _ in shards]

    def work(rank: int, group: Group, stream: int) -> None:
        group.all_gather(
            OneShot(1, call % 2, fingerprint=call, slots=ranks.slot_addresses(call % 2)),
            element_bytes=dtype.itemsize, x=shards[rank].data_ptr(), out=outputs[rank].data_ptr(),
            counts=[shard.numel() for shard in shards], stream=stream,
        )  # fmt: skip

    ranks.each(work)
    ranks.check_healthy()
    for output in outputs:
        assert torch.equal(output, torch.cat(shards)), (call, columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_shards_that_are_gathered_in_one_kernel_arrive_whole(ranks: VirtualRanks, dtype: torch.dtype) -> None:
    """Stored to each peer: virtual ranks have no multicast address."""
    for call, columns in enumerate((8, 7, 1024)):
        check_all_gather(ranks, dtype, call, columns)


def check_reduce_scatter(
    ranks: VirtualRanks, library: Library, pipelines: list[Pipeline], call: int, how: Raise
) -> None:
    columns, num_chunks, size, slot = 96, 3, ranks.size, call % 2
    rows = [(5 * rank + 7 * call) % 11 for rank in range(size)]
    partials = [[torch.randn(rows[owner], columns, device="cuda") for owner in range(size)] for _ in range(size)]
    outputs = [torch.full((count, columns), torch.nan, device="cuda", dtype=torch.bfloat16) for count in rows]
    part_bytes, row_bytes = SLOT_BYTES // size // 16 * 16, columns * 4

    def push(rank: int, owner: int, group: Group) -> None:
        base = ranks.slot_addresses(slot)[owner] + rank * part_bytes
        chunks = [
            Chunk(
                target=base + start * row_bytes, source=partials[rank][owner].data_ptr() + start * row_bytes,
                rows=stop - start, row_bytes=row_bytes, target_stride_bytes=row_bytes, source_stride_bytes=row_bytes,
                signal_peers=1 << owner, chunk=chunk,
            )
            for chunk, (start, stop) in enumerate(partition.chunk_ranges(rows[owner], num_chunks))
        ]  # fmt: skip
        Call(library, group, pipelines[rank], chunks, op=2, how=how).run(Steps.MOVE, stream=0)

    def work(rank: int, group: Group, stream: int) -> None:
        group.begin(op=2, slot=slot, fingerprint=call, stream=stream)
        pipelines[rank].fork(stream)
        for owner in partition.peers_after(rank, size):
            push(rank, owner, group)
        slots = ranks.slot_addresses(slot)[rank]
        parts = [partials[rank][rank].data_ptr() if s == rank else slots + s * part_bytes for s in range(size)]
        group.reduce(
            op=2, part_dtype=Dtype.F32, parts=parts, strides=[columns] * size, out=outputs[rank].data_ptr(),
            out_dtype=Dtype.BF16, out_stride=columns, rows=rows[rank], columns=columns, num_chunks=num_chunks,
            stream=stream,
        )  # fmt: skip
        pipelines[rank].join(stream)

    ranks.each(work)
    ranks.check_healthy()
    for owner, output in enumerate(outputs):
        parts = [partials[rank][owner] for rank in range(size)]
        assert torch.equal(output, expected_sum(parts, None, torch.bfloat16)), (call, owner)


@pytest.mark.parametrize("how", Raise, ids=lambda how: how.name)
def test_chunks_are_pushed_to_their_owner_and_reduced_as_they_come(
    ranks: VirtualRanks,
    library: Library,
    how: Raise,
) -> None:
    if how is Raise.WRITE_VALUE and not library.has_write_value():
        pytest.skip("needs a driver of the CUDA device that has cuStreamWriteValue32")
    pipelines = [Pipeline(library, 1) for _ in range(ranks.size)]
    for call in range(1, 4):
        check_reduce_scatter(ranks, library, pipelines, call, how)
    for pipeline in pipelines:
        pipeline.close()


def test_a_graph_with_an_odd_number_of_calls_replays_with_fresh_data(library: Library) -> None:
    """Its calls use slots 0, 1, 0: each replay begins with the slot that the last one ended with."""
    ranks = VirtualRanks(library, 2)
    inputs = [torch.empty(64, 128, device="cuda") for _ in range(2)]
    outputs = [[torch.empty_like(x) for _ in range(3)] for x in inputs]
    graphs = []
    for rank in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            for call in range(3):
                ranks.groups[rank].all_reduce(
                    OneShot(1, call % 2, fingerprint=call, slots=ranks.slot_addresses(call % 2)), dtype=Dtype.F32,
                    x=inputs[rank].data_ptr(), out=outputs[rank][call].data_ptr(), rows=64, columns=128,
                    stream=ranks.streams[rank].cuda_stream,
                )  # fmt: skip
        graphs.append(graph)
    for replay in range(5):
        for rank, x in enumerate(inputs):
            x.copy_(torch.randn(64, 128, generator=torch.Generator().manual_seed(10 * replay + rank)))
        torch.cuda.synchronize()
        for rank, graph in enumerate(graphs):
            with torch.cuda.stream(ranks.streams[rank]):
                graph.replay()
        torch.cuda.synchronize()
        ranks.check_healthy()
        for rank in range(2):
            for call in range(3):
                assert torch.equal(outputs[rank][call], inputs[0] + inputs[1]), (replay, rank, call)
    ranks.close()


def test_a_rank_that_does_not_come_is_named_and_the_context_survives(library: Library) -> None:
    ranks = VirtualRanks(library, 3, timeout_s=0.3)

    def work(rank: int, group: Group, stream: int) -> None:
        if rank != 2:
            group.barrier(op=7, fingerprint=1, stream=stream)
            group.barrier(op=8, fingerprint=2, stream=stream)

    ranks.each(work)
    assert ranks.groups[2].failure() is None
    failures = [group.failure() for group in ranks.groups[:2]]
    assert all(failure is not None and failure.op == 7 and failure.epoch == 1 for failure in failures)
    late = [failure for failure in failures if failure is not None and failure.kind is Kind.TIMEOUT]
    assert late and all(failure.peer == 2 and failure.chunk == -1 for failure in late)
    assert torch.ones(4, device="cuda").sum().item() == 4.0
    ranks.close()


def test_ranks_that_make_different_calls_say_so(library: Library) -> None:
    ranks = VirtualRanks(library, 2)
    ranks.each(lambda rank, group, stream: group.barrier(op=1, fingerprint=rank, stream=stream))
    kinds = {failure.kind for group in ranks.groups if (failure := group.failure()) is not None}
    assert Kind.MISMATCH in kinds and kinds <= {Kind.MISMATCH, Kind.POISONED}
    ranks.close()
