"""What workers of the interpreter do: one rank's kernel, with somebody who fills its buffers and raises its flags.

The same runs on a GPU (`Case.device`, tests/gpu/test_kernels.py): then the kernel spins on the default stream, while a
thread copies and raises flags on a stream of its own.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.kernels.interpreter import PACKAGE, load
from tests.kernels.sparse_memory import sparse_matrix
from tpkernels.partition import chunk_ranges, offsets
from tpkernels.testing.numeric import FP8_SUM_LOSS, GATED, Bounded, assert_bitwise_equal
from tpkernels.testing.payload import payload

PATIENCE = 400_000  # polls of the interpreter, about half a minute
FAILURE_WORDS = 12
MARGIN = 16  # rows and columns around every operand and result, which nobody may read or write; a tile at least


@dataclass(frozen=True)
class Case:
    """A rank's GEMM over the rows of all ranks; `shards` are their numbers, N and K those of the product."""

    shards: tuple[int, ...] = (33, 0, 17)
    n: int = 50
    k: int = 48
    rank: int = 0
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    num_chunks: int = 2
    block: tuple[int, int, int] = (16, 32, 32)
    loop: str = "flat"
    group_m: int = 2
    programs: int = 3
    activation: str = "none"
    bias: bool = False
    scale: str = "none"
    preactivation: bool = False
    addend: int = 0  # how many
    transposed: bool = False
    descriptors: bool = False
    stride: int = 0  # elements between the rows of all operands and results, if not as few as can be
    calls: int = 1
    first_epoch: int = 1
    delay: float = 0.01  # between chunks; the first one takes ten times as long, and finds the kernel waiting
    seed: int = 0
    package: str = PACKAGE
    folder: str | None = None
    patience: int = PATIENCE  # nanoseconds on a GPU
    device: str = "cpu"
    tiles: Any = None  # a GemmConfig, instead of `block` and the like

    @property
    def rows(self) -> int:
        return sum(self.shards)

    def module(self, name: str) -> Any:
        return load(self.package, name, self.folder)

    def config(self) -> Any:
        if self.tiles is not None:
            return replace(self.tiles, num_chunks=self.num_chunks)
        m, n, k = self.block
        return self.module("config").GemmConfig(
            m, n, k, self.group_m, 4, 2, self.programs, self.num_chunks, self.descriptors, loop=self.loop
        )

    def order(self, direction: str) -> Tensor:
        schedule = self.module("schedule")
        tiles = getattr(schedule, f"{direction}_order")(self.shards, self.num_chunks, self.config().block_m, self.rank)
        return self.place(torch.tensor(schedule.as_table(tiles), dtype=torch.int32).reshape(-1, schedule.FIELDS))

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def settle(self) -> None:
        """Wait until the kernel has ended; interpreted ones have."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def own_stream(self) -> AbstractContextManager[object]:
        """What a thread does inside does not wait for the kernel."""
        return nullcontext() if self.device == "cpu" else torch.cuda.stream(torch.cuda.Stream())


class Surroundings:
    """A group's state, failure record and pads, for one rank, or over shared memory that is passed in."""

    def __init__(self, case: Case, pads: list[Tensor] | None = None) -> None:
        self.state = case.place(torch.zeros(8, dtype=torch.int32))
        self.failure = torch.zeros(FAILURE_WORDS, dtype=torch.int32, pin_memory=case.device != "cpu")
        self.pads = pads or [case.place(torch.zeros(16, dtype=torch.int64)) for _ in case.shards]
        table = case.module("signals").group_table(
            state=self.state.data_ptr(),
            failure=self.failure.data_ptr(),
            timeout_ns=case.patience,
            rank=case.rank,
            pads=[pad.data_ptr() for pad in self.pads],
        )
        self.group = case.place(torch.tensor(table))

    def begin(self, epoch: int, fingerprint: int = 0x1234) -> int:
        """The call as one 64-bit word, which is also what a pad's signal says."""
        word = fingerprint << 32 | (epoch & 0xFFFFFFFF)
        self.state[:2] = torch.tensor([word]).view(torch.int32).to(self.state.device)
        return word

    def told(self, case: Case) -> dict[str, int]:
        return dict(zip(case.module("signals").FAILURE_FIELDS, self.failure.tolist(), strict=False))


