"""Checkpoints in Hugging Face's layout: safetensors files, with an index where there are several.

It owns how files are written, how slices of them are read and their bytes counted, and what a folder holds, which it
reads from the files' headers.

It refuses files that are cut off or whose header is damaged, an index that does not fit the files or leads out of the
folder, and pickled checkpoints (``pytorch_model.bin``).  It unpickles nothing.  Other changes of a file show only in
checkpoints of :func:`tpkernels.save_pretrained`, which carry digests of their tensors.  In others, ranks compare
samples: that finds two checkpoints of one model, and not two that differ in few elements.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import secrets
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.packages import needed
from tpkernels.state.originals import Box

__all__ = [
    "DTYPES",
    "Place",
    "SafetensorsFiles",
    "file_name",
    "put_into_place",
    "read_header",
    "staged_beside",
    "sync",
    "write_file",
    "write_index",
]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DIGESTS = "tpkernels.digests"
_PURPOSE = "a checkpoint"
# Bytes in a row that are worth a read of their own; it takes 2 us.
_SHORT_RUN = 1024
# Of a tensor without a digest, at its ends and at so many places in between.
_SAMPLE, _SAMPLES = 512, 6
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip


class SafetensorsFiles:
    """The tensors of a checkpoint folder, or of one safetensors file; reads slices of them.

    Raises:
        ValueError: there is no checkpoint, or it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.digests: dict[str, int] = {}
        self.bytes_read = 0
        """Of tensors, so far, on this rank; without the samples, 4 KiB of each that has no digest."""
        self._places: dict[str, Place] = {}
        files, index = _files_of(path)
        heads = hashlib.sha256()
        for file in files:
            heads.update(self._open(file, index))
        for name in sorted(self.shapes.keys() - self.digests.keys()):
            for piece in self._samples(name):
                heads.update(piece)
        lost = [name for name in index if name not in self.shapes]
        if lost:
            raise ValueError(f"the index of {path} names {lost[:3]}, which are not in the files it names")
        self.fingerprint = heads.hexdigest()

    @property
    def total_bytes(self) -> int:
        return sum(torch.Size(shape).numel() * self.dtypes[name].itemsize for name, shape in self.shapes.items())

    def _open(self, file: Path, index: Mapping[str, str]) -> bytes:
        """Read the header of one file; returns what identifies the file."""
        header = read_header(file, _PURPOSE)
        try:
            digests = json.loads(header.metadata.get(DIGESTS, "{}"))
            if not isinstance(digests, dict):
                raise ValueError(f"digests must be an object, got {str(digests)[:80]!r}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is damaged, cut off or no safetensors file: {error}") from None
        for name, entry in header.entries.items():
            if name in self.shapes or (index and index.get(name) != file.name):
                raise ValueError(f"{file.name} holds {name}, which the index has in {index.get(name, 'no file')}")
            if entry.dtype not in DTYPES:
                raise ValueError(f"{name} in {file} is {entry.dtype}, which is not supported")
            self.shapes[name], self.dtypes[name] = entry.shape, DTYPES[entry.dtype]
            self._places[name] = Place(header.file, entry.start)
        known = {name: digest for name, digest in digests.items() if name in header.entries}
        self.digests |= {name: _digest(file, digest) for name, digest in known.items()}
        return header.head + str(file.stat().st_size).encode()

    def _samples(self, name: str) -> Iterator[bytes]:
        """Pieces of a tensor that has no digest, the same on all ranks: each reads its own part of the rest, and would
        not see that another rank reads another checkpoint whose files have the same headers."""
        size = torch.Size(self.shapes[name]).numel() * self.dtypes[name].itemsize
        spread = random.Random(name)
        starts = {0, max(0, size - _SAMPLE), *(spread.randrange(max(1, size - _SAMPLE)) for _ in range(_SAMPLES))}
        for start in sorted(starts):
            yield self._places[name].piece(start, min(_SAMPLE, size - start))

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor; only that part of the file is looked at."""
        if 0 in box.sizes:
            return torch.empty(box.sizes, dtype=self.dtypes[name])
        part = torch.empty(box.sizes, dtype=self.dtypes[name])
        self._places[name].read(part, self.shapes[name], box.offsets)
        self.bytes_read += part.numel() * part.element_size()
        return part


class Entry(NamedTuple):
    """A tensor in a file: its shape, the name of its dtype there, and the byte at which it begins."""

    shape: tuple[int, ...]
    dtype: str
    start: int


class Header(NamedTuple):
    """What a file says at its beginning."""

    file: FileIO
    head: bytes
    metadata: Mapping[str, str]
    entries: Mapping[str, Entry]


def read_header(path: Path, purpose: str) -> Header:
    """What a safetensors file holds, as the library has checked it; the file stays open for its :class:`Place` s.

    Raises:
        ValueError: it is damaged, cut off or no such file.
    """
    with needed("safetensors", purpose):
        from safetensors import SafetensorError, safe_open
    try:
        handle: Any = safe_open(str(path), framework="pt")
        described = {name: handle.get_slice(name) for name in handle.keys()}
        file = path.open("rb", buffering=0)
        head = file.read(int.from_bytes(file.read(8), "little"))
        said = json.loads(head)
        entries = {
            name: Entry(tuple(tensor.get_shape()), tensor.get_dtype(), 8 + len(head) + said[name]["data_offsets"][0])
            for name, tensor in described.items()
        }
        return Header(file, head, handle.metadata() or {}, entries)
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:  # torch's, where it cannot map the file
        raise ValueError(f"{path} is damaged, cut off or no safetensors file: {error}") from None


class Place(NamedTuple):
    """Where the bytes of a tensor are.

    They are read and not mapped: a file that is cut off meanwhile would end the process with SIGBUS.
    """

    file: FileIO
    start: int

    def read(self, into: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> None:
        """Fill ``into`` with the box at ``offsets`` of a tensor of this shape.

        Raises:
            ValueError: the file ends before.
        """
        cut = max((dim for dim, size in enumerate(shape) if into.shape[dim] != size), default=0)
        inner = prod(shape[cut + 1 :])
        run = prod(into.shape[cut:]) * into.element_size()
        outer = prod(into.shape[:cut])
        if outer > 1 and run < _SHORT_RUN:  # whole rows, of which only parts are kept
            rows = torch.empty((into.shape[0], *shape[1:]), dtype=into.dtype)
            self.read(rows, shape, (offsets[0], *[0] * (len(shape) - 1)))
            within = zip(offsets[1:], into.shape[1:], strict=True)
            into.copy_(rows[(slice(None), *[slice(at, at + size) for at, size in within])])
            return
        raw: Any = into.reshape(-1).view(torch.uint8).numpy()
        bytes_of = memoryview(raw)
        for number, index in enumerate(product(*[range(n) for n in into.shape[:cut]])):
            at = 0
            for dim, size in enumerate(shape[:cut]):
                at = at * size + offsets[dim] + index[dim]
            if shape:
                at = (at * shape[cut] + offsets[cut]) * inner
            self._fill(bytes_of[number * run : (number + 1) * run], self.start + at * into.element_size())

    def piece(self, start: int, num_bytes: int) -> bytes:
        """Some bytes of the tensor, as they stand.

        Raises:
            ValueError: the file ends before.
        """
        found = bytearray(num_bytes)
        self._fill(memoryview(found), self.start + start)
        return bytes(found)

    def _fill(self, into: memoryview, at: int) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(self.file.fileno(), [into[done:]], at + done)
            if count == 0:
                raise ValueError(
                    f"{self.file.name} was cut off while it was read: it ends before byte {at + len(into)}"
                )
            done += count


def _digest(file: Path, digest: Any) -> int:
    if not isinstance(digest, int) or isinstance(digest, bool):
        raise ValueError(f"{file} has a digest that is not a number: {str(digest)[:80]!r}")
    return digest


def _files_of(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The files of a checkpoint, and which tensor its index has in which."""
    if path.is_file():
        return [path], {}
    index = path / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{index} is damaged or was cut off: {error!r}") from None
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} has no weight_map")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or not (path / file).is_file():
                raise ValueError(f"{index} has {name} in {file!r}, which is not a file of that folder")
        return [path / file for file in sorted(set(weight_map.values()))], weight_map
    if (path / SINGLE).is_file():
        return [path / SINGLE], {}
    if not path.is_dir():
        raise ValueError(f"there is no folder or file {path}: a checkpoint is read from disk, not from a hub")
    pickled = sorted(file.name for file in path.glob("*.bin"))
    what = f"only {pickled}, which are pickled and could run anything" if pickled else "neither"
    raise ValueError(f"{path} must hold {SINGLE} or {INDEX}; it has {what}")


