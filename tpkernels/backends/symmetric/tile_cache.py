"""Measured tile sizes, kept between runs: one JSON file in the user's cache folder.

Owns the file: ``tiles.json``, a version and at most ``MAX_ENTRIES`` entries, the oldest first.  An entry's key names
what a measurement depends on (GPU, compiler, shape, dtype, world size); its values are checked when they are read.
Writers hold a lock file and replace the file as a whole, so readers need none.

It does not trust what it finds.  It ignores, with a warning, a file that is cut off, too large, of another version, of
another user or writable by everybody, something that is no file, and an entry whose values are out of range.  It also
warns when the cache cannot be written or a package is missing.  Without the cache, tiles are measured again.
"""

from __future__ import annotations

import json
import math
import os
import stat
import tempfile
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tpkernels import config
from tpkernels.kernels.config import Tiles
from tpkernels.packages import MissingPackage, needed

__all__ = ["Entry", "TileCache", "file", "opened"]

VERSION = 2
MAX_ENTRIES = 512
MAX_BYTES = 1024 * 1024
LOCK_S = 10.0  # a writer holds the lock for milliseconds


@dataclass(frozen=True)
class Entry:
    """Tiles, and the microseconds that the slowest rank took with them.

    Raises:
        ValueError: no kernel can be launched with these, or the time is none.
    """

    tiles: Tiles
    slowest_us: float

    def __post_init__(self) -> None:
        if type(self.slowest_us) is not float or not 0 < self.slowest_us < math.inf:
            raise ValueError(f"slowest_us ({self.slowest_us!r}) must be a positive number")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.tiles), "slowest_us": self.slowest_us}

    @staticmethod
    def from_json(found: Any) -> Entry:
        """
        Raises:
            ValueError: it is no entry.
        """
        names = (*(field.name for field in fields(Tiles)), "slowest_us")
        if not isinstance(found, dict) or set(found) != set(names):
            raise ValueError(f"an entry has {', '.join(names)}; this is {str(found)[:80]}")
        *tiles, slowest_us = (found[name] for name in names)
        return Entry(Tiles(*tiles), slowest_us)


def file() -> Path:
    """Where this process keeps measured tiles.

    Raises:
        MissingPackage: nobody names a folder, and the package that knows the user's is not installed.
    """
    folder = config.load().cache_dir
    if folder is None:
        with needed("platformdirs", "the folder of measured tiles (unless TPKERNELS_CACHE_DIR names it)"):
            import platformdirs
        folder = platformdirs.user_cache_path("tpkernels")
    return folder / "tiles.json"


def opened() -> TileCache | None:
    """The cache of this process; None, with a warning, where there is no telling where it is."""
    try:
        return TileCache(file())
    except MissingPackage as error:
        warnings.warn(f"measured tiles are neither read nor kept: {error}", RuntimeWarning, stacklevel=2)
        return None


class TileCache:
    """The entries of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def find(self, key: str) -> Entry | None:
        return self._entries().get(key)

    def add(self, key: str, entry: Entry) -> None:
        """Put an entry in place of the key's old one; waits a moment for other writers."""
        try:
            with needed("filelock", "a file of measured tiles"):
                import filelock
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(self._path.with_suffix(".lock"), timeout=LOCK_S):
                entries = self._entries()
                entries.pop(key, None)
                entries[key] = entry
                self._replace({key: entries[key] for key in list(entries)[-MAX_ENTRIES:]})
        except (OSError, MissingPackage) as error:  # filelock.Timeout is an OSError
            self._warn(f"measured tiles are not kept: {error}")

    def _entries(self) -> dict[str, Entry]:
        try:
            found = json.loads(_read(self._path))
            if not isinstance(found, dict) or found.get("version") != VERSION:
                raise ValueError(f"this is not a file of version {VERSION}")
            if not isinstance(found.get("entries"), dict):
                raise ValueError("entries are missing")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
            self._warn(f"the file is not used: {error}")
            return {}
        entries = {}
        for key, value in found["entries"].items():
            try:
                entries[key] = Entry.from_json(value)
            except ValueError as error:
                self._warn(f"entry {key!r} is not used: {error}")
        return entries

    def _replace(self, entries: dict[str, Entry]) -> None:
        content = {"version": VERSION, "entries": {key: entry.to_json() for key, entry in entries.items()}}
        handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=".tiles-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self._path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(name)
            raise

    def _warn(self, what: str) -> None:
        warnings.warn(f"tile cache {self._path}: {what}", RuntimeWarning, stacklevel=4)


def _read(path: Path) -> str:
    """The text of a file that only this user (or root) can have written; a pipe would be, but is not waited for.

    Raises:
        OSError, ValueError: there is none such.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
            raise ValueError(f"user {status.st_uid} owns it, mode {status.st_mode & 0o777:o}: others can write it")
        if status.st_size > MAX_BYTES:
            raise ValueError(f"it has {status.st_size} bytes, at most {MAX_BYTES} are read")
        return file.read(MAX_BYTES + 1).decode()
