"""R21 and R22: waits that end while the context lives on, and graphs that never replay an old result."""

from __future__ import annotations

import time
from functools import partial

import torch

from gpu_steps.lab import Lab, LoneRank
from gpu_steps.outcome import Recorder, Row
from gpu_steps.roofline import KERNEL_S, TORCH_CALL_S, TRITON_LAUNCH_S
from tpkernels.backends.symmetric import cuda_native
from tpkernels.backends.symmetric.cuda_group import Group, OneShot
from tpkernels.backends.symmetric.cuda_native import Dtype, Kind
from tpkernels.backends.symmetric.residency import waiting_blocks
from tpkernels.kernels import all_gather_matmul as gather

TIMEOUT_S = 0.02
OVER_S = 0.1
TRIALS, REPLAYS = 100, 10_000


def run(recorder: Recorder) -> None:
    lab = Lab.of_this_gpu()
    aborts(lab, recorder, TRIALS)
    replays(lab, recorder, REPLAYS)


def aborts(lab: Lab, recorder: Recorder, trials: int) -> None:
    problem = f"a chunk that never comes, time-out {1e3 * TIMEOUT_S:g} ms"
    worst, wrong = "ms from the time-out to the end, worst", "trials without the right record, or without a context"
    recorder.predict("R21", problem, worst, 1e3 * (KERNEL_S + TORCH_CALL_S + TRITON_LAUNCH_S))
    recorder.predict("R21", problem, wrong, 0.0)
    found = [abort_once(lab) for _ in range(trials)]
    late = max(late_s for late_s, _ in found)
    recorder.row(Row("R21", problem, worst, 1e3 * late, "count", f"<= {1e3 * OVER_S:g}", trials))
    recorder.row(Row("R21", problem, wrong, float(sum(not named for _, named in found)), "count", "<= 0", trials))


def abort_once(lab: Lab) -> tuple[float, bool]:
    """A chunk of the last peer never comes: seconds from the time-out to the end, and whether the record names the peer
    and the context lives on. A group of its own, because a failed one is poisoned."""
    m, n, k, size = 512, 512, 256, 4
    whole, weight = lab.random(0, m, k), lab.random(1, n, k)
    out = whole.new_empty(m, n)
    config = lab.configure(m, n, k, size, moved_columns=k, reserved_sms=lab.reserved_sms(waits=True))
    rank = LoneRank(lab, size, timeout_s=TIMEOUT_S)
    rank.next_call()
    rank.preset()
    rank.flags[(size - 1) * config.num_chunks] = 0
    arrivals = gather.Arrivals(rank.order("all_gather", [m // size] * size, config), rank.flags, rank.table, 3)
    launch = partial(gather.all_gather_matmul, whole, weight, out, arrivals, config)
    launch(rehearsal=True)
    lab.settle()
    start = time.perf_counter()
    launch()
    lab.settle()
    late_s = time.perf_counter() - start - TIMEOUT_S
    failure = rank.group.failure()
    named = failure is not None and (failure.kind, failure.peer, failure.op) == (Kind.TIMEOUT, size - 1, 3)
    alive = float(torch.ones(4, device=lab.device).sum()) == 4.0
    rank.close()
    return late_s, named and alive


def replays(lab: Lab, recorder: Recorder, count: int) -> None:
    """Two virtual ranks, each with a graph of three one-shot all-reduces on slots 0, 1, 0; fresh data every time."""
    problem = "two virtual ranks, three all-reduces in a graph"
    recorder.predict("R22", problem, "stale results", 0.0)
    size, rows, columns = 2, 64, 128
    zeros = partial(torch.zeros, dtype=torch.uint8, device=lab.device)
    pads = [zeros(cuda_native.PAD_BYTES) for _ in range(size)]
    states = [zeros(cuda_native.STATE_BYTES) for _ in range(size)]
    slots = [[zeros(1 << 20) for _ in range(size)] for _ in range(2)]
    lab.settle()
    groups = [
        Group(
            lab.library,
            rank=r,
            pads=[pad.data_ptr() for pad in pads],
            state=states[r].data_ptr(),
            timeout_s=10.0,
            max_blocks=waiting_blocks(lab.num_sms // size),
        )
        for r in range(size)
    ]
    inputs = [torch.zeros(rows, columns, device=lab.device) for _ in range(size)]
    outputs = [[torch.zeros_like(x) for _ in range(3)] for x in inputs]
    streams, graphs = [torch.cuda.Stream() for _ in range(size)], []
    for rank in range(size):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[rank]):
            for call in range(3):
                at = OneShot(1, call % 2, fingerprint=call, slots=[slot.data_ptr() for slot in slots[call % 2]])
                groups[rank].all_reduce(
                    at, dtype=Dtype.F32, x=inputs[rank].data_ptr(), out=outputs[rank][call].data_ptr(), rows=rows,
                    columns=columns, stream=streams[rank].cuda_stream,
                )  # fmt: skip
        graphs.append(graph)
    stale = torch.zeros((), device=lab.device, dtype=torch.int64)
    for turn in range(count):
        for rank, x in enumerate(inputs):
            x.fill_(float(turn + 1000 * rank))
        torch.cuda.synchronize()
        for rank, graph in enumerate(graphs):
            with torch.cuda.stream(streams[rank]):
                graph.replay()
        torch.cuda.synchronize()
        for out in outputs[0] + outputs[1]:
            stale += (out != inputs[0] + inputs[1]).any()
    failures = [group.failure() for group in groups]
    if any(failures):
        raise RuntimeError(f"a kernel gave up: {failures}")
    recorder.row(Row("R22", problem, "stale results", float(stale), "count", "<= 0", count))
    for group in groups:
        group.close()
