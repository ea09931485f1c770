"""One of everything, small, right or wrong: what must be true before anything is worth measuring.

Each check files one figure, the faults that it has found; the first one ends the step, and with it the run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gpu_steps import experts, faults
from gpu_steps.environment import versions
from gpu_steps.gemm import departures_of
from gpu_steps.lab import Lab, LoneRank, check_product
from gpu_steps.outcome import Recorder, Row
from tpkernels import partition
from tpkernels.backends.symmetric import cuda_native
from tpkernels.backends.symmetric.cuda_group import Group, OneShot, Pipeline
from tpkernels.backends.symmetric.cuda_native import Dtype
from tpkernels.backends.symmetric.residency import waiting_blocks
from tpkernels.kernels import all_gather_matmul as gather
from tpkernels.kernels import matmul_reduce_scatter as scatter

SHAPE = (512, 384, 256)  # M, N, K
TP = 4
EXPERTS = experts.Layer(experts=5, top_k=2, d_model=256, d_ff=192, tokens=300)


def run(recorder: Recorder) -> None:
    recorder.fact("versions", versions())
    recorder.fact("library", str(cuda_native.file()))
    lab = Lab.of_this_gpu()
    checks: dict[str, Callable[[], None]] = {
        "the library's kernels load onto this GPU": lambda: lab.library.call("tpk_load_kernels"),
        "a sum over ranks is torch's, bit for bit": partial(reduction, lab),
        "a one-shot all-reduce of two virtual ranks is right": partial(one_shot, lab),
        "all-gather + GEMM, flags preset": partial(gather_gemm, lab),
        "GEMM + reduce-scatter, flags preset": partial(scatter_gemm, lab),
        "experts, gathered and summed, flags preset": partial(experts.check_layer, lab, EXPERTS),
        "a missing flag ends in time, by name, and the context lives": partial(missing_flag, lab),
    }
    for name in checks:
        recorder.predict("smoke", name, "faults", 0.0)
    for name, check in checks.items():
        check()
        recorder.row(Row("smoke", name, "faults", 0.0, "count", "<= 0", 1))


def reduction(lab: Lab) -> None:
    rank = LoneRank(lab, 3)
    rank.next_call()
    parts = [lab.random(r, 37, 96) for r in range(3)]
    out = torch.full_like(parts[0], float("nan"))
    rank.group.reduce(
        op=1, part_dtype=Dtype.BF16, out_dtype=Dtype.BF16, parts=[part.data_ptr() for part in parts],
        strides=[96] * 3, out=out.data_ptr(), out_stride=96, rows=37, columns=96, stream=lab.stream(),
    )  # fmt: skip
    rank.raise_if_failed()
    rank.close()
    equal("the reducer", out, (parts[0].float() + parts[1].float() + parts[2].float()).to(out.dtype))


def one_shot(lab: Lab) -> None:
    """Two ranks in this process, on streams of their own: each kernel waits for what the other one pushes."""
    size, rows, columns = 2, 8, 96
    pads, states = ([_zeros(lab, n) for _ in range(size)] for n in (cuda_native.PAD_BYTES, cuda_native.STATE_BYTES))
    room = size * lab.library.one_shot_slot_bytes(4 * rows * columns)
    slots = [_zeros(lab, room) for _ in range(size)]
    addresses, blocks = [pad.data_ptr() for pad in pads], waiting_blocks(lab.num_sms // size)
    groups = [
        Group(lab.library, rank=r, pads=addresses, state=states[r].data_ptr(), timeout_s=5.0, max_blocks=blocks)
        for r in range(size)
    ]
    inputs = [lab.random(r, rows, columns, dtype=torch.float32) for r in range(size)]
    outputs = [torch.full_like(x, float("nan")) for x in inputs]
    lab.settle()
    pipelines = [Pipeline(lab.library, 1) for _ in range(size)]
    call = OneShot(1, 0, fingerprint=7, slots=[slot.data_ptr() for slot in slots])
    for pipeline, group, x, out in zip(pipelines, groups, inputs, outputs, strict=True):
        group.all_reduce(
            call, dtype=Dtype.F32, x=x.data_ptr(), out=out.data_ptr(), rows=rows, columns=columns,
            stream=pipeline.stream(0),
        )  # fmt: skip
    for pipeline in pipelines:
        pipeline.join(lab.stream())
    lab.settle()
    for pipeline, group in zip(pipelines, groups, strict=True):
        failure = group.failure()
        if failure is not None:
            raise RuntimeError(f"a one-shot kernel gave up: {failure}")
        pipeline.close()
        group.close()
    for rank, out in enumerate(outputs):
        equal(f"the all-reduce on rank {rank}", out, inputs[0] + inputs[1])


def gather_gemm(lab: Lab) -> None:
    m, n, k = SHAPE
    whole, weight = lab.random(0, m, k), lab.random(1, n, k)
    out = torch.full((m, n), float("nan"), dtype=whole.dtype, device=lab.device)
    rank = LoneRank(lab, TP)
    rank.next_call()
    rank.preset()
    config = lab.configure(m, n, k, TP, moved_columns=k, reserved_sms=0)
    order = rank.order("all_gather", partition.array_split_sizes(m, TP), config)
    arrivals = gather.Arrivals(order, rank.flags, rank.table, 1)
    known = gather.all_gather_matmul(whole, weight, torch.empty_like(out), arrivals, config, rehearsal=True)
    gather.all_gather_matmul(whole, weight, out, arrivals, config, known=known)  # as `symmetric` does
    rank.raise_if_failed()
    rank.close()
    check_product("all-gather + GEMM", out, whole, weight)


def scatter_gemm(lab: Lab) -> None:
    """The product is right, and every chunk of every other rank has raised its flag."""
    m, n, k = SHAPE
    x, weight = lab.random(2, m, k), lab.random(3, n, k)
    out = torch.full((m, n), float("nan"), dtype=x.dtype, device=lab.device)
    rank = LoneRank(lab, TP)
    rank.next_call()
    config = lab.configure(m, n, k, TP, moved_columns=n, reserved_sms=0)
    departures = departures_of(rank, out, partition.array_split_sizes(m, TP), config)
    known = scatter.matmul_reduce_scatter(torch.empty_like(x), weight, departures, config, rehearsal=True)
    scatter.matmul_reduce_scatter(x, weight, departures, config, known=known)
    rank.raise_if_failed()
    check_product("GEMM + reduce-scatter", out, x, weight)
    chunks = config.num_chunks
    flags = rank.flags[chunks : TP * chunks].tolist()
    rank.close()
    if flags != [1] * len(flags):
        raise AssertionError(f"GEMM + reduce-scatter: the flags of the others' chunks are {flags}, each should be 1")


def missing_flag(lab: Lab) -> None:
    late_s, named = faults.abort_once(lab)
    if not named or late_s > faults.OVER_S:
        raise AssertionError(
            f"a wait for a flag that never comes ended {1e3 * late_s:.0f} ms after its time-out "
            f"(at most {1e3 * faults.OVER_S:.0f}), {'with' if named else 'without'} the right record and a live context"
        )


def equal(name: str, found: Tensor, expected: Tensor) -> None:
    wrong = int((found != expected).sum()) + int(found.isnan().sum())
    if wrong:
        raise AssertionError(f"{name}: {wrong} of {found.numel()} elements are wrong")


def _zeros(lab: Lab, num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=lab.device)
