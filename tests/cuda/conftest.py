"""The library of the CUDA kernels out of a wheel, built once as pip builds it."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest import mock

import pytest

from tests.builds import built_once, sources
from tpkernels.backends.symmetric import cuda_native

ROOT = Path(__file__).parents[2]
# What pip calls. Of the CPU core there is a refusal at once: another test builds it.
TOP = ("setup.py", "pyproject.toml", "README.md", "LICENSE")
BUILD = "from setuptools import build_meta as b; print(b.build_wheel('made'))"


@pytest.fixture(scope="session")
def built() -> tuple[Path, str]:
    """The library, its record beside it, and what the build said."""
    setup = runpy.run_path(str(ROOT / "setup.py"))
    with mock.patch.dict(os.environ, TPKERNELS_CUDA="1"):
        try:
            nvcc = setup["find_nvcc"]()
        except setup["CannotBuild"] as reason:
            nvcc = str(reason)
    made_of = [*(ROOT / name for name in TOP), *sources(ROOT / "csrc")]
    folder = built_once("cuda-wheel", made_of, (nvcc, _settings()), build)
    return folder / "build" / "cuda" / "_cuda.so", (folder / "said").read_text()


def _settings() -> dict[str, str]:
    """What setup.py and the compilers read from the environment."""
    flags = ("CXX", "CXXFLAGS", "LDFLAGS", "CUDA_HOME", "CUDA_PATH")
    return {name: os.environ[name] for name in flags if name in os.environ}


def build(folder: Path) -> None:
    for name in TOP:
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "csrc", folder / "csrc", ignore=shutil.ignore_patterns("bindings.cpp"))
    folder.joinpath("tpkernels").mkdir()
    folder.joinpath("tpkernels", "__init__.py").touch()
    folder.joinpath("made").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "TPKERNELS_REQUIRE_NATIVE"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=folder, env={**environment, "TPKERNELS_CUDA": "1"}, capture_output=True,
        text=True, timeout=500,
    )  # fmt: skip
    if done.returncode != 0 and "no nvcc: " in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-2].strip())
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.joinpath("made").iterdir()
    leftovers = folder / "build" / "cuda"  # whoever wants its rules and objects finds them beside the library
    for name in ("_cuda.so", "_cuda_build.json"):
        leftovers.joinpath(name).write_bytes(zipfile.ZipFile(wheel).read(f"tpkernels/{name}"))
    folder.joinpath("said").write_text(done.stdout)


@pytest.fixture(scope="session")
def library(built: tuple[Path, str]) -> cuda_native.Library:
    return cuda_native.Library(built[0])
