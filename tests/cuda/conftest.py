"""The library of the CUDA kernels, built once as an installation builds it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tpkernels.comm import cuda_native

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The library, and what the build said; from the function that the installation calls."""
    folder = tmp_path_factory.mktemp("cuda")
    shutil.copy(ROOT / "setup.py", folder)
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    code = "import runpy; print(runpy.run_path('setup.py')['build_cuda']()[0])"
    environment = {**os.environ, "TPKERNELS_CUDA": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    if done.returncode != 0 and "CannotBuild: no nvcc" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(done.stdout.strip().splitlines()[-1]), done.stdout


@pytest.fixture(scope="session")
def library(built: tuple[Path, str]) -> cuda_native.Library:
    return cuda_native.Library(built[0])
