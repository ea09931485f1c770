"""Measured tiles: the file that keeps them, what ranks make of each other's, what is measured, and who uses it.

The same between processes, with rubbish of every kind in the file: row R20-caches of tests/reliability.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import filelock
import pytest
import torch

pytest.importorskip("triton")

from tests.backends.test_symmetric_order import Recorder
from tpkernels import config
from tpkernels.backends.symmetric import implementations as symmetric
from tpkernels.backends.symmetric import kernel_launches, tile_cache, tuning
from tpkernels.backends.symmetric.resource import SymmetricMemory
from tpkernels.backends.symmetric.tile_cache import Entry, TileCache
from tpkernels.backends.symmetric.tuning import Gemm
from tpkernels.comm.agreement import Record
from tpkernels.dispatch import Problem
from tpkernels.errors import GroupMismatch, UnsupportedProblem
from tpkernels.kernels.config import Tiles
from tpkernels.partition import Layout

pytestmark = pytest.mark.cpu

TILES, OTHER = Tiles(64, 64, 32, 4, 3), Tiles(32, 128, 64, 8, 4)
TOO_LARGE = Tiles(256, 256, 256, 8, 6)
GEMM = Gemm(True, 4096, 2048, 1024, torch.bfloat16, 4)
LAYOUT = Layout(1, (1024,) * 4, 1)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_an_entry_is_found_again_by_its_key_alone(tmp_path: Path) -> None:
    cache = TileCache(tmp_path / "new" / "tiles.json")
    assert cache.find("a") is None
    cache.add("a", Entry(TILES, 5.0))
    cache.add("b", Entry(OTHER, 7.5))
    cache.add("a", Entry(OTHER, 4.0))
    again = TileCache(tmp_path / "new" / "tiles.json")
    assert (again.find("a"), again.find("b"), again.find("c")) == (Entry(OTHER, 4.0), Entry(OTHER, 7.5), None)
    assert (tmp_path / "new" / "tiles.json").stat().st_mode & 0o077 == 0, "a file that others may write is not trusted"
    assert not list(tmp_path.glob("new/.tiles-*"))


def test_the_oldest_entries_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_cache, "MAX_ENTRIES", 3)
    cache = TileCache(tmp_path / "tiles.json")
    for key in "abcad":
        cache.add(key, Entry(TILES, 1.0))
    assert list(json.loads((tmp_path / "tiles.json").read_text())["entries"]) == ["c", "a", "d"]


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: TileCache(tmp_path / "tiles.json").add(str(key), Entry(TILES, 1.0)), range(40)))
    cache = TileCache(tmp_path / "tiles.json")
    assert all(cache.find(str(key)) is not None for key in range(40))


def test_one_entry_that_is_wrong_leaves_the_others_alone(tmp_path: Path) -> None:
    cache = TileCache(tmp_path / "tiles.json")
    for key in "ab":
        cache.add(key, Entry(TILES, 1.0))
    content = json.loads((tmp_path / "tiles.json").read_text())
    content["entries"]["a"]["block_m"] = 48
    (tmp_path / "tiles.json").write_text(json.dumps(content))
    with pytest.warns(RuntimeWarning, match=r"entry 'a' is not used: block_m \(48\) must be one of 16, 32, 64, 128"):
        assert cache.find("b") == Entry(TILES, 1.0)


def test_what_can_not_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_cache, "LOCK_S", 0.01)
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="measured tiles are not kept"):
        TileCache(tmp_path / "file" / "tiles.json").add("a", Entry(TILES, 1.0))
    with (
        filelock.FileLock(tmp_path / "tiles.lock"),
        pytest.warns(RuntimeWarning, match="not kept: The file lock"),
    ):
        TileCache(tmp_path / "tiles.json").add("a", Entry(TILES, 1.0))


def test_the_folder_is_the_users_or_the_one_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TPKERNELS_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tile_cache.file() == tmp_path / "tpkernels" / "tiles.json"
    monkeypatch.setenv("TPKERNELS_CACHE_DIR", "/somewhere/else")
    assert tile_cache.file() == Path("/somewhere/else/tiles.json")
    with pytest.raises(ValueError, match=r"TPKERNELS_CACHE_DIR must be an absolute path, got 'here'"):
        config.load({"TPKERNELS_CACHE_DIR": "here"})


@pytest.mark.parametrize("package", ["platformdirs", "filelock"])
def test_tiles_are_not_kept_where_a_package_is_missing_and_a_warning_says_which(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TPKERNELS_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.warns(RuntimeWarning, match=f"the package '{package}' is missing.* pip install {package}"):
        cache = tile_cache.opened()
        if cache is not None:
            cache.add("a", Entry(TILES, 1.0))
    assert (cache is None) == (package == "platformdirs") and not list(tmp_path.iterdir())


def test_ranks_agree_without_the_packages_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks(monkeypatch, tmp_path)
    monkeypatch.delenv("TPKERNELS_CACHE_DIR")
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    ranks.cached(None, Entry(TILES, 1.0).to_json())
    with pytest.warns(RuntimeWarning, match="neither read nor kept"):
        assert ranks.agree() == TILES


# --- the choice of all ranks ------------------------------------------------------------------------------------------


def owning(**channels: Any) -> dict[str, SymmetricMemory]:
    """A group's resources, with these attributes of its channels."""
    stand_in: Any = SimpleNamespace(**channels)
    return {SymmetricMemory.name: SymmetricMemory(stand_in)}


