"""G3: does the overlap hide a link? PCIe is the link: the peers' shards, and the owners' slots, are pinned host memory.

All-gather + GEMM pulls the shards of 7 peers chunk by chunk, and a flag behind each lets the kernel go on; GEMM +
reduce-scatter pushes finished chunks out. Sizes are chosen such that transfer / GEMM is the named ratio on this GPU:
1 is the hardest, 0.4 is about that of 70B layers over NVLink. With the arrival clock data is there already, and flags
are raised at the pace of a link of 400 GB/s.

    overlap efficiency = (unfused - fused) / (unfused - max(GEMM, transfer)),  GEMM and unfused with cuBLAS

Beside the device's time stands the host's, for enqueuing a fused call. With one hardware queue
(CUDA_DEVICE_MAX_CONNECTIONS=1, where Megatron wants it) a kernel that waits holds up all that was enqueued behind it,
and it matters how flags are raised: by a kernel, a copy, or a value that the stream writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from gpu_steps import overlap
from gpu_steps.gemm import departures_of
from gpu_steps.lab import Lab, LoneRank, check_product
from gpu_steps.outcome import Recorder, Row, times_of
from gpu_steps.overlap import Forecast
from tpkernels import partition
from tpkernels.backends.symmetric.cuda_group import Call, Pipeline
from tpkernels.backends.symmetric.cuda_native import Chunk, Dtype, Raise, Steps
from tpkernels.kernels import all_gather_matmul as gather
from tpkernels.kernels import matmul_reduce_scatter as scatter
from tpkernels.kernels.config import GemmConfig
from tpkernels.kernels.known_launches import KnownLaunch

TP = 8
RATIOS = (1.0, 0.4)
NVLINK_GBPS = 400.0
M, K = 8192, 4096
CHUNKS = (1, 2, 4, 8)  # what cutting costs and gains
LANES = (1, 2)  # side streams: copies of two share the link, but what one of them waits for goes on beside the other
CLOCKED = ((3584, 8192), (1792, 4096))  # N, K of 70B and 8B, one of 8 ranks
ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"
PULL_LANES, PUSH_LANES = 1, 2  # as `symmetric` has them over PCIe
RATE_BYTES, RATE_SIZE = 1 << 28, 8192


@dataclass(frozen=True)
class Rates:
    """bytes and floating-point operations per second."""

    to_device: float
    to_host: float
    gemm: float

    def free_dim(self, ratio: float, bytes_per_s: float) -> int:
        """Columns (gather) or contraction (scatter) with which the GEMM lasts transfer / ratio."""
        exact = (TP - 1) / TP * self.gemm / (bytes_per_s * ratio)
        return max(256, round(exact / 256) * 256)


def run(recorder: Recorder) -> None:
    lab = Lab.of_this_gpu()
    rates = measure_rates(lab, recorder)
    how = Raise.WRITE_VALUE if lab.library.has_write_value() else Raise.KERNEL  # as `symmetric` does
    for ratio in RATIOS:
        measure_gather(lab, recorder, M, rates.free_dim(ratio, rates.to_device), K, TP, ratio, how=how)
        measure_scatter(lab, recorder, M, K, rates.free_dim(ratio, rates.to_host), TP, ratio)
    n, k = rates.free_dim(1.0, rates.to_device), rates.free_dim(1.0, rates.to_host)
    for chunks in CHUNKS:
        for lanes in LANES:
            measure_gather(lab, recorder, M, n, K, TP, 1.0, num_chunks=chunks, lanes=lanes, how=how)
            measure_scatter(lab, recorder, M, K, k, TP, 1.0, num_chunks=chunks, lanes=lanes)
    for n, k in CLOCKED:
        measure_clock(lab, recorder, M, n, k, TP, NVLINK_GBPS)


def run_one_queue(recorder: Recorder) -> None:
    """In a process that CUDA gives one queue."""
    if os.environ.get(ONE_QUEUE) != "1":
        raise RuntimeError(f"{ONE_QUEUE} is {os.environ.get(ONE_QUEUE, 'not set')}, and must be 1 from the start")
    lab = Lab.of_this_gpu()
    rates = measure_rates(lab, recorder)
    ways = (Raise.KERNEL, Raise.COPY, *((Raise.WRITE_VALUE,) if lab.library.has_write_value() else ()))
    for how in ways:
        measure_gather(lab, recorder, M, rates.free_dim(1.0, rates.to_device), K, TP, 1.0, how=how, one_queue=True)
    measure_scatter(lab, recorder, M, K, rates.free_dim(1.0, rates.to_host), TP, 1.0, one_queue=True)


def measure_rates(lab: Lab, recorder: Recorder) -> Rates:
    host = lab.pinned(RATE_BYTES // 2)
    device = torch.empty(RATE_BYTES // 2, dtype=torch.bfloat16, device=lab.device)
    a, b = lab.random(0, RATE_SIZE, RATE_SIZE), lab.random(1, RATE_SIZE, RATE_SIZE)
    bus, gemm = lab.card.pcie_s(RATE_BYTES), lab.card.library_gemm_s(RATE_SIZE, RATE_SIZE, RATE_SIZE)
    # name: call, work, its unit, seconds as modelled, what it is
    ways: dict[str, tuple[Callable[[], object], float, float, float, str]] = {
        "GB/s host to device": (lambda: device.copy_(host, non_blocking=True), RATE_BYTES, 1e9, bus, "PCIe link"),
        "GB/s device to host": (lambda: host.copy_(device, non_blocking=True), RATE_BYTES, 1e9, bus, "PCIe link"),
        "TFLOP/s of cuBLAS": (lambda: torch.mm(a, b.t()), 2.0 * RATE_SIZE**3, 1e12, gemm, "device"),
    }
    problem = f"copies of {RATE_BYTES >> 10} KiB, GEMM of {RATE_SIZE}^3"
    for name, (_, work, unit, seconds, _) in ways.items():
        recorder.predict("-", problem, name, work / seconds / unit)
    found = lab.measure({name: way[0] for name, way in ways.items()})
    rates = []
    for name, (_, work, unit, _, label) in ways.items():
        rates.append(work / found[name].median)
        times = times_of({name: found[name]})
        recorder.row(Row("-", problem, name, rates[-1] / unit, label, "", lab.repeats, times))
    return Rates(*rates)


# --- all-gather + GEMM ------------------------------------------------------------------------------------------------


class Pull:
    """One rank's all-gather + GEMM whose peers are buffers of the host."""

    def __init__(
        self, lab: Lab, m: int, n: int, k: int, tp: int, num_chunks: int | None = None, how: Raise = Raise.KERNEL,
        lanes: int = PULL_LANES,
    ) -> None:  # fmt: skip
        self.lab, self.rank, self.lanes = lab, LoneRank(lab, tp), lanes
        self.pipeline = Pipeline(lab.library, self.lanes)
        self.shards = partition.array_split_sizes(m, tp)
        self.expected, self.weight = lab.random(0, m, k), lab.random(1, n, k)
        self.host = lab.pinned(m, k)
        self.host.copy_(self.expected)
        self.whole, self.out = torch.empty_like(self.expected), self.expected.new_empty(m, n)
        config = lab.configure(m, n, k, tp, moved_columns=k, reserved_sms=lab.reserved_sms(waits=True))
        self.config = config if num_chunks is None else replace(config, num_chunks=num_chunks)
        self.whole[: self.shards[0]].copy_(self.expected[: self.shards[0]])
        self.arrivals = gather.Arrivals(
            self.rank.order("all_gather", self.shards, self.config), self.rank.flags, self.rank.table, 1
        )
        self._flagged = _call(self.pipeline, self.rank, self._chunks(True), how)
        self._plain = _call(self.pipeline, self.rank, self._chunks(False))
        self._known: KnownLaunch | None = None
        self._known = self.kernel(rehearsal=True)
        lab.settle()

    def _chunks(self, flags: bool) -> Sequence[Chunk]:
        row_bytes, starts = self.whole.shape[1] * 2, partition.offsets(self.shards)
        chunks, cut = [], self.config.num_chunks if flags else 1
        for number in range(cut):
            for turn, peer in enumerate(partition.peers_after(0, len(self.shards))):
                start, stop = partition.chunk_ranges(self.shards[peer], cut)[number]
                at, num_bytes = (starts[peer] + start) * row_bytes, (stop - start) * row_bytes
                chunks.append(
                    _copy(
                        self.whole.data_ptr() + at, self.host.data_ptr() + at, num_bytes, number,
                        turn % self.lanes, flag=self.flag(peer, number), raises=flags,
                    )
                )  # fmt: skip
        return chunks

    def flag(self, peer: int, number: int) -> int:
        return self.rank.flags.data_ptr() + 4 * (peer * self.config.num_chunks + number)

    def kernel(self, rehearsal: bool = False) -> KnownLaunch | None:
        """As `symmetric` launches it."""
        return gather.all_gather_matmul(
            self.whole, self.weight, self.out, self.arrivals, self.config, rehearsal=rehearsal, known=self._known
        )

    def fused(self) -> None:
        self.rank.next_call()
        self.pipeline.fork(self.lab.stream())
        _enqueue(self.rank, self._flagged)
        self.kernel()
        self.pipeline.join(self.lab.stream())

    def transfer(self) -> None:
        self.pipeline.fork(self.lab.stream())
        _enqueue(self.rank, self._plain)
        self.pipeline.join(self.lab.stream())

    def gemm(self) -> None:
        torch.mm(self.whole, self.weight.t(), out=self.out)

    def unfused(self) -> None:
        self.transfer()
        self.gemm()

    def gemm_beside(self) -> None:
        """Its time ends with the GEMM; the copies may go on. Whoever measures it waits for the device."""
        self.pipeline.fork(self.lab.stream())
        _enqueue(self.rank, self._plain)
        self.gemm()

    def check(self, name: str, call: Callable[[], None]) -> None:
        """With nothing of the peers there before, and no result."""
        self.whole[self.shards[0] :].fill_(float("nan"))
        self.out.fill_(float("nan"))
        call()
        self.rank.raise_if_failed()
        check_product(name, self.out, self.expected, self.weight)

    def close(self) -> None:
        self.lab.settle()
        self.pipeline.close()
        self.rank.close()


