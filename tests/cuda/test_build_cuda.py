"""How setup.py builds the library of the CUDA kernels: which nvcc it takes, for which architectures, and what a wheel,
`doctor` and the loader then say. The nvccs here are small programs; the real one builds for test_library.py."""

from __future__ import annotations

import ctypes
import json
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_build_native import Tree
from tpkernels import doctor
from tpkernels.backends.symmetric import cuda_native
from tpkernels.backends.symmetric.cuda_native import CudaError

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
CUDA_13 = "sm_75 sm_80 sm_86 sm_87 sm_88 sm_89 sm_90 sm_100 sm_110 sm_103 sm_120 sm_121"  # nvcc 13.0.88, in its order
CUDA_12_4 = "sm_50 sm_52 sm_53 sm_60 sm_61 sm_62 sm_70 sm_72 sm_75 sm_80 sm_86 sm_87 sm_89 sm_90"
# What it is asked is answered, what it does not know is refused as nvcc does, and the rest is compiled by g++.
STANDS_FOR_NVCC = """#!/bin/sh
case "$*" in
*-dryrun*) echo '#$ TOP={home}/bin/..' >&2; exit 0;;
*--version*) echo 'Cuda compilation tools, release 1.2, V{version}'; exit {status};;
*--list-gpu-code*) printf '%s\\n' {codes}; exit 0;;
esac
echo "$@" >> '{home}/log'
for word in "$@"; do
    case "$word" in
    -gencode=*) name="${{word#*arch=compute_}}"; name="${{name%%,*}}"
        case " {codes} " in
        *" sm_${{name%a}} "*) ;;
        *) echo "nvcc fatal : Unsupported gpu architecture 'compute_$name'" >&2; exit 1;;
        esac;;
    esac
done
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then out=$2; elif [ "$1" = -c ]; then source=$2; fi
    shift
done
g++ {option} -fPIC -x c++ -c "$source" -o "$out"
"""


def toolkit(home: Path, version: str = "13.0.1", codes: str = CUDA_13, *, status: int = 0, option: str = "-O0") -> Path:
    """A toolkit whose nvcc stands for one of this version; with a status, one that does not run."""
    for folder in ("bin", "lib"):
        home.joinpath(folder).mkdir(parents=True, exist_ok=True)
    (home / "lib" / "libcudart_static.a").write_bytes(b"!<arch>\n")
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(STANDS_FOR_NVCC.format(home=home, version=version, codes=codes, status=status, option=option))
    nvcc.chmod(0o755)
    return home


class Machine:
    """A machine with nvccs in some of the places where one may be; `setup` is setup.py there."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch = folder, monkeypatch
        self.setup = runpy.run_path(str(ROOT / "setup.py"))
        for name in ("TPKERNELS_CUDA", "CUDA_HOME", "CUDA_PATH"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", f"{folder / 'PATH' / 'bin'}:/usr/bin:/bin")
        monkeypatch.setitem(self.setup["find_nvcc"].__globals__, "USUAL_CUDA", str(folder / "usual"))
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder / name))
        monkeypatch.setattr(sys, "path", ["", str(folder / "isolated")])

    def install(self, **versions: str) -> None:
        """`pip` is the environment's site-packages, `isolated` those that a build brings; `!` does not run."""
        places = {"pip": "purelib/nvidia/cu13", "newer": "purelib/nvidia/cu14", "isolated": "isolated/nvidia/cu14"}
        for place, version in versions.items():
            home = toolkit(self.folder / places.get(place, place), version.rstrip("!"), status=int(version[-1] == "!"))
            if place.startswith("CUDA_"):
                self._patch.setenv(place, str(home))

    def find(self) -> Any:
        return self.setup["find_nvcc"]()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


