"""Loading the compiled core: every way in which it is not there has its own words."""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from tpkernels.gemm import native

pytestmark = pytest.mark.cpu
NAME = "tpkernels._native"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """`load(error or module)`: what the import does; answers (native(), why_not())."""

    def load(outcome: Exception | types.ModuleType) -> tuple[types.ModuleType | None, str]:
        def import_module(name: str) -> types.ModuleType:
            assert name == NAME
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        native._load.cache_clear()
        monkeypatch.setattr(native, "importlib", types.SimpleNamespace(import_module=import_module))
        return native.native(), native.why_not()

    yield load
    native._load.cache_clear()


def core(abi: int) -> types.ModuleType:
    module = types.ModuleType(NAME)
    module.ABI = abi  # type: ignore[attr-defined]
    return module


ABSENT = ModuleNotFoundError(f"No module named {NAME!r}", name=NAME)


def test_a_core_that_loads_is_loaded_once_and_there_is_no_reason(load) -> None:
    module = core(native.ABI)
    assert load(module) == (module, "")
    native.importlib.import_module = None  # type: ignore[assignment]
    assert native.native() is module


def test_a_core_of_another_revision_is_refused(load) -> None:
    found, reason = load(core(native.ABI + 1))
    assert found is None and f"revision ({native.ABI + 1})" in reason and f"({native.ABI})" in reason
    assert load(types.ModuleType(NAME))[0] is None, "one without a revision too"


def test_a_core_that_does_not_load_says_why(load) -> None:
    found, reason = load(ImportError("/lib/libc.so.6: version `GLIBC_2.38' not found"))
    assert found is None and reason == "the compiled core does not load: /lib/libc.so.6: version `GLIBC_2.38' not found"
    found, reason = load(ModuleNotFoundError("No module named 'other'", name="other"))
    assert "does not load: No module named 'other'" in reason, "missing is only the core itself"


def test_an_error_that_is_no_import_error_is_not_hidden(load) -> None:
    with pytest.raises(ZeroDivisionError):
        load(ZeroDivisionError("our bug"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "the compiled core was never built"),
        ('{"built": false, "reason": "no C++ compiler"}', "the compiled core was not built: no C++ compiler"),
        ('{"built": true, "module": "_native.cpython-99.so"}', "not there for this Python: _native.cpython-99.so was"),
        ("{half", "is not a record of a build"),
        ("[]", "is not a record of a build"),
        ('{"built": false, "unknown": 1}', "is not a record of a build"),
    ],
)
def test_a_missing_core_is_explained_by_the_record_of_its_build(
    load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, said: str
) -> None:
    record = tmp_path / "_native_build.json"
    if text is not None:
        record.write_text(text)
    monkeypatch.setattr(native, "RECORD", record)
    found, reason = load(ABSENT)
    assert found is None and said in reason


def test_the_real_import_goes_to_the_extension_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is no shared library stands where the module would be."""
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    tmp_path.joinpath(f"_native{suffix}").write_text("not a library")
    monkeypatch.setattr(importlib.import_module("tpkernels"), "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    native._load.cache_clear()
    try:
        assert native.native() is None and "does not load" in native.why_not() and str(tmp_path) in native.why_not()
    finally:
        native._load.cache_clear()


# --- how to build it --------------------------------------------------------------------------------------------------


class Distribution:
    def __init__(self, origin: object) -> None:
        self.origin = None if origin is None else json.dumps(origin)

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.origin


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///home/a%20b/tp", "dir_info": {}}, "install --no-deps '/home/a b/tp'"),
        ({"url": "file:///tmp/tpkernels.tar.gz", "archive_info": {}}, "--no-cache-dir --no-binary tpkernels tpkernels"),
        (None, "--no-cache-dir --no-binary tpkernels tpkernels"),
    ],
)
def test_the_command_that_builds_again_installs_from_where_the_package_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: object, command: str
) -> None:
    monkeypatch.setattr(native, "PACKAGE", tmp_path / "site-packages" / "tpkernels")
    monkeypatch.setattr(native.importlib.metadata, "distribution", lambda name: Distribution(origin))
    assert native.how_to_rebuild().startswith(f"{sys.executable} -m pip install --no-deps")
    assert native.how_to_rebuild().endswith(command)


def test_in_a_source_tree_the_command_is_an_editable_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.joinpath("setup.py").write_text("")
    monkeypatch.setattr(native, "PACKAGE", tmp_path / "tpkernels")
    assert native.how_to_rebuild().endswith(f"--no-deps -e {tmp_path}")


def test_a_core_that_is_older_than_its_sources_is_outdated(tmp_path: Path) -> None:
    built = tmp_path / "_native.so"
    built.write_text("")
    module = core(native.ABI)
    module.__file__ = str(built)
    csrc = tmp_path / "csrc"
    assert not native.outdated(module, csrc), "an installed wheel has no sources beside it"
    csrc.joinpath("cpu").mkdir(parents=True)
    for name in ("bindings.cpp", "cpu/reduce.h", "README.md"):
        csrc.joinpath(name).write_text("")
        os.utime(csrc / name, (1, 1))
    assert not native.outdated(module, csrc)
    os.utime(csrc / "README.md")
    os.utime(built, (2, 2))
    assert not native.outdated(module, csrc), "a text is not compiled"
    os.utime(csrc / "cpu/reduce.h")
    assert native.outdated(module, csrc)
