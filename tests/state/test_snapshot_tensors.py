"""Snapshots are written and read without a pickle, and torch.distributed.checkpoint reads the files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tpkernels as tpk
from tpkernels.state.originals import Box
from tpkernels.state.snapshot_tensors import SnapshotTensors
from tpkernels.testing.spawn import Pools

LIMIT_S = 120.0


def model_on(mesh: Any) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6), nn.LayerNorm(6))
    return tpk.parallelize(model, mesh)


@contextmanager
def no_pickle_between_ranks() -> Iterator[None]:
    def refuse(*args: object) -> None:
        raise AssertionError("an object is pickled between ranks")

    with (
        mock.patch.object(distributed_c10d, "_object_to_tensor", refuse),
        mock.patch.object(distributed_c10d, "_tensor_to_object", refuse),
    ):
        yield


def save_and_load(folder: str, replicas: int) -> tuple[bool, list[str]]:
    """Whether everything came back; and the keys of this rank's file."""
    mesh = tpk.init(dp=replicas)
    model = model_on(mesh["tp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    whole = tpk.full_state_dict(model)
    with no_pickle_between_ranks():
        tpk.save_snapshot(model, optimizer, folder, extra={"step": 1})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        extra = tpk.load_snapshot(model, optimizer, folder)
    same = all(torch.equal(tensor, whole[name]) for name, tensor in tpk.full_state_dict(model).items())
    path = Path(folder) / f"shard-{dist.get_rank() + 1:05d}-model-00001-of-00001.safetensors"
    with safe_open(path, framework="pt") as file:
        keys = list(file.keys())
    return same and extra == {"step": 1}, keys


def _read_by_torch(folder: Path) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    manifest = json.loads((folder / "snapshot.json").read_text())["snapshot"]
    state = {
        key: torch.zeros(entry["shape"] or [1], dtype=getattr(torch, entry["dtype"]))
        for key, entry in manifest["tensors"].items()
    }
    load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return state


@pytest.mark.sample(1)
@pytest.mark.gloo
@pytest.mark.parametrize(("world", "replicas"), [(4, 2), (3, 1)])
def test_a_snapshot_goes_without_a_pickle_and_torch_reads_its_files(
    ranks: Pools, tmp_path: Path, world: int, replicas: int
) -> None:
    found = ranks(world).run(save_and_load, str(tmp_path), replicas, timeout=LIMIT_S)
    assert all(whole for whole, _ in found)
    keys = [key for _, held in found for key in held]
    if replicas == 2:  # each box is written by one of the two ranks that hold it
        for first, second in ((0, 2), (1, 3)):
            assert not set(found[first][1]) & set(found[second][1]), found
    assert keys.count("model.3.weight") == 1, "a replica is written once"
    assert keys.count("model.0.weight") == world // replicas
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6), nn.LayerNorm(6))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for parameter in plain.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = _read_by_torch(tmp_path)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(state[f"model.{name}"], tensor), name


def on_one_axis(folder: str) -> bool:
    """A weight that is cut over the replicas alone, as FSDP leaves what no plan cuts."""
    mesh = tpk.init(dp=2, tp=2)
    model = model_on(mesh["tp"])
    norm: Any = model[3]
    norm.weight = nn.Parameter(distribute_tensor(torch.arange(6.0), mesh["dp"], [Shard(0)]))
    before = [cast(DTensor, parameter).to_local().clone() for parameter in model.parameters()]
    tpk.save_snapshot(model, None, folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    tpk.load_snapshot(model, None, folder)
    after = [cast(DTensor, parameter).to_local() for parameter in model.parameters()]
    return all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.gloo
def test_a_weight_on_one_axis_of_the_mesh_is_written_once(ranks: Pools, tmp_path: Path) -> None:
    assert ranks(4).run(on_one_axis, str(tmp_path), timeout=LIMIT_S) == [True] * 4
    state = _read_by_torch(tmp_path)
    assert torch.equal(state["model.3.weight"], torch.arange(6.0))


# ---------------------------------------------------------------- files


@pytest.mark.cpu
def test_boxes_are_found_wherever_they_were_cut(tmp_path: Path) -> None:
    whole = torch.arange(35.0).reshape(5, 7)
    for number, (rows, columns) in enumerate([((0, 2), (0, 7)), ((2, 5), (0, 3)), ((2, 5), (3, 7))]):
        part = whole[slice(*rows), slice(*columns)].clone()
        info = {"w": {"saved_offsets": [rows[0], columns[0]]}}
        save_file({"w": part}, tmp_path / f"{number}.safetensors", metadata={"DCP_SHARDING_INFO": json.dumps(info)})
    files = SnapshotTensors(tmp_path)
    files.check({"w": {"shape": [5, 7], "dtype": "float32"}})
    for box in (Box((0, 0), (5, 7)), Box((1, 2), (3, 4)), Box((3, 3), (1, 1)), Box((0, 0), (0, 7))):
        staged = torch.full(box.sizes, torch.nan)
        target: Any = mock.Mock(staged=staged, box=box)
        files.read([("w", target)])
        assert torch.equal(staged, whole[box.slices]), box


@pytest.mark.cpu
@pytest.mark.parametrize(
    "info",
    ["[]", "{", "[" * 100_000, "{}", '{"w": 3}', '{"w": {}}', '{"w": {"saved_offsets": [0]}}',
     '{"w": {"saved_offsets": [0, -1]}}', '{"w": {"saved_offsets": [0, "1"]}}', '{"w": {"saved_offsets": [0, 1e300]}}'],
)  # fmt: skip
def test_odd_places_are_value_errors(tmp_path: Path, info: str) -> None:
    save_file({"w": torch.ones(3, 2)}, tmp_path / "a.safetensors", metadata={"DCP_SHARDING_INFO": info})
    with pytest.raises(ValueError, match="is damaged or was cut off"):
        SnapshotTensors(tmp_path)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [([4, 2], "float32", "have 6 of the 8"), ([2, 3], "float32", "another snapshot's"), ([3, 2], "int32", "not int32"),
     ([6], "float32", "another snapshot's")],
)  # fmt: skip
def test_files_that_are_not_the_manifests_are_value_errors(
    tmp_path: Path, shape: list[int], dtype: str, said: str
) -> None:
    save_file({"w": torch.ones(3, 2)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=said):
        SnapshotTensors(tmp_path).check({"w": {"shape": shape, "dtype": dtype}})