# --- which nvcc -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "chosen", "found"),
    [
        ({"PATH": "12.4.131"}, "PATH", "PATH"),
        ({"PATH": "12.4.131", "pip": "13.0.88"}, "purelib", "pip's nvidia-cuda-nvcc"),
        ({"PATH": "13.1.2", "pip": "13.0.88"}, "PATH", "PATH"),
        ({"PATH": "13.0.88", "pip": "13.0.88", "usual": "13.0.88"}, "PATH", "PATH"),
        ({"PATH": "9.9.9", "pip": "12.10.1"}, "purelib", "pip's nvidia-cuda-nvcc"),  # as numbers, not as words
        ({"pip": "13.0.88", "newer": "14.1.2"}, "purelib/nvidia/cu14", "pip's nvidia-cuda-nvcc"),
        ({"isolated": "14.0.1", "usual": "13.0.88"}, "isolated", "pip's nvidia-cuda-nvcc"),
        ({"usual": "13.0.88"}, "usual", "usual"),
        ({"PATH": "13.0.88!", "pip": "12.4.131"}, "purelib", "pip's nvidia-cuda-nvcc"),
        ({"CUDA_HOME": "12.4.131", "PATH": "13.0.88", "pip": "13.0.88"}, "CUDA_HOME", "CUDA_HOME"),
        ({"CUDA_PATH": "12.4.131", "PATH": "13.0.88"}, "CUDA_PATH", "CUDA_PATH"),
    ],
)
def test_the_newest_nvcc_is_taken_unless_cuda_home_names_one(
    machine: Machine, there: dict[str, str], chosen: str, found: str
) -> None:
    machine.install(**there)
    nvcc = machine.find()
    assert Path(nvcc.program).is_relative_to(machine.folder / chosen) and nvcc.found.endswith(found)


@pytest.mark.parametrize(
    ("there", "reason"),
    [
        ({}, r"no nvcc: neither on PATH nor in pip's packages or .*/usual\n.*pip install nvidia-cuda-nvcc"),
        ({"PATH": "11.8.89", "usual": "11.2.1"}, r"nvcc 11\.8\.89 \(.*/PATH/bin/nvcc, PATH\) is too old: 12\.0 is the"),
        ({"PATH": "13.0.88!"}, r"/PATH/bin/nvcc \(PATH\) does not tell its version: --version fails"),
        ({"CUDA_HOME": "11.8.89", "PATH": "13.0.88"}, r"nvcc 11\.8\.89 \(.*, CUDA_HOME\) is too old"),
    ],
)
def test_where_no_nvcc_will_do_the_reason_says_which_was_seen(
    machine: Machine, there: dict[str, str], reason: str
) -> None:
    machine.install(**there)
    with pytest.raises(machine.setup["CannotBuild"], match=reason):
        machine.find()


def test_a_cuda_home_without_nvcc_is_named_where_there_is_no_other(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", "/nonexistent/cuda")
    with pytest.raises(machine.setup["CannotBuild"], match=r"neither on PATH nor in /nonexistent/cuda \(CUDA_HOME\), "):
        machine.find()
    machine.install(PATH="13.0.88")
    assert machine.find().found == "PATH"


# --- which architectures ----------------------------------------------------------------------------------------------

NATIVE_80 = "-gencode=arch=compute_80,code=[sm_80,compute_80]"


@pytest.mark.parametrize(
    ("codes", "flags"),
    [
        (CUDA_13, [NATIVE_80, "-gencode=arch=compute_90a,code=sm_90a", "-gencode=arch=compute_100a,code=sm_100a"]),
        (CUDA_12_4, [NATIVE_80, "-gencode=arch=compute_90a,code=sm_90a"]),
        ("sm_80", [NATIVE_80]),
        ("sm_90 sm_100", ["-gencode=arch=compute_90a,code=[sm_90a,compute_90a]",
                          "-gencode=arch=compute_100a,code=sm_100a"]),
    ],
)  # fmt: skip
def test_only_architectures_that_nvcc_lists_are_asked_of_it(machine: Machine, codes: str, flags: list[str]) -> None:
    toolkit(machine.folder / "PATH", codes=codes)
    known = machine.setup["known_architectures"](machine.find())
    assert machine.setup["code_flags"](known) == flags


def test_an_nvcc_for_other_gpus_is_refused_with_its_list(machine: Machine) -> None:
    toolkit(machine.folder / "PATH", codes="sm_110 sm_120")
    with pytest.raises(machine.setup["CannotBuild"], match=r"knows none of sm_80, sm_90a, sm_100a\n  sm_110\n  sm_120"):
        machine.setup["known_architectures"](machine.find())


# --- what is built ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """A small source tree with one kernel."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    for name in ("TPKERNELS_CUDA", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    made = Tree(tmp_path)
    made.write("csrc/cuda/answer.cu", 'extern "C" int answer() { return 42; }\n')
    return made


def record_of(tree: Tree) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tree.package.joinpath("_cuda_build.json").read_text())
    return found


