"""Ranks that save and load while one of them is refused something, and what they then find in folder and model."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tpkernels as tpk
from tests.injection.hooks import Calls, failing, recorded
from tests.nn.reference import tp_mesh
from tpkernels.state.originals import Box
from tpkernels.state.safetensors_files import SafetensorsFiles
from tpkernels.state.snapshot_files import read_manifest
from tpkernels.state.snapshot_tensors import SnapshotTensors

__all__ = ["is_whole_export", "is_whole_snapshot", "load_with_failures", "save_once", "save_with_failures"]

WIDTH = 8


def _model(number: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Every parameter is this number, and so is every momentum."""
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))
    tpk.parallelize(model, tp_mesh(), {"0": "column", "1": "row"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, number)
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    return model, optimizer


def _numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[float]:
    tensors: list[Any] = [*model.parameters(), *(slots["momentum_buffer"] for slots in optimizer.state.values())]
    return {float(one) for tensor in tensors for one in tensor.detach().to_local().flatten()}


def _save(how: str, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    if how == "snapshot":
        tpk.save_snapshot(model, optimizer, folder)
    else:
        tpk.save_pretrained(model, folder, max_file_bytes=600)


def save_once(how: str, hooks: str, below: str, records: str) -> None:
    """A save whose steps are recorded, and one before it, so that nothing of the first time is among them."""
    model, optimizer = _model(3.0)
    _save(how, model, optimizer, Path(below).with_name("first"))
    with recorded(hooks, below, Path(records) / f"record-{dist.get_rank()}"):
        _save(how, model, optimizer, Path(below) / "saved")


def save_with_failures(
    how: str, hooks: str, below: str, victim: int, calls: int, error: int
) -> list[tuple[str, str, str]]:
    """For every n: the call that fails on the victim, what this rank's save said, and what is in the folder."""
    model, optimizer = _model(3.0)
    _save(how, model, optimizer, Path(below) / "first")
    found = []
    for n in range(1, 10**6):
        folder, said = Path(below) / f"try-{n}", "saved"
        with failing(hooks, Calls(calls), n if dist.get_rank() == victim else 0, error, below=below) as told:
            try:
                _save(how, model, optimizer, folder)
            except ValueError as refused:
                said = f"ValueError: {refused}"
        dist.barrier()
        whole = is_whole_snapshot if how == "snapshot" else is_whole_export
        found.append((told.failed, said, whole(folder, 3.0)))
        struck: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(struck, told.failed)
        if not any(struck):
            return found
    raise AssertionError("it never ended")


def load_with_failures(how: str, hooks: str, below: str, victim: int, calls: int) -> list[tuple[str, str, set[float]]]:
    """For every n: the call that fails on the victim, what this rank's load said, and what its model then holds."""
    folder = Path(below) / "saved"
    _save(how, *_model(3.0), folder)
    found = []
    for n in range(1, 10**6):
        model, optimizer = _model(1.0)
        said = "loaded"
        with failing(hooks, Calls(calls), n if dist.get_rank() == victim else 0, errno.EIO, below=below) as told:
            try:
                if how == "snapshot":
                    tpk.load_snapshot(model, optimizer, folder)
                else:
                    tpk.load_pretrained(model, folder)
            except ValueError as refused:
                said = f"ValueError: {refused}"
        held = _numbers(model, optimizer)
        found.append((told.failed, said, held if how == "snapshot" else held - {1.0} or held))
        struck: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(struck, told.failed)
        if not any(struck):
            return found
    raise AssertionError("it never ended")


# ---------------------------------------------------------------- what is in a folder


def is_whole_snapshot(folder: Path, number: float) -> str:
    """ "none", "whole", or what is wrong."""
    from safetensors.torch import load_file

    try:
        manifest = read_manifest(folder)
        SnapshotTensors(folder).check(manifest["tensors"])
    except ValueError:
        return "none"
    numbers: set[float] = set()
    for file in folder.glob("*.safetensors"):
        for tensor in load_file(file).values():
            numbers.update(tensor.flatten().tolist())
    return "whole" if numbers == {number} else f"says that it is whole, and holds {sorted(numbers)}"


def is_whole_export(folder: Path, number: float) -> str:
    try:
        files = SafetensorsFiles(folder)
        numbers: set[float] = set()
        for name, shape in files.shapes.items():
            numbers.update(files.read(name, Box((0,) * len(shape), shape)).flatten().tolist())
    except ValueError:
        return "none"
    return "whole" if numbers == {number} else f"can be read, and holds {sorted(numbers)}"
