"""Caches of measured tiles that differ between ranks, or are rubbish (R20): one choice on all ranks, right results.

The ranks are processes with an emulated GPU each (tests/backends/emulated.py), and a cache folder each. A cache that
can not be used is warned of and as good as none; nothing of it reaches a kernel.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.backends.contract import BASE, JUDGES
from tests.backends.emulated import Emulation
from tests.cuda import emulator
from tests.reliability.outcome import Outcome
from tpkernels.backends.symmetric import tuning
from tpkernels.comm.groups import resolve
from tpkernels.testing.cases import GATHER, REDUCE, SCATTER
from tpkernels.testing.spawn import WorkerPool

GOOD = {"block_m": 32, "block_n": 32, "block_k": 16, "num_warps": 4, "num_stages": 2, "loop": "flat",
        "slowest_us": 8.5}  # fmt: skip
OTHER = {**GOOD, "block_n": 64, "num_stages": 3, "loop": "nested"}
VERSION = 2
FUSED = (GATHER, SCATTER, REDUCE)


def _file(entry: Any, version: Any = VERSION) -> Callable[[str], bytes]:
    return lambda key: json.dumps({"version": version, "entries": {key: entry}}).encode()


RUBBISH: Mapping[str, Callable[[str], bytes]] = {
    "empty": lambda key: b"",
    "cut off": lambda key: _file(GOOD)(key)[:-9],
    "a pickle": lambda key: b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix",
    "no text": lambda key: b"\xff\xfe\x00" * 50,
    "no object": lambda key: b"[3]",
    "too deep": lambda key: b"[" * 100_000,
    "too large": lambda key: _file(GOOD)(key) + b" " * 2**21,
    "another version": _file(GOOD, VERSION + 1),
    "no entries": lambda key: b'{"version": 2, "entries": [1]}',
    "a negative number": _file({**GOOD, "block_m": -32}),
    "a huge number": _file({**GOOD, "block_n": 2**40}),
    "a fraction": _file({**GOOD, "block_k": 16.5}),
    "a truth value": _file({**GOOD, "num_stages": True}),
    "text for a number": _file({**GOOD, "num_warps": "4; import os"}),
    "a loop that there is not": _file({**GOOD, "loop": "endless"}),
    "not a number": _file({**GOOD, "slowest_us": float("nan")}),
    "a field too few": _file({name: value for name, value in GOOD.items() if name != "num_warps"}),
    "a field too many": _file({**GOOD, "__class__": "Tiles"}),
}
# Legal in itself, but no such GPU has the memory.
UNFIT = {**GOOD, "block_m": 256, "block_n": 256, "block_k": 256, "num_stages": 6, "num_warps": 8}
FOLDERS = ("a folder in its place", "a pipe in its place", "another user's")
KINDS = (
    "diverging", "one rank knows", "unfit for the GPU", "measured together",
    *(f"first: {name}" for name in (*RUBBISH, *FOLDERS)), "all: cut off", "all: a huge number",
)  # fmt: skip


def caches(count: int, size: int = 2) -> Outcome:
    """R20: ranks whose caches differ, or are rubbish."""
    outcome = Outcome("R20 caches")
    # Triton decides to interpret when it is imported, which a fork server would do too early.
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        with WorkerPool(size, group_timeout=60.0) as pool:
            per_rank = pool.run(_trials, count, str(emulator.library()), folder, timeout=120.0 + 6.0 * count)
    for trial, found in enumerate(zip(*per_rank, strict=True)):
        kind = KINDS[_kind_of(trial, count)]
        tiles = {json.dumps(tiles) for tiles, _ in found}
        problem = next((problem for _, problem in found if problem is not None), None)
        if problem is None and len(tiles) > 1:
            problem = "the ranks took different tiles"
        outcome.add(None if problem is None else f"{kind}: {problem}", repr(found))
    return outcome


def _kind_of(trial: int, count: int) -> int:
    """All kinds in turn; those of a slice are spread over them."""
    return trial % len(KINDS) if count >= len(KINDS) else trial * len(KINDS) // count


def _trials(count: int, library: str, folder: str) -> list[tuple[Any, str | None]]:
    kinds = [KINDS[_kind_of(trial, count)] for trial in range(count)]
    return [_one(dist.get_rank(), kind, trial, library, Path(folder)) for trial, kind in enumerate(kinds)]


def _one(rank: int, kind: str, trial: int, library: str, folder: Path) -> tuple[Any, str | None]:
    """The tiles that this rank took, and what is wrong with them or with the results."""
    own = folder / f"{trial}-{rank}"
    own.mkdir()
    os.environ.update(TPKERNELS_CACHE_DIR=str(own), TPKERNELS_TUNE="1" if kind in _TUNED else "0")
    case = BASE.but(op=FUSED[trial % len(FUSED)], shape=(8, 16), ns=(10,), integers=True, implementation="symmetric")
    keys: list[str] = []

    def key_of(*arguments: Any) -> str:
        keys.append(original(*arguments))
        if len(keys) == 1:
            _prepare(own / "tiles.json", kind, rank, keys[0])
        return keys[0]

    original = tuning.key_of
    settings = Emulation(library, str(folder), capability=80)
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as warned, settings.group() as group:
        warnings.simplefilter("always")
        with mock.patch.object(tuning, "key_of", key_of), mock.patch.object(tuning, "ROUNDS", 2):
            JUDGES["unfused"](case, group)
        plans = [plan for plan in resolve(group).agreed.values() if plan.implementation.name == "symmetric"]
        (agreed,) = [plan.agreed for plan in plans]
    tiles = None if agreed is None else asdict(agreed)
    said = [str(one.message) for one in warned if "tile cache" in str(one.message)]
    wrong = _judge(kind, rank, tiles, said, own / "tiles.json", keys[0])
    return tiles, wrong if time.monotonic() - start < 60 else "a rank hung"


_TUNED = ("measured together", "all: a huge number")


def _prepare(path: Path, kind: str, rank: int, key: str) -> None:
    content: bytes | None = None
    where, _, name = kind.partition(": ")
    if kind == "diverging":
        content = _file((GOOD, OTHER)[rank % 2])(key)
    elif kind == "one rank knows":
        content = None if rank == 0 else _file(OTHER)(key)
    elif kind == "unfit for the GPU":
        content = _file(UNFIT if rank == 0 else OTHER)(key)
    elif where == "first" and rank > 0:
        content = _file(OTHER)(key)
    elif name in RUBBISH:
        content = RUBBISH[name](key)
    elif name == FOLDERS[0]:
        path.mkdir()
    elif name == FOLDERS[1]:
        os.mkfifo(path)
    elif name == FOLDERS[2]:
        content = _file(GOOD)(key)
    if content is not None:
        path.write_bytes(content)
    if name == FOLDERS[2] and rank == 0:
        path.chmod(0o666)


def _judge(kind: str, rank: int, tiles: Any, said: list[str], path: Path, key: str) -> str | None:
    rubbish = kind.startswith("all: ") or (kind.startswith("first: ") and rank == 0)
    if bool(said) != rubbish:
        return "rubbish without a warning" if rubbish else f"a warning without reason: {said[0]}"
    if kind in _TUNED:
        kept = json.loads(path.read_text())["entries"].get(key)
        if tiles is None or kept is None:
            return "nothing was measured and kept"
        return None if {**kept, "slowest_us": 0} == {**tiles, "slowest_us": 0} else "another entry was kept"
    if kind.startswith("all: "):
        return None if tiles is None else "rubbish was used"
    expected = GOOD if kind == "diverging" else OTHER
    return None if tiles == {n: v for n, v in expected.items() if n != "slowest_us"} else "not the tiles of the cache"
