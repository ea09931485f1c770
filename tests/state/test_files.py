"""Files of checkpoints: written whole or not at all, and read as far as they go."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, tp_mesh
from tpkernels.state import huggingface_export, safetensors_files
from tpkernels.state.originals import Box
from tpkernels.state.safetensors_files import DIGESTS, SafetensorsFiles
from tpkernels.testing.spawn import Pools

safetensors_torch = pytest.importorskip("safetensors.torch", reason="the package safetensors is missing")


def _export_twice(folder: str) -> list[tuple[str, list[str]]]:
    """What is in the folder's place after a save whose second file cannot be written, and after one that can."""
    torch.manual_seed(0)
    model = tpk.parallelize(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)), tp_mesh())
    write = huggingface_export.write_file
    seen: list[tuple[str, list[str]]] = []
    for name in ("new", "used"):
        for breaks in (True, False):

            def write_or_break(path: Path, *args: Any, breaks: bool = breaks) -> None:
                if breaks and "00002" in path.name:
                    raise OSError("the disk is full")
                write(path, *args)

            huggingface_export.write_file = write_or_break
            try:
                tpk.save_pretrained(model, f"{folder}/{name}", max_file_bytes=600)
                said = "saved"
            except ValueError as error:
                said = str(error)
            finally:
                huggingface_export.write_file = write
            dist.barrier()
            seen.append((said, sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))))
            dist.barrier()
    return seen


@pytest.mark.gloo
def test_an_export_that_fails_leaves_nothing_and_one_that_does_not_is_whole(ranks: Pools, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes").write_text("mine")
    before = ["used", "used/notes"]
    for seen in ranks(2).run(_export_twice, str(tmp_path), timeout=LIMIT_S):
        (said, left), (again, new), (broken, kept), (last, used) = seen
        assert "the disk is full" in said and left == before, (said, left)
        assert again == last == "saved" and "the disk is full" in broken
        files = {path for path in new if path.startswith("new/")}
        assert "new/model.safetensors.index.json" in files and len(files) >= 3, new
        assert kept == new, kept
        assert {path.replace("used/", "new/") for path in used if "used/" in path} == files | {"new/notes"}
        assert not any("partial" in path for path in used)


@pytest.mark.cpu
def test_boxes_of_all_kinds_are_read_as_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {
        "matrix": torch.arange(35.0).reshape(5, 7),
        "cube": torch.arange(2 * 3 * 4, dtype=torch.bfloat16).reshape(2, 3, 4),
        "bytes": torch.arange(11, dtype=torch.uint8),
        "number": torch.tensor(3.5, dtype=torch.float64),
    }
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors")
    for short in (0, 1 << 20):
        monkeypatch.setattr(safetensors_files, "_SHORT_RUN", short)
        files = SafetensorsFiles(tmp_path)
        for name, tensor in tensors.items():
            ends = [[(0, n), (1, n), (0, n - 1), (n - 1, n)] for n in tensor.shape]
            for spans in itertools.product(*ends):
                box = Box(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))
                assert torch.equal(files.read(name, box), tensor[box.slices]), (name, spans, short)


@pytest.mark.cpu
def test_a_file_that_is_cut_off_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    """Mapped, it ended the process with SIGBUS."""
    path = tmp_path / "model.safetensors"
    safetensors_torch.save_file({"w": torch.ones(512, 512)}, path)
    files = SafetensorsFiles(tmp_path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    assert torch.equal(files.read("w", Box((0, 0), (100, 512))), torch.ones(100, 512))
    for box in (Box((0, 0), (512, 512)), Box((256, 0), (256, 512)), Box((0, 256), (512, 256))):
        with pytest.raises(ValueError, match=r"model\.safetensors was cut off while it was read"):
            files.read("w", box)


@pytest.mark.cpu
@pytest.mark.parametrize("digests", ['["w"]', '{"w": "1"}', '{"w": null}', "[" * 100_000, "{"])
def test_odd_digests_are_value_errors(tmp_path: Path, digests: str) -> None:
    safetensors_torch.save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors", metadata={DIGESTS: digests})
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        SafetensorsFiles(tmp_path)


@pytest.mark.cpu
@pytest.mark.parametrize("index", ["[]", "[" * 100_000, json.dumps({"weight_map": {"w": 3}}), '{"weight_map": []}'])
def test_odd_indices_are_value_errors(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"index\.json"):
        SafetensorsFiles(tmp_path)


def _loaded_from_two(folders: list[str]) -> tuple[str, bool]:
    """Each rank is given a checkpoint of its own; what it says, and whether its model is as it was."""
    mesh = tpk.init()["tp"]
    model = tpk.parallelize(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)), mesh)
    before = {name: tensor.clone() for name, tensor in tpk.full_state_dict(model).items()}
    try:
        tpk.load_pretrained(model, folders[dist.get_rank()])
        said = "loaded"
    except ValueError as error:
        said = str(error)
    after = tpk.full_state_dict(model)
    return said, all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.gloo
def test_ranks_do_not_load_parts_of_different_checkpoints_without_digests(ranks: Pools, tmp_path: Path) -> None:
    """The headers are the same, and no rank reads what another one does."""
    folders = []
    for seed in range(2):
        torch.manual_seed(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        plain = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
        state = {name: tensor for name, tensor in plain.state_dict().items() if "weight" in name}
        state |= {"0.bias": torch.zeros(96), "1.bias": torch.zeros(64)}  # what ranks compare in any case
        safetensors_torch.save_file(state, folder / "model.safetensors")
        folders.append(str(folder))
    for said, unchanged in ranks(2).run(_loaded_from_two, folders, timeout=LIMIT_S):
        assert "the ranks have different checkpoints" in said and unchanged, said
    assert ranks(2).run(_loaded_from_two, [folders[0]] * 2, timeout=LIMIT_S)[0][0] == "loaded"


@pytest.mark.cpu
def test_samples_are_taken_at_both_ends_and_in_between(tmp_path: Path) -> None:
    def fingerprint(folder_number: int, **tensors: torch.Tensor) -> str:
        folder = tmp_path / str(folder_number)
        folder.mkdir()
        safetensors_torch.save_file(tensors, folder / "model.safetensors")
        return SafetensorsFiles(folder).fingerprint

    whole, empty = torch.zeros(100_000), torch.zeros(0, 3)
    same = fingerprint(0, w=whole, number=torch.tensor(1.0), empty=empty)
    assert fingerprint(1, w=whole.clone(), number=torch.tensor(1.0), empty=empty) == same
    assert fingerprint(2, w=whole, number=torch.tensor(2.0), empty=empty) != same
    for number, rows in enumerate((slice(0, 1), slice(99_999, None), slice(20_000, 80_000)), start=3):
        other = whole.clone()
        other[rows] = 1.0
        assert fingerprint(number, w=other, number=torch.tensor(1.0), empty=empty) != same, rows
