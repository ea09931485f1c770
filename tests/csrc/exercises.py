"""What the tests of the compiled kernels share: how they are built with their drivers, and matrices in memory.

All kernels and drivers are one library for ctypes (:func:`of_the_installation`), and one program under
AddressSanitizer and UndefinedBehaviorSanitizer: `exercise CASES [few_rows | residual_norm | tree_sum]`.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.builds import as_installed, built_once, compiler, sources

REPOSITORY = Path(__file__).parents[2]
CPU = REPOSITORY / "csrc" / "cpu"
KINDS = ("reduce", "few_rows", "residual_norm", "tree_sum")
KERNELS = tuple(path for kind in KINDS for path in sorted(CPU.glob(f"{kind}*.cpp")))
DRIVERS = tuple(Path(__file__).parent / f"{kind}_exercise.cpp" for kind in KINDS)
ISA_FLAGS = {
    "avx512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c".split(),
    "avx2": "-mavx2 -mfma -mf16c".split(),
    "amx": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mamx-tile -mamx-bf16".split(),
}
FLAGS = "-std=c++17 -fPIC -ffp-contract=off -Wall -Wextra -Wpedantic -Wconversion -Werror".split()
SANITIZED = "-O0 -g -fsanitize=address,undefined -fno-sanitize-recover=all".split()
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # in the order of tpk::Dtype
GUARD = 0xA5


# ---------------------------------------------------------------- building


def built(target: str, flags: Sequence[str]) -> Path:
    """A program of all kernels, compiled with these flags, and their drivers; the objects stay beside it.

    The drivers' objects are those of :func:`of_the_installation`: the flags are for what is tested.
    """
    library = of_the_installation()
    drivers = [library.parent / f"{driver.stem}.o" for driver in DRIVERS]

    def make(folder: Path) -> None:
        for path in drivers:
            shutil.copy(path, folder)
        with ThreadPoolExecutor(2) as pool:
            kernels = list(pool.map(lambda unit: compile_one(unit, folder, flags), KERNELS))
        link(folder / target, [*kernels, *(folder / path.name for path in drivers)], flags)

    made_of = [*sources(CPU), *drivers]
    return built_once(f"csrc-{target}", made_of, (flags, FLAGS, ISA_FLAGS), make) / target


def of_the_installation() -> Path:
    """A library of the drivers and of the kernels' objects as the installation has them; these are copied beside it."""
    core, facts = as_installed("build_core")
    objects = [core.parent / "cpu" / f"{kernel.stem}.o" for kernel in KERNELS]

    def make(folder: Path) -> None:
        for path in objects:
            shutil.copy(path, folder)
        drivers = [compile_one(driver, folder, ["-O1"]) for driver in DRIVERS]
        link(folder / "kernels.so", [*(folder / path.name for path in objects), *drivers], [])

    return built_once("csrc-kernels.so", [*objects, *DRIVERS], (facts, FLAGS), make) / "kernels.so"


def compile_one(source: Path, folder: Path, flags: Sequence[str]) -> Path:
    output = folder / f"{source.stem}.o"
    isa_flags = ISA_FLAGS.get(source.stem.rpartition("_")[2], []) if platform.machine() == "x86_64" else []
    own = source.parent if source.parent.name == "cpu" else CPU
    done = run([compiler(), *FLAGS, *flags, *isa_flags, f"-I{own}", "-c", str(source), "-o", str(output)])
    assert done.returncode == 0, done.stderr
    return output


def link(target: Path, objects: Sequence[Path], flags: Sequence[str]) -> Path:
    shared = ["-shared"] if target.suffix == ".so" else []
    done = run([compiler(), *flags, *shared, *map(str, objects), "-o", str(target)])
    assert done.returncode == 0, done.stderr
    return target


def run(command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment}
    )


# ---------------------------------------------------------------- matrices in memory


class Rows:
    """A matrix at any byte offset and row stride, with guard bytes before, behind and between its rows."""

    def __init__(self, values: torch.Tensor, *, padding: int = 0, offset: int = 0) -> None:
        self.rows, self.columns = values.shape
        self.dtype, self.offset, self.stride = values.dtype, offset, self.columns + padding
        self.buffer = torch.full((self.rows * self.stride * values.itemsize + 256,), GUARD, dtype=torch.uint8)
        self._window()[:] = as_bytes(values)

    def _window(self) -> torch.Tensor:
        size = self.dtype.itemsize
        return self.buffer.as_strided((self.rows, self.columns * size), (self.stride * size, 1), 64 + self.offset)

    @property
    def address(self) -> int:
        return self.buffer.data_ptr() + 64 + self.offset

    def values(self) -> torch.Tensor:
        return self._window().clone().view(self.dtype)

    def guards_are_intact(self) -> bool:
        copy = self.buffer.clone()
        self._window().fill_(GUARD)
        intact = bool((self.buffer == GUARD).all())
        self.buffer.copy_(copy)
        return intact


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8).reshape(values.shape[0], values.shape[1] * values.itemsize)
