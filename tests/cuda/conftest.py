"""The library of the CUDA kernels as `setup.py` builds it, and what its assembler gave each kernel.

The installation has built it already: here only those of its sources are compiled that have changed since.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from filelock import FileLock

from tests.builds import TIMEOUT_S
from tpkernels.backends.symmetric import cuda_native

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def built() -> Path:
    """The library; its record, its objects and the rules of ninja lie beside it."""
    setup = runpy.run_path(str(ROOT / "setup.py"))
    folder = ROOT / "build" / "cuda"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock", timeout=TIMEOUT_S), mock.patch.dict(os.environ, TPKERNELS_CUDA="1"):
        try:
            library, facts = setup["build_cuda"]()
        except setup["CannotBuild"] as error:
            if "no nvcc: " in error.reason:
                pytest.skip(error.reason)
            raise
        record = {"built": True, "module": library.name, **facts}
        folder.joinpath("_cuda_build.json").write_text(json.dumps(record))
    assert isinstance(library, Path)
    return library


@dataclass(frozen=True)
class Resources:
    """Of one instance of a kernel, read from its machine code; bytes, registers of a thread."""

    kernel: str
    architecture: str
    registers: int
    stack: int
    shared: int
    local: int


@pytest.fixture(scope="session")
def resources(built: Path) -> Sequence[Resources]:
    told = subprocess.run(
        [cuobjdump(), "-res-usage", built], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    found = []
    for part in re.split(r"^arch = ", told, flags=re.MULTILINE)[1:]:
        for name, *numbers in re.findall(
            r"Function _ZN3tpk\d+([a-z_]+?)(?:I\S*)?E\S*:\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", part
        ):
            found.append(Resources(name, part.split()[0], *map(int, numbers)))
    return found


def cuobjdump() -> Path:
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        pytest.skip("needs cuobjdump, of the package triton")
    return Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@pytest.fixture(scope="session")
def library(built: Path) -> cuda_native.Library:
    return cuda_native.Library(built)
