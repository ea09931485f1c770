"""Build entry point: everything declarative is in pyproject.toml; here is how the compiled core is built.

Owns the build of `csrc/` into the extension module `tpkernels._native`: a ninja file, a C++17 compiler (CXX, CXXFLAGS
and LDFLAGS are honoured) and pybind11's headers for the one file that binds. It knows nothing of torch, so that it
works under build isolation. Objects stay in `build/native/`, so that building again compiles only what changed.

A core that cannot be built does not fail the installation: tpkernels then runs without it, and
`tpkernels/_native_build.json` holds the reason, for `tpkernels doctor`. TPKERNELS_REQUIRE_NATIVE=1 makes it fail.

The CUDA kernels are a plain C library, `tpkernels/_cuda.so`, which nothing links and every machine can load: one wheel
serves machines with and without a GPU. It is built wherever nvcc is found (a GPU need not be there), for those of our
architectures that this nvcc knows; `tpkernels/_cuda_build.json` says how that went. A library that cannot be built does
not fail the installation, unless TPKERNELS_CUDA is 1; with 0 it is not built.
"""

import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
MODULE = "_native" + sysconfig.get_config_var("EXT_SUFFIX")
RECORD = "_native_build.json"
CUDA_MODULE, CUDA_RECORD = "_cuda.so", "_cuda_build.json"
BUILD_TIMEOUT_S = 1800

# No contraction: a fused multiply-add rounds once where its parts round twice, and results must not depend on which
# of the instruction sets runs.
FLAGS = "-std=c++17 -O3 -fPIC -fvisibility=hidden -ffp-contract=off -pthread -Wall -Wextra".split()
# Files for one instruction set; which of them runs is decided at run time. Elsewhere they are empty.
X86_FLAGS = {
    "_avx2.cpp": "-mavx2 -mfma -mf16c".split(),
    "_avx512.cpp": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c".split(),
    "_amx.cpp": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mamx-tile -mamx-bf16".split(),
}
# Of these, flags that older compilers do not know (g++ 11 and clang 12 do): without them the file is empty, too.
NEW_FLAGS = "-mamx-tile -mamx-bf16".split()
# A spilled register fails the build; a warning that nvcc will drop an architecture one day does not.
CUDA_FLAGS = """
    -std=c++17 -O3 --expt-relaxed-constexpr -Werror all-warnings -Wno-deprecated-gpu-targets
    -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra -Xptxas -v,-warn-spills,-warn-lmem-usage,-Werror
""".split()
# Machine code for the GPUs of data centres; the drivers of other GPUs compile the PTX of the first one.
ARCHITECTURES = ("80", "90a", "100a")
USUAL_CUDA = "/usr/local/cuda"
Build = Callable[[], tuple[Path, dict[str, object]]]
OLDEST_NVCC = (12, 0)  # the first that knows sm_90a wherever it knows sm_90: only the latter is in its list


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


def reply_of(command: list[str], advice: str) -> subprocess.CompletedProcess[str]:
    """What a compiler says about itself; CannotBuild if it does not run, or fails."""
    try:
        reply = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{shlex.join(command)} does not run: {error}", advice) from error
    if reply.returncode != 0:
        raise CannotBuild(f"{shlex.join(command)} fails", advice, first_errors(reply.stdout + reply.stderr))
    return reply


def ask(command: list[str]) -> str:
    """First line of what the C++ compiler says about itself."""
    return (reply_of(command, "repair it, or set CXX to another one").stdout.strip().splitlines() or [""])[0]


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


def special_flags(compiler: list[str]) -> dict[str, list[str]]:
    """Flags by how the name of a source ends, as far as the target has the instructions and the compiler the flags."""
    if not ask([*compiler, "-dumpmachine"]).startswith("x86_64"):
        return {}
    try:
        ask([*compiler, *NEW_FLAGS, "-x", "c++", "-fsyntax-only", os.devnull])
    except CannotBuild:
        return {end: [] if set(NEW_FLAGS) & set(flags) else flags for end, flags in X86_FLAGS.items()}
    return X86_FLAGS


# --- the build --------------------------------------------------------------------------------------------------------


