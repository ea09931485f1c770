"""`tpkernels run`: a script, run as the main program by each of several local ranks.

Owns the subcommand's arguments. A script that makes its own process group, or calls `tpk.init()`, finds its peers as
under torchrun. It has no elasticity and no restarts: the first rank that fails ends the others.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from tpkernels import config, flags
from tpkernels.launching.local_ranks import launch

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_tp(parser, 2, "local ranks to start (default 2); the script decides what they share")
    parser.add_argument(
        "script",
        type=flags.existing_file,
        metavar="SCRIPT",
        help="a Python file; each rank runs it as the main program",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what follows is the script's")


def main(options: argparse.Namespace) -> int:
    """Run the script.

    Raises:
        ValueError: this process is a rank already.
        LaunchError: it failed on a rank.
    """
    if config.job_environment() is not None:
        raise ValueError("`tpkernels run` starts ranks itself; under torchrun give the script to torchrun")
    return max(launch(_run, options.tp, options.script, list(options.arguments)))


def _run(script: str, arguments: list[str]) -> int:
    """One rank's run; its exit code."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        raise
    return 0
