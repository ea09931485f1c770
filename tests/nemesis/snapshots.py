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
    """What is wrong with the snapshots `step-N`, in which every number is N, and with the checkpoints `export-N`."""
    found = []
    for step in folder.glob("step-*"):
        number = float(step.name.removeprefix("step-"))
        try:
            manifest = read_manifest(step)
            SnapshotTensors(step).check(manifest["tensors"])
        except ValueError:
            continue  # it says that it is none
        for file in step.glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                if name.startswith("model.") and not bool((tensor == number).all()):
                    found.append(f"{step.name} says that it is whole, and has {tensor.unique()[:3].tolist()} in {name}")
    for export in folder.glob("export-*"):
        found += _torn_export(export, float(export.name.removeprefix("export-")))
    return found


def _torn_export(folder: Path, number: float) -> list[str]:
    try:
        files = SafetensorsFiles(folder)
    except ValueError:
        return []
    numbers: set[float] = set()
    for name, shape in files.shapes.items():
        numbers.update(torch.unique(files.read(name, Box((0,) * len(shape), shape))).tolist())
    return [] if numbers == {number} else [f"{folder.name} can be read, and has the numbers {sorted(numbers)}"]
