"""W real processes run both kernels against each other's memory, call after call."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernels import world as worlds
from tests.kernels.interpreter import Failed, Interpreter, mutant

pytestmark = pytest.mark.cpu

SHARDS = ((17, 0, 37), (20, 33), (5, 40, 1, 18))


def run(interpreter: Interpreter, world: worlds.World) -> None:
    world.folder.mkdir()
    worlds.Memory(world)  # the files exist before any rank maps them
    interpreter.run_all("world.run_rank", [(world, rank) for rank in range(len(world.shards))])


@pytest.mark.full("tests/backends/test_symmetric.py interprets these kernels on ranks, too")
def test_ranks_compute_what_they_should_call_after_call(interpreter: Interpreter, tmp_path: Path, full: bool) -> None:
    for shards in SHARDS if full else SHARDS[:1]:
        folder = tmp_path / f"{len(shards)} ranks"
        run(interpreter, worlds.World(folder, shards, n=40, k=48, num_chunks=2, calls=12 if full else 2))


@pytest.mark.slow("6 s in the interpreter")
def test_a_chunk_announced_after_its_first_tile_is_caught(interpreter: Interpreter, tmp_path: Path) -> None:
    package = mutant(tmp_path, "mutant_early", {"signals.py": (" + 1 == num_tiles", " == 0")})
    world = worlds.World(
        tmp_path / "memory", (40, 90), n=64, k=48, num_chunks=1, calls=2, package=package, module_folder=str(tmp_path)
    )
    with pytest.raises(Failed, match="BoundExceeded"):
        run(interpreter, world)
