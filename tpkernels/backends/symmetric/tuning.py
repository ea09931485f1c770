"""Tile sizes of ``symmetric``'s GEMMs: what ranks' caches know, what they measure on request, and their one choice.

:func:`agree` runs when a signature is new to a group.  Every rank says what its cache has for the GEMM; all take the
entry of the lowest rank that has one which this kind of GPU can run.  Where none has, and ``TPKERNELS_TUNE=1`` asks for
it, every rank measures the same candidates and all take those that are fastest on the slowest rank.  Else the pure
function of :mod:`tpkernels.kernels.config` stays, and this module returns None.

What is measured is the GEMM with what follows it (scales, a bias, the activation; preactivations are not kept), with
every chunk there: tile sizes, not overlap.  The number of chunks follows from the tiles by the pure function, which
knows waves.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tpkernels import config
from tpkernels.backends.symmetric import tile_cache
from tpkernels.backends.symmetric.cuda_native import MAX_CHUNKS, STATE_BYTES
from tpkernels.backends.symmetric.memory import Device
from tpkernels.backends.symmetric.residency import gemm_programs
from tpkernels.backends.symmetric.resource import channels_of
from tpkernels.backends.symmetric.tile_cache import Entry
from tpkernels.comm import agreement
from tpkernels.comm.groups import Group
from tpkernels.dispatch import Problem
from tpkernels.errors import GroupMismatch, UnsupportedProblem
from tpkernels.gemm import fp8
from tpkernels.kernels.config import GemmConfig, Tiles, candidates, configure
from tpkernels.ops.contract import GATED
from tpkernels.partition import Layout

__all__ = ["FP8_CAPABILITY", "Gemm", "agree", "gemm_of", "tiles_of_blocks"]

ROUNDS = 7  # the first one compiles and warms up
FP8_CAPABILITY = 89


@dataclass(frozen=True)
class Gemm:
    """One rank's GEMM in a fused call, in numbers that are equal on all ranks: m rows over all of them.

    n: columns of the result; a gated activation has two weights of so many.
    """

    gathers: bool
    m: int
    n: int
    k: int
    dtype: torch.dtype
    world_size: int
    out_dtype: torch.dtype | None = None
    activation: str | None = None

    @property
    def result_dtype(self) -> torch.dtype:
        return self.out_dtype or self.dtype

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def moved_row_bytes(self) -> int:
        return self.k * self.dtype.itemsize if self.gathers else self.n * self.result_dtype.itemsize

    @property
    def allows_tf32(self) -> bool:
        """As torch's own products do now; it may change from call to call."""
        return self.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"

    def configure(self, device: Device, *, tiles: Tiles | None = None, pointers: bool = False) -> GemmConfig:
        """The pure function's answer, or what follows from measured ``tiles``."""
        return _configure(self, device.capability, device.num_sms, tiles, pointers, self.allows_tf32)

    def refusal(self, device: Device, tiles: Tiles) -> str | None:
        return tiles.refusal(device.capability, _name(self.dtype), self.gated)


@lru_cache(maxsize=1024)
def _configure(
    gemm: Gemm, capability: int, num_sms: int, tiles: Tiles | None, pointers: bool, allow_tf32: bool
) -> GemmConfig:
    return configure(
        capability=capability, num_sms=num_sms, m=gemm.m, n=gemm.n, k=gemm.k, dtype=_name(gemm.dtype),
        world_size=gemm.world_size, moved_row_bytes=gemm.moved_row_bytes, dual=gemm.gated, pointers=pointers,
        allow_tf32=allow_tf32, reserved_sms=num_sms - gemm_programs(num_sms, waits=gemm.gathers), tiles=tiles,
    )  # fmt: skip


