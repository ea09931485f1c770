"""Build entry point: everything declarative is in pyproject.toml; here is how the compiled core is built.

Owns the build of `csrc/` into the extension module `tpkernels._native`: a ninja file, a C++17 compiler (CXX, CXXFLAGS
and LDFLAGS are honoured) and pybind11's headers for the one file that binds. It knows nothing of torch, so that it
works under build isolation. Objects stay in `build/native/`, so that building again compiles only what changed.

A core that cannot be built does not fail the installation: tpkernels then runs without it, and
`tpkernels/_native_build.json` holds the reason, for `tpkernels doctor`. TPKERNELS_REQUIRE_NATIVE=1 makes it fail.
"""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
MODULE = "_native" + sysconfig.get_config_var("EXT_SUFFIX")
RECORD = "_native_build.json"
BUILD_TIMEOUT_S = 1800

# No contraction: a fused multiply-add rounds once where its parts round twice, and results must not depend on which
# of the instruction sets runs.
FLAGS = "-std=c++17 -O3 -fPIC -fvisibility=hidden -ffp-contract=off -pthread -Wall -Wextra".split()
# Files for one instruction set; which of them runs is decided at run time. Elsewhere they are empty.
X86_FLAGS = {
    "_avx2.cpp": "-mavx2 -mfma -mf16c".split(),
    "_avx512.cpp": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c".split(),
}


class CannotBuild(Exception):
    """Why there will be no core, what to do about it, and the first lines of the compiler's own errors."""

    def __init__(self, reason: str, advice: str, errors: tuple[str, ...] = ()) -> None:
        super().__init__("\n  ".join([reason, *errors, advice]))
        self.reason, self.advice, self.errors = reason, advice, errors


# --- what the build needs ---------------------------------------------------------------------------------------------


def find_compiler() -> list[str]:
    """The command of the C++ compiler: $CXX, or the first of the usual names."""
    advice = "install one: apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora), conda install cxx-compiler"
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            reason = f"no C++ compiler: CXX is {shlex.join(chosen)}, which is no program"
            raise CannotBuild(reason, f"unset CXX, or {advice}")
        return chosen
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise CannotBuild("no C++ compiler: neither g++ nor c++ nor clang++ is on PATH, and CXX is not set", advice)


def ask(command: list[str]) -> str:
    """First line of what the compiler says about itself."""
    advice = "repair it, or set CXX to another one"
    try:
        reply = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{shlex.join(command)} does not run: {error}", advice) from error
    if reply.returncode != 0:
        raise CannotBuild(f"{shlex.join(command)} fails", advice, first_errors(reply.stdout + reply.stderr))
    return (reply.stdout.strip().splitlines() or [""])[0]


def python_headers() -> list[str]:
    folders = dict.fromkeys(sysconfig.get_path(name) for name in ("include", "platinclude"))
    if not any(Path(folder, "Python.h").is_file() for folder in folders):
        package = "python{}.{}-dev".format(*sys.version_info[:2])
        raise CannotBuild(
            f"no Python.h in {' or '.join(folders)}",
            f"install them: apt install {package} (Debian, Ubuntu), dnf install {package}el (Fedora)",
        )
    return list(folders)


def pybind11_headers(build: Path) -> str:
    """A copy of the headers: those of an isolated build lie elsewhere each time, and would be compiled each time."""
    try:
        import pybind11
    except ImportError as error:
        raise CannotBuild("no pybind11 (and no build isolation to bring it)", "pip install pybind11") from error
    copy = build / f"pybind11-{pybind11.__version__}"
    if not copy.is_dir():
        shutil.rmtree(build / "copying", ignore_errors=True)
        shutil.copytree(pybind11.get_include(), build / "copying")
        os.replace(build / "copying", copy)
    return str(copy)


def find_ninja() -> str:
    """The program of the package `ninja`. Under build isolation it lies on PATH, but not where the package looks."""
    try:
        from ninja import BIN_DIR
    except ImportError:
        BIN_DIR = ""
    found = shutil.which("ninja", path=BIN_DIR) or shutil.which("ninja")
    if found is None:
        raise CannotBuild("no ninja (and no build isolation to bring it)", "pip install ninja")
    return found


# --- the build --------------------------------------------------------------------------------------------------------


