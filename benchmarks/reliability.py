"""The reliability table in full counts: faults are injected, every rank's outcome is judged, latencies are kept.

    python benchmarks/reliability.py --json benchmarks/results/reliability-DATE.json [--rows R1,R5] [--scale 0.1]

A row's `count` is the number of trials (or calls) that were made, `full` the number that the table asks for. Some rows
need root. All of it takes more than half an hour on 2 cores. Rows can be run a few at a time: a result file that exists
keeps the rows that this run does not make anew, each with its own date and command. --budget SECONDS begins no row
after that time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.reliability.outcome import Outcome
from tests.reliability.rows import ROWS, Row
from tpkernels.measure import report


def run_row(row: Row, count: int) -> dict:
    start = time.monotonic()
    try:
        outcome = row.run(count)
    except Exception as error:  # noqa: BLE001 - one row that breaks must not take the others' figures along
        outcome = Outcome(row.name)
        outcome.add("the row broke off", repr(error)[:2000])
    return {
        "name": row.name,
        "what": row.what,
        "full": row.full,
        **outcome.to_json(),
        "seconds": round(time.monotonic() - start, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def describe(result: dict) -> str:
    figures = result["latency"]
    names = ("median_ms", "p99_ms", "max_ms")
    times = "" if figures is None else "/".join(f"{figures[name]:.1f}" for name in names) + " ms (median/p99/max)"
    verdict = "passed" if result["passed"] else "FAILED"
    return (
        f"{result['name']:<14}{result['count']:>8} of {result['full']:<8}{verdict} {result['seconds']:>7.1f} s  {times}"
    )


def write(path: Path, results: list[dict]) -> None:
    kept = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []
    by_name = {result["name"]: result for result in (*kept, *results)}
    ordered = [by_name[row.name] for row in ROWS if row.name in by_name]
    content = {**report.describe_environment({"cores": os.cpu_count()}), "results": ordered}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="names, or beginnings of names, separated by commas (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full counts")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no row is begun")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    given = {name for name in args.rows.split(",") if name}
    whole = given & {row.name for row in ROWS}
    beginnings = tuple(given - whole) if given else ("",)
    start, results = time.monotonic(), []
    for row in ROWS:
        asked = row.name in whole or row.name.startswith(beginnings)
        if not asked or (row.needs_root and os.geteuid() != 0):
            continue
        if time.monotonic() - start > args.budget:
            print(f"{row.name:<14} left out: the budget is spent")
            continue
        results.append(run_row(row, max(1, round(row.full * args.scale))))
        print(describe(results[-1]), flush=True)
        for problem in results[-1].get("problems", ()):
            print("    " + problem[:300], flush=True)
        if args.json:  # after every row: a run that is ended early keeps what it has
            write(Path(args.json), results)
    return 0 if all(result["passed"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