def gemm_of(problem: Problem) -> Gemm:
    """The GEMM of a problem, as the rank with the largest part of the weight computes it."""
    size, gathers = problem.world_size, problem.facts.gathers
    n, k = (problem.n // size, problem.k) if gathers else (problem.n, -(-problem.k // size))
    n = n // 2 if problem.activation in GATED else n
    return Gemm(gathers, problem.m, n, k, problem.dtype, size, problem.out_dtype, problem.activation)


def tiles_of_blocks(problem: Problem, device: Device) -> Tiles:
    """With ``same_bits``: the tiles of a rank of the largest degree, which every degree takes.

    They are those for operands that are read through pointers: whether descriptors fit depends on the degree.

    Raises:
        UnsupportedProblem: the operands are fp8, and the GPU has no tensor cores for them; all ranks have such GPUs.
    """
    if problem.out_dtype is not None and device.capability < FP8_CAPABILITY:
        raise UnsupportedProblem(
            f"fp8 operands with same_bits={problem.same_bits} need GPUs of capability 8.9, these have "
            f"{device.capability / 10}: the library's GEMM, which computes without, is not proven to give the same bits"
        )
    return gemm_of(replace(problem, world_size=problem.same_bits)).configure(device, pointers=True).tiles


def agree(group: Group, call: int, gemm: Gemm, layout: Layout) -> Tiles | None:
    """Tiles that all ranks take, or None: the pure function's.  Collective.

    Raises:
        GroupMismatch: ``TPKERNELS_TUNE`` differs between ranks.
        UnsupportedProblem: tiles would have to be measured while a graph is captured.
        GroupMismatch, PeerLost, CollectiveTimeout: a rank did not come.
    """
    device, tunes = channels_of(group).device, config.load().tune
    cache, key = tile_cache.opened(), key_of(gemm, device)
    mine = None if cache is None else cache.find(key)
    facts = {"cached": None if mine is None else mine.to_json(), "tunes": tunes}
    records = agreement.exchange_records(group, call, agreement.Record("tiles", facts), part="tiles")
    asked = [record.facts["tunes"] for record in records]
    if len(set(asked)) > 1:
        raise GroupMismatch(f"rank {group.rank}, call {call}: TPKERNELS_TUNE differs between ranks: {asked}")
    for record in records:
        found = _runnable(record.facts["cached"], gemm, device)
        if found is not None:
            return found.tiles
    if not tunes:
        return None
    if device.capturing():
        raise UnsupportedProblem(
            "TPKERNELS_TUNE=1: tiles cannot be measured while a CUDA graph is captured: make this call once before"
        )
    entry = _measured_together(group, call, gemm, layout, device)
    if entry is not None and cache is not None:
        cache.add(key, entry)
    return None if entry is None else entry.tiles


def key_of(gemm: Gemm, device: Device) -> str:
    """What a measurement depends on."""
    import triton

    result = "" if gemm.out_dtype is None else f" -> {_name(gemm.out_dtype)}"
    return (
        f"{device.name}; triton {triton.__version__}; {'gather' if gemm.gathers else 'scatter'} m={gemm.m} n={gemm.n} "
        f"k={gemm.k} {_name(gemm.dtype)}{result} world={gemm.world_size}{' tf32' if gemm.allows_tf32 else ''}"
        f"{f' {gemm.activation}' if gemm.activation else ''}"
    )


def _runnable(said: Any, gemm: Gemm, device: Device) -> Entry | None:
    """A rank's entry, if this kind of GPU can run it: judged alike on every rank."""
    if said is None:
        return None
    try:
        entry = Entry.from_json(said)
    except ValueError:  # of a rank whose code is not ours
        return None
    return entry if gemm.refusal(device, entry.tiles) is None else None


def _measured_together(group: Group, call: int, gemm: Gemm, layout: Layout, device: Device) -> Entry | None:
    """What is fastest on the slowest rank; None if every candidate failed somewhere."""
    usual = gemm.configure(device).tiles
    tried = candidates(usual, capability=device.capability, dtype=_name(gemm.dtype), dual=gemm.gated)
    with device.current():
        times = _measure(gemm, layout, device, group.rank, tried)
    records = agreement.exchange_records(group, call, agreement.Record("tile times", {"us": times}), part="tile times")
    by_rank = [record.facts["us"] for record in records]
    slowest = [None if None in column else max(column) for column in zip(*by_rank, strict=True)]
    able = [(us, place) for place, us in enumerate(slowest) if us is not None]
    if not able:
        return None
    us, place = min(able)
    return Entry(tried[place], us)


def _measure(gemm: Gemm, layout: Layout, device: Device, rank: int, tried: Sequence[Tiles]) -> list[float | None]:
    """Median microseconds of each on this rank, in turns; None where it does not compile, or memory is lacking."""
    failures: tuple[type[Exception], ...] = (torch.OutOfMemoryError, *_compiler_errors())
    times: list[list[float]] = [[] for _ in tried]
    failed: set[int] = set()
    try:
        bench = _Bench(gemm, layout, device, rank)
    except failures:
        return [None] * len(tried)
    for _ in range(ROUNDS):
        for place, tiles in enumerate(tried):
            if place in failed:
                continue
            try:
                times[place].append(device.time_us(bench.launch(tiles)))
            except failures:
                failed.add(place)
    return [None if place in failed else statistics.median(times[place][1:]) for place in range(len(tried))]


class _Bench:
    """The GEMM on memory of its own, with every chunk there: the call is number 0, and so are all signals."""

    def __init__(self, gemm: Gemm, layout: Layout, device: Device, rank: int) -> None:
        from tpkernels.kernels.signals import group_table

        self._gemm, self._layout, self._device, self._rank = gemm, layout, device, rank
        self._x, self._scale = self._random(gemm.m, gemm.k), None
        self._weights = [self._random(gemm.n, gemm.k) for _ in range(2 if gemm.gated else 1)]
        if gemm.dtype == fp8.DTYPE:
            scale = device.empty((gemm.m, 1), torch.float32).fill_(1.0)
            packed = fp8.split(fp8.pack(self._x, scale), (gemm.k,))[0] if gemm.gathers else fp8.Scaled(self._x, scale)
            self._x, self._scale = packed.numbers, packed.scale  # as far apart as in a call
        self._of_columns = device.empty((gemm.n,), torch.float32).fill_(1.0)
        self._out = device.empty((gemm.m * gemm.n + 16 * gemm.world_size,), gemm.result_dtype)
        per_chunk = gemm.world_size * MAX_CHUNKS
        self._zeros = device.empty((STATE_BYTES + 2 * per_chunk,), torch.int32).zero_()
        self._counters, self._flags = self._zeros[STATE_BYTES:].split(per_chunk)
        zero = self._zeros.data_ptr()
        pads = [zero] * gemm.world_size
        table = group_table(state=zero, failure=zero, timeout_ns=device.patience(1.0), rank=rank, pads=pads)
        self._table = device.upload(table, torch.int64)

    def launch(self, tiles: Tiles) -> Callable[[], None]:
        settings = self._gemm.configure(self._device, tiles=tiles)
        return self._gather(settings) if self._gemm.gathers else self._scatter(settings)

    def _random(self, rows: int, columns: int) -> Tensor:
        """Numbers as they occur: on zeros a GPU draws less power, and is faster."""
        return self._device.empty((rows, columns), torch.bfloat16).normal_().to(self._gemm.dtype)

    def _order(self, make: Callable[..., Any], settings: GemmConfig) -> Tensor:
        from tpkernels.kernels import schedule

        table = schedule.as_table(make(self._layout, settings.num_chunks, settings.block_m, self._rank))
        return self._device.upload(table, torch.int32).reshape(-1, schedule.FIELDS)

    def _gather(self, settings: GemmConfig) -> Callable[[], None]:
        from tpkernels.kernels import all_gather_matmul as kernel
        from tpkernels.kernels.schedule import all_gather_order

        order = self._order(all_gather_order, settings)
        arrivals = kernel.Arrivals(order=order, signals=self._flags, group=self._table, op=0)
        out = self._out[: self._gemm.m * self._gemm.n].view(self._gemm.m, self._gemm.n)
        scale = None if self._scale is None else self._of_columns
        bias = self._of_columns.to(self._gemm.result_dtype)
        settled: dict[str, Any] = {
            "activation": self._gemm.activation or "none", "bias": bias, "scale_whole": self._scale,
            "scale_weight": scale,
        }  # fmt: skip
        if self._gemm.gated:
            settled |= {"weight_up": self._weights[1], "bias_up": bias, "scale_weight_up": scale}

        def launch() -> None:
            kernel.all_gather_matmul(self._x, self._weights[0], out, arrivals, settings, **settled)

        return launch

    def _scatter(self, settings: GemmConfig) -> Callable[[], None]:
        from tpkernels.kernels import matmul_reduce_scatter as kernel
        from tpkernels.kernels.schedule import reduce_scatter_order

        device, size = self._device, self._gemm.world_size
        row_bytes, start, starts = self._gemm.n * self._out.element_size(), self._out.data_ptr(), []
        for owner in range(size):
            starts.append(start)
            start += -(-self._layout.shard_rows(owner) * row_bytes // 16) * 16
        departures = kernel.Departures(
            order=self._order(reduce_scatter_order, settings), staging=device.upload(starts, torch.int64),
            signals=device.upload([self._flags.data_ptr()] * size, torch.int64), counters=self._counters,
            group=self._table, staging_dtype=self._gemm.result_dtype, staging_stride=self._gemm.n,
        )  # fmt: skip
        scale = None if self._scale is None else self._of_columns

        def launch() -> None:
            kernel.matmul_reduce_scatter(
                self._x, self._weights[0], departures, settings, scale_x=self._scale, scale_weight=scale
            )

        return launch


def _compiler_errors() -> tuple[type[Exception], ...]:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return CompilationError, OutOfResources, PTXASError


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
