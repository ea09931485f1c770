"""What stands in a snapshot, and the manifest beside the files of its tensors.

::

    shard-00001-model-00001-of-00001.safetensors    what rank 0 wrote; one per rank
    snapshot.json                                   names, shapes, digests, the optimizer's values, the caller's extra

Nothing is pickled, neither in files nor between ranks (:mod:`tpkernels.state.snapshot_tensors`).  The manifest has a
digest of itself, and is put into place whole after everything else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from tpkernels.nn.digests import json_digest
from tpkernels.nn.parameters import shard_parameter
from tpkernels.nn.same_weights import compared
from tpkernels.state.manifest import check_manifest
from tpkernels.state.originals import Original, local_of
from tpkernels.state.safetensors_files import sync

__all__ = ["as_written", "read_manifest", "write_manifest"]

FORMAT, VERSION, MANIFEST = "tpkernels.snapshot", 1, "snapshot.json"


def as_written(original: Original) -> Tensor:
    """The tensor of an original's shape that is written, each rank its part; one number as a vector.

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


def write_manifest(folder: Path, body: Mapping[str, Any]) -> None:
    text = json.dumps({"format": FORMAT, "version": VERSION, "digest": json_digest(body), "snapshot": body}, indent=1)
    partial = folder / f"{MANIFEST}.partial"
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync(folder)  # a file system may write the name of the manifest before those of the files
    partial.replace(folder / MANIFEST)
    sync(folder)
    sync(folder.resolve().parent)


def read_manifest(folder: Path) -> dict[str, Any]:
    """What :func:`write_manifest` wrote.

    Raises:
        ValueError: there is none, it was cut off or changed, or it says what no save has written.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"there is no {MANIFEST} in {folder}: this is not a snapshot, or it was not finished")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} is not JSON, or was cut off: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("version") != VERSION:
        raise ValueError(f'{MANIFEST} must say "format": {FORMAT!r} and "version": {VERSION}')
    body = document.get("snapshot")
    if not isinstance(body, dict) or json_digest(body) != document.get("digest"):
        raise ValueError(f"the contents of {MANIFEST} do not match its digest: the file was changed or damaged")
    check_manifest(body)
    return body
