"""Steps that are programs of their own: the build, the tests, and the sanitizer over the small ones."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpu_steps.outcome import Recorder, Row
from tpkernels.backends.symmetric import cuda_native

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "gpu"
# The cheap ones first: whoever runs out of time has seen them.
TEST_FILES = (
    "test_virtual_ranks", "test_kernels", "test_symmetric", "test_experts", "test_nccl", "test_several_gpus",
    "test_trainers",
)  # fmt: skip


# What `setup.py build_ext --inplace` does for the CUDA kernels, and for them alone: the compiled core stays as it is.
BUILD = """
import json, pathlib, runpy
setup = runpy.run_path("setup.py")
built, facts = setup["build_cuda"]()
package = pathlib.Path("tpkernels")
setup["replace"](package / setup["CUDA_MODULE"], built.read_bytes())
record = {"built": True, "module": setup["CUDA_MODULE"], **facts}
setup["replace"](package / setup["CUDA_RECORD"], json.dumps(record, indent=1).encode())
"""
LOADS = f"from {cuda_native.__name__} import load; load()"


class Unavailable(Exception):
    """A step that cannot run here, with the reason; not a failure."""


def build(recorder: Recorder) -> None:
    """The library of the CUDA kernels, unless one is there that loads."""
    if cuda_native.library() is not None:
        recorder.fact("CUDA kernels", f"were built before: {cuda_native.file()}")
        return
    if cuda_native.file() != cuda_native.FILE:
        raise RuntimeError(f"the library that was handed in cannot be used: {cuda_native.why_not()}")
    environment = {**os.environ, "TPKERNELS_CUDA": "1"}
    built = run_program([sys.executable, "-c", BUILD], recorder.log("setup"), environment)
    loaded = run_program([sys.executable, "-c", LOADS], recorder.log("load"))
    if loaded.status != 0:
        said = [line for line in (built.text + loaded.text).splitlines() if "rror" in line or "without" in line]
        raise RuntimeError(f"the CUDA kernels cannot be built: {' / '.join(said[-3:])}")
    recorder.fact("CUDA kernels", "built")


def tests(recorder: Recorder) -> None:
    """tests/gpu, a file at a time, with the counts of the reports that pytest writes."""
    wrong = []
    for name in TEST_FILES:
        report = recorder.log(f"{name}-junit")
        options = ["-v", "--maxfail=5", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", str(TESTS / f"{name}.py"), *options]
        done = run_program(command, recorder.log(name))
        recorder.fact(name, done.last_line)
        if report.is_file():
            for kind, names in read_junit(report.read_text(encoding="utf-8")).items():
                recorder.fact(f"{name}, {kind}", names)
        if done.status != 0:
            wrong.append(f"{name}: {done.last_line}")
    if wrong:
        raise RuntimeError("; ".join(wrong))


def read_junit(text: str) -> dict[str, list[str]]:
    """Names of the tests that failed or were skipped, with the first line of the reason."""
    found: dict[str, list[str]] = {"failed": [], "skipped": []}
    for case in ElementTree.fromstring(text).iter("testcase"):
        for element, kind in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
            for one in case.findall(element):
                why = (one.get("message") or "").splitlines()
                found[kind].append(f"{case.get('name')}: {why[0][:200] if why else ''}")
    return {kind: names for kind, names in found.items() if names}


def sanitizer(tool: str, way: str, recorder: Recorder) -> None:
    program = shutil.which("compute-sanitizer")
    if program is None:
        raise Unavailable("compute-sanitizer is not on the PATH")
    # Without the caching allocator each tensor has an end that the tool knows.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    problem, what = f"{tool}, kernels {way}", "errors"
    recorder.predict("-", problem, what, 0.0)
    command = [program, "--tool", tool, "--error-exitcode", "77", "--print-limit", "20", sys.executable,
               str(ROOT / "benchmarks" / "gpu_steps" / "sanitized.py"), way]  # fmt: skip
    done = run_program(command, recorder.log("output"), environment)
    errors = re.findall(r"ERROR SUMMARY: (\d+) error", done.text)
    if not errors or (done.status != 0 and not sum(map(int, errors))):
        raise RuntimeError(f"exit {done.status}: {done.last_line}; see {recorder.log('output').name}")
    found = float(sum(map(int, errors)))
    recorder.row(Row("-", problem, what, found, "count", "<= 0", 1))
    if found:
        raise RuntimeError(f"{found:g} errors: see {recorder.log('output').name}")


memcheck_alone, memcheck_together, synccheck_alone, synccheck_together = (
    partial(sanitizer, tool, way) for tool in ("memcheck", "synccheck") for way in ("alone", "together")
)


@dataclass(frozen=True)
class Done:
    status: int
    text: str

    @property
    def last_line(self) -> str:
        return next((line.strip("= ") for line in reversed(self.text.splitlines()) if line.strip()), "no output")


def run_program(command: list[str], log: Path, environment: dict[str, str] | None = None) -> Done:
    """What it prints goes to `log`, which stays if it is ended. Bounded: whoever runs the step ends this with it."""
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    return Done(done.returncode, log.read_text(encoding="utf-8", errors="replace"))
