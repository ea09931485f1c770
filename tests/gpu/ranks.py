"""What the ranks of these tests do: W processes that share one GPU.

`share_gpu` makes a worker such a rank: the settings that several ranks of one GPU need, and where the operands of
`tests/ops/support.py` go. Everything else here is a scenario; the values come from the contract of the backends.

Processes of one GPU take turns (without MPS), so a rank that spins holds its peers up for a time slice; time-outs are
long, sizes small, and each rank's kernels get a share of the SMs, as they would have to if all ran at once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.backends.contract import JUDGES
from tests.ops.scaled import ScaledCase, judge_cases
from tests.ops.support import PLACE, new_group
from tpkernels import errors, selftest
from tpkernels.backends.symmetric.resource import SymmetricMemory
from tpkernels.comm import startup
from tpkernels.comm.groups import resolve
from tpkernels.partition import array_split_sizes
from tpkernels.testing import dealt, grouped
from tpkernels.testing.cases import Case
from tpkernels.testing.dealt import DealtCase
from tpkernels.testing.grouped import GroupedCase
from tpkernels.testing.library_sums import summed_in_fp32
from tpkernels.testing.numeric import assert_bitwise_equal
from tpkernels.testing.payload import exact_matmul, integer_payload, payload
from tpkernels.testing.spawn import WorkerPool

SETTINGS = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",
    "CUDA_MODULE_LOADING": "EAGER",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # tests that poison memory switch to deterministic algorithms
}
PATIENCE_S = 30.0
_SUMS = ExitStack()


def share_gpu(world: int, backend: str | None = None, own_gpu: bool = False, zero_cta: bool = False) -> str:
    """Make this worker a rank on GPU 0, or with `own_gpu` on its own one, and say which GPU that is.

    backend: of the groups; None is gloo. zero_cta: NCCL moves chunks with copy engines.
    """
    os.environ.update({**SETTINGS, "TPKERNELS_NCCL_ZERO_CTA": str(int(zero_cta))})  # before this process touches CUDA
    PLACE.device, PLACE.backend = torch.device("cuda", dist.get_rank() if own_gpu else 0), backend
    torch.cuda.set_device(PLACE.device)
    _SUMS.enter_context(summed_in_fp32())  # for as long as this worker is such a rank
    if backend == "nccl":
        PLACE.options = lambda: startup._nccl_options(PATIENCE_S)  # those of `tpk.init`
    else:
        PLACE.prepare = lambda group: _take_share(group, 1 if own_gpu else world)
    return torch.cuda.get_device_name(PLACE.device)


def _take_share(group: Any, world: int) -> None:
    """Give this rank's kernels their part of the SMs; a group without symmetric memory says why."""
    tpk.all_reduce(torch.zeros(1, device=PLACE.device), group, implementation="unfused")  # the ranks meet
    memory: SymmetricMemory = resolve(group).resources[SymmetricMemory.name]
    if memory.channels is None:
        raise RuntimeError(f"no symmetric memory: {memory.no_memory}")
    memory.channels.share_gpu(max(3, torch.cuda.get_device_properties(PLACE.device).multi_processor_count // world))


def judge_all(cases: Sequence[Case], judge: str, num_chunks: int | None) -> int:
    """Every case on one new group of these ranks; how many there were. fp8 has a judge of its own, for values."""
    with new_group(num_chunks, timeout=PATIENCE_S) as group:
        for case in cases:
            if isinstance(case, ScaledCase):
                judge_cases([case], group)
            else:
                JUDGES[judge](case, group)
            settle()
        _nothing_failed(group)
    return len(cases)


def judge_experts(cases: Sequence[GroupedCase | DealtCase], num_chunks: int | None) -> int:
    """Every case with experts, forward and backward, on one new group of these ranks; how many there were."""
    with new_group(num_chunks, timeout=PATIENCE_S) as group:
        for case in cases:
            if isinstance(case, DealtCase):
                dealt.judge(case, group, device=PLACE.device)
            else:
                grouped.judge(case, group, device=PLACE.device)
            settle()
        _nothing_failed(group)
    return len(cases)


def settle() -> None:
    if PLACE.device.type == "cuda":
        torch.cuda.synchronize()


def captured(work: Callable[[], list[torch.Tensor]]) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """The outputs of `work` and what computes them again, from a CUDA graph; on CPU ranks by doing it again."""
    work()
    settle()
    if PLACE.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = work()
        return outs, graph.replay
    outs = work()

    def again() -> None:
        for out, new in zip(outs, work(), strict=True):
            out.copy_(new)

    return outs, again


def _nothing_failed(group: Any) -> None:
    channels = resolve(group).resources[SymmetricMemory.name].channels
    if channels is not None:
        channels.check()


def replay(implementation: str, op: str, replays: int, rows: int = 192) -> int:
    """Capture two calls of an op in a graph, replay it with new data every time; how many results were judged."""
    rank, world = dist.get_rank(), dist.get_world_size()
    gathers, n, k = op == "all_gather_matmul", 96, 128
    with new_group(2, timeout=PATIENCE_S) as group, torch.no_grad():
        shape = (rows // world, k) if gathers else (rows, k)
        x = torch.zeros(shape, dtype=torch.bfloat16, device=PLACE.device)
        ws = [integer_payload((n, k), torch.bfloat16, rank=r, name="w", nonzeros=k) for r in range(world)]
        weight = ws[rank].to(PLACE.device)
        fused = getattr(tpk, op)

        def two_calls() -> list[torch.Tensor]:
            return [fused(x, weight, group, implementation=implementation) for _ in range(2)]

        outs, once_more = captured(two_calls)
        for turn in range(replays):
            xs = [integer_payload(shape, torch.bfloat16, rank=r, call=turn, name="x") for r in range(world)]
            x.copy_(xs[rank])
            for out in outs:
                out.fill_(float("nan"))
            once_more()
            settle()
            if gathers:
                exact = exact_matmul([torch.cat(xs)], [ws[rank]], dtype=torch.bfloat16)
            else:
                exact = exact_matmul(xs, ws, dtype=torch.bfloat16)
                if op == "matmul_reduce_scatter":
                    exact = exact.split(rows // world)[rank]
            for number, out in enumerate(outs):
                what = f"{op}, replay {turn}, call {number}, rank {rank}"
                assert_bitwise_equal(out, exact, what, either_zero=True)
        _nothing_failed(group)
    return replays * len(outs)


def sums_with_a_norm(implementation: str, rows: Sequence[int], columns: int = 520) -> int:
    """A residual and a norm behind a sum: exact sums, and rows normalised as in fp64; how many calls were judged."""
    rank, world, eps, calls = dist.get_rank(), dist.get_world_size(), 1e-6, 0
    with new_group(2, timeout=PATIENCE_S) as group, torch.no_grad():
        for m in rows:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                xs = [integer_payload((m, 64), dtype, rank=r, call=m, name="x", nonzeros=8) for r in range(world)]
                ws = [integer_payload((columns, 64), dtype, rank=r, name="w", nonzeros=8) for r in range(world)]
                residual = payload((m, columns), dtype, name="residual")
                weight, smallest = payload((columns,), dtype, name="norm"), torch.finfo(dtype).tiny
                expected = exact_matmul(xs, ws, dtype=dtype) + residual
                for op in ("matmul_all_reduce", "matmul_reduce_scatter"):
                    cut = array_split_sizes(m, world) if op == "matmul_reduce_scatter" else (m,)
                    mine = rank if len(cut) > 1 else 0
                    own = residual.split(cut)[mine].contiguous().to(PLACE.device)
                    normed, sums = getattr(tpk, op)(
                        xs[rank].to(PLACE.device), ws[rank].to(PLACE.device), group, residual=own,
                        norm_weight=weight.to(PLACE.device), eps=eps, implementation=implementation,
                    )  # fmt: skip
                    settle()
                    what = f"{op} of {m} rows, {dtype}, rank {rank}"
                    assert_bitwise_equal(sums.cpu(), expected.split(cut)[mine].contiguous(), what, either_zero=True)
                    exact = torch.nn.functional.rms_norm(sums.cpu().double(), (columns,), weight.double(), eps)
                    limit = torch.finfo(dtype).eps + (columns + 8) * torch.finfo(torch.float32).eps
                    bound = limit * exact.abs().clamp(min=smallest)
                    assert ((normed.cpu().double() - exact).abs() <= bound).all(), f"{what}: normed"
                    calls += 1
        _nothing_failed(group)
    return calls


def modules_of_the_selftest(dtypes: tuple[str, ...]) -> list[str]:
    """What `tpkernels test` says of modules and whole decoders, in every implementation: all that is wrong."""
    if PLACE.device.type == "cuda":
        _take_share(dist.group.WORLD, dist.get_world_size())
    rows = selftest.run_rank(selftest.Options(PLACE.device.type, dtypes, ("modules",), quick=True))
    settle()
    assert PLACE.device.type == "cpu" or any("symmetric" in row.ran for row in rows), "symmetric did nothing"
    return [f"{row.what}, {row.implementation}: {failure}" for row in rows for failure in row.failures]


def late_peer(timeout_s: float) -> dict[str, Any]:
    """The last rank stays away from a call. What the others are told, how long after the time-out, and what works then.

    Rank-invariant facts are agreed on before, so that nobody waits on the host.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.ones(128 * world, 128, device=PLACE.device, dtype=torch.bfloat16)
    told: dict[str, Any] = {}
    with new_group(1, timeout=timeout_s) as group, torch.no_grad():

        def call() -> torch.Tensor:
            return tpk.matmul_reduce_scatter(x, x[:64], group, implementation="symmetric")

        call()
        settle()
        if rank == world - 1:
            time.sleep(timeout_s + 1.0)
        else:
            start = time.perf_counter()
            call()
            settle()  # returns: the kernels gave up
            told["seconds"] = time.perf_counter() - start
            try:
                call()
            except errors.TpKernelsError as error:
                told |= {"error": type(error).__name__, "ranks": list(error.ranks), "text": str(error)}  # type: ignore[attr-defined]
    told["context"] = float(torch.ones(4, device=PLACE.device).sum())
    with new_group(1, timeout=PATIENCE_S) as group:
        told["new group"] = float(tpk.all_reduce(x[:1, :8], group, implementation="symmetric").sum())
    return told


def without_a_peer(how: str, timeout_s: float) -> dict[str, Any]:
    """The last rank "dies" or is "late" between two calls on a group made as `tpk.init` makes its own.

    What the others are told and when, and whether their device works then.
    """
    rank, world, told = dist.get_rank(), dist.get_world_size(), dict[str, Any]()
    x = torch.ones(128 * world, 128, device=PLACE.device, dtype=torch.bfloat16)
    group = startup.new_group(range(world), PLACE.device.type, timeout_s)

    def call() -> torch.Tensor:
        return tpk.matmul_reduce_scatter(x, x[:64], group, implementation="chunked")

    call()
    settle()
    dist.barrier()
    if rank == world - 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.5 * timeout_s)
        return told
    start = time.perf_counter()
    try:
        call()
        settle()  # returns: the communicator was aborted
        call()
    except errors.CommunicationError as error:
        told |= {"error": type(error).__name__, "ranks": list(error.ranks), "text": str(error)}
    told["seconds"] = time.perf_counter() - start
    told["context"] = float(torch.ones(4, device=PLACE.device).sum())
    return told


def check_without_a_peer(pool: WorkerPool, how: str, timeout_s: float, within_s: float | None = None) -> None:
    """within_s: when the others must have heard; default: as NCCL groups promise it."""
    told, *_ = pool.run(without_a_peer, how, timeout_s, return_exceptions=True, timeout=120.0)
    assert told["error"] == {"dies": "PeerLost", "late": "CollectiveTimeout"}[how], told
    assert told["ranks"] == [pool.nproc - 1] and "call 2 on group" in told["text"], told
    assert "matmul_reduce_scatter(" in told["text"] and told["context"] == 4.0, told
    assert told["seconds"] < (within_s or {"dies": 5.0, "late": 1.1 * timeout_s}[how]), told