def file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_file(path: Path, tensors: Mapping[str, Tensor], digests: Mapping[str, int]) -> None:
    with needed("safetensors", _PURPOSE):
        from safetensors.torch import save_file
    said = json.dumps({name: digests[name] for name in tensors})
    save_file(dict(tensors), str(path), metadata={"format": "pt", DIGESTS: said})


def write_index(folder: Path, files: Mapping[str, str], total_bytes: int) -> None:
    """Write which tensor is in which file."""
    text = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": dict(files)}, indent=2)
    (folder / INDEX).write_text(text, encoding="utf-8")


def staged_beside(folder: Path) -> Path:
    """A new folder for what :func:`put_into_place` shall put into ``folder``; inside it where that exists already."""
    folder = folder.resolve()
    name = f".partial-{secrets.token_hex(4)}"
    staged = folder / name if folder.is_dir() else folder.with_name(f".{folder.name}{name}")
    staged.mkdir(parents=True)
    return staged


def put_into_place(staged: Path, folder: Path) -> None:
    """Have the disk take all files, and then give them their names: a new folder at once.

    In a folder that exists already they come one by one, and last the one without which there is no checkpoint.
    """
    files = sorted(staged.iterdir(), key=lambda file: (file.name in (SINGLE, INDEX), file.name))
    for path in (*files, staged):
        sync(path)
    folder = folder.resolve()
    if staged.parent == folder:
        for file in files:
            file.replace(folder / file.name)
        staged.rmdir()
        sync(folder)
    else:
        staged.rename(folder)
    sync(folder.parent)


def sync(path: Path) -> None:
    """Return when the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
