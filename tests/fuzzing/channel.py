"""The fuzzer of the compiled core's control segment: with libFuzzer where there is clang, else without coverage."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.builds import built_once, sources
from tests.csrc.exercises import ISA_FLAGS
from tests.csrc.test_sanitizers import ADDRESS, CSRC, FLAGS, Tree

__all__ = ["CORPUS", "guided", "standalone"]

HERE = Path(__file__).parent
TARGET, CORPUS = HERE / "channel_fuzz.cpp", HERE / "corpus" / "channel"
SANITIZED = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all".split()


def standalone(clean: Tree) -> Path:
    """A program that plays files and changes of them. clean: the core under the sanitizers, whose objects it takes."""

    def make(folder: Path) -> None:
        objects = [str(path) for unit, path in clean.objects.items() if unit != "races.cpp"]
        _run([clean.compiler, *FLAGS, *ADDRESS, "-DTPK_STANDALONE", f"-I{CSRC}", str(TARGET), *objects, "-pthread",
              "-o", str(folder / "fuzz")])  # fmt: skip

    return built_once("fuzz-channel", [*sources(CSRC), TARGET], (FLAGS, ADDRESS), make) / "fuzz"


def guided() -> Path | None:
    """libFuzzer's program, or None without clang or its runtime (Debian: clang, libclang-rt-dev)."""
    clang = shutil.which("clang++")
    if clang is None or not _has_runtime(clang):
        return None

    def make(folder: Path) -> None:
        objects = []
        for unit in sorted((CSRC / "cpu").glob("*.cpp")):
            objects.append(str(folder / f"{unit.stem}.o"))
            isa = ISA_FLAGS.get(unit.stem.rpartition("_")[2]) if platform.machine() == "x86_64" else None
            flags: Sequence[str] = [*SANITIZED, "-fsanitize=fuzzer-no-link"] if isa is None else isa
            _run([clang, "-std=c++17", *flags, f"-I{CSRC}", "-c", str(unit), "-o", objects[-1]])
        _run([clang, "-std=c++17", *SANITIZED, "-fsanitize=fuzzer", f"-I{CSRC}", str(TARGET), *objects, "-pthread",
              "-o", str(folder / "fuzz")])  # fmt: skip

    return built_once("fuzz-channel-guided", [*sources(CSRC), TARGET], (SANITIZED, ISA_FLAGS), make) / "fuzz"


def _has_runtime(clang: str) -> bool:
    done = subprocess.run(
        [clang, "-fsanitize=fuzzer", "-x", "c", "-", "-o", os.devnull],
        input="int LLVMFuzzerTestOneInput(const char* b, unsigned long n) { return 0; }",
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode == 0


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900
    )  # beside other work of the lowest priority
    assert done.returncode == 0, done.stderr
