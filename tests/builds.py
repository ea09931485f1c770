"""What tests compile, built once for one state of its sources: for all processes of a run, and for the runs after it.

What the installation has built serves here as well (:func:`as_installed`).

Owns `build/tests/NAME/KEY`, of each name the few that were used last. A key is all that a build is made of: files,
commands, and what the compiler says of itself. A build that was cut short is made anew.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import shutil
import subprocess
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

__all__ = ["as_installed", "built_once", "compiler", "sources"]

ROOT = Path(__file__).parents[1]
KEPT = 3  # of each name: a branch, the one before, and a stray edit
TIMEOUT_S = 900  # of a wait for another process's build; the longest takes half a minute of an idle core


def compiler() -> str:
    found = os.environ.get("CXX", "").split(" ")[0] or shutil.which("g++") or shutil.which("c++")
    if not found or shutil.which(found) is None:
        pytest.skip("needs a C++ compiler (g++)")
    return found


@cache
def _words_of(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60).stdout


def sources(*folders: Path) -> list[Path]:
    """All files below these folders that are not Python's."""
    return [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file() and _counts(path)]


def _counts(path: Path) -> bool:
    return path.suffix not in (".py", ".pyc", ".json", ".md")


def built_once(name: str, files: Iterable[Path], settings: object, make: Callable[[Path], None]) -> Path:
    """The folder into which `make(folder)` has built. settings: what decides besides the files' bytes, as its repr."""
    told = hashlib.sha256(repr((settings, _words_of(compiler()))).encode())
    for path in files:
        content = path.read_bytes()
        told.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    kept = ROOT / "build" / "tests" / name
    kept.mkdir(parents=True, exist_ok=True)
    folder = kept / told.hexdigest()[:16]
    done = folder / "built"
    with FileLock(kept / "lock", timeout=TIMEOUT_S):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
        done.touch()
        by_age = sorted(kept.glob("*/built"), key=lambda path: path.stat().st_mtime)
        for old in by_age[:-KEPT]:
            shutil.rmtree(old.parent)
    return folder


def as_installed(build: str) -> tuple[Path, dict[str, Any]]:
    """What setup.py's function ``build`` gives: the built file, its objects beside it, and the facts of the build.

    Of what the installation has compiled only that is compiled again which has changed since. Skips the test where
    setup.py says that it cannot be built for want of a compiler.
    """
    setup = runpy.run_path(str(ROOT / "setup.py"))
    (ROOT / "build").mkdir(exist_ok=True)
    with FileLock(ROOT / "build" / f"{build}.lock", timeout=TIMEOUT_S):
        try:
            found: tuple[Path, dict[str, Any]] = setup[build]()
        except setup["CannotBuild"] as error:
            if error.reason.startswith(("no nvcc: ", "no C++ compiler: ")):
                pytest.skip(error.reason)
            raise
    return found
