"""The library of the CUDA kernels: built, loaded on any machine, and clear about what is missing.

nvcc compiles for sm_80, sm_90a and sm_100a and fails on a spilled register; that needs no GPU.
"""

from __future__ import annotations

import ctypes
import re
import runpy
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda.conftest import Resources, cuobjdump
from tpkernels import errors
from tpkernels.backends.symmetric import cuda_group, cuda_native
from tpkernels.backends.symmetric.cuda_group import Failure, Norm, OneShot
from tpkernels.backends.symmetric.cuda_native import Chunk, CudaError, Dtype, Kind
from tpkernels.gemm import native

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
HEADER = (ROOT / "csrc" / "cuda" / "launch.h").read_text()
KERNELS = {
    "begin_call",
    "end_call",
    "meet",
    "signal_chunk",
    "wait_chunk",
    "raise_flags",
    "relay",
    "reduce",
    "all_reduce",
    "all_reduce_norm",
    "all_reduce_two_shot",
    "all_gather",
}
ARCHITECTURES = {"sm_80", "sm_90a", "sm_100a"}
NO_GPU_ERRORS = (35, 100)  # no driver (or an old one), no device


# --- building with nvcc -----------------------------------------------------------------------------------------------


def test_every_kernel_compiles_for_every_architecture_without_spilling(resources: Sequence[Resources]) -> None:
    found = {(each.kernel, each.architecture) for each in resources}
    assert found == {(kernel, architecture) for kernel in KERNELS for architecture in ARCHITECTURES}
    assert {(each.stack, each.local) for each in resources} == {(0, 0)}


def test_the_record_names_the_architectures_that_the_library_has(built: Path) -> None:
    tool = cuobjdump()
    record = native.build_record(built.with_name("_cuda_build.json"))
    assert record is not None and record.built and record.dropped == ()
    found = {
        option: subprocess.run([tool, option, built], capture_output=True, text=True, check=True, timeout=60).stdout
        for option in ("-lelf", "-lptx")
    }
    code = {f"sm_{name}" for name in re.findall(r"\.sm_(\w+)\.cubin", found["-lelf"])}
    ptx = {f"compute_{name}" for name in re.findall(r"\.sm_(\w+)\.ptx", found["-lptx"])}
    assert code == ARCHITECTURES and ptx == {"compute_80"} and set(record.architectures) == code | ptx


