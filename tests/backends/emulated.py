"""An emulated GPU per rank: `symmetric` itself, its Triton kernels and its CUDA source, as W processes on CPU tensors.

Owns `EmulatedDevice`, which stands where `CudaDevice` does: the library is `csrc/cuda` under g++
(tests/cuda/emulator.py), symmetric memory is files that all ranks map, the current stream is the calling thread, side
streams are threads. Triton kernels run in the interpreter, which is chosen when triton is imported: by
`TRITON_INTERPRET` in the rank's environment.

What it can not show: anything of the GPU's own (PTX, TMA, the memory model, copy engines, CUDA graphs), and hosts that
run ahead of the current stream, except ahead of a GEMM.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import tpkernels as tpk
from tests.ops.support import _write_environment
from tpkernels.backends.pools import outside_of_pools
from tpkernels.backends.symmetric import channels as symmetric_channels
from tpkernels.backends.symmetric import implementations as symmetric
from tpkernels.backends.symmetric.channels import SymmetricChannels
from tpkernels.backends.symmetric.cuda_native import Library
from tpkernels.backends.symmetric.memory import Allocation
from tpkernels.backends.symmetric.resource import SymmetricMemory, channels_of
from tpkernels.comm import agreement
from tpkernels.comm.groups import Group, resolve

POLLS_PER_SECOND = 5000  # of an interpreted kernel, about


class EmulatedDevice:
    kind, name = "cpu", "an emulated GPU"
    num_sms = 4

    def __init__(self, group: Group, settings: Emulation) -> None:
        self.library, self.capability = Library(Path(settings.library)), settings.capability
        self._group, self._folder, self._allocations = group, Path(settings.folder), 0
        self._multicasts = settings.multicast
        self.library._library.emulated_late(group.rank, settings.late_us)
        self._kernels = ThreadPoolExecutor(1)
        self._warming: int | None = None
        self._in_pool: list[tuple[str, StorageWeakRef]] = []
        self._launched: list[Future[None]] = []

    def allocate(self, num_bytes: int) -> Allocation:
        group, self._allocations = self._group, self._allocations + 1
        assert group.key is not None
        name = f"{group.key.replace('/', '-')}-{self._allocations}"

        def mapped(rank: int) -> Tensor:
            return torch.from_file(str(self._folder / f"{name}-{rank}"), shared=True, size=num_bytes, dtype=torch.uint8)

        local = mapped(group.rank)  # made, and of zeros
        self._meet("made")
        addresses = [local if rank == group.rank else mapped(rank) for rank in range(group.size)]
        self._meet("mapped")
        (self._folder / f"{name}-{group.rank}").unlink()
        table = tuple(memory.data_ptr() for memory in addresses)
        return Allocation(local, table, self._multicast(num_bytes, table), handle=addresses)

    def _multicast(self, num_bytes: int, addresses: Sequence[int]) -> int:
        if not self._multicasts:
            return 0
        emulated = self.library._library.emulated_multicast
        emulated.argtypes, emulated.restype = (ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int), ctypes.c_void_p
        found: int | None = emulated(num_bytes, (ctypes.c_void_p * len(addresses))(*addresses), len(addresses))
        assert found is not None, "no window is left"
        return found

    def _meet(self, step: str) -> None:
        record = agreement.Record("emulated memory", {})
        agreement.exchange_records(self._group, 0, record, part=f"emulated/{self._allocations}/{step}")

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def order(self) -> None:
        """There is one stream."""

    def stream(self) -> int:
        """The caller's thread, behind the GEMMs: whoever asks enqueues something that comes after them."""
        launched, self._launched = self._launched, []
        for kernel in launched:
            kernel.result()
        return 0

    def launch(self, kernel: Callable[[], None]) -> None:
        self._launched.append(self._kernels.submit(kernel))

    def synchronize(self) -> None:
        self.stream()

    def time_us(self, kernel: Callable[[], None]) -> float:
        start = time.perf_counter()
        kernel()
        return 1e6 * (time.perf_counter() - start)

    def capturing(self) -> bool:
        return False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._taken(torch.empty(tuple(shape), dtype=dtype))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return outside_of_pools(lambda: self._taken(torch.zeros(tuple(shape), dtype=dtype)))

    def upload(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        return outside_of_pools(lambda: self._taken(torch.tensor(values, dtype=dtype)))

    def _taken(self, made: Tensor) -> Tensor:
        if self._warming == threading.get_ident():
            self._in_pool.append((f"{made.dtype}{list(made.shape)}", StorageWeakRef(made.untyped_storage())))
        return made

    @contextmanager
    def warming_up(self) -> Iterator[list[str]]:
        """What "reduce-overhead" does at a function's first run: this thread's memory is of the graph's pool.

        Yields a list that afterwards says what of it still lives, and that the graph's next run will write over.
        """
        found: list[str] = []
        self._warming = threading.get_ident()
        try:
            yield found
        finally:
            self._warming = None
        self.synchronize()
        gc.collect()
        found += [text for text, storage in self._in_pool if not storage.expired()]
        self._in_pool.clear()

    def patience(self, timeout_s: float) -> int:
        return int(timeout_s * POLLS_PER_SECOND)


@dataclass(frozen=True)
class Emulation:
    """What the ranks of a test are told.

    library, folder: of tests/cuda/emulator.py; where memory is mapped from. fuse_from_rows, one_shot_bytes,
    two_shot_bytes: thresholds of the backend, by default such that tiny calls take the ways of large ones. late_us: how
    late tasks of side streams may be. most_lanes: side streams of a channel; peers share them when they are fewer.
    multicast: whether a store can reach all ranks. checks: whether the first call of a kind is preceded by one whose
    answer is known. stream_writes: or kernels raise the flags of arrived chunks.
    """

    library: str
    folder: str
    num_chunks: int | None = None
    fuse_from_rows: int = 1
    one_shot_bytes: int = 0
    two_shot_bytes: int = 0
    timeout: float = 60.0
    late_us: int = 0
    capability: int = 80
    most_lanes: int = 4
    multicast: bool = False
    checks: bool = False
    stream_writes: bool = True

    @contextmanager
    def group(self) -> Iterator[Any]:
        """A new group of all ranks that has symmetric memory; raises what its kernels have left unsaid."""
        own = {
            "FUSE_FROM_ROWS": self.fuse_from_rows, "ONE_SHOT_BYTES": self.one_shot_bytes,
            "TWO_SHOT_BYTES": self.two_shot_bytes,
        }  # fmt: skip
        thresholds = {name: getattr(symmetric, name) for name in own}
        vars(symmetric).update(own)
        chunks = None if self.num_chunks is None else str(self.num_chunks)
        writes = None if self.stream_writes else "0"
        _write_environment(
            {"TPKERNELS_NUM_CHUNKS": chunks, "TPKERNELS_CALIBRATE": "0", "TPKERNELS_STREAM_WRITES": writes}
        )
        made = dist.new_group(timeout=timedelta(seconds=self.timeout))
        try:
            tpk.all_reduce(torch.zeros(1), made, implementation="unfused")  # the ranks meet
            group = resolve(made)
            agreement.meet(group, 0, torch.device("cpu"))  # one rank has not met itself yet
            with mock.patch.object(symmetric_channels, "MAX_LANES", self.most_lanes):
                channels = SymmetricChannels(group, EmulatedDevice(group, self))
            channels.checks_first_use = self.checks
            group.resources[SymmetricMemory.name] = SymmetricMemory(channels)
            yield made
            if group.poison is None:
                channels.check()
            channels.close()
        finally:
            vars(symmetric).update(thresholds)
            names = ("TPKERNELS_NUM_CHUNKS", "TPKERNELS_CALIBRATE", "TPKERNELS_STREAM_WRITES")
            _write_environment(dict.fromkeys(names))
            dist.destroy_process_group(made)


def give_up_after(made: Any, seconds: float) -> None:
    """From now on the group's kernels wait no longer; its ranks still have the group's own time to meet.

    A short time-out of the whole group would end kernels that only wait for a rank that has no core just now: what
    they leave is void, and a test that compares it fails.
    """
    channels = channels_of(resolve(made))
    for channel in (channels.main, channels.side):
        channel.timeout_s, channel.group._group.timeout_ns = seconds, int(1e9 * seconds)
        channel._remembered.pop("group table", None)
