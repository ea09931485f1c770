"""Scripts and commands that run in forks of a process that has imported torch, so that a test waits for no imports."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from tpkernels import cli
from tpkernels.launching import local_ranks
from tpkernels.testing.spawn import fork_server

__all__ = ["command_forked", "run_forked"]

TIMEOUT_S = 300  # seconds of work; minutes beside other jobs on two cores


def run_forked(script: Path) -> str:
    """Run a script in its folder, and the ranks that it launches, without a new interpreter; its output."""
    return _forked(script.parent, _be_the_script, script)


def command_forked(folder: Path, *arguments: str) -> str:
    """``python -m tpkernels ARGUMENTS`` in a folder, and the ranks that it launches, in the same way."""
    return _forked(folder, _be_the_command, arguments)


def _forked(folder: Path, become: Callable[..., None], what: object) -> str:
    output = folder / "output.txt"
    process = fork_server().Process(target=_alone, args=(folder, output, become, what))
    process.start()
    process.join(TIMEOUT_S)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0, output.read_text()
    return output.read_text()


def _alone(folder: Path, output: Path, become: Callable[..., None], what: object) -> None:
    with output.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.chdir(folder)
    with mock.patch.object(local_ranks, "new_interpreters", lambda: multiprocessing.get_context("fork")):
        become(what)


def _be_the_script(script: Path) -> None:
    sys.argv = [str(script)]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def _be_the_command(arguments: tuple[str, ...]) -> None:
    sys.exit(cli.main(list(arguments)))
