"""Variables in a weight file while it is loaded: each rank reads the slices of its own parts, and nothing else of them.

It owns :class:`Stored`, a variable that is still in the file, and :class:`Member`, a file in an archive.  Keras closes
one of several shards before the variables of it are wanted; it is then opened again.  What somebody has compressed in
an archive (Keras does not) is first unpacked into a temporary file.
"""

from __future__ import annotations

import io
import struct
import tempfile
import zipfile
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpkernels.integrations.keras import backend
from tpkernels.integrations.keras.cuts import Cut

__all__ = ["Member", "Stored", "member", "unread"]

_PIECE = 1 << 18
"""Bytes that are unpacked at a time."""


class Stored:
    """A dataset of an HDF5 file.  To NumPy, and so to whatever does not know this class, it is the whole array."""

    def __init__(self, dataset: Any, dtype: Any) -> None:
        self.shape: tuple[int, ...] = tuple(dataset.shape)
        self.dtype = np.dtype(dtype)
        self._dataset, self._file, self._name = dataset, dataset.file.filename, dataset.name

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, where: Any) -> Any:
        return np.asarray(self)[where]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """The whole array, read anew.

        Raises:
            ValueError: it is wanted without a copy.
        """
        if copy is False:
            raise ValueError("a variable of a weight file has to be read, which makes a copy")
        found = np.empty(self.shape, self.dtype)
        if found.size:
            self._read(found, (), ())
        return found if dtype is None else found.astype(dtype, copy=False)

    def _read(self, found: Any, there: Any, here: Any) -> None:
        if self._dataset:
            self._dataset.read_direct(found, there, here)
            return
        with backend.weight_file(self._file) as file:
            file[self._name].read_direct(found, there, here)

    def part(self, cut: Cut, rank: int) -> Tensor:
        """What ``rank`` holds of it; no other number is read."""
        found = np.empty(cut.shape_on(rank), self.dtype)
        before, at = (slice(None),) * cut.dim, 0
        for start, stop in cut.ranges[rank]:
            here = (*before, slice(at, at + stop - start))
            if found[here].size:
                self._read(found, (*before, slice(start, stop)), here)
            at += stop - start
        if self.dtype.name == "bfloat16":  # which torch does not know of NumPy
            return torch.from_numpy(found.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(found)


class Member(io.RawIOBase):
    """``size`` bytes of a file from ``start``, as a file."""

    def __init__(self, path: str, start: int, size: int) -> None:
        super().__init__()
        self._file, self._start, self._size, self._at = open(path, "rb", buffering=0), start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        here = memoryview(buffer)[: max(0, self._size - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(here)
        self._at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def member(archive: zipfile.ZipFile, name: str) -> io.RawIOBase | None:
    """The file ``name`` of an archive, read where it lies; None where it is encrypted, or the archive no file."""
    info = archive.getinfo(name)
    if archive.filename is None or info.flag_bits & 1:
        return None
    if info.compress_type != zipfile.ZIP_STORED:
        return _unpacked(archive, name)
    with open(archive.filename, "rb") as file:
        file.seek(info.header_offset)
        signature, name_bytes, extra_bytes = struct.unpack("<4s22xHH", file.read(30))
    if signature != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"{archive.filename} has no file {name!r} where its directory says")
    return Member(archive.filename, info.header_offset + 30 + name_bytes + extra_bytes, info.file_size)


def _unpacked(archive: zipfile.ZipFile, name: str) -> io.RawIOBase:
    """A copy of it on the disk, without a name: it is gone when it is closed."""
    copy = tempfile.TemporaryFile(buffering=0)
    try:
        with archive.open(name) as packed:
            while piece := packed.read(_PIECE):
                copy.write(piece)
        copy.seek(0)
    except BaseException:
        copy.close()
        raise
    return copy


def unread() -> AbstractContextManager[None]:
    """Inside, Keras's ``load_weights`` assigns variables as :class:`Stored`."""
    return backend.datasets_as(Stored, member)
