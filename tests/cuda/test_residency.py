"""No grid that waits locks out what it waits for: on each of these GPUs, wherever the hardware puts its blocks.

Registers and shared memory are those of the built library, read from its machine code; no GPU is needed.  The rule that
cuts the grids is `tpkernels/backends/symmetric/residency.py`, and why it has these numbers stands in
csrc/cuda/README.md.  The grids that the library had before, and kernels of one warp with a few more registers, must
fail.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.builds import compiler
from tests.cuda import emulator
from tests.cuda.conftest import Resources
from tests.cuda.occupancy import LIMITS, Gpu, Kernel, Limits, least_room, room
from tpkernels.backends.symmetric.channels import MAX_LANES
from tpkernels.backends.symmetric.cuda_group import Group, Norm, OneShot
from tpkernels.backends.symmetric.cuda_native import PAD_BYTES, STATE_BYTES, Dtype, Library
from tpkernels.backends.symmetric.residency import NCCL_CTAS, gemm_programs, waiting_blocks
from tpkernels.backends.symmetric.tuning import Gemm

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
GPUS = (
    Gpu("A100", 80, 108, "NVIDIA A100 Tensor Core GPU Architecture, table of GA100 and A100"),
    Gpu("A40", 86, 84, "data sheet: 10,752 CUDA cores, 128 an SM (NVIDIA Ampere GA102 GPU Architecture)"),
    Gpu("L40S", 89, 142, "data sheet: 18,176 CUDA cores, 128 an SM"),
    Gpu("RTX 4090", 89, 128, "NVIDIA Ada GPU Architecture, table of the GeForce RTX 4090"),
    Gpu("H20", 90, 78, "no data sheet says it: what the driver reports, as published with Geekbench results"),
    Gpu("H100 PCIe", 90, 114, "NVIDIA H100 Tensor Core GPU Architecture, table of H100 PCIe"),
    Gpu("H100 SXM", 90, 132, "NVIDIA H100 Tensor Core GPU Architecture, table of H100 SXM5"),
    Gpu("H200", 90, 132, "data sheet: the compute of H100 SXM5"),
    Gpu("B200", 100, 148, "2 x 74 enabled of 2 x 80: what the driver reports"),
)
each_gpu = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)

# NCCL_MAX_NTHREADS and ncclShmemDynamicSize of src/include/device.h, -maxrregcount of makefiles/common.mk (NCCL 2.2x).
# Its static shared memory comes on top, and changes nothing: registers alone make it the only one of its kind on an SM.
NCCL = Kernel("a CTA of NCCL", threads=640, registers=96, shared=20 * 4112)
LANES = 2 * MAX_LANES  # side streams of a group's two channels: as many kernels of one warp may be wanted at once

# What the kernels are, so that a new one must be put somewhere: they wait with a grid, or are a single warp.
GRIDS = {"reduce", "all_reduce", "all_reduce_norm", "all_reduce_two_shot", "all_gather"}
ONE_WARP = {"begin_call", "end_call", "meet", "signal_chunk", "wait_chunk", "raise_flags", "relay"}


def whole_sm(limits: Limits) -> Kernel:
    """A block of somebody else, who wants all that an SM has."""
    return Kernel("a block that takes an SM", 512, limits.registers // 512, 1024 * (limits.shared_kib - 1))


# --- what the compiler gave the kernels -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def kernels(resources: Sequence[Resources]) -> Mapping[str, Mapping[str, list[Kernel]]]:
    """By architecture and name: each instance of a kernel in the library."""
    one_warp, of_a_call = _constant("sync.cu", "kOneWarp"), _constant("numbers.h", "kReduceThreads")
    threads = dict.fromkeys(ONE_WARP, one_warp) | dict.fromkeys(GRIDS, of_a_call)
    threads["reduce"] = _constant("reduce_kernel.h", "kSumThreads")
    found: dict[str, dict[str, list[Kernel]]] = {}
    for each in resources:
        kernel = Kernel(each.kernel, threads[each.kernel], each.registers, each.shared)
        found.setdefault(each.architecture, {}).setdefault(each.kernel, []).append(kernel)
    return found


def _constant(file: str, name: str) -> int:
    found = re.search(rf"\b{name} = (\d+);", (ROOT / "csrc" / "cuda" / file).read_text())
    assert found is not None, f"csrc/cuda/{file} has no {name} any more"
    return int(found[1])


def of(kernels: Mapping[str, Mapping[str, list[Kernel]]], gpu: Gpu, names: set[str]) -> list[Kernel]:
    """Those that run on a GPU: code for sm_80 runs on 8.6 and 8.9, that for sm_90a and sm_100a on the one kind."""
    code = kernels["sm_80" if gpu.capability < 90 else f"sm_{gpu.capability}a"]
    return [kernel for name in sorted(names) for kernel in code[name]]


def test_every_kernel_is_one_that_waits_with_a_grid_or_a_single_warp(
    kernels: Mapping[str, Mapping[str, list[Kernel]]],
) -> None:
    assert set(kernels) == {"sm_80", "sm_90a", "sm_100a"}
    for architecture in kernels.values():
        assert set(architecture) == GRIDS | ONE_WARP
        assert sum(map(len, architecture.values())) == len(ONE_WARP) + 18


# --- the rule ---------------------------------------------------------------------------------------------------------


@each_gpu
def test_beside_blocks_that_wait_there_is_room_for_nccl_and_for_somebody_elses_kernel(
    gpu: Gpu, kernels: Mapping[str, Mapping[str, list[Kernel]]]
) -> None:
    blocks = waiting_blocks(gpu.num_sms)
    for waiting in of(kernels, gpu, GRIDS):
        assert least_room(gpu, waiting, blocks, whole_sm(gpu.limits)) >= NCCL_CTAS + 1, waiting
        for warp in of(kernels, gpu, ONE_WARP):
            assert least_room(gpu, waiting, blocks, warp) >= LANES
            # NCCL and the other kernel have come, and taken what was free.
            assert room(gpu.limits, [waiting], warp) > 0 and NCCL_CTAS * room(gpu.limits, [NCCL], warp) >= LANES


def lanes_beside_a_gemm(gpu: Gpu, programs: int, warps: Sequence[Kernel]) -> int:
    """Kernels of one warp that find room, whatever part of NCCL's CTAs came before the GEMM.

    A CTA of the GEMM is taken to leave nothing of its SM, and CTAs for which there is no SM yet to take any that is
    left.
    """
    return min(
        (gpu.num_sms - nccl - min(programs, gpu.num_sms - nccl)) * room(gpu.limits, [], warp)
        + nccl * room(gpu.limits, [NCCL], warp)
        for nccl in range(NCCL_CTAS + 1)
        for warp in warps
    )


@each_gpu
def test_beside_a_gemm_that_waits_there_is_room_for_whoever_raises_its_flags(
    gpu: Gpu, kernels: Mapping[str, Mapping[str, list[Kernel]]]
) -> None:
    warps = of(kernels, gpu, ONE_WARP)
    assert lanes_beside_a_gemm(gpu, gemm_programs(gpu.num_sms, waits=True), warps) >= LANES
    # The faults: the one SM that was left before, and kernels that take the 40 registers which they took before.
    assert lanes_beside_a_gemm(gpu, gpu.num_sms - 1, warps) < LANES
    larger = [replace(warp, registers=40) for warp in warps]
    assert lanes_beside_a_gemm(gpu, gemm_programs(gpu.num_sms, waits=True), larger) == 0


@pytest.mark.parametrize(("num_sms", "blocks", "programs"), [(132, 96, 130), (78, 42, 76), (72, 36, 70), (20, 10, 18),
                                                             (4, 2, 2), (2, 1, 1), (1, 1, 1)])  # fmt: skip
def test_the_rule_leaves_the_same_on_every_large_gpu_and_half_of_a_small_one(
    num_sms: int, blocks: int, programs: int
) -> None:
    assert waiting_blocks(num_sms) == blocks
    assert gemm_programs(num_sms, waits=True) == programs
    assert gemm_programs(num_sms, waits=False) == max(1, num_sms - 1)


@pytest.mark.parametrize("gathers", [True, False])
def test_a_gemm_is_launched_with_no_more_than_the_rule_says(gathers: bool) -> None:
    device: Any = SimpleNamespace(capability=90, num_sms=132)
    found = Gemm(gathers, 8192, 3584, 4096, torch.bfloat16, 8).configure(device)
    assert found.num_programs == gemm_programs(132, waits=gathers)


# --- grids that are too large -----------------------------------------------------------------------------------------


def test_the_uncapped_grid_of_512_blocks_locks_out_the_kernels_that_would_end_its_waiting() -> None:
    """The reducer as it was: 512 blocks of 256 threads at 64 registers; kernels of one warp at 40."""
    warp, reducer = Kernel("wait_chunk", 32, 40), Kernel("reduce", 256, 64)
    locked_out, beside_nccl = set(), set()
    for gpu in GPUS:
        assert least_room(gpu, reducer, 512, NCCL) == 0, gpu.name
        if least_room(gpu, reducer, 512, warp) == 0:
            locked_out.add(gpu.name)
        taken = replace(gpu, num_sms=gpu.num_sms - NCCL_CTAS)  # by NCCL, beside which nothing of that size fits
        assert room(gpu.limits, [NCCL], warp) == room(gpu.limits, [NCCL], reducer) == 0
        if least_room(taken, reducer, 512, warp) == 0:
            beside_nccl.add(gpu.name)
    assert locked_out == {"A100", "A40", "RTX 4090", "H20", "H100 PCIe"}
    assert beside_nccl == {gpu.name for gpu in GPUS}


@each_gpu
def test_two_blocks_per_sm_would_leave_nccl_nothing(
    gpu: Gpu, kernels: Mapping[str, Mapping[str, list[Kernel]]]
) -> None:
    """Nor one block: half of the registers of every SM are free, and no CTA of NCCL fits into three quarters of one."""
    for threads, blocks in ((256, 2 * gpu.num_sms), (256, gpu.num_sms), (512, gpu.num_sms)):
        reducer = replace(max(of(kernels, gpu, {"reduce"}), key=lambda k: k.registers), threads=threads)
        assert least_room(gpu, reducer, blocks, NCCL) == 0
    assert room(gpu.limits, [], NCCL) == 1


# --- the arithmetic ---------------------------------------------------------------------------------------------------


def test_the_arithmetic_is_that_of_nvidias_occupancy_calculator(built: Path, tmp_path: Path) -> None:
    capabilities = sorted(LIMITS)
    cases = list(itertools.product(capabilities, (32, 64, 256, 512, 640, 1024), (8, 32, 33, 40, 64, 65, 96, 128, 168)))
    rows = ",".join(
        f"{{{c},{t},{r},{LIMITS[c].threads},{LIMITS[c].registers},{1024 * LIMITS[c].shared_kib}}}" for c, t, r in cases
    )
    source = tmp_path / "occupancy.cpp"
    source.write_text(
        '#include <cstdio>\n#include "cuda_occupancy.h"\n'
        f"const int cases[][6] = {{{rows}}};\n"
        "int main() { for (const auto& c : cases) {\n"
        "cudaOccDeviceProp gpu; cudaOccFuncAttributes kernel; cudaOccDeviceState state; cudaOccResult result;\n"
        "gpu.computeMajor = c[0] / 10; gpu.computeMinor = c[0] % 10; gpu.maxThreadsPerBlock = 1024;\n"
        "gpu.maxThreadsPerMultiprocessor = c[3]; gpu.regsPerBlock = gpu.regsPerMultiprocessor = c[4];\n"
        "gpu.warpSize = 32; gpu.sharedMemPerBlock = 49152; gpu.sharedMemPerMultiprocessor = c[5]; gpu.numSms = 1;\n"
        "gpu.sharedMemPerBlockOptin = c[5] - 1024; gpu.reservedSharedMemPerBlock = 1024;\n"
        "kernel.maxThreadsPerBlock = 1024; kernel.numRegs = c[2];\n"
        "const int bad = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &gpu, &kernel, &state, c[1], 0);\n"
        'std::printf("%d\\n", bad ? -bad : result.activeBlocksPerMultiprocessor); } }\n'
    )
    include = re.search(r"-I'?(\S+/include)'?\s", built.with_name("build.ninja").read_text())
    assert include is not None
    program = tmp_path / "occupancy"
    command = [compiler(), "-O0", f"-I{include[1]}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=60)
    told = subprocess.run([program], capture_output=True, text=True, check=True, timeout=60).stdout.split()
    found = [room(LIMITS[c], [], Kernel("any", t, r)) for c, t, r in cases]
    assert found == [int(count) for count in told] and len(set(found)) > 8


def test_blocks_of_different_kernels_share_the_quarters_of_an_sm() -> None:
    limits = LIMITS[90]
    assert room(limits, [NCCL], Kernel("one warp", 32, 32)) == 4  # 1024 of 16384 registers are left of each quarter
    assert room(limits, [NCCL], Kernel("one warp", 32, 33)) == 0
    assert room(limits, [NCCL], Kernel("two warps", 64, 32)) == 2
    assert room(limits, [Kernel("all threads", 1024, 32)] * 2, Kernel("one warp", 32, 8)) == 0
    assert room(limits, [Kernel("shared memory", 32, 8, 226 * 1024)], Kernel("one warp", 32, 8)) == 1
    assert room(LIMITS[86], [Kernel("a block", 32, 8)] * 15, Kernel("one warp", 32, 8)) == 1
    assert room(limits, [NCCL, NCCL], Kernel("one warp", 32, 8)) == 0  # that cannot be


def test_blocks_are_put_where_they_leave_least() -> None:
    """Against every way to put them."""
    gpu = Gpu("of three SMs", 90, 3, "")
    others = [Kernel("half", 512, 64), Kernel("a quarter", 256, 64), Kernel("most", 640, 96), Kernel("one", 1024, 8)]
    for waiting, blocks, kernel in itertools.product(others, range(14), others):
        most = room(gpu.limits, [], waiting)
        ways = [
            sum(room(gpu.limits, [waiting] * count, kernel) for count in counts)
            for counts in itertools.product(range(most + 1), repeat=gpu.num_sms)
            if sum(counts) == min(blocks, most * gpu.num_sms)
        ]
        assert least_room(gpu, waiting, blocks, kernel) == min(ways), (waiting, blocks, kernel)


# --- the launches -----------------------------------------------------------------------------------------------------


class LoneRank:
    """A group of one on the emulated runtime, and the blocks of what it launched last."""

    def __init__(self, library: Library, max_blocks: int) -> None:
        self._library = library
        self._memory = [torch.zeros(size, dtype=torch.uint8) for size in (PAD_BYTES, STATE_BYTES)]
        pad, state = (memory.data_ptr() for memory in self._memory)
        self._group = Group(library, rank=0, pads=[pad], state=state, timeout_s=5.0, max_blocks=max_blocks)
        self._x = torch.arange(40.0 * 24).reshape(40, 24)

    def _blocks(self, out: torch.Tensor) -> int:
        assert torch.equal(out, self._x) and self._group.failure() is None
        function = self._library._library.emulated_last_blocks
        function.restype = ctypes.c_uint
        count: int = function()
        return count

    def reduce(self) -> int:
        out = torch.full_like(self._x, torch.nan)
        self._group.reduce(
            op=1, part_dtype=Dtype.F32, parts=[self._x.data_ptr()], strides=[24], out=out.data_ptr(),
            out_dtype=Dtype.F32, out_stride=24, rows=40, columns=24, num_chunks=3, stream=0,
        )  # fmt: skip
        return self._blocks(out)

    def all_reduce(self, two_steps: bool = False) -> int:
        out, slot = torch.full_like(self._x, torch.nan), torch.zeros(2, *self._x.shape)
        self._group.all_reduce(
            OneShot(2, 0, 1, [slot.data_ptr()]), dtype=Dtype.F32, x=self._x.data_ptr(), out=out.data_ptr(), rows=40,
            columns=24, stream=0, two_steps=two_steps,
        )  # fmt: skip
        return self._blocks(out)

    def all_reduce_norm(self) -> int:
        out, slot, scales = torch.full_like(self._x, torch.nan), torch.zeros(2, *self._x.shape), torch.empty(40)
        more = [torch.ones_like(self._x) for _ in range(3)]
        self._group.all_reduce_norm(
            OneShot(2, 0, 1, [slot.data_ptr()]), Norm(*(one.data_ptr() for one in more), scales.data_ptr(), 1e-6),
            dtype=Dtype.F32, x=self._x.data_ptr(), out=out.data_ptr(), rows=40, columns=24, stream=0,
        )  # fmt: skip
        return self._blocks(out - 1)

    def all_reduce_two_shot(self) -> int:
        return self.all_reduce(two_steps=True)

    def all_gather(self) -> int:
        out, slot = torch.full_like(self._x, torch.nan), torch.zeros_like(self._x)
        self._group.all_gather(
            OneShot(3, 1, 1, [slot.data_ptr()]), element_bytes=4, x=self._x.data_ptr(), out=out.data_ptr(),
            counts=[40 * 24], stream=0,
        )  # fmt: skip
        return self._blocks(out)


# Blocks that there is work for: a strip of a row each, 256 bytes each, a row each.
LAUNCHES = {"reduce": 240, "all_reduce": 15, "all_reduce_norm": 40, "all_reduce_two_shot": 15, "all_gather": 15}


def test_no_launch_has_more_blocks_than_the_group_may_wait_with() -> None:
    library = Library(emulator.library())
    for name, wanted in LAUNCHES.items():
        for most in (1, 2, 7, 1000):
            assert getattr(LoneRank(library, most), name)() == min(most, wanted), name


def test_a_launch_that_does_not_ask_is_seen(full: bool) -> None:
    if not full:
        pytest.skip("--full: compiles the launches once more")
    uncapped = {
        "reduce.cu": {"a.group->max_blocks": "512"},
        "one_shot.cu": {"std::min(most, group.max_blocks)": "std::min(most, 1000 * group.max_blocks)"},
    }
    library = Library(emulator.library(uncapped))
    for name, wanted in LAUNCHES.items():
        assert getattr(LoneRank(library, 2), name)() == wanted, name