def test_nvcc_alone_is_enough_no_gpu_and_no_variable(tree: Tree, tmp_path: Path) -> None:
    home = toolkit(tmp_path / "toolkit", "12.4.131", CUDA_12_4)
    tree.build(CUDA_HOME=str(home))
    record = record_of(tree)
    assert record["built"] is True and ctypes.CDLL(str(tree.package / "_cuda.so")).answer() == 42, record
    assert record["found"] == f"{home}/bin/nvcc (CUDA_HOME)" and record["compiler"].startswith("nvcc 12.4.131, g++")
    assert record["architectures"] == ["sm_80", "sm_90a", "compute_80"] and record["dropped"] == ["sm_100a"]
    assert tree.record["built"] is True, "the CPU core is built as ever"
    tree.build(CUDA_HOME=str(home), TPKERNELS_CUDA="0")
    assert record_of(tree)["reason"] == "TPKERNELS_CUDA is 0" and not tree.package.joinpath("_cuda.so").exists()


def test_a_failing_nvcc_is_recorded_removes_the_library_and_fails_only_who_requires_it(
    tree: Tree, tmp_path: Path
) -> None:
    home = toolkit(tmp_path / "toolkit")
    tree.build(CUDA_HOME=str(home))
    toolkit(home, "13.0.2", option="--no-such-option")
    output = tree.build(CUDA_HOME=str(home))
    assert record_of(tree)["reason"].startswith("compilation failed with nvcc 13.0.2"), "another version compiles anew"
    assert not tree.package.joinpath("_cuda.so").exists() and "installed WITHOUT its CUDA kernels: comp" in output
    with pytest.raises(RuntimeError, match="TPKERNELS_CUDA=1, but its CUDA kernels cannot be built: compilation fail"):
        tree.build(CUDA_HOME=str(home), TPKERNELS_CUDA="1")


def test_an_nvcc_that_never_ends_is_recorded_as_well(tree: Tree, tmp_path: Path) -> None:
    home = toolkit(tmp_path / "toolkit", option="-O0; sleep 8;")
    in_two_seconds = "import builtins; p = __import__('pathlib').Path('setup.py'); t = p.read_text()\n"
    in_two_seconds += "p.write_text(t.replace('BUILD_TIMEOUT_S = 1800', 'BUILD_TIMEOUT_S = 2'))"
    tree.build(in_two_seconds, CUDA_HOME=str(home), CXX="g++")
    assert record_of(tree)["reason"].endswith("had not ended after 2 s")


@pytest.mark.full("builds two wheels; the library and its record are read where they are built in place")
def test_a_wheel_holds_the_library_and_one_without_nvcc_holds_the_reason(tree: Tree, tmp_path: Path) -> None:
    home = toolkit(tmp_path / "toolkit")
    for environment, there in (({"CUDA_HOME": str(home)}, True), ({"TPKERNELS_CUDA": "0"}, False)):
        wheel = tree.backend("build_wheel", **environment)
        archive = zipfile.ZipFile(wheel)
        wheel.unlink()
        assert ("tpkernels/_cuda.so" in archive.namelist()) is there
        assert json.loads(archive.read("tpkernels/_cuda_build.json"))["built"] is there
    assert "linux" in wheel.name, "no machine of another kind takes it for its own"


# --- what doctor and the loader say -----------------------------------------------------------------------------------


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's folder, empty."""
    monkeypatch.delenv("TPKERNELS_CUDA_LIBRARY", raising=False)
    monkeypatch.setattr(cuda_native, "FILE", tmp_path / "_cuda.so")
    monkeypatch.setattr(cuda_native, "RECORD", tmp_path / "_cuda_build.json")
    monkeypatch.setattr(cuda_native, "_load", cuda_native._load.__wrapped__)
    return tmp_path


