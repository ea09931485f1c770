"""``python -m tests.fuzzing --seconds 3600``: fuzz the compiled core's control segment and the parsers for long.

New inputs of the core go to ``build/fuzzing``; what crashes it is left in ``build``, for the corpus. With ``--record
FILE`` what ran without a finding goes to that file, so that hours add up over many runs; the last line has the sums.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import secrets
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzzing.channel import CORPUS, guided
from tests.fuzzing.parsers import PARSERS, fuzz

CORE = "core"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description=__doc__)
    parser.add_argument("--seconds", type=int, default=3600, help="for the core, and for each parser")
    parser.add_argument("--only", nargs="+", choices=[CORE, "parsers", *PARSERS], metavar="NAME", help="one or several")
    parser.add_argument("--seed", type=int, help="of the parsers' inputs (by default a fresh one, which is printed)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="a JSON file that gets a row for each that ran")
    given = parser.parse_args()
    names = [name for name in (CORE, *PARSERS) if not given.only or _is_asked_for(name, given.only)]
    seed = secrets.randbelow(1_000_000) if given.seed is None else given.seed
    if names != [CORE]:
        print(f"--seed {seed} repeats the parsers' inputs", flush=True)
    for name in names:
        before, start = _cpu_s(), time.monotonic()
        if name == CORE:
            program = guided()
            if program is None:
                print("no clang with libFuzzer: Debian has both in clang and libclang-rt-dev", file=sys.stderr)
                return 2
            before, start = _cpu_s(), time.monotonic()  # building it is not fuzzing
            inputs = _core(program, given.seconds)
            if inputs is None:
                return 1
        else:
            inputs = _parser(name, given.seconds, seed)
        if given.record:
            spent = {"seconds": round(time.monotonic() - start), "cpu_s": round(_cpu_s() - before)}
            _note(given.record, {"target": name, **spent, "inputs": inputs})
    if given.record:
        rows = json.loads(given.record.read_text(encoding="utf-8"))
        wall, cpu = Counter[str](), Counter[str]()
        for row in rows:
            wall[row["target"]] += row["seconds"]
            cpu[row["target"]] += row["cpu_s"]
        sums = [f"{name} {wall[name] / 60:.0f} min, {cpu[name] / 60:.0f} of a core" for name in (CORE, *PARSERS)]
        print("in all: " + "; ".join(sums))
    return 0


def _cpu_s() -> float:
    """Of this process, and of those that it has waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _is_asked_for(name: str, asked: list[str]) -> bool:
    return name in asked or (name in PARSERS and "parsers" in asked)


def _core(program: Path, seconds: int) -> int | None:
    """How many inputs were tried, or None where one crashed."""
    new = Path("build/fuzzing")
    new.mkdir(parents=True, exist_ok=True)
    limits = [f"-max_total_time={seconds}", "-max_len=6000", "-timeout=60", "-artifact_prefix=build/"]
    command = [str(program), str(new), str(CORPUS), *limits, "-print_final_stats=1"]
    counted = None
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as running:
        assert running.stderr is not None
        for line in running.stderr:  # an hour is long: what it tells is shown as it comes
            print(line, end="", file=sys.stderr, flush=True)
            counted = re.search(r"number_of_executed_units:\s*(\d+)", line) or counted
    if running.returncode:
        return None
    assert counted, "libFuzzer did not say how many inputs it tried"
    print(f"the core: {counted[1]} inputs in {seconds} s, nothing found", flush=True)
    return int(counted[1])


def _parser(name: str, seconds: int, seed: int) -> int:
    random.seed(f"{seed} {name}")
    tried = fuzz(name, seconds)
    print(f"{name}: {tried} inputs, none but ValueError", flush=True)
    return tried


def _note(path: Path, row: dict[str, Any]) -> None:
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    lines = ",\n".join(" " + json.dumps(one) for one in [*rows, row | {"date": now, "commit": commit}])
    new = path.with_suffix(".new")
    new.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
