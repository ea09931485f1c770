"""System calls of this process that fail on demand, and a record of what it writes: the door to `hooks.cpp`."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntFlag
from functools import cache
from pathlib import Path

from tests.builds import built_once, compiler

__all__ = ["Calls", "Failing", "failing", "library", "recorded"]

SOURCE = Path(__file__).with_name("hooks.cpp")
FLAGS = "-std=c++17 -O1 -fPIC -shared -Wall -Wextra -Wpedantic -Wconversion -Werror".split()


class Calls(IntFlag):
    """What may fail: calls on files below a folder, memory that processes share, sockets, tensors' memory."""

    FILES, MEMORY, SOCKETS, ALLOCATIONS = 1, 2, 4, 8


def library() -> Path:
    def make(folder: Path) -> None:
        command = [compiler(), *FLAGS, str(SOURCE), "-o", str(folder / "hooks.so"), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr

    return built_once("injection-hooks", [SOURCE], FLAGS, make) / "hooks.so"


@cache
def _loaded(path: str) -> ctypes.CDLL:
    hooks = ctypes.CDLL(path)
    hooks.hook_failed.restype = ctypes.c_char_p
    hooks.hook_disarm.restype = ctypes.c_long
    return hooks


class Failing:
    """What came of one armed stretch."""

    count = 0
    """Calls that were made."""
    failed = ""
    """The one that has failed."""


@contextmanager
def failing(
    path: str, calls: Calls, n: int, error: int, *, below: str | Path = "", for_good: bool = False
) -> Iterator[Failing]:
    """The n-th of these calls fails with `error`, with `for_good` every later one, too; n 0 only counts."""
    hooks, told = _loaded(path), Failing()
    hooks.hook_install()  # what was loaded since the last time, too
    hooks.hook_arm(os.fsencode(below), int(calls), ctypes.c_long(n), error, int(for_good))
    try:
        yield told
    finally:
        told.count = hooks.hook_disarm()
        told.failed = hooks.hook_failed().decode()


@contextmanager
def recorded(path: str, below: str | Path, record: Path) -> Iterator[None]:
    """Write to `record` what this process does to files below a folder; `replay.read` reads it."""
    hooks = _loaded(path)
    hooks.hook_install()
    file = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    hooks.hook_record(os.fsencode(below), file)
    try:
        yield
    finally:
        hooks.hook_record(b"", -1)
        os.close(file)