def measure_gather(
    lab: Lab, recorder: Recorder, m: int, n: int, k: int, tp: int, ratio: float, num_chunks: int | None = None,
    how: Raise = Raise.KERNEL, one_queue: bool = False, lanes: int = PULL_LANES,
) -> None:  # fmt: skip
    pull = Pull(lab, m, n, k, tp, num_chunks, how, lanes)
    chunks = pull.config.num_chunks
    queue = f", one queue, flags by {how.name}" if one_queue else ""
    problem = f"AG+GEMM M{m} N{n} K{k} of {tp}, transfer/GEMM {ratio:g}, {chunks} chunks, {lanes} side streams{queue}"
    # The kernels that raise flags wait for copies; with one queue the GEMM is enqueued behind all of them.
    hides = not (one_queue and how is Raise.KERNEL)
    forecast = Forecast(
        lab.card.library_gemm_s(m, n, k), lab.card.our_gemm_s(m, n, k), lab.card.pcie_s(2 * sum(pull.shards[1:]) * k),
        chunks, hides, driver_calls=4 + 2 * chunks * (tp - 1), torch_calls=1,
    )  # fmt: skip
    whole = num_chunks is None and not one_queue
    overlap.predict(recorder, problem, forecast, "G3" if whole else "-", beside=whole)
    for name, call in (("fused", pull.fused), ("unfused", pull.unfused)):
        pull.check(f"AG+GEMM {name}", call)
    candidates = {"gemm": pull.gemm, "transfer": pull.transfer, "unfused": pull.unfused, "fused": pull.fused}
    if whole:
        candidates["gemm beside copies"] = pull.gemm_beside
    overlap.report(lab, recorder, problem, candidates, "PCIe link", "G3" if whole else "-")
    pull.rank.raise_if_failed()
    pull.close()