def as_int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def padded(
    rows: int, columns: int, dtype: torch.dtype, value: Tensor | None = None, device: str = "cpu", stride: int = 0
) -> tuple[Tensor, Tensor]:
    """(view [rows, columns], what is around it): NaN everywhere, unless `value` is given for the view."""
    align = 16 // dtype.itemsize  # descriptors want rows of multiples of 16 bytes
    width = -(-(columns + MARGIN) // align) * align
    if stride:
        around = sparse_matrix(rows + 2 * MARGIN, width, stride, dtype, device)
    else:
        around = torch.full((rows + 2 * MARGIN, width), float("nan"), device=device).to(dtype)
    view = around[MARGIN : MARGIN + rows, :columns]
    if value is not None:
        view.copy_(value)
    return view, around


def assert_margin_untouched(around: Tensor, view: Tensor) -> None:
    finite = around.float().isfinite()
    finite[MARGIN : MARGIN + view.shape[0], : view.shape[1]] = False
    assert not finite.any(), f"written outside of the result at {finite.nonzero()[:4].tolist()} (margin {MARGIN})"


def weights(case: Case, call: int, name: str) -> Tensor:
    w = payload((case.n, case.k), case.dtype, call=call, rank=case.seed, name=name, scale=0.5)
    if case.transposed:
        return padded(case.k, case.n, case.dtype, w.T, case.device, case.stride)[0].T
    return padded(case.n, case.k, case.dtype, w, case.device, case.stride)[0]


def scales(case: Case, name: str, count: int) -> Tensor | None:
    if case.scale == "none":
        return None
    values = payload((count if case.scale == "row" else 1,), torch.float32, name=name).abs() + 0.5
    if name == "x" and case.stride:
        return padded(len(values), 1, torch.float32, values[:, None], case.device, case.stride)[0][:, 0]
    if name == "x":  # scales lie apart where rows bring theirs along
        return case.place(torch.stack([torch.full_like(values, float("nan")), values], 1))[:, 1]
    return case.place(values)


def product(case: Case, x: Tensor, w: Tensor, bias: Tensor | None, sx: Tensor | None, sw: Tensor | None) -> Bounded:
    """fp32 accumulation; two roundings more for scales, which the operands' exact products are given in fp64."""
    x, w, bias, sx, sw = (t if t is None else t.cpu() for t in (x, w, bias, sx, sw))
    assert x is not None and w is not None
    if sx is None or sw is None:
        return Bounded.sum_of_products([x], [w], bias=bias, dtype=torch.float32)
    loss = 0.0 if case.device == "cpu" else FP8_SUM_LOSS
    of_x = Bounded.scaled(x, sx[:, None], sums_lose=loss) if loss else x.double() * sx.double()[:, None]
    scaled = Bounded.sum_of_products([of_x], [w.double() * sw.double()[:, None]], dtype=torch.float32)
    scaled = scaled.rounded(torch.float32).rounded(torch.float32)
    return scaled if bias is None else scaled.plus(bias).rounded(torch.float32)


def expected_gather(case: Case, x: Tensor, parts: list[tuple[Tensor, Tensor | None, Tensor | None]],
                    sx: Tensor | None) -> tuple[list[Bounded], Bounded]:  # fmt: skip
    """(before, after) the activation, not yet rounded; `parts` are weight, bias and scale of gate and up."""
    sums = [product(case, x, w, bias, sx, sw) for w, bias, sw in parts]
    z = sums[0]
    if case.activation == "none":
        return sums, z
    if case.activation not in GATED:
        return sums, z.activation(case.activation, dtype=torch.float32, input_rounded=False)
    return sums, z.gated(case.activation, sums[1], dtype=torch.float32, input_rounded=False)


def gather(case: Case) -> list[Tensor]:
    """`calls` calls of all_gather_matmul, each with fresh data that arrives late and in a shuffled order."""
    kernel = case.module("all_gather_matmul")
    around = Surroundings(case)
    before_first = as_int32(case.first_epoch - 1)
    signals = case.place(torch.full((len(case.shards) * case.num_chunks,), before_first, dtype=torch.int32))
    results = []
    for call in range(case.calls):
        epoch = as_int32(case.first_epoch + call)
        around.begin(epoch)
        x = payload((case.rows, case.k), case.dtype, call=call, rank=case.seed, name="x")
        whole, _ = padded(case.rows, case.k, case.dtype, device=case.device, stride=case.stride)
        start = offsets(case.shards)[case.rank]
        whole[start : start + case.shards[case.rank]] = case.place(x[start : start + case.shards[case.rank]])
        names = ("gate", "up") if case.activation in GATED else ("gate",)
        sx = scales(case, "x", case.rows)
        parts: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
        for name in names:
            bias = payload((case.n,), case.dtype if case.scale == "none" else torch.float32, call=call, name=name)
            bias = case.place(bias)
            parts.append((weights(case, call, name), bias if case.bias else None, scales(case, name, case.n)))
        like_out = partial(
            padded, case.rows, case.n, case.out_dtype or case.dtype, device=case.device, stride=case.stride
        )
        out, margin = like_out()
        before = [like_out()[0] for _ in names]
        kept = before if case.preactivation else []
        up = parts[1] if len(parts) == 2 else (None, None, None)
        launch = partial(
            kernel.all_gather_matmul, whole, parts[0][0], out,
            kernel.Arrivals(case.order("all_gather"), signals, around.group, 7), case.config(),
            activation=case.activation, bias=parts[0][1], weight_up=up[0], bias_up=up[1], scale_whole=sx,
            scale_weight=parts[0][2], scale_weight_up=up[2],
            **dict(zip(("preactivation", "preactivation_up"), kept, strict=False)),
        )  # fmt: skip
        arrive = partial(_arrive, case, call, case.place(x), whole, signals, epoch)
        if case.device != "cpu":  # what loads a kernel while another one spins may wait for it: these have run before
            arrive()
            whole[:start], whole[start + case.shards[case.rank] :] = math.nan, math.nan
            signals.fill_(as_int32(epoch - 1))
        _run_beside(case, launch, threading.Thread(target=arrive))
        assert not around.failure.any(), around.told(case)
        rows_of_scale = [None if s is None else s.expand(n) for s, n in ((sx, case.rows), (parts[0][2], case.n))]
        full = [(w, b, None if s is None else s.expand(case.n)) for w, b, s in parts]
        sums, y = expected_gather(case, x, full, rows_of_scale[0])
        y.rounded(out.dtype).check(out, f"call {call}")
        for name, z, found in zip(names, sums, kept, strict=False):
            z.rounded(out.dtype).check(found, f"preactivation ({name}) of call {call}")
        assert_margin_untouched(margin, out)
        results.append(out.clone())
    return results


def _run_beside(
    case: Case, launch: Callable[..., None], other: threading.Thread, stop: threading.Event | None = None
) -> None:
    """Launch the kernel beside a thread that ends by itself, or after `stop`. On a GPU nothing is loaded meanwhile."""
    if case.device != "cpu":
        launch(rehearsal=True)
        case.settle()
    other.start()
    launch()
    if stop is not None:
        case.settle()
        stop.set()
    other.join()
    case.settle()


def _arrive(case: Case, call: int, x: Tensor, whole: Tensor, signals: Tensor, epoch: int) -> None:
    """The copy engines: each chunk of each peer, in an order of nobody's choosing."""
    chunks = [
        (rank, chunk, offsets(case.shards)[rank] + start, offsets(case.shards)[rank] + stop)
        for rank, rows in enumerate(case.shards)
        for chunk, (start, stop) in enumerate(chunk_ranges(rows, case.num_chunks))
        if rank != case.rank
    ]
    random.Random(f"{case.seed} {call}").shuffle(chunks)
    time.sleep(9 * case.delay)
    with case.own_stream():
        for rank, chunk, start, stop in chunks:
            time.sleep(case.delay)
            whole[start:stop] = x[start:stop]
            signals[rank * case.num_chunks + chunk] = epoch


def scatter(case: Case) -> list[list[Tensor]]:
    """`calls` calls of matmul_reduce_scatter; whoever sees a chunk's flag must find its rows complete."""
    kernel = case.module("matmul_reduce_scatter")
    around, world_size = Surroundings(case), len(case.shards)
    flags = case.place(torch.full((world_size, case.num_chunks), as_int32(case.first_epoch - 1), dtype=torch.int32))
    counters = case.place(torch.zeros(world_size * case.num_chunks, dtype=torch.int32))
    results = []
    for call in range(case.calls):
        epoch = as_int32(case.first_epoch + call)
        around.begin(epoch)
        like = partial(padded, device=case.device, stride=case.stride)
        x = like(case.rows, case.k, case.dtype, payload((case.rows, case.k), case.dtype, call=call, name="x"))[0]
        w, addend = weights(case, call, "w"), None
        shape, names = (case.rows, case.n), ["addend", "second", "third"][: case.addend]
        addends = [payload(shape, torch.float32, call=call, name=name) for name in names]
        if case.addend == 1:
            addend = like(case.rows, case.n, torch.float32, addends[0])[0]
        elif addends:
            addend = case.place(torch.nn.functional.pad(torch.stack(addends), (0, 0, 0, 3), value=float("nan")))
        sx, sw = scales(case, "x", case.rows), scales(case, "w", case.n)
        staging_dtype = case.out_dtype or torch.float32
        staging = [like(rows, case.n, staging_dtype)[1][MARGIN:] for rows in case.shards]
        departures = kernel.Departures(
            order=case.order("reduce_scatter"),
            staging=case.place(torch.tensor([part.data_ptr() for part in staging])),
            signals=case.place(torch.tensor([flags[owner].data_ptr() for owner in range(world_size)])),
            counters=counters,
            group=around.group,
            staging_dtype=staging_dtype,
            staging_stride=staging[0].stride(0),
        )
        seen: dict[tuple[int, int], Tensor] = {}
        stop = threading.Event()
        watcher = threading.Thread(target=_watch, args=(case, flags, epoch, staging, seen, stop))
        launch = partial(
            kernel.matmul_reduce_scatter, x, w, departures, case.config(), addend=addend, scale_x=sx, scale_weight=sw
        )
        _run_beside(case, launch, watcher, stop)
        sums = product(case, x, w, None, None if sx is None else sx.expand(case.rows),
                          None if sw is None else sw.expand(case.n))  # fmt: skip
        for one in addends:
            sums = sums.plus(one).rounded(torch.float32)
        sums = sums.rounded(staging_dtype)
        for owner, rows in enumerate(case.shards):
            sums.narrow(0, offsets(case.shards)[owner], rows).check(staging[owner][:rows, : case.n], f"{owner}")
            assert staging[owner][rows:].isnan().all() and staging[owner][:, case.n :].isnan().all(), "margin"
            for chunk, (start, end) in enumerate(chunk_ranges(rows, case.num_chunks)):
                assert (flags[owner, chunk] == epoch) == (end > start and case.n > 0), f"flag of {owner}, {chunk}"
                if (owner, chunk) in seen:
                    assert_bitwise_equal(seen[owner, chunk], staging[owner][start:end], f"chunk {chunk} when flagged")
        assert not counters.any()
        results.append([part.clone() for part in staging])
    return results


def _watch(case: Case, flags: Tensor, epoch: int, staging: list[Tensor], seen: dict[tuple[int, int], Tensor],
           stop: threading.Event) -> None:  # fmt: skip
    """Copies each chunk as soon as its flag says that it is there."""
    with case.own_stream():
        while not stop.is_set():
            raised = (flags == epoch).tolist()
            for owner, rows in enumerate(case.shards):
                for chunk, (start, end) in enumerate(chunk_ranges(rows, case.num_chunks)):
                    if end > start and (owner, chunk) not in seen and raised[owner][chunk]:
                        seen[owner, chunk] = staging[owner][start:end].cpu().clone()
            time.sleep(0)


def missing_chunk(case: Case, poison: int | None) -> tuple[dict[str, int], list[int], float, list[bool], list[bool]]:
    """A call whose last peer never comes. What the record says, the poison in all pads, the seconds it took, which row
    tiles have a result, and whether a reduce-scatter that follows announces anything."""
    kernel = case.module("all_gather_matmul")
    around = Surroundings(case)
    around.begin(case.first_epoch)
    signals = case.place(torch.full((len(case.shards) * case.num_chunks,), case.first_epoch, dtype=torch.int32))
    signals[-case.num_chunks :] = case.first_epoch - 1
    x, w = case.place(payload((case.rows, case.k), case.dtype, name="x")), weights(case, 0, "w")
    out, _ = padded(case.rows, case.n, case.dtype, device=case.device)
    if poison is not None:
        around.pads[case.rank][0] = poison + 1
    order = case.order("all_gather")
    launch = partial(
        kernel.all_gather_matmul, x, w, out, kernel.Arrivals(order, signals, around.group, 7), case.config()
    )
    launch(rehearsal=True)
    case.settle()
    start = time.perf_counter()
    launch()
    case.settle()
    seconds = time.perf_counter() - start
    done = [bool(out[row : row + rows].isfinite().all()) for row, rows in order[:, :2].tolist()]
    second = case.module("matmul_reduce_scatter")
    flags = case.place(torch.zeros(len(case.shards), case.num_chunks, dtype=torch.int32))
    width = -(-case.n // 64) * 64
    staging = case.place(torch.zeros(case.rows, width))
    second.matmul_reduce_scatter(x, w, second.Departures(
        case.order("reduce_scatter"), case.place(torch.full((len(case.shards),), staging.data_ptr())),
        case.place(torch.tensor([flag.data_ptr() for flag in flags])), case.place(torch.zeros(16, dtype=torch.int32)),
        around.group, torch.float32, width,
    ), case.config())  # fmt: skip
    case.settle()
    poisoned = [int(pad[0]) for pad in around.pads]
    return around.told(case), poisoned, seconds, done, flags.flatten().bool().tolist()