class Ranks:
    """Rank 1 of three, whose peers' records are given by part; `measured`: what it measures of each candidate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        monkeypatch.setenv("TPKERNELS_CACHE_DIR", str(folder))
        monkeypatch.setattr(tuning.agreement, "exchange_records", self._exchange)
        monkeypatch.setattr(tuning, "_measure", lambda *arguments: self.measured(arguments[-1]))
        self.set = monkeypatch.setenv
        self.device = Recorder()
        self.peers: dict[str, list[dict[str, Any]]] = {}
        self.measured: Callable[[Sequence[Tiles]], list[float | None]] = lambda tried: [1.0] * len(tried)
        self.said: list[str] = []

    def _exchange(self, group: Any, call: int, record: Record, part: str) -> list[Record]:
        self.said.append(part)
        first, last = (Record(part, json.loads(json.dumps(facts))) for facts in self.peers[part])
        return [first, record, last]

    def cached(self, first: Any, last: Any, tunes: bool = False) -> None:
        self.peers["tiles"] = [{"cached": entry, "tunes": tunes} for entry in (first, last)]

    def agree(self) -> Tiles | None:
        group: Any = SimpleNamespace(rank=1, size=3, resources=owning(device=self.device))
        return tuning.agree(group, 7, GEMM, LAYOUT)

    @property
    def key(self) -> str:
        return tuning.key_of(GEMM, self.device)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Ranks]:
    yield Ranks(monkeypatch, tmp_path)


def said(tiles: Tiles) -> dict[str, Any]:
    return Entry(tiles, 2.0).to_json()


def test_the_lowest_rank_that_knows_tiles_which_run_is_followed(ranks: Ranks) -> None:
    for first, last, expected in (
        (said(OTHER), None, OTHER),
        (None, said(OTHER), OTHER),
        (said(OTHER), said(TILES), OTHER),
        (said(TOO_LARGE), said(TILES), TILES),
        ({"block_m": 7}, said(TILES), TILES),
        ("{}", None, None),
        (None, None, None),
    ):
        ranks.cached(first, last)
        assert ranks.agree() == expected, (first, last)
    TileCache(tile_cache.file()).add(ranks.key, Entry(TILES, 3.0))
    ranks.cached(None, said(OTHER))
    assert ranks.agree() == TILES
    assert "tile times" not in ranks.said


def test_a_key_names_all_that_a_measurement_depends_on(ranks: Ranks) -> None:
    others = [replace(GEMM, **{name: value}) for name, value in (
        ("gathers", False), ("m", 8), ("n", 8), ("k", 8), ("dtype", torch.float16), ("world_size", 2),
        ("out_dtype", torch.float16), ("activation", "silu"), ("activation", "swiglu"))]  # fmt: skip
    assert len({tuning.key_of(gemm, ranks.device) for gemm in (GEMM, *others)}) == 10
    assert ranks.device.name in ranks.key and "triton" in ranks.key


def test_what_is_fastest_on_the_slowest_rank_is_taken_and_kept(ranks: Ranks) -> None:
    ranks.set("TPKERNELS_TUNE", "1")
    ranks.cached(None, None, tunes=True)
    tried = tuning.candidates(GEMM.configure(ranks.device).tiles, capability=80, dtype="bfloat16")
    assert len(tried) >= 5 and len(set(tried)) == len(tried)
    # Candidate 1 is the fastest on this rank, but slow on a peer; 2 runs nowhere on the last; 3 is good everywhere.
    mine, first, last = ([9.0] * len(tried) for _ in range(3))
    mine[1], first[1], mine[2], first[2], last[2] = 1.0, 20.0, 1.0, 1.0, None  # type: ignore[call-overload]
    mine[3], first[3], last[3] = 5.0, 4.0, 6.0
    ranks.measured = lambda candidates: [*mine]
    ranks.peers["tile times"] = [{"us": first}, {"us": last}]
    assert ranks.agree() == tried[3]
    assert TileCache(tile_cache.file()).find(ranks.key) == Entry(tried[3], 6.0)
    nothing = {"us": [None] * len(tried)}
    ranks.peers["tile times"] = [nothing, nothing]
    tile_cache.file().unlink()
    assert ranks.agree() is None and not tile_cache.file().exists()


def test_ranks_of_which_some_would_measure_and_a_capture_are_refused(ranks: Ranks) -> None:
    ranks.cached(None, None, tunes=True)
    with pytest.raises(GroupMismatch, match=r"TPKERNELS_TUNE differs between ranks: \[True, False, True\]"):
        ranks.agree()
    ranks.set("TPKERNELS_TUNE", "1")
    with (
        mock.patch.object(ranks.device, "capturing", return_value=True),
        pytest.raises(UnsupportedProblem, match="cannot be measured while a CUDA graph is captured"),
    ):
        ranks.agree()


def test_a_candidate_that_does_not_compile_is_left_out_and_medians_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    times = iter([50.0, 3.0, 9.0, 4.0, 100.0, 5.0, 6.0])

    class Bench:
        def __init__(self, *arguments: Any) -> None: ...

        def launch(self, tiles: Tiles) -> Callable[[], None]:
            if tiles == OTHER:
                raise OutOfResources(300_000, 232_448, "shared memory")
            return lambda: None

    recorder = Recorder()
    recorder.time_us = lambda kernel: next(times)  # type: ignore[method-assign]
    monkeypatch.setattr(tuning, "_Bench", Bench)
    assert tuning._measure(GEMM, LAYOUT, recorder, 0, (TILES, OTHER)) == [5.5, None]
    monkeypatch.setattr(tuning, "_Bench", mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    assert tuning._measure(GEMM, LAYOUT, recorder, 0, (TILES, OTHER)) == [None, None]


# --- who uses them ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_tiles_are_agreed_for_calls_that_run_a_fused_kernel_alone(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Layout] = []
    monkeypatch.setattr(tuning, "agree", lambda group, call, gemm, layout: asked.append(layout))
    (offer,) = [o for o in symmetric.dispatch.implementations(op) if o.name == "symmetric"]
    assert offer.agree is not None
    large = Problem(op, 4096, 4096, 4096, torch.bfloat16, 4)
    device = Recorder()
    group: Any = SimpleNamespace(resources=owning(device=device, checks_first_use=False))
    offer.agree(group, 1, large, LAYOUT)
    assert asked == [LAYOUT]
    few = Layout(1, (8,) * 4, 1)
    offer.agree(group, 1, replace(large, m=32), few)
    if op != "matmul_all_reduce":
        offer.agree(group, 1, large, Layout.of((4096, 4096), 1, [1024] * 4))  # features
    else:
        offer.agree(group, 1, replace(large, n=8), LAYOUT)  # one shot
    fp8 = replace(large, dtype=torch.float8_e4m3fn, out_dtype=torch.bfloat16)
    offer.agree(group, 1, fp8, LAYOUT)  # a GPU without such a kernel
    assert asked == [LAYOUT]
    device.capability = 89
    offer.agree(group, 1, fp8, LAYOUT)
    assert asked == [LAYOUT] * 2


def launched(agreed: Tiles | None, n: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    context: Any = SimpleNamespace(
        problem=Problem("all_gather_matmul", 4096, 2048 * 4, 1024, dtype, 4), agreed=agreed, forced_chunks=False,
        num_chunks=8,
    )  # fmt: skip
    channel: Any = SimpleNamespace(device=Recorder())
    x, weight = torch.empty(4096, 1024, dtype=dtype), torch.empty(n, 1024, dtype=dtype)
    return kernel_launches._config(context, channel, (weight,), x, kernel_launches._num_chunks(context, channel))


def test_agreed_tiles_reach_the_gemm_that_they_were_measured_for_and_chunks_follow_from_them() -> None:
    usual, tuned = launched(None, 2048), launched(OTHER, 2048)
    assert tuned.tiles == OTHER != usual.tiles
    assert tuned.num_chunks == GEMM.configure(Recorder(), tiles=OTHER).num_chunks
    assert (tuned.num_programs, tuned.descriptors) == (usual.num_programs, usual.descriptors)
    # A weight with few columns is another GEMM: its tiles are its own, the number of chunks is everybody's.
    few = launched(OTHER, 48)
    assert few.tiles == launched(None, 48).tiles and few.num_chunks == tuned.num_chunks


def test_the_precision_of_fp32_products_may_change_between_calls() -> None:
    before, found = torch.get_float32_matmul_precision(), []
    try:
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            found.append(launched(None, 2048, torch.float32).precision)
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == ["ieee", "tf32", "ieee"]
