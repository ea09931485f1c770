"""Scripts that run in forks of a process that has imported torch, so that a test does not wait for imports."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

from tpkernels.launching import local_ranks
from tpkernels.testing.spawn import fork_server

__all__ = ["run_forked"]

TIMEOUT_S = 300  # seconds of work; minutes beside other jobs on two cores


def run_forked(script: Path) -> str:
    """Run a script, and the ranks that it launches, in forks of processes that have imported torch; its output."""
    output = script.with_suffix(".txt")
    process = fork_server().Process(target=_be_the_script, args=(script, output))
    process.start()
    process.join(TIMEOUT_S)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0, output.read_text()
    return output.read_text()


def _be_the_script(script: Path, output: Path) -> None:
    with output.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.chdir(script.parent)
    sys.argv = [str(script)]
    with mock.patch.object(local_ranks, "new_interpreters", lambda: multiprocessing.get_context("fork")):
        runpy.run_path(str(script), run_name="__main__")
