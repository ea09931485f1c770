"""``save_pretrained``: write a parallelized model as a checkpoint that ``from_pretrained`` of transformers loads.

Rank 0 of the job writes.  It holds one file's tensors at a time, and the other ranks hold one tensor.

``torch.distributed.checkpoint.HuggingFaceStorageWriter`` is not used, because it waits in collectives without a
deadline, knows nothing of packed parameters and tied names, and writes no digests.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tpkernels.state.collective_errors import Ranks
from tpkernels.state.originals import Original, check_real, originals_of, unique
from tpkernels.state.safetensors_files import file_name, put_into_place, staged_beside, write_file, write_index

__all__ = ["save_pretrained"]


def save_pretrained(model: nn.Module, folder: str | Path, *, max_file_bytes: int = 5_000_000_000) -> None:
    """Write a checkpoint in Hugging Face's layout, with original names and shapes; all ranks call it.

    Safetensors files with digests of their tensors, an index where there are several, and, for a model of transformers,
    its configuration.  The first of several tied names is written.  Any model can be written; :func:`load_pretrained`
    reads it at any number of ranks.

    The folder holds a checkpoint when this returns, on the disk; one that is interrupted leaves a hidden folder with
    ``.partial-`` in its name, and no checkpoint.

    Args:
        folder: holds no safetensors yet, and is the same for all ranks.
        max_file_bytes: a file is closed before it would be larger; a single tensor may be.

    Examples:
        >>> mlp = tpk.parallelize(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)), mesh["tp"])
        >>> tpk.save_pretrained(mlp, folder)
        >>> sorted(path.name for path in folder.iterdir())
        ['model.safetensors']

    Raises:
        ValueError: a folder that holds a checkpoint, a model that is not parallelized or on the meta device, a failure
            to write; on every rank.
    """
    path, everyone = Path(folder), Ranks.all()
    what = "save_pretrained"

    def prepare() -> tuple[list[list[Original]], dict[str, Any]]:
        originals = originals_of(model)
        check_real(originals)
        if path.exists() and (not path.is_dir() or any(path.glob("*.safetensors*"))):
            raise ValueError(f"{path} holds a checkpoint already, or is not a folder: name another folder")
        if max_file_bytes < 1:
            raise ValueError(f"max_file_bytes must be at least 1, got {max_file_bytes}")
        return _files(unique(originals), max_file_bytes), {}

    files, _ = everyone.together(what, prepare)
    assert files is not None
    ranks = Ranks.of(model)
    digests = ranks.digests(what, [original for file in files for original in file])
    writes, failure = dist.get_rank() == 0, None
    staged: Path | None = None
    placed: dict[str, str] = {}
    for number, file in enumerate(files):
        tensors: dict[str, Tensor] = {}
        for original in file:  # every rank gathers, whatever becomes of the files
            whole = original.whole()
            if writes and failure is None:
                tensors[original.name] = whole.cpu().contiguous()
        if writes and failure is None:
            name = file_name(number, len(files))
            placed |= dict.fromkeys(tensors, name)
            try:
                staged = staged or staged_beside(path)
                write_file(staged / name, tensors, digests)
            except Exception as error:  # noqa: BLE001 - the others are gathering; it is raised below, on all
                failure = error

    def finish() -> None:
        if failure is not None:
            raise ValueError(f"writing to {path} failed: {failure!r}")
        if staged is not None:
            total = sum(_bytes(original) for file in files for original in file)
            _write_rest(model, staged, placed if len(files) > 1 else {}, total)
            put_into_place(staged, path)

    try:
        everyone.step(what, finish)
    except BaseException:
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)  # the error in hand says more than one about what is left
        raise


def _files(originals: Sequence[Original], limit: int) -> list[list[Original]]:
    files: list[list[Original]] = [[]]
    size = 0
    for original in originals:
        if files[-1] and size + _bytes(original) > limit:
            files.append([])
            size = 0
        files[-1].append(original)
        size += _bytes(original)
    return files


def _bytes(original: Original) -> int:
    count = 1
    for size in original.shape:
        count *= size
    return count * original.dtype.itemsize


def _write_rest(model: nn.Module, folder: Path, placed: dict[str, str], total: int) -> None:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        config.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        config.save_pretrained(folder)
        generation: Any = getattr(model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(folder)
    if placed:
        write_index(folder, placed, total)
