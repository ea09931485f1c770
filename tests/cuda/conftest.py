"""The library of the CUDA kernels as `setup.py` builds it, and what its assembler gave each kernel."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from tests.builds import as_installed
from tpkernels.backends.symmetric import cuda_native


@pytest.fixture(scope="session")
def built() -> Path:
    """The library; its record, its objects and the rules of ninja lie beside it."""
    with mock.patch.dict(os.environ, TPKERNELS_CUDA="1"):
        library, facts = as_installed("build_cuda")
    record = {"built": True, "module": library.name, **facts}
    temporary = library.with_name(f"_cuda_build.json.{os.getpid()}")  # other processes read it
    temporary.write_text(json.dumps(record))
    temporary.replace(library.with_name("_cuda_build.json"))
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