def write_ninja_file(build: Path, compiler: list[str], version: str) -> None:
    """`build.ninja`: one object per source, each with the flags of its kind, and the module linked from them.

    Paths within the tree are relative: what is compiled stays valid when the tree is moved or copied.
    """

    def path(name: object) -> str:
        return str(name).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    def within(place: Path | str) -> str:
        return os.path.relpath(place, build)

    def words(parts: list[str]) -> str:
        return shlex.join(parts).replace("$", "$$")

    cxxflags, ldflags = (shlex.split(os.environ.get(name, "")) for name in ("CXXFLAGS", "LDFLAGS"))
    by_end = special_flags(compiler)
    bindings = [f"-I{folder}" for folder in (*python_headers(), within(pybind11_headers(build)))]
    stamp = stamped(build, version)
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
        special = next((flags for end, flags in by_end.items() if source.name.endswith(end)), [])
        headers = bindings if source.name == "bindings.cpp" else []
        objects.append(path(source.relative_to(CSRC).with_suffix(".o")))
        lines.append(f"build {objects[-1]}: compile {path(within(source))} | {stamp.name}")
        lines.append(f"  flags = {words([*FLAGS, *special, f'-I{within(CSRC)}', *headers, *cxxflags])}")
    lines.append(f"build {path(MODULE)}: link {' '.join(objects)}")
    build.joinpath("build.ninja").write_text("\n".join(lines) + "\n")


def stamped(build: Path, version: str) -> Path:
    """What objects depend on: another version of the compiler under the same name compiles everything anew."""
    stamp = build / "compiler.txt"
    if not stamp.is_file() or stamp.read_text() != version:
        stamp.write_text(version)
    return stamp


def run_ninja(ninja: str, build: Path, version: str, advice: str) -> None:
    advice = f"{advice}; otherwise report these lines, please"
    command, both = [ninja, "-C", str(build)], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run(command, **both, text=True, timeout=BUILD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise CannotBuild(f"compilation with {version} had not ended after {error.timeout:g} s", advice) from error
    print(done.stdout)
    if done.returncode != 0:
        raise CannotBuild(f"compilation failed with {version}", advice, first_errors(done.stdout))


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
    run_ninja(ninja, build, version, "a newer compiler may do (g++ 9 or clang 10 at least)")
    return build / MODULE, {"compiler": version, "flags": FLAGS + shlex.split(os.environ.get("CXXFLAGS", ""))}


# --- the CUDA kernels -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler; `found` says where, `version` is empty if the program does not tell."""

    program: str
    found: str
    version: tuple[int, ...]

    @classmethod
    def at(cls, found: str, path: str) -> list["Nvcc"]:
        """The first one in these folders, or none."""
        program = shutil.which("nvcc", path=path) if path else None
        if program is None:
            return []
        try:
            said = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", reply_of([program, "--version"], "").stdout)
        except CannotBuild:
            said = None
        return [cls(program, found, tuple(map(int, said.groups())) if said else ())]

    def __str__(self) -> str:
        return f"nvcc {'.'.join(map(str, self.version))}"


def find_nvcc() -> Nvcc:
    """That of CUDA_HOME or CUDA_PATH, if there is one; else the newest of PATH, pip's packages and the usual place."""
    advice = "pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl, or install the CUDA toolkit 13"
    if os.environ.get("TPKERNELS_CUDA") == "0":
        raise CannotBuild("TPKERNELS_CUDA is 0", "unset it and install again")
    homes = {name: home for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))}
    # In an isolated build sys.path has the folders of the build, and sysconfig those of the environment around it.
    folders = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *filter(None, sys.path)])
    pip = [str(folder) for site in folders for folder in sorted(Path(site).glob("nvidia/cu*/bin"))]
    nvccs = [one for name, home in homes.items() for one in Nvcc.at(name, os.path.join(home, "bin"))][:1]
    if not nvccs:
        nvccs += Nvcc.at("PATH", os.environ.get("PATH", os.defpath))
        nvccs += [one for folder in pip for one in Nvcc.at("pip's nvidia-cuda-nvcc", folder)]
        nvccs += Nvcc.at(USUAL_CUDA, os.path.join(USUAL_CUDA, "bin"))
    if not nvccs:
        named = "".join(f"{home} ({name}), " for name, home in homes.items())
        raise CannotBuild(f"no nvcc: neither on PATH nor in {named}pip's packages or {USUAL_CUDA}", advice)
    newest = max(nvccs, key=lambda nvcc: nvcc.version)  # of equal ones the first
    if not newest.version:
        raise CannotBuild(f"{newest.program} ({newest.found}) does not tell its version: --version fails", advice)
    if newest.version < OLDEST_NVCC:
        least = ".".join(map(str, OLDEST_NVCC))
        raise CannotBuild(f"{newest} ({newest.program}, {newest.found}) is too old: {least} is the least", advice)
    return newest