# --- GEMM + reduce-scatter --------------------------------------------------------------------------------------------


class Push:
    """One rank's GEMM + reduce-scatter whose peers' slots are buffers of the host; their partials are here already."""

    def __init__(
        self, lab: Lab, m: int, n: int, k: int, tp: int, num_chunks: int | None = None,
        lanes: int = PUSH_LANES,
    ) -> None:  # fmt: skip
        self.lab, self.rank, self.lanes = lab, LoneRank(lab, tp), lanes
        self.pipeline = Pipeline(lab.library, self.lanes)
        self.shards = partition.array_split_sizes(m, tp)
        self.x, self.weight = lab.random(0, m, k), lab.random(1, n, k)
        self.partial, self.host = self.x.new_empty(m, n), lab.pinned(m, n)
        self.others = [lab.random(2 + r, self.shards[0], n) for r in range(tp - 1)]
        self.sum = self.x.new_empty(self.shards[0], n)
        config = lab.configure(m, n, k, tp, moved_columns=n, reserved_sms=lab.reserved_sms(waits=False))
        self.config: GemmConfig = config if num_chunks is None else replace(config, num_chunks=num_chunks)
        self.departures = departures_of(self.rank, self.partial, self.shards, self.config)
        self._flagged = _call(self.pipeline, self.rank, self._chunks(True))
        self._plain = _call(self.pipeline, self.rank, self._chunks(False))
        self._known: KnownLaunch | None = None
        self._known = self.kernel(rehearsal=True)
        lab.settle()

    def _chunks(self, flags: bool) -> Sequence[Chunk]:
        row_bytes, starts = self.partial.shape[1] * 2, partition.offsets(self.shards)
        chunks, cut = [], self.config.num_chunks if flags else 1
        for number in range(cut):
            for turn, owner in enumerate(partition.peers_after(0, len(self.shards))):
                start, stop = partition.chunk_ranges(self.shards[owner], cut)[number]
                at, num_bytes = (starts[owner] + start) * row_bytes, (stop - start) * row_bytes
                flag = self.rank.flags.data_ptr() + 4 * (owner * self.config.num_chunks + number)
                chunks.append(
                    _copy(
                        self.host.data_ptr() + at, self.partial.data_ptr() + at, num_bytes, number,
                        turn % self.lanes, flag=flag, waits=flags and num_bytes > 0,
                    )
                )  # fmt: skip
        return chunks

    def kernel(self, rehearsal: bool = False) -> KnownLaunch | None:
        """As `symmetric` launches it."""
        return scatter.matmul_reduce_scatter(
            self.x, self.weight, self.departures, self.config, rehearsal=rehearsal, known=self._known
        )

    def reduce(self) -> None:
        n = self.sum.shape[1]
        parts = [self.partial.data_ptr(), *(other.data_ptr() for other in self.others)]
        self.rank.group.reduce(
            op=2, part_dtype=Dtype.BF16, out_dtype=Dtype.BF16, parts=parts, strides=[n] * len(parts),
            out=self.sum.data_ptr(), out_stride=n, rows=self.sum.shape[0], columns=n, stream=self.lab.stream(),
        )  # fmt: skip

    def fused(self) -> None:
        self.rank.next_call()
        self.pipeline.fork(self.lab.stream())
        self.kernel()
        _enqueue(self.rank, self._flagged)
        self.reduce()
        self.pipeline.join(self.lab.stream())

    def transfer(self) -> None:
        self.pipeline.fork(self.lab.stream())
        _enqueue(self.rank, self._plain)
        self.pipeline.join(self.lab.stream())

    def gemm(self) -> None:
        torch.mm(self.x, self.weight.t(), out=self.partial)

    def unfused(self) -> None:
        self.gemm()
        self.transfer()
        self.reduce()

    def check(self, name: str, call: Callable[[], None]) -> None:
        for tensor in (self.partial, self.host, self.sum):
            tensor.fill_(float("nan"))
        call()
        self.rank.raise_if_failed()
        peers = torch.arange(self.shards[0], self.x.shape[0])
        picked = peers[torch.linspace(0, len(peers) - 1, min(128, len(peers))).long()]
        check_product(f"{name}, what has left", self.host, self.x, self.weight, picked)
        total = self.partial[: self.shards[0]].float()
        for other in self.others:
            total = total + other.float()
        if not torch.equal(self.sum, total.to(self.sum.dtype)):
            raise AssertionError(f"{name}: the sum of this rank's rows is wrong")

    def close(self) -> None:
        self.lab.settle()
        self.pipeline.close()
        self.rank.close()


