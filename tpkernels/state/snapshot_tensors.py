"""The tensors of a snapshot: one safetensors file per rank, with the boxes of the tensors that it wrote.

The files are those that ``torch.distributed.checkpoint``'s ``HuggingFaceStorageWriter`` makes (``save_distributed``),
and its reader reads them.  Each says in its metadata where its boxes begin; this package wrote them by way of torch
until its ranks stopped exchanging pickled plans.  Here every rank finds out by itself what it writes and reads: ranks
exchange sizes and digests in JSON, and no tensor.

Owns: which rank writes what of which several hold the same, and where the boxes lie in the files.
Refuses: files that are cut off or damaged, that lack parts, or that are no files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.nn.digests import json_digest
from tpkernels.packages import needed
from tpkernels.state.collective_errors import Ranks
from tpkernels.state.originals import Box, box_of, local_of
from tpkernels.state.safetensors_files import DTYPES, Place, read_header, sync
from tpkernels.state.staging import Target

__all__ = ["SnapshotTensors", "dtype_name", "share_out", "write_tensors"]

_INFO, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_PURPOSE = "a snapshot"


class _Chunk(NamedTuple):
    box: Box
    place: Place
    dtype: torch.dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------- writing


def share_out(everyone: Ranks, model: Ranks, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this rank writes of the ``tensors`` (in their originals' shapes): each box is one rank's.  Collective.

    Of the replicas on a mesh the first counts.  Ranks of several meshes, each of which holds all of the model, hold the
    same boxes then, and share them out by their sizes.
    """
    boxes = {key: box_of(tensor) for key, tensor in tensors.items() if model.counts(tensor)}
    mine = {key: box for key, box in boxes.items() if prod(box.sizes)}
    said = everyone.exchange(
        "save_snapshot: boxes",
        {"boxes": json_digest([(key, box.offsets, box.sizes) for key, box in mine.items()]), "rank": everyone.rank},
    )
    own = next(one["boxes"] for one in said if one["rank"] == everyone.rank)
    alike = sorted(one["rank"] for one in said if one["boxes"] == own)
    load = dict.fromkeys(alike, 0)
    written = {}
    for key, box in mine.items():
        writer = min(alike, key=lambda rank: (load[rank], rank))
        load[writer] += prod(box.sizes) * tensors[key].element_size()
        if writer == everyone.rank:
            written[key] = tensors[key]
    return written


