"""Whether what a trial has saved is whole, or said to be none: read from the files, in this process, without ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tpkernels.state.originals import Box
from tpkernels.state.safetensors_files import SafetensorsFiles
from tpkernels.state.snapshot_files import read_manifest
from tpkernels.state.snapshot_tensors import SnapshotTensors

__all__ = ["torn"]


def torn(folder: Path) -> list[str]:
    """What is wrong with the snapshots `step-N`, in which every number is N, and with the checkpoints `export-N`.

    Those of all steps but the last were finished, and have to be there.
    """
    found = []
    steps = sorted(folder.glob("step-*"), key=_number)
    for step in steps:
        number = _number(step)
        try:
            manifest = read_manifest(step)
            SnapshotTensors(step).check(manifest["tensors"])
        except ValueError as error:
            if step != steps[-1]:
                found.append(f"{step.name} was saved, and is none any more: {error}")
            continue
        for file in step.glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                if name.startswith("model.") and not bool((tensor == number).all()):
                    found.append(f"{step.name} says that it is whole, and has {tensor.unique()[:3].tolist()} in {name}")
    for export in folder.glob("export-*"):
        found += _torn_export(export, was_saved=bool(steps) and _number(export) < _number(steps[-1]))
    return found


def _number(folder: Path) -> float:
    return float(folder.name.partition("-")[2])


def _torn_export(folder: Path, was_saved: bool) -> list[str]:
    number = _number(folder)
    try:
        files = SafetensorsFiles(folder)
    except ValueError as error:
        return [f"{folder.name} was saved, and cannot be read any more: {error}"] if was_saved else []
    numbers: set[float] = set()
    for name, shape in files.shapes.items():
        numbers.update(torch.unique(files.read(name, Box((0,) * len(shape), shape))).tolist())
    return [] if numbers == {number} else [f"{folder.name} can be read, and has the numbers {sorted(numbers)}"]