def measure_scatter(
    lab: Lab, recorder: Recorder, m: int, n: int, k: int, tp: int, ratio: float, one_queue: bool = False,
    num_chunks: int | None = None, lanes: int = PUSH_LANES,
) -> None:  # fmt: skip
    push = Push(lab, m, n, k, tp, num_chunks, lanes)
    chunks = push.config.num_chunks
    queue = ", one queue" if one_queue else ""
    problem = f"GEMM+RS M{m} N{n} K{k} of {tp}, transfer/GEMM {ratio:g}, {chunks} chunks, {lanes} side streams{queue}"
    mine = 2 * push.shards[0] * n
    reduce_s = lab.card.reduce_s(tp, mine)
    forecast = Forecast(
        lab.card.library_gemm_s(m, n, k), lab.card.our_gemm_s(m, n, k), lab.card.pcie_s(2 * m * n - mine), chunks, True,
        driver_calls=5 + 2 * chunks * (tp - 1), torch_calls=1, behind_s=reduce_s,
    )  # fmt: skip
    target = "-" if one_queue or num_chunks is not None else "G3"
    overlap.predict(recorder, problem, forecast, target, beside=False)
    for name, call in (("fused", push.fused), ("unfused", push.unfused)):
        push.check(f"GEMM+RS {name}", call)
    candidates = {"gemm": push.gemm, "transfer": push.transfer, "unfused": push.unfused, "fused": push.fused}
    overlap.report(lab, recorder, problem, candidates, "PCIe link", target)
    push.rank.raise_if_failed()
    push.close()