@pytest.mark.usefixtures("built")  # skips where there is no nvcc
def test_a_kernel_that_spills_fails_the_build(tmp_path: Path) -> None:
    """The flags of setup.py on a kernel that indexes an array that no register can hold."""
    facts = runpy.run_path(str(ROOT / "setup.py"))
    source = tmp_path / "spills.cu"
    source.write_text(
        "__global__ void spills(int* p, int n) { int a[64]; for (int i = 0; i < 64; ++i) a[i] = p[i] * n;"
        " for (int i = 0; i < n; ++i) a[p[i] & 63] += a[i & 63]; for (int i = 0; i < 64; ++i) p[i] = a[i]; }"
    )
    flags = [*facts["CUDA_FLAGS"], "-gencode=arch=compute_80,code=sm_80"]
    command = [facts["find_nvcc"]().program, *flags, "-c", str(source), "-o", str(tmp_path / "o")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "Local memory used" in done.stdout + done.stderr


def test_the_library_needs_no_cuda_to_load_and_exports_its_interface_alone(built: Path) -> None:
    tool = shutil.which("nm")
    if tool is None:
        pytest.skip("needs nm (binutils)")
    listed = subprocess.run([tool, "-D", "--defined-only", str(built)], capture_output=True, text=True, timeout=60)
    exported = {line.split()[-1] for line in listed.stdout.splitlines()}
    declared = set(re.findall(r"^[a-z_0-9* ]+?\b(tpk_\w+)\(", HEADER, re.MULTILINE))
    assert exported == declared and len(declared) > 15
    needed = subprocess.run(["ldd", str(built)], capture_output=True, text=True, timeout=60).stdout
    assert "cuda" not in needed.replace("_cuda.so", "") and "torch" not in needed


# --- the interface ----------------------------------------------------------------------------------------------------


def test_python_and_c_agree_on_constants_and_structures(tmp_path: Path) -> None:
    names = {"ABI": "TPK_CUDA_ABI"} | {
        name: f"TPK_{name}"
        for name in ("MAX_RANKS", "MAX_CHUNKS", "SLOTS", "PAD_BYTES", "STATE_BYTES", "STATE_RAISED_OFFSET",
                     "STATE_FAILED_OFFSET", "FLAG_RAISED")
    }  # fmt: skip
    structures: Mapping[str, type[ctypes.Structure]] = {
        "tpk_group": cuda_native.GroupRecord, "tpk_chunk": Chunk, "tpk_failure": cuda_native.FailureRecord,
        "tpk_one_shot": cuda_native.OneShotRecord, "tpk_call": cuda_native.CallRecord,
        "tpk_norm": cuda_native.NormRecord,
    }  # fmt: skip
    values = [(f"(long){macro}", getattr(cuda_native, name)) for name, macro in names.items()]
    values += [(f"(long)TPK_{dtype.name}", int(dtype)) for dtype in Dtype]
    values += [(f"(long)TPK_{kind.name}", int(kind)) for kind in Kind]
    values += [(f"(long)TPK_RAISE_{how.name}", int(how)) for how in cuda_native.Raise]
    values += [(f"(long)TPK_{step.name}", int(step)) for step in cuda_native.Steps]
    for struct, mirror in structures.items():
        values.append((f"(long)sizeof({struct})", ctypes.sizeof(mirror)))
        for name, *_ in mirror._fields_:
            values.append((f"(long)offsetof({struct}, {name})", getattr(mirror, name).offset))
    prints = "".join(f'printf("%ld\\n", {expression});' for expression, _ in values)
    tmp_path.joinpath("sizes.c").write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "cuda/launch.h"\nint main(void) {{ {prints} }}'
    )
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C compiler")
    program = str(tmp_path / "sizes")
    command = [compiler, f"-I{ROOT / 'csrc'}", str(tmp_path / "sizes.c"), "-o", program]
    subprocess.run(command, check=True, timeout=60)
    found = subprocess.run([program], capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert [int(value) for value in found] == [value for _, value in values]


class NoDevice:
    """A group whose addresses are never followed: either an argument is refused, or there is no GPU."""

    def __init__(self, library: cuda_native.Library, world_size: int = 2, **fields: Any) -> None:
        self.memory = ctypes.create_string_buffer(4096)
        address = (ctypes.addressof(self.memory) + 255) & ~255
        pads = (ctypes.c_void_p * 64)(*[address] * 64)
        values = {"rank": 0, "world_size": world_size, "pads": pads, "state": address, "failure": address}
        values |= {"max_blocks": 3} | fields
        self.group = cuda_group.Group.__new__(cuda_group.Group)
        self.group._library, self.group._group = library, cuda_native.GroupRecord(**values)
        self.group._failure_address, self.group.world_size = None, world_size
        self.address = address


CALLS: Mapping[str, Callable[[cuda_group.Group, int], None]] = {
    "begin": lambda group, a: group.begin(op=1, slot=0, fingerprint=1, stream=0),
    "end": lambda group, a: group.end(op=1, stream=0),
    "barrier": lambda group, a: group.barrier(op=1, fingerprint=1, stream=0),
    "signal": lambda group, a: group.signal(chunk=0, peers=2, stream=0),
    "wait": lambda group, a: group.wait(op=1, chunk=0, peers=2, stream=0),
    "raise_flag": lambda group, a: group.raise_flag(a, stream=0),
    "wait_flag": lambda group, a: group.wait_flag(a, op=1, chunk=0, stream=0),
    "reduce": lambda group, a: group.reduce(
        op=1, part_dtype=Dtype.F32, parts=[a, a], strides=[8, 8], out=a, out_dtype=Dtype.BF16, out_stride=8, rows=1,
        columns=8, stream=0),
    "all_reduce": lambda group, a: group.all_reduce(
        OneShot(1, 0, 1, [a, a]), dtype=Dtype.F16, x=a, out=a, rows=1, columns=8, stream=0),
    "all_reduce_norm": lambda group, a: group.all_reduce_norm(
        OneShot(1, 0, 1, [a, a]), Norm(a, a, a, a, 1e-6), dtype=Dtype.F16, x=a, out=a, rows=1, columns=8, stream=0),
    "all_reduce_two_shot": lambda group, a: group.all_reduce(
        OneShot(1, 0, 1, [a, a]), dtype=Dtype.F16, x=a, out=a, rows=1, columns=8, stream=0, two_steps=True),
    "all_gather": lambda group, a: group.all_gather(
        OneShot(1, 0, 1, [a, a], a), element_bytes=2, x=a, out=a, counts=[8, 0], stream=0),
}  # fmt: skip

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: the pointers are not real")


@needs_no_gpu
@pytest.mark.parametrize("name", CALLS)
def test_a_launch_without_a_gpu_says_so(library: cuda_native.Library, name: str) -> None:
    nobody = NoDevice(library)
    with pytest.raises(CudaError, match=rf"tpk_{name}: CUDA error (35|100) \(.+\): .*`tpkernels doctor`") as caught:
        CALLS[name](nobody.group, nobody.address)
    assert caught.value.code in NO_GPU_ERRORS


@needs_no_gpu
def test_what_allocates_says_so_as_well(library: cuda_native.Library) -> None:
    for make in (
        lambda: cuda_group.Group(library, rank=0, pads=[256], state=256, timeout_s=1.0, max_blocks=3),
        lambda: cuda_group.Pipeline(library, 2),
        library.device_count,
        library.has_write_value,
    ):
        with pytest.raises(CudaError, match=r"CUDA error (35|100) "):
            make()


REFUSALS: Mapping[str, tuple[dict[str, Any], Callable[[cuda_group.Group, int], None], str]] = {
    "world size": ({"world_size": 65}, CALLS["begin"], r"tpk_begin: world_size \(65\) must be from 1 to 64"),
    "rank": ({"rank": 2}, CALLS["signal"], r"rank \(2\) must be from 0 to 1"),
    "no block": ({"max_blocks": 0}, CALLS["reduce"], r"max_blocks \(0\) must be from 1 to 2147483647"),
    "state": ({"state": 8}, CALLS["barrier"], r"state \(0x8\) is NULL or not aligned to 16"),
    "slot": ({}, lambda g, a: g.begin(op=1, slot=2, fingerprint=0, stream=0), r"slot \(2\) must be from 0 to 1"),
    "chunk": ({}, lambda g, a: g.signal(chunk=64, peers=1, stream=0), r"chunk \(64\) must be from 0 to 63"),
    "dtypes": (
        {},
        lambda g, a: g.reduce(
            op=1, part_dtype=Dtype.BF16, parts=[a, a], strides=[8, 8], out=a, out_dtype=Dtype.F16, out_stride=8,
            rows=1, columns=8, stream=0),
        r"part_dtype \(1\) and out_dtype \(2\) must be equal, or one of them fp32",
    ),
    "parts": (
        {},
        lambda g, a: g.reduce(
            op=1, part_dtype=Dtype.F32, parts=[a], strides=[8, 8], out=a, out_dtype=Dtype.F32, out_stride=8, rows=1,
            columns=8, stream=0),
        r"parts has 1 entries, one per rank \(2\)",
    ),
    "slots": (
        {},
        lambda g, a: g.all_reduce(
            OneShot(1, 0, 0, [a, a + 4]), dtype=Dtype.F32, x=a, out=a, rows=1, columns=8, stream=0),
        r"slots\[1\] \(0x\w+\) is NULL or not aligned to 16",
    ),
    "multicast": (
        {},
        lambda g, a: g.all_reduce(
            OneShot(1, 1, 0, [a, a], a + 8), dtype=Dtype.F32, x=a, out=a, rows=1, columns=8, stream=0),
        r"multicast \(0x\w+\) is not aligned to 16",
    ),
    "counts": (
        {},
        lambda g, a: g.all_gather(OneShot(1, 0, 0, [a, a]), element_bytes=4, x=a, out=a, counts=[1, -1], stream=0),
        r"counts \(-1\) must be from 0 to",
    ),
    "element bytes": (
        {},
        lambda g, a: g.all_gather(OneShot(1, 0, 0, [a, a]), element_bytes=8, x=a, out=a, counts=[1, 1], stream=0),
        r"element_bytes \(8\) must be 2 or 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_a_wrong_argument_is_refused_with_its_name_and_value(library: cuda_native.Library, case: str) -> None:
    fields, call, message = REFUSALS[case]
    nobody = NoDevice(library, **fields)
    with pytest.raises(ValueError, match=message):
        call(nobody.group, nobody.address)


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        (Kind.TIMEOUT, errors.CollectiveTimeout, "call 9 on this group, chunk 4: rank 1 waited 2.5 s for rank 3"),
        (Kind.POISONED, errors.GroupPoisoned, "rank 1 gave up, because rank 3 failed"),
        (Kind.MISMATCH, errors.GroupMismatch, "rank 1 and rank 3 made different calls (fingerprint 0x00000007 there)"),
        (Kind.ALARM, errors.GroupPoisoned, "rank 1 gave up, because another of its kernels did"),
    ],
)
def test_the_record_of_a_failure_becomes_an_error(kind: Kind, error: type[Exception], text: str) -> None:
    record = cuda_native.FailureRecord(
        state=0, kind=kind, rank=1, op=5, peer=3, chunk=4, epoch=9, expected=9, got=8, fingerprint=7,
        waited_ns=2_500_000_000,
    )  # fmt: skip
    group = cuda_group.Group.__new__(cuda_group.Group)
    group._failure_address = ctypes.addressof(record)
    assert group.failure() is None
    record.state = 1
    failure = group.failure()
    assert failure == Failure(kind, 1, 5, 3, 4, 9, 9, 8, 7, 2.5)
    raised = failure.error("matmul_all_reduce")
    assert type(raised) is error and text in str(raised) and "matmul_all_reduce" in str(raised)
    assert raised.ranks == (() if kind is Kind.ALARM else (3,))
