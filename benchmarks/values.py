"""The whole grid of values: every family, in every way it is used, on 2, 3 and 4 ranks, against the unsharded model.

    python benchmarks/values.py --json benchmarks/results/values-DATE.json [--worlds 3,4] [--modes train,compile]

Cells and bound are those of tests/models/grid.py and judge.py: output, loss, every gradient and, after 20 steps of
AdamW with clipping, every parameter, each element's error in units of what the unsharded model in the same dtype is
off; more than 8 is wrong. A cell's `worst` is the largest of all its elements on all ranks, `compared` the number of
tensors. All of it is hours of work on 2 cores, so that it can be run piece by piece: cells that the file has, and that
passed, are not run again (--again: they are), each keeps the date, commit and command of its own run, and the order
brings every model early, in one of its combinations of dtype and residual (--turns 1: in that alone). --budget SECONDS
begins no cells after that time.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import revision
from tests.models import zoo
from tests.models.grid import HAS_BLOCKS, MODES, WORLDS, Cell, grid, groups, reference_of, run_group, worst_of
from tpkernels.measure import report
from tpkernels.testing.spawn import WorkerPool
from tpkernels.verification.bounds import FACTOR

TIMEOUT_S = 1500.0
"""For one group of cells, and for one collective: a rank of a loaded machine can be stopped for minutes."""


def turn(cell: Cell) -> tuple[int, int]:
    """First each model in one of its combinations, another one for each; uneven heads before even ones."""
    place = (*zoo.UNEVEN, *zoo.FAMILIES, *zoo.PLAIN).index(cell.name)
    combinations = 4 if cell.name in HAS_BLOCKS and cell.mode != "dropout" else 2
    return (2 * cell.sequence + (cell.dtype == "bf16") - place) % combinations, place


def run(pool: WorkerPool, cells: list[Cell]) -> list[dict[str, Any]]:
    """What to file about each cell; if one of several fails, each is run on a model of its own."""
    start = time.monotonic()
    found: list[dict[str, Any]]
    try:
        results = pool.run(run_group, cells, reference_of(cells), timeout=TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - a cell that breaks must not take the others along
        if len(cells) > 1:
            return [row for cell in cells for row in run(pool, [cell])]
        found = [{"passed": False, "error": "".join(traceback.format_exception(error))[-4000:]}]
    else:
        found = []
        for mine in zip(*results, strict=True):
            worst = worst_of(mine)
            where = next(iter(worst))
            found.append({"passed": worst[where] <= FACTOR, "worst": round(worst[where], 3), "where": where})
            found[-1]["compared"] = len(worst)
    about = {
        "seconds": round((time.monotonic() - start) / len(cells), 1),
        "date": revision.now(),
        "commit": revision.commit(),
        "command": _command(),
    }
    return [{"world": pool.nproc, **asdict(cell), **row, **about} for cell, row in zip(cells, found, strict=True)]


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("world", "name", "sequence", "dtype", "mode"))


def read(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    rows = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []
    return {key(row): row for row in rows}


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    cells = {mode: [cell for cell in grid() if cell.mode == mode] for mode in MODES}
    modes = [(mode, len(mine), len({cell.name for cell in mine})) for mode, mine in cells.items()]
    setup = {"cores": os.cpu_count(), "factor": FACTOR, "worlds": WORLDS, "modes": modes}
    head = json.dumps(report.describe_environment(setup) | {"command": _command()}, indent=1).removesuffix("\n}")
    lines = ",\n".join("  " + json.dumps(row) for row in sorted(rows, key=key))
    path.write_text(f'{head},\n "results": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def describe(row: dict[str, Any]) -> str:
    verdict = "passed" if row["passed"] else "FAILED"
    what = f"{row['name']:<15}{'cut' if row['sequence'] else 'whole':<7}{row['dtype']:<6}{row['mode']:<11}"
    found = f"{row['worst']:6.2f} {row['where']}" if "worst" in row else row["error"].splitlines()[-1][:300]
    return f"{row['world']} ranks  {what}{verdict} {row['seconds']:7.1f} s  {found}"


def _command() -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", required=True)
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--models", default="", help="names, separated by commas (default: all)")
    parser.add_argument("--turns", type=int, default=4, help="of each model so many of its combinations")
    parser.add_argument("--again", action="store_true", help="also cells that the file has")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no cells are begun")
    args = parser.parse_args()
    path, start, failed = Path(args.json), time.monotonic(), 0
    revision.commit()
    names = args.models.split(",") if args.models else None
    wanted = [c for c in grid() if c.mode in args.modes.split(",") and (names is None or c.name in names)]
    wanted = [c for c in wanted if turn(c)[0] < args.turns]
    for world in map(int, args.worlds.split(",")):
        done = {} if args.again else {k: row for k, row in read(path).items() if row["passed"]}
        left = [cell for cell in wanted if key({"world": world, **asdict(cell)}) not in done]
        with WorkerPool(world, forked=True, group_timeout=TIMEOUT_S) as pool:
            for cells in sorted(groups(left), key=lambda group: turn(group[0])):
                if time.monotonic() - start > args.budget:
                    print("the budget is spent")
                    break
                rows = run(pool, cells)
                failed += sum(not row["passed"] for row in rows)
                write(path, {**read(path), **{key(row): row for row in rows}}.values())  # what is done is kept
                for row in rows:
                    print(describe(row), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
