"""`./quickstart` and the compiled core: when it is built again, and what is said about it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.test_quickstart import Checkout

pytestmark = pytest.mark.cpu


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout")


def installs(calls: list[str]) -> list[str]:
    return [call.split()[-1] for call in calls if call.startswith("-m pip") and " -e " in call]


def test_changed_native_sources_and_a_new_compiler_build_the_project_again(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout.make_environment(torch="2.13.0")
    sources = checkout.root / "csrc" / "cpu"
    sources.mkdir(parents=True)
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    def edit_a_source() -> None:
        sources.joinpath("reduce.cpp").write_text("int x;\n")

    def edit_a_text() -> None:
        sources.joinpath("notes.md").write_text("text\n")

    def install_a_compiler() -> None:
        programs.joinpath("g++").write_text("")
        programs.joinpath("g++").chmod(0o755)

    def find_headers() -> None:
        answers = json.loads(checkout.bin.joinpath("answers.json").read_text())
        checkout.bin.joinpath("answers.json").write_text(json.dumps({**answers, "headers": True}))

    def choose_a_compiler() -> None:
        monkeypatch.setenv("CXX", "clang++")

    checkout.run("bench")
    for change, count in (
        (edit_a_source, 1), (edit_a_text, 0), (install_a_compiler, 1), (find_headers, 1), (choose_a_compiler, 1),
    ):  # fmt: skip
        before = len(checkout.calls())
        change()
        checkout.run("bench")
        assert installs(checkout.calls()[before:]) == [f"{checkout.root}[bench]"] * count, change


def test_the_output_says_how_the_build_of_the_core_went(checkout: Checkout) -> None:
    checkout.make_environment(torch="2.13.0")
    checkout.write_core_record(built=True, module="_native.so", compiler="g++ 12.2.0")
    assert "compiled core: built by g++ 12.2.0\n" in checkout.run("bench")[1]
    checkout.write_core_record(built=False, module="_native.so", reason="no compiler", advice="install one")
    assert "compiled core: NOT built, everything else works: no compiler\n    install one" in checkout.run("bench")[1]


def test_a_core_that_is_gone_or_required_is_built_although_nothing_changed(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout.make_environment(torch="2.13.0")
    monkeypatch.delenv("TPKERNELS_REQUIRE_NATIVE", raising=False)

    def installed_again() -> bool:
        before = len(checkout.calls())
        checkout.run("bench")
        return bool(installs(checkout.calls()[before:]))

    assert installed_again()
    checkout.write_core_record(built=True, module="_native.so")
    assert installed_again(), "built, but the module is not there"
    checkout.root.joinpath("tpkernels", "_native.so").write_text("")
    assert not installed_again()
    checkout.write_core_record(built=False, module="_native.so", reason="no compiler", advice="install one")
    assert not installed_again(), "the same attempt would fail in the same way"
    monkeypatch.setenv("TPKERNELS_REQUIRE_NATIVE", "1")
    assert installed_again(), "and now it has to say so"