def known_architectures(nvcc: Nvcc) -> list[str]:
    """Those of ARCHITECTURES that this nvcc compiles for. It lists sm_90, and means sm_90a as well."""
    command = [nvcc.program, "--list-gpu-code"]
    listed = reply_of(command, "repair it").stdout.split()
    known = [each for each in ARCHITECTURES if f"sm_{each.rstrip('a')}" in listed]
    if not known:
        wanted = ", ".join(f"sm_{each}" for each in ARCHITECTURES)
        raise CannotBuild(f"{nvcc} ({nvcc.program}) knows none of {wanted}", "install the CUDA toolkit 13", (*listed,))
    return known


def code_flags(architectures: list[str]) -> list[str]:
    """Machine code for each, and the PTX of the first."""
    first, *rest = (f"-gencode=arch=compute_{each},code=" for each in architectures)
    codes = [f"sm_{each}" for each in architectures]
    return [f"{first}[{codes[0]},compute_{architectures[0]}]", *map("".join, zip(rest, codes[1:], strict=True))]


def cuda_toolkit(nvcc: str) -> Path:
    """The root of the toolkit, in nvcc's own words: the program that we found may be a wrapper elsewhere."""
    said = reply_of([nvcc, "-dryrun", "-c", "none.cu"], "repair it")
    root = re.search(r"^#\$ TOP=(.*)$", said.stderr, re.MULTILINE)
    if root is None:
        raise CannotBuild(f"{nvcc} does not say where its toolkit is", "repair it", first_errors(said.stderr))
    return Path(root[1].strip()).resolve()


def static_cuda_runtime(toolkit: Path) -> Path:
    for folder in ("lib64", "lib", f"targets/{platform.machine()}-linux/lib", "targets/sbsa-linux/lib"):
        if toolkit.joinpath(folder, "libcudart_static.a").is_file():
            return toolkit / folder / "libcudart_static.a"
    raise CannotBuild(f"no libcudart_static.a in {toolkit}", "pip install nvidia-cuda-runtime, or the whole toolkit")


def build_cuda() -> tuple[Path, dict[str, object]]:
    """The built library of the CUDA kernels and the facts of its build.

    Raises:
        CannotBuild: it is not wanted here, something is missing, or nvcc refuses (also: a kernel spills registers).
    """
    nvcc = find_nvcc()
    sources = sorted(CSRC.glob("cuda/*.cu"))
    if not sources:
        raise CannotBuild(f"no sources in {CSRC / 'cuda'}", "take the whole source tree or the sdist")
    compiler, ninja, toolkit = find_compiler(), find_ninja(), cuda_toolkit(nvcc.program)
    architectures, runtime = known_architectures(nvcc), static_cuda_runtime(toolkit)
    version = f"{nvcc}, {ask([*compiler, '--version'])}"
    flags = [*CUDA_FLAGS, *code_flags(architectures)]
    build = ROOT / "build" / "cuda"
    build.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{os.path.relpath(CSRC, build)}", f"-I{toolkit / 'include'}", f"-I{toolkit / 'include' / 'cccl'}"]
    link = "-shared -Wl,--no-undefined -Wl,--exclude-libs,ALL -pthread".split()
    write_rules(
        build / "build.ninja",
        compile=[nvcc.program, "-ccbin", compiler[0], *flags, *includes],
        link=[*compiler, *link, "$in", str(runtime), "-ldl", "-lrt", "-o", "$out"],
        sources=sources,
        stamp=stamped(build, version),
    )
    run_ninja(ninja, build, version, "CUDA 13.0 is what we build with")
    return build / CUDA_MODULE, {
        "compiler": version,
        "found": f"{nvcc.program} ({nvcc.found})",
        "architectures": [f"sm_{each}" for each in architectures] + [f"compute_{architectures[0]}"],
        "dropped": [f"sm_{each}" for each in ARCHITECTURES if each not in architectures],
        "flags": flags,
    }


