"""W processes, each interpreting its rank's kernels; symmetric memory is files that all of them map.

Every rank addresses its peers through pointer tables of its own mapping, as it would NVLink peers. A call is: publish
the shard; all-gather GEMM while a thread copies the peers' chunks here; GEMM whose partials are pushed into the owners'
staging, announced in their pads; sum in rank order. Slots alternate between calls. In each call one rank waits until
its neighbour reads: the neighbour sees its tiles come.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.kernels.interpreter import PACKAGE
from tests.kernels.scenarios import Case, Surroundings, as_int32
from tpkernels.partition import chunk_ranges, offsets
from tpkernels.testing.numeric import Bounded
from tpkernels.testing.payload import payload

PATIENCE_S = 60.0
CHUNK_WORD, MAX_CHUNKS = 16 + 64, 64  # the pad of csrc/cuda/protocol.h
PAD_WORDS = CHUNK_WORD + 64 * MAX_CHUNKS


@dataclass(frozen=True)
class World:
    folder: Path
    shards: tuple[int, ...]
    n: int
    k: int
    num_chunks: int
    calls: int
    first_epoch: int = 2**31 - 2
    package: str = PACKAGE
    module_folder: str | None = None


class Memory:
    """Every rank's shard, staging, pad and counts of calls: published, and read from; as this process maps them."""

    def __init__(self, world: World) -> None:
        size, largest = len(world.shards), max(1, *world.shards)
        self.x = [self._map(world, f"x{r}", (2, largest, world.k), torch.bfloat16) for r in range(size)]
        self.staging = [self._map(world, f"staging{r}", (2, size, largest, world.n)) for r in range(size)]
        self.pads = [self._map(world, f"pad{r}", (PAD_WORDS,), torch.int64) for r in range(size)]
        self.published = self._map(world, "published", (size,), torch.int64)
        self.reading = self._map(world, "reading", (size,), torch.int64)

    @staticmethod
    def _map(world: World, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        count = torch.Size(shape).numel()
        return torch.from_file(str(world.folder / name), shared=True, size=count, dtype=dtype).view(shape)


def wait_until(word: Tensor, value: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while int(word) != value:
        assert time.monotonic() < deadline, f"waited for {value:#x}, found {int(word):#x}"
        time.sleep(0.0005)


def run_rank(world: World, rank: int) -> None:
    memory = Memory(world)
    case = Case(
        shards=world.shards, n=world.n, k=world.k, rank=rank, num_chunks=world.num_chunks,
        package=world.package, folder=world.module_folder,
    )  # fmt: skip
    around = Surroundings(case, memory.pads)
    flags = torch.full((len(world.shards) * world.num_chunks,), as_int32(world.first_epoch - 1), dtype=torch.int32)
    counters = torch.zeros_like(flags)
    order = case.order("all_gather"), case.order("reduce_scatter")
    late = random.Random(f"{rank}")
    for call in range(world.calls):
        word = around.begin(world.first_epoch + call, fingerprint=0x7000 + call)
        if late.random() < 0.5:
            time.sleep(0.1 * late.random())
        rows, slot = world.shards[rank], call % 2
        memory.x[rank][slot, :rows] = payload((rows, world.k), torch.bfloat16, rank=rank, call=call, name="x")
        memory.published[rank] = call + 1
        y = _gather(world, case, memory, around, flags, order[0], call, late)
        _scatter(world, case, memory, around, counters, order[1], call, word, y)
    assert not around.failure.any(), around.told(case)


def _weight(world: World, rank: int, call: int, name: str, shape: tuple[int, int]) -> Tensor:
    return payload(shape, torch.bfloat16, rank=rank, call=call, name=name, scale=0.3)


def _gather(
    world: World,
    case: Case,
    memory: Memory,
    around: Surroundings,
    flags: Tensor,
    order: Tensor,
    call: int,
    late: random.Random,
) -> Tensor:
    kernel, rank, starts = case.module("all_gather_matmul"), case.rank, offsets(world.shards)
    whole = torch.full((case.rows, world.k), float("nan"), dtype=torch.bfloat16)
    whole[starts[rank] : starts[rank] + world.shards[rank]] = memory.x[rank][call % 2, : world.shards[rank]]
    chunks = [(peer, c) for peer in range(len(world.shards)) if peer != rank for c in range(world.num_chunks)]
    late.shuffle(chunks)

    def copy() -> None:
        for peer, chunk in chunks:
            wait_until(memory.published[peer], call + 1)
            start, stop = chunk_ranges(world.shards[peer], world.num_chunks)[chunk]
            whole[starts[peer] + start : starts[peer] + stop] = memory.x[peer][call % 2, start:stop]
            flags[peer * world.num_chunks + chunk] = as_int32(world.first_epoch + call)

    copies = threading.Thread(target=copy)
    copies.start()
    weight = _weight(world, rank, call, "up", (world.k, world.k))
    out = torch.full((case.rows, world.k), float("nan"), dtype=torch.bfloat16)
    kernel.all_gather_matmul(
        whole, weight, out, kernel.Arrivals(order, flags, around.group, 1), case.config(), activation="silu"
    )
    copies.join()
    x = torch.cat([
        payload((rows, world.k), torch.bfloat16, rank=r, call=call, name="x") for r, rows in enumerate(world.shards)
    ])  # fmt: skip
    z = Bounded.sum_of_products([x], [weight], dtype=torch.float32)
    z.activation("silu", dtype=torch.float32, input_rounded=False).rounded(torch.bfloat16).check(out, f"call {call}")
    return out


def _scatter(
    world: World,
    case: Case,
    memory: Memory,
    around: Surroundings,
    counters: Tensor,
    order: Tensor,
    call: int,
    word: int,
    y: Tensor,
) -> None:
    """The product of each rank is made of its own inputs: payloads, so that every rank can check the sum."""
    kernel, rank, slot, size = case.module("matmul_reduce_scatter"), case.rank, call % 2, len(world.shards)
    shape = (case.rows, world.k)
    xs = [payload(shape, torch.bfloat16, rank=r, call=call, name="partial") for r in range(size)]
    ws = [_weight(world, r, call, "down", (world.n, world.k)) for r in range(size)]
    pads = [pad.data_ptr() + 8 * (CHUNK_WORD + rank * MAX_CHUNKS) for pad in memory.pads]
    departures = kernel.Departures(
        order=order,
        staging=torch.tensor([part[slot, rank].data_ptr() for part in memory.staging]),
        signals=torch.tensor(pads),
        counters=counters,
        group=around.group,
        staging_dtype=torch.float32,
        staging_stride=world.n,
        signal_pads=True,
    )
    if call % size == rank:
        wait_until(memory.reading[(rank + 1) % size], call + 1)
    kernel.matmul_reduce_scatter(xs[rank], ws[rank], departures, case.config())
    memory.reading[rank] = call + 1
    rows = world.shards[rank]
    total = torch.zeros(rows, world.n)
    for chunk, (start, stop) in enumerate(chunk_ranges(rows, world.num_chunks)):
        for source in range(size):
            if stop > start:
                wait_until(memory.pads[rank][CHUNK_WORD + source * MAX_CHUNKS + chunk], word)
            total[start:stop] += memory.staging[rank][slot, source, start:stop]
    expected = Bounded.sum_of_products(xs, ws, dtype=torch.float32).rounded(torch.float32)
    expected.narrow(0, offsets(world.shards)[rank], rows).check(total, f"reduced, call {call}")
    memory.staging[rank][slot].fill_(float("nan"))  # a chunk of an old call must not pass for a new one