def write_ninja_file(build: Path, compiler: list[str], version: str) -> None:
    """`build.ninja`: one object per source, each with the flags of its kind, and the module linked from them."""

    def path(name: object) -> str:
        return str(name).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    def words(parts: list[str]) -> str:
        return shlex.join(parts).replace("$", "$$")

    cxxflags, ldflags = (shlex.split(os.environ.get(name, "")) for name in ("CXXFLAGS", "LDFLAGS"))
    x86 = ask([*compiler, "-dumpmachine"]).startswith("x86_64")
    bindings = [f"-I{folder}" for folder in (*python_headers(), pybind11_headers(build))]
    # Another version of the compiler under the same name compiles everything anew.
    stamp = build / "compiler.txt"
    if not stamp.is_file() or stamp.read_text() != version:
        stamp.write_text(version)
    lines = [
        "rule compile",
        f"  command = {words(compiler)} $flags -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {words(compiler)} -shared -pthread $in -o $out {words(ldflags)}",
    ]
    objects = []
    for source in [CSRC / "bindings.cpp", *sorted(CSRC.glob("cpu/*.cpp"))]:
        special = next((flags for end, flags in X86_FLAGS.items() if x86 and source.name.endswith(end)), [])
        headers = bindings if source.name == "bindings.cpp" else []
        objects.append(path(source.relative_to(CSRC).with_suffix(".o")))
        lines.append(f"build {objects[-1]}: compile {path(source)} | {stamp.name}")
        lines.append(f"  flags = {words([*FLAGS, *special, f'-I{CSRC}', *headers, *cxxflags])}")
    lines.append(f"build {path(MODULE)}: link {' '.join(objects)}")
    build.joinpath("build.ninja").write_text("\n".join(lines) + "\n")


def first_errors(output: str) -> tuple[str, ...]:
    """The lines of a failed build that say what went wrong."""
    lines = [line.strip()[:300] for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() and not line.startswith("FAILED")]
    return tuple((errors or lines[-5:])[:5])


def build_core() -> tuple[Path, dict[str, object]]:
    """The built module and the facts of its build.

    Raises:
        CannotBuild: something is missing, or the compiler refuses.
    """
    if not sys.platform.startswith("linux"):
        raise CannotBuild(f"the core needs Linux (memfd_create); this is {platform.system()}", "nothing to be done")
    if not CSRC.joinpath("bindings.cpp").is_file():
        raise CannotBuild(f"no sources in {CSRC}", "take the whole source tree or the sdist")
    compiler = find_compiler()
    version = ask([*compiler, "--version"])
    ninja = find_ninja()
    build = ROOT / "build" / "native" / sysconfig.get_config_var("SOABI")
    build.mkdir(parents=True, exist_ok=True)
    write_ninja_file(build, compiler, version)
    done = subprocess.run(
        [ninja, "-C", str(build)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=BUILD_TIMEOUT_S
    )
    print(done.stdout)
    if done.returncode != 0:
        advice = "a newer compiler may do (g++ 9 or clang 10 at least); otherwise report these lines, please"
        raise CannotBuild(f"compilation failed with {version}", advice, first_errors(done.stdout))
    return build / MODULE, {"compiler": version, "flags": FLAGS + shlex.split(os.environ.get("CXXFLAGS", ""))}


def replace(target: Path, content: bytes) -> None:
    """Whole or not at all, and never in place: a running process may have the old module mapped."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, target)


class BuildCore(build_ext):
    """`build_ext` that builds the core, and leaves a record of how that went where the module would be."""

    def run(self) -> None:
        record: dict[str, object] = {"built": False, "module": MODULE}
        module = None
        try:
            module, facts = build_core()
            record |= {"built": True, **facts}
        except CannotBuild as error:
            if os.environ.get("TPKERNELS_REQUIRE_NATIVE") == "1":
                raise CompileError(f"TPKERNELS_REQUIRE_NATIVE=1, but there is no compiled core: {error}") from error
            record |= {"reason": error.reason, "advice": error.advice, "errors": error.errors}
            print(f"WARNING: tpkernels is installed WITHOUT its compiled core: {error}", file=sys.stderr)
        for folder in self.folders():
            if module is not None:
                replace(folder / MODULE, module.read_bytes())
            else:
                folder.joinpath(MODULE).unlink(missing_ok=True)  # that of an earlier build fits no longer
            replace(folder / RECORD, json.dumps(record, indent=1).encode())

    def folders(self) -> list[Path]:
        """Where the results go: into the wheel, and for editable installations also into the source tree."""
        return [Path(self.build_lib, "tpkernels"), *([ROOT / "tpkernels"] if self.inplace else [])]

    def get_outputs(self) -> list[str]:
        built = [Path(self.build_lib, "tpkernels", name) for name in (MODULE, RECORD)]
        return [str(file) for file in built if file.exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {name: str(ROOT / "tpkernels" / Path(name).name) for name in self.get_outputs()} if self.inplace else {}


if __name__ == "__main__":
    sources = [str(source.relative_to(ROOT)) for source in [CSRC / "bindings.cpp", *sorted(CSRC.glob("cpu/*.cpp"))]]
    setup(ext_modules=[Extension("tpkernels._native", sources)], cmdclass={"build_ext": BuildCore})
