"""What tests compile is built once for a state of its sources, and never taken for that of another one."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import builds

pytestmark = pytest.mark.cpu


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(builds, "ROOT", tmp_path)
    path = tmp_path / "unit.cpp"
    path.write_text("int one;")
    return path


def copying(source: Path, made: list[str]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        made.append(folder.name)
        folder.joinpath("object").write_text(source.read_text())

    return make


def test_another_source_other_flags_and_another_compiler_build_anew(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def build(settings: object = "-O1") -> str:
        return (builds.built_once("unit", [source], settings, copying(source, made)) / "object").read_text()

    assert build() == build() == "int one;" and len(made) == 1
    source.write_text("int two;")
    assert build() == "int two;" and len(made) == 2
    build("-O2")
    assert len(made) == 3
    monkeypatch.setattr(builds, "_words_of", lambda program: "another compiler")
    build()
    assert len(made) == len(set(made)) == 4
    source.rename(source.with_name("renamed.cpp"))
    source = source.with_name("renamed.cpp")
    build()
    assert len(set(made)) == 5


def test_a_build_that_failed_is_made_again_and_leaves_nothing_behind(source: Path) -> None:
    def fails(folder: Path) -> None:
        folder.joinpath("half").write_text("")
        raise RuntimeError("no space left")

    with pytest.raises(RuntimeError, match="no space left"):
        builds.built_once("unit", [source], None, fails)
    folder = builds.built_once("unit", [source], None, copying(source, []))
    assert folder.joinpath("object").exists() and not folder.joinpath("half").exists()


def test_the_oldest_builds_of_a_name_leave_and_those_of_another_name_stay(source: Path) -> None:
    other = builds.built_once("other", [source], None, copying(source, []))
    folders = []
    for number in range(builds.KEPT):
        folders.append(builds.built_once("unit", [source], number, copying(source, [])))
        os.utime(folders[-1] / "built", (number, number))
    builds.built_once("unit", [source], 0, copying(source, []))  # used again: now 1 is the oldest
    builds.built_once("unit", [source], "one more", copying(source, []))
    assert [folder.exists() for folder in folders] == [True, False, *[True] * (builds.KEPT - 2)] and other.exists()


def _in_a_process(root: Path, source: Path, started: Path) -> None:
    builds.ROOT = root

    def make(folder: Path) -> None:
        with started.open("a") as file:
            file.write("x")

    builds.built_once("unit", [source], None, make)


def test_of_several_processes_one_builds(source: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_in_a_process, args=(tmp_path, source, started)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4 and started.read_text() == "x"