def write_rules(file: Path, *, compile: list[str], link: list[str], sources: list[Path], stamp: Path) -> None:
    """A ninja file of one command for all sources, relative to it; ninja's own variables in the commands stay."""

    def words(parts: list[str]) -> str:
        return " ".join(part if part in ("$in", "$out") else shlex.quote(part).replace("$", "$$") for part in parts)

    def path(name: Path) -> str:
        return os.path.relpath(name, file.parent).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    lines = ["rule compile", f"  command = {words(compile)} -MD -MF $out.d -c $in -o $out"]
    lines += ["  depfile = $out.d", "  deps = gcc", "rule link", f"  command = {words(link)}"]
    lines += [f"build {source.stem}.o: compile {path(source)} | {stamp.name}" for source in sources]
    lines += [f"build {CUDA_MODULE}: link {' '.join(f'{source.stem}.o' for source in sources)}"]
    file.write_text("\n".join(lines) + "\n")


@contextmanager
def one_build_at_a_time() -> Iterator[None]:
    """Two ninjas must not share a folder: a second build waits for the first, and then finds its objects made."""
    if not sys.platform.startswith("linux"):  # nothing is built there
        yield
        return
    import fcntl

    (ROOT / "build").mkdir(exist_ok=True)
    with ROOT.joinpath("build", "setup.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # each half of a build ends within BUILD_TIMEOUT_S
        yield


def replace(target: Path, content: bytes) -> None:
    """Whole or not at all, and never in place: a running process may have the old module mapped."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, target)


class BuildCore(build_ext):
    """`build_ext` that builds the core, and leaves a record of how that went where the module would be."""

    def run(self) -> None:
        with one_build_at_a_time():
            self.run_part(build_core, MODULE, RECORD, "TPKERNELS_REQUIRE_NATIVE", "its compiled core")
            self.run_part(build_cuda, CUDA_MODULE, CUDA_RECORD, "TPKERNELS_CUDA", "its CUDA kernels")

    def run_part(self, build: Build, name: str, record_name: str, required: str, what: str) -> None:
        """What cannot be built fails the installation where the variable `required` is 1."""
        record, module = dict[str, object](built=False, module=name), None
        try:
            module, facts = build()
            record |= {"built": True, **facts}
        except CannotBuild as error:
            if os.environ.get(required) == "1":
                raise CompileError(f"{required}=1, but {what} cannot be built: {error}") from error
            record |= {"reason": error.reason, "advice": error.advice, "errors": error.errors}
            print(f"WARNING: tpkernels is installed WITHOUT {what}: {error}", file=sys.stderr)
        self.leave(name, module, record_name, record)

    def leave(self, name: str, built: Path | None, record_name: str, record: dict[str, object]) -> None:
        """The module, if there is one, and its record where the package is; that of an earlier build fits no longer."""
        for folder in self.folders():
            if built is not None:
                replace(folder / name, built.read_bytes())
            else:
                folder.joinpath(name).unlink(missing_ok=True)
            replace(folder / record_name, json.dumps(record, indent=1).encode())

    def folders(self) -> list[Path]:
        """Where the results go: into the wheel, and for editable installations also into the source tree."""
        return [Path(self.build_lib, "tpkernels"), *([ROOT / "tpkernels"] if self.inplace else [])]

    def get_outputs(self) -> list[str]:
        built = [Path(self.build_lib, "tpkernels", name) for name in (MODULE, RECORD, CUDA_MODULE, CUDA_RECORD)]
        return [str(file) for file in built if file.exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {name: str(ROOT / "tpkernels" / Path(name).name) for name in self.get_outputs()} if self.inplace else {}


if __name__ == "__main__":
    sources = [str(source.relative_to(ROOT)) for source in [CSRC / "bindings.cpp", *sorted(CSRC.glob("cpu/*.cpp"))]]
    urls = runpy.run_path(str(ROOT / "project_urls.py"))["project_urls"](ROOT)
    setup(ext_modules=[Extension("tpkernels._native", sources)], cmdclass={"build_ext": BuildCore}, project_urls=urls)
