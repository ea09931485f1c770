"""``python -m tests.mutations.floors``: each fault of every floor in a copy of this tree, and the tests that kill it.

Exit code 1 if any survives.  ``--check``: whether each edit still finds its line, and nothing is run.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import Queue

from tests.mutations.edits import EDITS, Edit

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1800  # of idle minutes it takes two at most; beside other jobs it has taken ten


def edited(text: str, edit: Edit) -> str:
    if text.count(edit.old) != 1:
        raise ValueError(f"{edit.file} has {edit.old!r} {text.count(edit.old)} times, not once: mend the edit")
    return text.replace(edit.old, edit.new)


def check() -> None:
    for edit in EDITS:
        edited((ROOT / "tpkernels" / edit.file).read_text(), edit)


def copy_tree(to: Path) -> None:
    """What git tracks, and what was built; modules are compiled once for all edits."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    built = [str(path.relative_to(ROOT)) for end in ("*.so", "_*_build.json") for path in ROOT.glob(f"tpkernels/{end}")]
    for name in [*filter(None, listed.split("\0")), *built]:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name)
    # By hash: an edit may change neither a file's size nor the second of its time.
    compileall.compile_dir(to / "tpkernels", quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)


def code_of(tree: Path, tests: str) -> tuple[int | None, str]:
    """pytest's exit code, None where it took too long, and the first test that failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *shlex.split(tests)]
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None, ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return done.returncode, failed[1] if failed else ""


def outcome(tree: Path, edit: Edit) -> tuple[str, str]:
    """How it ended, and the test that killed it. Whoever asks knows that the tests pass without the fault."""
    path = tree / "tpkernels" / edit.file
    original = path.read_text()
    path.write_text(edited(original, edit))
    try:
        code, killer = code_of(tree, edit.tests)
    finally:
        path.write_text(original)
    return {0: "survives", 1: "killed", None: "hangs"}.get(code, f"exit code {code}"), killer


def outcomes(trees: Queue[Path], edits: Sequence[Edit]) -> dict[str, dict[str, str]]:
    """Of edits that the same tests are to notice, told as they come."""
    tree, told = trees.get(), {}
    try:
        sound = code_of(tree, edits[0].tests)[0] == 0
        for edit in edits:
            begun = time.monotonic()
            found, killer = outcome(tree, edit) if sound else ("fails anyway", "")
            told[edit.name] = {"outcome": found, "by": killer}
            by = f"  <- {killer}" if killer else ""
            print(f"{found:14} {time.monotonic() - begun:5.0f} s  {edit.name}{by}", flush=True)
    finally:
        trees.put(tree)
    return told


def file_outcomes(path: Path, told: dict[str, dict[str, str]]) -> None:
    """Into what earlier runs of other edits filed there; an edit that is no longer in the list leaves the file."""
    filed = json.loads(path.read_text()) if path.exists() else {}
    known = {**filed, **told}
    path.write_text(json.dumps({edit.name: known[edit.name] for edit in EDITS if edit.name in known}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations.floors", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of files' names or edits; all by default")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="copies of the tree that are tested at once")
    parser.add_argument("--out", type=Path, metavar="FILE", help="add to FILE which test killed which edit")
    given = parser.parse_args()
    check()
    chosen = [edit for edit in EDITS if not given.names or any(part in edit.name for part in given.names)]
    if given.check:
        print(f"{len(EDITS)} edits find their lines")
        return 0
    by_tests: dict[str, list[Edit]] = {}
    for edit in chosen:
        by_tests.setdefault(edit.tests, []).append(edit)
    told: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="tpkernels-floors-") as folder, ThreadPoolExecutor(given.jobs) as threads:
        trees: Queue[Path] = Queue()
        for number in range(given.jobs):
            copy_tree(Path(folder, str(number)))
            trees.put(Path(folder, str(number)))
        for found in threads.map(partial(outcomes, trees), by_tests.values()):
            told.update(found)
    alive = [edit.name for edit in chosen if told[edit.name]["outcome"] != "killed"]
    if given.out:
        file_outcomes(given.out, told)
    print(f"{len(chosen)} faults, {len(chosen) - len(alive)} killed; not killed: {'; '.join(alive) or 'none'}")
    return int(bool(alive))


if __name__ == "__main__":
    sys.exit(main())