# --- arrival clock ----------------------------------------------------------------------------------------------------


def measure_clock(lab: Lab, recorder: Recorder, m: int, n: int, k: int, tp: int, gbps: float) -> None:
    """Flags go up at the pace of a link that brings `gbps` to this rank."""
    pull = Pull(lab, m, n, k, tp)
    chunks = pull.config.num_chunks
    problem = f"AG+GEMM M{m} N{n} K{k} of {tp} at {gbps:g} GB/s, {chunks} chunks"
    forecast = Forecast(
        lab.card.library_gemm_s(m, n, k), lab.card.our_gemm_s(m, n, k), 2 * sum(pull.shards[1:]) * k / (1e9 * gbps),
        chunks, True, driver_calls=2 * chunks * (tp - 1), torch_calls=3,
    )  # fmt: skip
    overlap.predict(recorder, problem, forecast, "G3", beside=False)
    pull.whole.copy_(pull.expected)
    side = torch.cuda.Stream(priority=-1)
    cycles_per_s = _cycles_per_second(lab)
    num_bytes = sum(pull.shards[1:]) * k * 2
    turns = [(peer, c) for c in range(pull.config.num_chunks) for peer in partition.peers_after(0, tp)]
    nap = round(cycles_per_s * num_bytes / (gbps * 1e9) / len(turns))

    def clock() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for peer, number in turns:
                torch.cuda._sleep(nap)
                pull.rank.group.raise_flag(pull.flag(peer, number), stream=side.cuda_stream)

    def fused() -> None:
        pull.rank.next_call()
        clock()
        pull.kernel()
        torch.cuda.current_stream().wait_stream(side)

    def transfer() -> None:
        clock()
        torch.cuda.current_stream().wait_stream(side)

    def unfused() -> None:
        transfer()
        pull.gemm()

    fused()
    pull.rank.raise_if_failed()
    check_product("arrival clock", pull.out, pull.expected, pull.weight)
    candidates = {"gemm": pull.gemm, "transfer": transfer, "unfused": unfused, "fused": fused}
    overlap.report(lab, recorder, problem, candidates, "arrival clock", "G3")
    pull.rank.raise_if_failed()
    pull.close()


def _cycles_per_second(lab: Lab) -> float:
    cycles = 20_000_000
    found = lab.measure({"sleep": partial(torch.cuda._sleep, cycles)})
    return cycles / found["sleep"].median


# --- chunks -----------------------------------------------------------------------------------------------------------


def _copy(
    target: int, source: int, num_bytes: int, number: int, lane: int, *, flag: int, raises: bool = False,
    waits: bool = False,
) -> Chunk:  # fmt: skip
    return Chunk(
        target=target, source=source, rows=1, row_bytes=num_bytes, target_stride_bytes=num_bytes,
        source_stride_bytes=num_bytes, flags=flag, raise_ranks=int(raises), wait_ranks=int(waits), chunk=number,
        lane=lane,
    )  # fmt: skip


def _call(pipeline: Pipeline, rank: LoneRank, chunks: Sequence[Chunk], how: Raise = Raise.KERNEL) -> Call:
    return Call(rank.lab.library, rank.group, pipeline, chunks, op=1, how=how)


def _enqueue(rank: LoneRank, call: Call) -> None:
    call.record.raised_value = rank.epoch  # a lone rank begins no call: its flags go up with the number of the call
    call.run(Steps.MOVE, stream=0)