def test_doctor_and_loader_say_what_is_missing(installation: Path) -> None:
    record = '{"built": false, "module": "_cuda.so", "reason": "no nvcc: nowhere", "advice": "get one"}'
    installation.joinpath("_cuda_build.json").write_text(record)
    (finding,) = doctor._cuda_kernels()
    assert finding.status == "optional" and "not built: no nvcc: nowhere" in finding.value
    assert finding.advice.splitlines()[0] == "get one" and "TPKERNELS_CUDA=1" in finding.advice
    with pytest.raises(CudaError, match=r"not built: no nvcc: nowhere; build it: TPKERNELS_CUDA=1 "):
        cuda_native.load()
    installation.joinpath("_cuda.so").write_bytes(b"not a library")
    assert cuda_native.library() is None and "do not load" in cuda_native.why_not()


def put(built: Path, folder: Path, **changes: object) -> None:
    """A copy of the library and its record, some of whose fields are others."""
    folder.joinpath("_cuda.so").unlink(missing_ok=True)  # it may be mapped
    shutil.copy(built, folder / "_cuda.so")
    record = json.loads(built.with_name("_cuda_build.json").read_text()) | changes
    folder.joinpath("_cuda_build.json").write_text(json.dumps(record))


def test_doctor_shows_the_library_its_architectures_and_how_it_was_found(built: Path, installation: Path) -> None:
    put(built, installation, found="/opt/bin/nvcc (PATH)")
    kernels, library = doctor._cuda_kernels()
    assert kernels.value.startswith("for sm_80, sm_90a, sm_100a, PTX of compute_80; ")
    if torch.cuda.is_available():
        assert kernels.status == "ok" and "devices in reach" in kernels.value
    else:
        assert kernels.status == "optional" and "nothing to run on" in kernels.value and "CUDA error" in kernels.advice
    assert library.value.startswith(f"{installation}/_cuda.so (this installation's), built by nvcc 1")
    assert library.value.endswith(", found: /opt/bin/nvcc (PATH)") and library.status == "ok"
    put(built, installation, dropped=["sm_100a"])
    (_, library) = doctor._cuda_kernels()
    assert library.status == "optional" and "without sm_100a, which its nvcc did not know" in library.advice


def test_a_library_that_was_built_elsewhere_can_be_named(
    built: Path, installation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = installation / "elsewhere"
    elsewhere.mkdir()
    put(built, elsewhere)
    monkeypatch.setenv("TPKERNELS_CUDA_LIBRARY", str(elsewhere / "_cuda.so"))
    kernels, library = doctor._cuda_kernels()
    assert kernels.value.startswith("for sm_80, sm_90a")
    assert library.value.startswith(f"{elsewhere}/_cuda.so (named by TPKERNELS_CUDA_LIBRARY), built by nvcc ")
    elsewhere.joinpath("_cuda.so").rename(elsewhere / "other.so")
    monkeypatch.setenv("TPKERNELS_CUDA_LIBRARY", str(elsewhere / "other.so"))
    kernels, library = doctor._cuda_kernels()
    assert kernels.value.startswith("for architectures that no record"), "the record beside it is that of another file"
    monkeypatch.setenv("TPKERNELS_CUDA_LIBRARY", str(elsewhere / "_cuda.so"))
    (finding,) = doctor._cuda_kernels()
    assert f"TPKERNELS_CUDA_LIBRARY is {elsewhere}/_cuda.so, which is no file" in finding.value
    assert "unset TPKERNELS_CUDA_LIBRARY" in finding.advice
    monkeypatch.setenv("TPKERNELS_CUDA_LIBRARY", "_cuda.so")
    (finding,) = doctor._cuda_kernels()
    assert finding.status == "broken" and "TPKERNELS_CUDA_LIBRARY must be an absolute path" in finding.value


def test_the_program_that_stands_for_nvcc_refuses_what_it_does_not_list(tmp_path: Path) -> None:
    """Otherwise an architecture that was not dropped would go unnoticed here."""
    nvcc = toolkit(tmp_path, codes=CUDA_12_4) / "bin" / "nvcc"
    command = [nvcc, "-gencode=arch=compute_100a,code=sm_100a", "-c", "x.cu", "-o", "x.o"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Unsupported gpu architecture 'compute_100a'" in done.stderr
