"""Every architecture of the installed transformers: built small, parallelized as a new user does, and compared.

    python benchmarks/architectures.py [--only NAME,...] [--world 2] [--sequence-parallel] [--out FILE.json] [--write]

For each: `make_plan(model, mesh)` without inputs and `parallelize`, then outputs, loss, every gradient, evaluation, and
the unsharded model after planning, against the unsharded model in fp64 (tests/models/architectures/). Where the model
could not be traced without inputs, once more with them. Each runs in processes of its own with a time limit, so that
one that crashes or hangs is a row. Rows that the file has are not run again (--again: they are); --write makes the
tables of docs/architectures.md from the files of benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import revision
from benchmarks.architecture_tables import document, read_files, summary
from tests.models.architectures.catalogue import architectures
from tests.models.architectures.sweep import examine_architecture, preload
from tpkernels.measure import report
from tpkernels.verification.bounds import FACTOR

TIMEOUT_S = 120.0
"""For one architecture's unsharded model, and for its ranks; more where others use the machine (--timeout)."""


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["name"], row["world"], row["sequence_parallel"]


def read(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    rows = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []
    return {key(row): row for row in rows}


def write(path: Path, rows: dict[tuple[Any, ...], dict[str, Any]], timeout: float) -> None:
    """In the order of transformers' list; a new file takes the place of the old one at once."""
    import transformers

    order = {name: index for index, name in enumerate(architectures())}
    about = report.describe_environment({"cores": os.cpu_count(), "factor": FACTOR, "timeout_s": timeout})
    about["versions"]["transformers"] = transformers.__version__
    head = json.dumps(about | {"command": _command()}, indent=1).removesuffix("\n}")
    lines = ",\n".join(
        "  " + json.dumps(row)
        for row in sorted(rows.values(), key=lambda r: (r["world"], r["sequence_parallel"], order.get(r["name"], 0)))
    )
    new = path.with_suffix(".new")
    new.write_text(f'{head},\n "results": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    new.replace(path)


def describe(row: dict[str, Any]) -> str:
    details = row.get("reason") or next((f"{n} {s:.1e}" for n, s in row.get("wrong", {}).items()), "")
    plan = f"cut {row['cut']:.2f} proven {row['proven']}{'' if row['traced'] else ' untraced'}" if "cut" in row else ""
    return f"{row['name']:<32}{row['status']:<16}{row['seconds']:6.1f} s  {plan}  {details}"[:260]


def _command() -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, separated by commas (default: all)")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--out", metavar="FILE", help="result file; rows it has are kept")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds (default: %(default)g)")
    parser.add_argument("--again", action="store_true", help="also rows that the file has")
    parser.add_argument("--failed", action="store_true", help="of the rows that the file has, those that are not right")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no row is begun")
    parser.add_argument(
        "--write", action="store_true", help="make docs/architectures.md from the result files, run nothing"
    )
    args = parser.parse_args()
    if args.write:
        target = Path(__file__).parents[1] / "docs" / "architectures.md"
        results = Path(__file__).parent / "results"
        text = document(read_files(results, "architectures"), read_files(results, "plan-shares"))
        target.write_text(text, encoding="utf-8")
        return 0
    start, path, bad = time.monotonic(), Path(args.out) if args.out else None, 0
    known = architectures()
    names = [name for name in args.only.split(",") if name] or list(known)
    if strangers := [name for name in names if name not in known]:
        parser.error(f"this transformers has no {', '.join(strangers)}")
    preload()
    rows = read(path) if path else {}
    for name in names:
        mine = {"name": name, "world": args.world, "sequence_parallel": args.sequence_parallel}
        old = rows.get(key(mine))
        if old and not args.again and not (args.failed and old["status"] not in ("right", "no model")):
            continue
        if time.monotonic() - start > args.budget:
            print("the budget is spent")
            break
        begun = time.monotonic()
        row = mine | examine_architecture(name, args.world, args.sequence_parallel, args.timeout)
        row["seconds"] = round(time.monotonic() - begun, 1)
        row |= {"date": revision.now(), "commit": revision.commit()}
        bad += row["status"] in ("wrong", "raises")
        if path:
            rows = read(path) | {key(row): row}
            write(path, rows, args.timeout)
        print(describe(row), flush=True)
    if rows:
        print(summary(list(rows.values())))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
