"""Processes in which Triton interprets kernels on the CPU.

The interpreter is chosen when triton is imported, by an environment variable; the test process itself stays without it.
Workers are persistent. Each call has a time limit, after which all workers are ended and the next call gets new ones.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).parents[2] / "tpkernels" / "kernels"
PACKAGE = "tpkernels.kernels"


def why_not() -> str:
    """Why nothing can be interpreted with these packages; empty if it can."""
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):  # it makes scalars of arrays with one element, which numpy 2.4 refuses
        return f"the interpreter of Triton {triton} does not work with numpy {numpy}: install triton>=3.7"
    return ""


def _start() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    # Products are numpy's. OpenBLAS's kernels for Haswell and Zen compute a row otherwise at another place in its tile.
    os.environ["OPENBLAS_CORETYPE"] = "Prescott"
    sys.setswitchinterval(0.0005)  # a kernel that polls must not starve the thread that it waits for
    import torch

    torch.set_num_threads(1)


def _call(module: str, name: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, getattr(importlib.import_module(module), name)(*arguments)
    except Exception:  # noqa: BLE001 - it goes to the test as text: not every exception survives pickling
        lines = traceback.format_exc().splitlines()  # the interpreter's errors print whole tensors
        return False, "\n".join(line[:300] for line in lines[-40:])


class Failed(AssertionError):
    """What was raised in a worker, as text."""


class Interpreter:
    """`run("scenarios.gather", case)` runs a function of a module of this folder in a worker."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def run(self, function: str, *arguments: Any, timeout: float = 120) -> Any:
        return self.run_all(function, [arguments], timeout=timeout)[0]

    def run_all(self, function: str, arguments: Sequence[tuple[Any, ...]], *, timeout: float = 120) -> list[Any]:
        """All calls at once, each in a worker of its own: they may wait for each other."""
        assert len(arguments) <= self.workers
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.workers, mp_context=context, initializer=_start)
        module, _, name = function.rpartition(".")
        futures = [self._pool.submit(_call, f"tests.kernels.{module}", name, each) for each in arguments]
        try:
            for future in as_completed(futures, timeout):
                ok, value = future.result()
                if not ok:
                    raise Failed(value)
        except (TimeoutError, BrokenProcessPool, Failed) as error:
            if len(futures) > 1 or not isinstance(error, Failed):
                self.close()  # others may wait for the one that failed
            if isinstance(error, Failed):
                raise
            raise Failed(f"a worker died, or its kernel has not ended within {timeout} s: {error!r}") from None
        return [future.result()[1] for future in futures]

    def close(self) -> None:
        if self._pool is not None:
            for process in list(self._pool._processes.values()):
                process.kill()  # a worker may be in a wait of the kernel under test
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def mutant(folder: Path, name: str, changes: Mapping[str, tuple[str, str]]) -> str:
    """A copy of the kernels under another package name, in which a piece of text of each named file is replaced."""
    package = folder / name
    shutil.copytree(KERNELS, package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in package.glob("*.py"):
        text = file.read_text().replace(PACKAGE, name)
        if file.name in changes:
            old, new = changes[file.name]
            assert old in text, f"{file.name} has no {old!r} any more; the seeded fault must follow the code"
            text = text.replace(old, new)
        file.write_text(text)
    return name


def load(package: str, module: str, folder: str | None = None) -> Any:
    """A module of the kernels, or of a mutant of them in `folder`."""
    if folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(f"{package}.{module}")
