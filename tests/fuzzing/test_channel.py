"""A control segment in which anything stands makes an error of a rank's call, within its time: no crash, no bad bit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.csrc.test_sanitizers import ADDRESS, _built
from tests.fuzzing.channel import CORPUS, guided, standalone

pytestmark = pytest.mark.cpu


@pytest.mark.slow("3 s: compiles the fuzzer")
def test_what_fuzzing_has_found_and_changes_of_it_are_errors(full: bool) -> None:
    program = standalone(_built("races-address", ADDRESS))
    files = sorted(str(path) for path in CORPUS.iterdir())
    assert len(files) >= 20
    done = subprocess.run([str(program), "50" if full else "4", *files], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


@pytest.mark.full("30 s, and a minute to compile; python -m tests.fuzzing goes on for longer")
def test_fuzzing_that_is_guided_by_coverage_finds_nothing(tmp_path: Path) -> None:
    program = guided()
    if program is None:
        pytest.skip("needs clang and libFuzzer (Debian: apt-get install clang libclang-rt-dev)")
    done = subprocess.run(
        [str(program), str(tmp_path), str(CORPUS), "-max_total_time=30", "-max_len=6000", "-timeout=60"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
