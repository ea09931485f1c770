"""A GPU to measure on, and one rank of a group whose other ranks are not there.

Owns what all steps need: streams and pinned memory, the clock, tensors of random numbers, the judge of products. The
same code runs on an emulated GPU (tests/measure/one_gpu_on_cpu.py): what belongs to CUDA goes through `Lab`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu_steps.roofline import Card, card_of
from tpkernels.backends.symmetric import cuda_group, cuda_native
from tpkernels.backends.symmetric.cuda_native import Library
from tpkernels.backends.symmetric.residency import gemm_programs, waiting_blocks
from tpkernels.kernels import schedule
from tpkernels.kernels.config import GemmConfig, configure
from tpkernels.kernels.signals import group_table
from tpkernels.measure.timing import Measurement, measure
from tpkernels.testing.numeric import Bounded

CHECKED_ROWS = 128


@dataclass(frozen=True)
class Lab:
    device: torch.device
    library: Library
    capability: int
    num_sms: int
    card: Card  # what predictions are made from
    polls_per_second: float = 1e9  # in what kernels count; nanoseconds on a GPU
    repeats: int = 15

    @staticmethod
    def of_this_gpu() -> Lab:
        torch.cuda.set_device(0)
        properties = torch.cuda.get_device_properties(0)
        capability, num_sms = 10 * properties.major + properties.minor, properties.multi_processor_count
        card = card_of(properties.name, capability, num_sms)
        return Lab(torch.device("cuda", 0), cuda_native.load(), capability, num_sms, card)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream) if self.on_gpu else 0

    def settle(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def random(self, seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device).to(dtype)

    def pinned(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, pin_memory=self.on_gpu)

    def measure(self, candidates: dict[str, Callable[[], object]]) -> dict[str, Measurement]:
        return measure(candidates, repeats=self.repeats, warmup=2, device=self.device)

    def reserved_sms(self, *, waits: bool) -> int:
        return self.num_sms - gemm_programs(self.num_sms, waits=waits)

    def host_time(self, name: str, call: Callable[[], object]) -> Measurement:
        """What a call costs the host, which finds the device idle and waits for nothing."""
        samples = []
        for _ in range(self.repeats):
            self.settle()
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
        self.settle()
        return Measurement(name, tuple(samples))

    def configure(
        self, m: int, n: int, k: int, world_size: int, moved_columns: int, reserved_sms: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> GemmConfig:  # fmt: skip
        return configure(
            capability=self.capability, num_sms=self.num_sms, m=m, n=n, k=k, dtype=str(dtype).removeprefix("torch."),
            world_size=world_size, moved_row_bytes=dtype.itemsize * moved_columns,
            reserved_sms=min(reserved_sms, self.num_sms - 1),
        )  # fmt: skip


class LoneRank:
    """Rank 0 of `world_size`: its state, pads and flags, with which kernels run as in a group. Close it."""

    def __init__(self, lab: Lab, world_size: int, timeout_s: float = 10.0) -> None:
        self.lab, self.world_size, self.epoch = lab, world_size, 0
        self.pads = [self._words(cuda_native.PAD_BYTES // 8, torch.int64) for _ in range(world_size)]
        self.state = self._words(cuda_native.STATE_BYTES // 4, torch.int32)
        self.flags = self._words(world_size * cuda_native.MAX_CHUNKS, torch.int32)
        self.counters = torch.zeros_like(self.flags)
        pads = [pad.data_ptr() for pad in self.pads]
        self.group = cuda_group.Group(
            lab.library, rank=0, pads=pads, state=self.state.data_ptr(), timeout_s=timeout_s,
            max_blocks=waiting_blocks(lab.num_sms),
        )  # fmt: skip
        table = group_table(
            state=self.group.state, failure=self.group.failure_on_device,
            timeout_ns=int(timeout_s * lab.polls_per_second), rank=0, pads=pads,
        )  # fmt: skip
        self.table = torch.tensor(table).to(lab.device)
        lab.settle()

    def _words(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=self.lab.device)

    def next_call(self) -> None:
        """Begin a call, on the current stream: signals of the one before count no longer."""
        self.state[0].add_(1)
        self.epoch += 1

    def preset(self) -> None:
        """Everything has come."""
        self.flags.copy_(self.state[0].expand_as(self.flags))

    def order(self, which: str, shards: Sequence[int], config: GemmConfig, waits: bool = True) -> Tensor:
        """The table of row tiles; without `waits` every chunk is this rank's own, in the same order."""
        tiles = getattr(schedule, f"{which}_order")(tuple(shards), config.num_chunks, config.block_m, 0)
        if not waits:
            tiles = tuple(replace(tile, rank=0) for tile in tiles)
        table = torch.tensor(schedule.as_table(tiles), dtype=torch.int32).reshape(-1, schedule.FIELDS)
        return table.to(self.lab.device)

    def raise_if_failed(self) -> None:
        self.lab.settle()
        failure = self.group.failure()
        if failure is not None:
            raise RuntimeError(f"a kernel gave up: {failure}")

    def close(self) -> None:
        self.lab.settle()
        self.group.close()


def check_product(name: str, out: Tensor, a: Tensor, b: Tensor, rows: Tensor | None = None) -> None:
    """Raise unless `out`, or its `rows`, is a b^T in bf16, within the fp64 bound; a sample of the rows where many."""
    count = a.shape[0]
    checked = rows if rows is not None else torch.linspace(0, count - 1, min(count, CHECKED_ROWS)).long()
    picked = checked.to(a.device)
    bound = Bounded.sum_of_products([a[picked]], [b], dtype=out.dtype).rounded(out.dtype)
    bound.check(out[checked.to(out.device)], name)