def write_tensors(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's file, and have the disk take it; none if there is nothing to write.

    Raises:
        ValueError, OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not tensors:
        return
    with needed("safetensors", _PURPOSE):
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    info = {key: {_OFFSETS: list(box_of(tensor).offsets)} for key, tensor in tensors.items()}
    path = folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
    metadata = {"format": "pt", "DCP_VERSION": "1.0", _INFO: json.dumps(info)}
    try:
        save_file({key: _own(local_of(tensor)) for key, tensor in tensors.items()}, str(path), metadata=metadata)
    except SafetensorError as error:
        raise ValueError(f"writing {path} failed: {error}") from error
    sync(path)
    sync(folder)


def _own(tensor: Tensor) -> Tensor:
    """With memory of its own: safetensors refuses tensors that share theirs."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


# ---------------------------------------------------------------- reading


class SnapshotTensors:
    """The tensors in the files of a folder, by the keys that they were written under.

    Raises:
        ValueError: a file that is damaged, cut off or none.
    """

    def __init__(self, folder: Path) -> None:
        self._chunks: dict[str, list[_Chunk]] = {}
        files = sorted(folder.glob("*.safetensors"))
        odd = [path.name for path in files if not path.is_file()]
        if odd:
            raise ValueError(f"{odd[0]} in {folder} is not a regular file")  # to open a pipe would wait for its writer
        for path in files:
            try:
                self._open(path)
            except ValueError as error:
                raise ValueError(f"a file of the snapshot {folder} is damaged or was cut off: {error}") from None

    def _open(self, path: Path) -> None:
        header = read_header(path, _PURPOSE)
        info: Any = _parsed(header.metadata[_INFO]) if _INFO in header.metadata else None
        for key, entry in header.entries.items():
            offsets: Any = (0,) * len(entry.shape)
            if info is not None:
                offsets = info.get(key, {}).get(_OFFSETS) if isinstance(info.get(key), dict) else None
            fits = isinstance(offsets, list | tuple) and len(offsets) == len(entry.shape)
            if not fits or not all(type(offset) is int and 0 <= offset < 2**62 for offset in offsets):
                raise ValueError(f"{path.name} does not say where its part of {key} begins")
            if entry.dtype not in DTYPES:
                raise ValueError(f"{key} in {path.name} is {entry.dtype}, which is not supported")
            box = Box(tuple(offsets), entry.shape)
            self._chunks.setdefault(key, []).append(_Chunk(box, Place(header.file, entry.start), DTYPES[entry.dtype]))

    def check(self, tensors: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that the files hold all of the tensors of a manifest, from their headers alone.

        Raises:
            ValueError: a tensor that is missing, incomplete or of another shape or dtype.
        """
        for key, entry in tensors.items():
            shape, chunks = tuple(entry["shape"]) or (1,), self._chunks.get(key, [])
            if not chunks and prod(shape):
                raise ValueError(f"the files lack {key}: one of them is missing")
            found = sum(prod(chunk.box.sizes) for chunk in chunks)
            if found != prod(shape) or (found and _extent([chunk.box for chunk in chunks], shape) != shape):
                raise ValueError(
                    f"the files have {found} of the {prod(shape)} elements of {key}, whose shape is {shape}: one of "
                    "them is missing or another snapshot's"
                )
            dtypes = {dtype_name(chunk.dtype) for chunk in chunks}
            if dtypes - {entry["dtype"]}:
                raise ValueError(f"{key} is {', '.join(sorted(dtypes))} in the files, not {entry['dtype']}")

    def read(self, targets: Iterable[tuple[str, Target]]) -> None:
        """Fill what is staged, by the key it was written under, wherever the ranks that wrote it had cut.

        Raises:
            ValueError: a file ends before.
        """
        for key, target in targets:
            staged, offsets = target.staged, target.box.offsets
            if staged.dim() == 0:
                staged, offsets = staged.reshape(1), (0,)
            wanted = Box(tuple(offsets), tuple(staged.shape))
            for chunk in self._chunks.get(key, []):
                _fill(staged, wanted, chunk)


def _fill(staged: Tensor, wanted: Box, chunk: _Chunk) -> None:
    """Read what the chunk has of the wanted box."""
    low = [max(pair) for pair in zip(wanted.offsets, chunk.box.offsets, strict=True)]
    high = [min(pair) for pair in zip(_ends(wanted), _ends(chunk.box), strict=True)]
    sizes = tuple(end - start for start, end in zip(low, high, strict=True))
    if any(size <= 0 for size in sizes):
        return
    direct = sizes == wanted.sizes and staged.device.type == "cpu" and staged.is_contiguous()
    part = staged if direct else torch.empty(sizes, dtype=chunk.dtype)
    within = tuple(start - offset for start, offset in zip(low, chunk.box.offsets, strict=True))
    chunk.place.read(part, chunk.box.sizes, within)
    if not direct:
        start = [at - offset for at, offset in zip(low, wanted.offsets, strict=True)]
        staged[tuple(slice(at, at + size) for at, size in zip(start, sizes, strict=True))].copy_(part)


def _ends(box: Box) -> tuple[int, ...]:
    return tuple(offset + size for offset, size in zip(box.offsets, box.sizes, strict=True))


def _extent(boxes: Sequence[Box], shape: Sequence[int]) -> tuple[int, ...]:
    """How far the boxes reach; nowhere if they have another number of dimensions than the shape."""
    if any(len(box.sizes) != len(shape) for box in boxes):
        return ()
    return tuple(max(ends) for ends in zip(*(_ends(box) for box in boxes if prod(box.sizes)), strict=True))


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its metadata is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("its metadata is no object")
    return found
