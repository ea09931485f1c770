"""``python -m tests.fuzzing --seconds 3600``: fuzz the compiled core's control segment and the parsers for long.

New inputs of the core go to ``build/fuzzing``; what crashes it is left in ``build``, for the corpus.
"""

from __future__ import annotations

import argparse
import random
import secrets
import subprocess
import sys
from pathlib import Path

from tests.fuzzing.channel import CORPUS, guided
from tests.fuzzing.parsers import PARSERS, fuzz


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description=__doc__)
    parser.add_argument("--seconds", type=int, default=3600, help="for the core, and for each parser")
    parser.add_argument("--only", choices=["core", "parsers"])
    parser.add_argument("--seed", type=int, help="of the parsers' inputs (by default a fresh one, which is printed)")
    given = parser.parse_args()
    failed = 0
    if given.only != "parsers":
        program = guided()
        if program is None:
            print("no clang with libFuzzer: Debian has both in clang and libclang-rt-dev", file=sys.stderr)
            return 2
        new = Path("build/fuzzing")
        new.mkdir(parents=True, exist_ok=True)
        limits = [f"-max_total_time={given.seconds}", "-max_len=6000", "-timeout=20", "-artifact_prefix=build/"]
        failed |= subprocess.run([str(program), str(new), str(CORPUS), *limits]).returncode
        print("the core: " + ("see above" if failed else f"{given.seconds} s, nothing found"), flush=True)
    if given.only != "core":
        seed = secrets.randbelow(1_000_000) if given.seed is None else given.seed
        print(f"--seed {seed} repeats these inputs", flush=True)
        for name in PARSERS:
            random.seed(f"{seed} {name}")
            tried = fuzz(name, given.seconds)
            print(f"{name}: {tried} inputs, none but ValueError", flush=True)
    return int(failed != 0)


if __name__ == "__main__":
    sys.exit(main())
