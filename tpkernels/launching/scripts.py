"""`tpkernels run`: a script, run as the main program by each of several local ranks.

Owns the subcommand's arguments. A script that makes its own process group, or calls `tpk.init()`, finds its peers as
under torchrun. It has no elasticity and no restarts: the first rank that fails ends the others.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from tpkernels.launching.local_ranks import launch

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nproc", type=int, default=2, metavar="N", help="local ranks (default: 2)")
    parser.add_argument("script", help="a Python file; each rank runs it as the main program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what follows is the script's")


def main(options: argparse.Namespace) -> int:
    """Run the script.

    Raises:
        ValueError: there is no such file, or no such number of ranks.
        LaunchError: it failed on a rank.
    """
    script = Path(options.script)
    if not script.is_file():
        raise ValueError(f"there is no script {options.script!r}")
    codes = launch(_run, options.nproc, str(script), list(options.arguments))
    return max(codes)


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
