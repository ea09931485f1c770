"""What only the PTX of the CUDA kernels shows: through which caches they read, and where signals and fences are."""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu


@cache
def compile_ptx(built: Path, source: Path) -> str:
    """The PTX that the flags of setup.py give."""
    rules = built.with_name("build.ninja").read_text()
    nvcc = re.search(r"command = (\S+)", rules)
    assert nvcc is not None
    flags = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", f"-I{source.parents[1]}", "-arch=compute_90", "-ptx"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "unit.ptx")
        command = [nvcc[1], *flags, str(source), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return out.read_text()


def kernels_of(ptx: str) -> dict[str, str]:
    """Name to body of each kernel."""
    return dict(re.findall(r"\.entry (\w+)\((.*?\n})", ptx, re.DOTALL))


READS_PAST_THE_CACHES = re.compile(r"ld\.global\S*\.nc|ldu\.|ld\.global\.ca")


@pytest.mark.parametrize("unit", ["sync", "reduce", "one_shot"])
@pytest.mark.slow("6 s: compiles every kernel")
def test_no_kernel_reads_peers_data_through_a_cache_that_acquiring_does_not_refresh(built: Path, unit: str) -> None:
    ptx = compile_ptx(built, built.parents[2] / "csrc" / "cuda" / f"{unit}.cu")
    kernels = kernels_of(ptx)
    assert kernels
    for name, body in kernels.items():
        assert READS_PAST_THE_CACHES.search(body) is None, name
        waits, signals = "ld.acquire.sys.global.u" in body, "st.release.sys.global.u" in body
        assert signals, f"{name}: a failure, at least, is told"
        assert waits or "signal_chunk" in name or "raise_flag" in name or "end_call" in name, name
        if "signal_chunk" in name:
            first_signal = body.index("st.release.sys.global.u64")
            assert "bar" in body[:first_signal], f"{name}: signals before the block has written"
    assert "__internal" not in ptx and "call.uni" not in ptx, "a function call: registers would be spilled across it"


def alias_fences_are_missing(body: str) -> bool:
    """Every multicast store has a fence before it and one behind it that is before the next signal."""
    stores = [match.start() for match in re.finditer(r"multimem\.st", body)]
    before = body.rfind("fence.proxy.alias", 0, stores[0])
    behind = body.find("fence.proxy.alias", stores[-1])
    # The first release behind the stores is the signal; what a wait does in failing comes before them, or later.
    signal = body.find("st.release.sys.global.u64", stores[-1])
    slot_wait = body.rfind("ld.acquire.sys.global.u64", 0, stores[0])
    return not 0 <= slot_wait < before < stores[0] <= stores[-1] < behind < signal


def test_multicast_stores_are_fenced_from_what_reaches_their_memory_by_another_address(
    built: Path,
) -> None:
    """The ways on which order is lost are no races of threads on a CPU; that is read in the PTX."""
    kernels = kernels_of(compile_ptx(built, built.parents[2] / "csrc" / "cuda" / "one_shot.cu"))
    assert len(kernels) == 11
    for name, body in kernels.items():
        assert "multimem.st.relaxed.sys.global.v4.f32" in body and "multimem.ld_reduce" not in body, name
        assert not alias_fences_are_missing(body), name
        fences = [match.span() for match in re.finditer(r"fence\.proxy\.alias;", body)]
        assert len(fences) == 2, name
        for start, end in fences:
            assert alias_fences_are_missing(body[:start] + body[end:]), f"{name}: the lint sees nothing"


def test_that_cache_would_be_seen(built: Path, tmp_path: Path) -> None:
    source = tmp_path / "cuda" / "restricted.cu"
    source.parent.mkdir()
    source.write_text(
        "__global__ void copy(const float* __restrict__ from, float* __restrict__ to) { to[threadIdx.x] = from[0]; }"
    )
    (body,) = kernels_of(compile_ptx(built, source)).values()
    assert READS_PAST_THE_CACHES.search(body)
