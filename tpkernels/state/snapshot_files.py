"""The files of a snapshot: safetensors by way of ``torch.distributed.checkpoint``, and the manifest beside them.

::

    shard-00001-model-00001-of-00001.safetensors    what rank 0 wrote; one per rank
    snapshot.json                                   names, shapes, digests, the optimizer's values, the caller's extra

Nothing is pickled.  The manifest carries a digest of itself, and is put into place whole after everything else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from tpkernels.nn.digests import json_digest
from tpkernels.nn.parameters import shard_parameter
from tpkernels.nn.same_weights import compared
from tpkernels.packages import needed
from tpkernels.state.manifest import check_manifest
from tpkernels.state.originals import Original, local_of
from tpkernels.state.staging import Target

__all__ = [
    "as_written",
    "check_files",
    "dtype_name",
    "read_manifest",
    "read_tensors",
    "write_manifest",
    "write_tensors",
]

FORMAT, VERSION, MANIFEST = "tpkernels.snapshot", 1, "snapshot.json"


def as_written(original: Original) -> Tensor:
    """The tensor of an original's shape that is given to DCP; one number as a vector.

    Collective for packed ones, and those that have a dimension for units.
    """
    if len(original.parts) == 1 and original.parts[0].units is None:
        tensor = original.parts[0].tensor.detach()
        return local_of(tensor).reshape(1) if tensor.dim() == 0 else tensor
    whole, tensor = original.whole(), original.parts[0].tensor
    mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
    if mesh is None or mesh.ndim > 1:
        return whole
    with compared():
        return shard_parameter(whole, mesh, original.dim).detach()


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors.  Collective over all ranks of the job.

    Raises:
        ValueError: some rank could not write.
    """
    try:
        save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        raise ValueError(f"writing to {folder} failed: {error}") from None


def read_tensors(folder: Path, targets: Iterable[tuple[str, Target]]) -> None:
    """Fill what is staged, by the key it was written under.  Collective over all ranks of the job.

    Raises:
        ValueError: some rank could not read.
    """
    try:
        load({}, storage_reader=HuggingFaceStorageReader(str(folder)), planner=_Planner(targets))
    except CheckpointException as error:
        raise ValueError(f"reading {folder} failed: {error}") from None


class _Planner(DefaultLoadPlanner):
    """Reads each rank's boxes of the tensors, wherever the ranks that wrote them had cut."""

    def __init__(self, targets: Iterable[tuple[str, Target]]) -> None:
        super().__init__(flatten_state_dict=False)
        self.boxes: dict[str, list[ChunkStorageMetadata]] = {}
        self.places: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        for key, target in targets:
            staged, offsets = target.staged, target.box.offsets
            if staged.dim() == 0:
                staged, offsets = staged.reshape(1), (0,)
            if staged.numel():
                chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=staged.shape)
                self.boxes.setdefault(key, []).append(chunk)
                self.places[key, tuple(offsets)] = staged

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, chunks in self.boxes.items():
            stored = self.metadata.state_dict_metadata[key] if self.metadata is not None else None
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(key, stored, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.places[index.fqn, tuple(index.offset)]


def check_files(folder: Path, tensors: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that the files hold all of the tensors of a manifest, from their headers alone.

    Raises:
        ValueError: a file that is damaged or cut off, a tensor that is missing, incomplete or of another shape.
    """
    with needed("safetensors", "a snapshot"):
        from safetensors import SafetensorError
    odd = [path.name for path in folder.glob("*.safetensors") if not path.is_file()]
    if odd:
        raise ValueError(f"{odd[0]} in {folder} is no regular file")  # to open a pipe would wait for its writer
    try:
        metadata: Metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a file of the snapshot {folder} is damaged or was cut off: {error!r}") from None
    for key, entry in tensors.items():
        stored = metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise ValueError(f"the files lack {key}: one of them is missing")
        shape = tuple(entry["shape"]) or (1,)
        found = sum(prod(chunk.sizes) for chunk in stored.chunks)
        if found != prod(shape) or (found and tuple(stored.size) != shape):
            raise ValueError(
                f"the files have {found} of the {prod(shape)} elements of {key}, whose shape is {shape}: one of them "
                "is missing or another snapshot's"
            )
        if dtype_name(stored.properties.dtype) != entry["dtype"]:
            raise ValueError(f"{key} is {dtype_name(stored.properties.dtype)} in the files, not {entry['dtype']}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_manifest(folder: Path, body: Mapping[str, Any]) -> None:
    text = json.dumps({"format": FORMAT, "version": VERSION, "digest": json_digest(body), "snapshot": body}, indent=1)
    partial = folder / f"{MANIFEST}.partial"
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """What :func:`write_manifest` wrote.

    Raises:
        ValueError: there is none, it was cut off or changed, or it says what no save has written.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"there is no {MANIFEST} in {folder}: this is no snapshot, or one that was not finished")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} is no JSON, or was cut off: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("version") != VERSION:
        raise ValueError(f'{MANIFEST} must say "format": {FORMAT!r} and "version": {VERSION}')
    body = document.get("snapshot")
    if not isinstance(body, dict) or json_digest(body) != document.get("digest"):
        raise ValueError(f"the contents of {MANIFEST} do not match its digest: the file was changed or damaged")
    check_manifest(body)
    return body
