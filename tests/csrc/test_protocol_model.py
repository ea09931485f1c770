"""The Spin model of the protocol: every interleaving is explored, and each rule broken on purpose is caught.

Builds `protocol.pml` with `spin` and the C compiler, one variant at a time (the macros at its top).  Counts of states
are those of one machine and only here to show that a variant is not empty.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

MODEL = Path(__file__).parent / "protocol.pml"
CORRECT = (
    "R=2",
    "R=2 DEATHS=1",
    "R=2 MISMATCH=1 DEATHS=2",
    "R=2 MISMATCH=2 DEATHS=1",
    "R=3 NO_SLEEP",
    "R=3 NO_SLEEP MISMATCH=2",
    "R=3 MISMATCH=1 CALLS=1",
)
# Minutes of work: only with `pytest --full`.
CORRECT_AND_LARGE = (
    "R=2 DEATHS=2 CALLS=2",
    "R=2 DEATHS=2",
    "R=3 CALLS=2",
    "R=3 GATHERS CALLS=2",
    "R=3 NO_SLEEP MISMATCH=1 DEATHS=1 CALLS=2",
    "R=3 GATHERS DEATHS=1 CALLS=1",
    "R=3 MISMATCH=1 DEATHS=1 CALLS=1",
    "R=3 NO_SLEEP DEATHS=1 CALLS=2",
    "R=3 NO_SLEEP MISMATCH=2 DEATHS=1 CALLS=2",
    "R=3 NO_SLEEP MISMATCH=3 DEATHS=1 CALLS=1",
    "R=4 NO_SLEEP CALLS=2",
)
WRONG_DATA, HANGS, WRONG_BLAME = r"assertion violated .*\.part\[", r"invalid end state", r"assertion violated .*blamed"
MUTANTS = {
    "R=2 NO_SLEEP FLAG_RESET": WRONG_BLAME,  # the flag of a rank that has ended was reset: it seems to have died
    "R=2 NO_SLEEP FLAG_CONSTANT": r"assertion violated .*header\[",  # the header of two calls ago
    "R=2 NO_SLEEP ONE_SLOT": WRONG_DATA,
    "R=3 NO_SLEEP ONE_PEER": WRONG_DATA,
    "R=2 NO_SLEEP SUM_EARLY": WRONG_DATA,
    "R=2 SLEEPERS_FIRST": HANGS,
    "R=2 NO_COMPARE": HANGS,
    "R=2 NO_SLEEP HEADER_LATE MISMATCH=1": WRONG_DATA,
    "R=2 NO_SLEEP HEADER_LATE MISMATCH=2": WRONG_DATA,
    "R=2 EPOCH_FIRST": WRONG_BLAME,
    "R=3 NO_SLEEP BLAME_POISONED MISMATCH=2 CALLS=2": WRONG_BLAME,
    "R=3 NO_SLEEP POISON_FIRST MISMATCH=3 DEATHS=1 CALLS=1": WRONG_BLAME,
    "R=3 NO_SLEEP LEAVE_EARLY MISMATCH=2 CALLS=2": WRONG_BLAME,
    "R=3 NO_SLEEP NO_TAKEOVER MISMATCH=1 DEATHS=1 CALLS=1": HANGS,
}


def explore(variant: str, folder: Path) -> str:
    """What Spin says of ``variant``: its whole output, in which it is made sure that the search was not cut short."""
    cc = next((found for name in ("gcc", "cc", "clang") if (found := shutil.which(name))), None)
    spin = shutil.which("spin")
    if spin is None or cc is None:
        pytest.skip("needs the model checker spin (Debian: apt-get install spin) and a C compiler")
    macros = [f"-D{macro}" for macro in variant.split()]
    level = "-O2" if variant in CORRECT_AND_LARGE else "-O0"  # the search of the others is shorter than an optimization
    build = [cc, level, "-w", "-DSAFETY", "-DCOLLAPSE", "-DVECTORSZ=2048", "-DMEMLIM=6000", "-o", "pan", "pan.c"]
    for command in ([spin, "-a", *macros, str(MODEL)], build, ["./pan", "-m1000000", "-w22"]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, f"{variant}: {command}: {done.stdout}\n{done.stderr}"
    for cut_short in ("max search depth too small", "out of memory", "Search not completed"):
        assert cut_short not in done.stdout or "errors: 1" in done.stdout, f"{variant}: {done.stdout}"
    return done.stdout


def check_correct(variant: str, folder: Path) -> None:
    report = explore(variant, folder)
    assert "errors: 0" in report, f"{variant}: {report}"
    stored = re.search(r"(\d+) states, stored", report)
    assert stored is not None and int(stored[1]) > 1000, f"{variant}: {report}"


@pytest.mark.sample(2)
@pytest.mark.parametrize("variant", CORRECT)
@pytest.mark.slow("2 s of a model checker")
def test_no_interleaving_breaks_the_protocol(variant: str, tmp_path: Path) -> None:
    check_correct(variant, tmp_path)


def test_no_interleaving_of_more_ranks_calls_and_deaths_breaks_the_protocol(tmp_path: Path, full: bool) -> None:
    if not full:
        pytest.skip("--full: takes minutes")
    for variant in CORRECT_AND_LARGE:
        check_correct(variant, tmp_path)


@pytest.mark.sample(3)
@pytest.mark.parametrize("variant", MUTANTS)
@pytest.mark.slow("2 s of a model checker")
def test_breaking_one_rule_is_caught(variant: str, tmp_path: Path) -> None:
    report = explore(variant, tmp_path)
    assert "errors: 1" in report and re.search(MUTANTS[variant], report), f"{variant}: {report}"


def test_every_mutant_of_the_model_is_run() -> None:
    text = MODEL.read_text()
    described = set(re.findall(r"^ \*   ([A-Z_]+)  ", text, re.MULTILINE))
    used = {macro.split("=")[0] for variant in (*CORRECT, *CORRECT_AND_LARGE, *MUTANTS) for macro in variant.split()}
    assert described <= used
    assert all(len(re.findall(rf"\b{name}\b", text)) > 1 for name in described), "a mutant that changes nothing"
