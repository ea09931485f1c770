"""A disk that can be full: a file system of its own, in memory, for what the ranks of one trial save.

Owns: `Disk`, mounted while it is entered. Assumes root on Linux; `unavailable` says what is missing.
"""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from pathlib import Path

__all__ = ["Disk", "unavailable"]

SIZE = 64 << 20  # a thousand times what one step of a trial saves
_MNT_DETACH = 2  # linux/mount.h


def unavailable() -> str | None:
    """Why there can be no such disk here, or None."""
    return None if os.geteuid() == 0 else "needs root, to mount one"


class Disk:
    """A folder, or a file system of its own, which `fill` leaves without room. A context manager."""

    def __init__(self, path: Path, *, of_its_own: bool) -> None:
        self.path, self._mounts = path, of_its_own

    def __enter__(self) -> Disk:
        self.path.mkdir()
        if self._mounts:
            _check(_libc().mount(b"tmpfs", bytes(self.path), b"tmpfs", 0, f"size={SIZE}".encode()))
        return self

    def __exit__(self, *_: object) -> None:
        if self._mounts:
            _check(_libc().umount2(bytes(self.path), _MNT_DETACH))

    @property
    def _filler(self) -> Path:
        return self.path / "filler"

    def fill(self) -> None:
        """Take all room that is left."""
        assert self._mounts, "the folder is on a disk of this machine"
        size, part = 0, SIZE
        with self._filler.open("ab") as file:
            while part >= os.sysconf("SC_PAGE_SIZE"):
                try:
                    os.posix_fallocate(file.fileno(), size, part)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    part //= 2
                else:
                    size += part

    def empty(self) -> None:
        """Give it back."""
        with suppress(FileNotFoundError):
            self._filler.unlink()


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
