"""setup.py on machines of every kind: with a compiler, without one, without headers, with one that fails.

The sources here are a stand-in for csrc/ that compiles in a moment; the real ones are built by test_packaging.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULE = "_native" + sysconfig.get_config_var("EXT_SUFFIX")
TIMEOUT_S = 120
pytestmark = pytest.mark.cpu
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

BINDINGS = """
#include <Python.h>
#include "cpu/answer.h"
static PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__native() {
    PyObject* m = PyModule_Create(&module);
    PyModule_AddIntConstant(m, "ABI", 1);
    PyModule_AddIntConstant(m, "answer", answer() + wide());
    return m;
}
"""
PORTABLE = """#include "cpu/answer.h"
#ifdef __AVX2__
#error this file is for every CPU
#endif
int answer() { return 40; }
"""
WIDE = """#include "cpu/answer.h"
#if defined(__x86_64__) && !defined(__AVX2__)
#error built without its instruction set
#endif
int wide() { return 2; }
"""
# Stands for a program in PATH or CXX; what it is asked is answered, the rest goes to the real compiler.
WRAPPER = """#!/bin/sh
case "$*" in
*--version*) echo "{version}";;
*-dumpmachine*) echo "{machine}";;
*) echo "$@" >> {log}; exec g++ "$@";;
esac
"""


class Tree:
    """A source tree with a small package and small native sources, in a folder with an awkward name."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a tree: of $HOME's"
        self.root.mkdir()
        for name in ("setup.py", "project_urls.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
            shutil.copy2(ROOT / name, self.root / name)
        self.package = self.root / "tpkernels"
        self.write("tpkernels/__init__.py", "")
        self.write("tpkernels/py.typed", "")
        self.write("csrc/bindings.cpp", BINDINGS)
        self.write("csrc/cpu/answer.h", "int answer();\nint wide();\n")
        self.write("csrc/cpu/answer.cpp", PORTABLE)
        self.write("csrc/cpu/wide_avx2.cpp", WIDE)

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def python(self, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
        dropped = ("CXX", "CXXFLAGS", "LDFLAGS", "TPKERNELS_REQUIRE_NATIVE")
        env = {name: value for name, value in os.environ.items() if name not in dropped} | environment
        argv = [sys.executable, *args]
        return subprocess.run(argv, cwd=self.root, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)

    def build(self, before: str = "", **environment: str) -> str:
        """`setup.py build_ext --inplace`, after a line of Python; what it printed."""
        code = f"{before}\nimport runpy, sys\nsys.argv = ['setup.py', 'build_ext', '--inplace']\n"
        done = self.python("-c", code + "runpy.run_path('setup.py', run_name='__main__')", **environment)
        if done.returncode != 0:
            raise RuntimeError(done.stdout + done.stderr)
        return done.stdout + done.stderr

    def backend(self, hook: str, **environment: str) -> Path:
        """Run one hook of the build backend, as pip does; the file that it made."""
        code = f"from setuptools import build_meta as b; b.{hook}('made')"
        self.root.joinpath("made").mkdir(exist_ok=True)
        done = self.python("-c", code, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        (made,) = self.root.joinpath("made").iterdir()
        return made

    @property
    def record(self) -> dict[str, object]:
        return json.loads(self.package.joinpath("_native_build.json").read_text())

    def answer(self) -> str:
        return self.python("-c", "from tpkernels import _native; print(_native.answer)").stdout.strip()

    def compiled(self, output: str) -> set[str]:
        """The sources that a build compiled."""
        lines = [line for line in output.splitlines() if line.startswith("[") and " -c " in line]
        return {line.rpartition(" -o ")[2].removeprefix("cpu/").removesuffix(".o") for line in lines}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


# --- with a compiler --------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.slow("3 s of compiling")
def test_the_core_builds_in_place_and_building_again_compiles_only_what_changed(tree: Tree) -> None:
    """One tree for several builds: also for what a process keeps that runs the old core, and for a build that fails."""
    assert tree.compiled(tree.build()) == {"bindings", "answer", "wide_avx2"}
    assert tree.answer() == "42"
    assert tree.record["built"] is True and tree.record["module"] == MODULE
    assert "g++" in str(tree.record["compiler"]) and "-ffp-contract=off" in tree.record["flags"]  # type: ignore[operator]
    assert tree.compiled(tree.build()) == set()

    with tree.package.joinpath(MODULE).open("rb") as mapped:
        before = mapped.read()
        tree.write("csrc/cpu/answer.cpp", PORTABLE.replace("40", "50"))
        assert tree.compiled(tree.build()) == {"answer"} and tree.answer() == "52"
        mapped.seek(0)
        assert mapped.read() == before and tree.package.joinpath(MODULE).read_bytes() != before

    tree.write("csrc/cpu/answer.h", "int answer();\nint wide();\nint more();\n")
    assert tree.compiled(tree.build()) == {"bindings", "answer", "wide_avx2"}, "all include the header"
    assert tree.compiled(tree.build(CXXFLAGS="-O0")) == {"bindings", "answer", "wide_avx2"}

    assert tree.package.joinpath(MODULE).exists()
    tree.write("csrc/cpu/answer.cpp", "#error this compiler is too old\n")
    tree.build()
    assert "compilation failed with g++" in str(tree.record["reason"])
    assert any("this compiler is too old" in line for line in tree.record["errors"])  # type: ignore[attr-defined]
    assert not tree.package.joinpath(MODULE).exists(), "a stale core under newer Python code is worse than none"


@needs_compiler
def test_another_version_of_the_compiler_compiles_everything_anew(tree: Tree, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    for version, count in (("1.0", 3), ("1.0", 0), ("2.0", 3)):
        compiler.write_text(WRAPPER.format(version=f"compiler {version}", machine="x86_64-any", log=tmp_path / "log"))
        compiler.chmod(0o755)
        assert len(tree.compiled(tree.build(CXX=str(compiler)))) == count
        assert tree.record["compiler"] == f"compiler {version}"


@needs_compiler
def test_instruction_sets_of_x86_are_not_asked_of_other_machines(tree: Tree, tmp_path: Path) -> None:
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    tree.write("csrc/cpu/wide_avx2.cpp", WIDE.replace("__x86_64__", "NEVER"))
    for machine, has_flags in (("aarch64-linux-gnu", False), ("x86_64-linux-gnu", True)):
        compiler.write_text(WRAPPER.format(version=machine, machine=machine, log=log))
        compiler.chmod(0o755)
        tree.build(CXX=f"{compiler} -DCHOSEN")
        calls = log.read_text().splitlines()
        log.unlink()
        asked = [call for call in calls if "-fsyntax-only" in call]  # whether it knows the newest flags
        assert all("-DCHOSEN" in call for call in calls) and len(calls) - len(asked) == 4
        assert any("-mavx2" in call for call in calls) is has_flags is bool(asked)


@needs_compiler
def test_a_compiler_that_does_not_know_the_newest_flags_compiles_without_them(tree: Tree, tmp_path: Path) -> None:
    refuses = """#!/bin/sh
case "$*" in
*-mamx-tile*) echo "unrecognized command-line option '-mamx-tile'" >&2; exit 1;;
*) exec g++ "$@";;
esac
"""
    for name, text in (("knows", '#!/bin/sh\nexec g++ "$@"\n'), ("refuses", refuses)):
        compiler = tmp_path / name
        compiler.write_text(text)
        compiler.chmod(0o755)
        macro = "#ifndef" if name == "knows" else "#ifdef"
        wrong = f"#if defined(__x86_64__)\n{macro} __AMX_BF16__\n#error the flags of another compiler\n#endif\n#endif\n"
        tree.write("csrc/cpu/tiles_amx.cpp", wrong)
        tree.build(CXX=str(compiler))
        assert tree.record["built"] is True and tree.answer() == "42"


@needs_compiler
def test_the_ninja_of_an_isolated_build_is_found_where_the_package_does_not_look(tree: Tree) -> None:
    found = shutil.which("ninja", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]))
    assert found is not None, "ninja is in the extra `test`"
    isolated = "import sys, types; sys.modules['ninja'] = m = types.ModuleType('ninja'); m.BIN_DIR = ''"
    tree.build(isolated, PATH=os.pathsep.join([os.path.dirname(found), os.environ["PATH"]]))
    assert tree.answer() == "42"


@needs_compiler
def test_an_editable_installation_builds_into_the_source_tree(tree: Tree) -> None:
    wheel = tree.backend("build_editable")
    assert tree.answer() == "42" and tree.record["built"] is True
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "_native" in name]


@needs_compiler
def test_a_wheel_comes_from_the_sdist_alone_and_holds_the_core_and_its_record(tree: Tree) -> None:
    sdist = tree.backend("build_sdist")
    unpacked = Tree.__new__(Tree)
    with tarfile.open(sdist) as archive:
        # Debian 12's Python 3.11.2 has no filters yet; the archive is our own.
        archive.extractall(tree.root.parent, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    unpacked.root = tree.root.parent / sdist.name.removesuffix(".tar.gz")
    names = set(zipfile.ZipFile(unpacked.backend("build_wheel")).namelist())
    assert {f"tpkernels/{MODULE}", "tpkernels/_native_build.json"} <= names
    assert not [name for name in names if "csrc" in name or name.endswith((".o", ".cpp"))]


# --- without ----------------------------------------------------------------------------------------------------------

NO_PROGRAMS = {"PATH": "/nonexistent"}
MISSING = {
    "nothing on PATH": ("", NO_PROGRAMS, "neither g++ nor c++ nor clang++", "apt install g++"),
    "CXX is no program": ("", {"CXX": "/nonexistent/g++"}, "CXX is /nonexistent/g++", "unset CXX"),
    "a compiler that fails": ("", {"CXX": "false"}, "false --version fails", "set CXX"),
    "no Python.h": (
        "import sysconfig; g = sysconfig.get_path\n"
        "sysconfig.get_path = lambda name, *a: ('/nonexistent/' if 'include' in name else '') + g(name, *a)",
        {},
        "no Python.h in /nonexistent/",
        "apt install python3.",
    ),
    "no pybind11": ("import sys; sys.modules['pybind11'] = None", {}, "no pybind11", "pip install pybind11"),
    "no ninja": (
        "import sys, shutil; sys.modules['ninja'] = None; w = shutil.which\n"
        "shutil.which = lambda name, path=None: None if name == 'ninja' else w(name, path=path)",
        {},
        "no ninja",
        "pip install ninja",
    ),
    "not Linux": (
        "import sys, setuptools.command.build_ext; sys.platform = 'freebsd14'",
        {},
        "the core needs Linux",
        "nothing",
    ),
}


@pytest.mark.parametrize("case", MISSING)
@pytest.mark.slow("2 s")
def test_what_is_missing_is_recorded_and_the_build_succeeds(tree: Tree, case: str) -> None:
    before, environment, reason, advice = MISSING[case]
    if case.startswith("no ") and shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    output = tree.build(before, **environment)
    assert tree.record["built"] is False
    assert reason in str(tree.record["reason"]) and advice in str(tree.record["advice"])
    assert "WARNING: tpkernels is installed WITHOUT its compiled core" in output and reason in output


def test_a_required_core_that_cannot_be_built_fails_the_installation(tree: Tree) -> None:
    with pytest.raises(RuntimeError, match=r"_NATIVE=1, but its compiled core cannot be built: no C\+\+ com"):
        tree.build(TPKERNELS_REQUIRE_NATIVE="1", **NO_PROGRAMS)
    tree.build(TPKERNELS_REQUIRE_NATIVE="0", **NO_PROGRAMS)


@pytest.mark.full("5 s of a core; what is recorded and what doctor makes of a record are tested by themselves")
def test_without_a_compiler_pip_install_succeeds_and_doctor_says_what_is_missing(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    shutil.rmtree(tree.package)
    shutil.copytree(ROOT / "tpkernels", tree.package, ignore=shutil.ignore_patterns("__pycache__", "_native*"))
    target = tmp_path / "installed"
    pip = ("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(target), ".")
    done = tree.python(*pip, CXX="/nonexistent/g++")
    assert done.returncode == 0, done.stdout + done.stderr
    code = (
        # An editable installation of this environment would lend its core to a package that has none.
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        "import tpkernels, tpkernels.doctor as d, tpkernels.gemm.native as n\n"
        "print(tpkernels.__file__, n.native(), *d._core(), sep='\\n')"
    )
    seen = tree.python("-P", "-c", code, PYTHONPATH=str(target))
    assert seen.returncode == 0, seen.stderr
    where, core, finding, services = seen.stdout.splitlines()
    assert where.startswith(str(target)) and core == "None"
    assert "not built: no C++ compiler: CXX is /nonexistent/g++" in finding and "apt install g++" in finding
    assert "a tree: of" in finding, "the command that installs from the same place again"
    assert "work: memfd_create" in services
