"""``python -m tests.mutations``: every seeded fault of the planner, against the model that is known to kill it.

With ``--search``: look for such models for the faults that have none, and write them down.  Exit code 1 if any survives.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from typing import Any

from tests.fuzz.runner import judged, shrunk
from tests.fuzz.vocabulary import Spec
from tests.mutations.faults import FAULTS
from tests.mutations.search import KILLERS, candidates, check_with, fired, is_killed, killers, run_all
from tests.mutations.unreachable import UNREACHABLE
from tpkernels.testing.spawn import Pools

RANK = ("wrong", "raises")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names of faults; all by default")
    parser.add_argument("--search", action="store_true")
    given = parser.parse_args()
    names = [name for name in FAULTS if not given.names or any(part in name for part in given.names)]
    pools = Pools(forked=True)
    try:
        if given.search:
            _search(pools, [name for name in names if name not in killers() and name not in UNREACHABLE])
        told = run_all(pools, [name for name in names if name not in UNREACHABLE])
    finally:
        pools.close()
    for name, how in told.items():
        print(f"{how:14} {name}")
    for name in names:
        if name in UNREACHABLE:
            print(f"{'unreachable':14} {name}: {UNREACHABLE[name]}")
    alive = [name for name, how in told.items() if how.startswith("survives")]
    print(f"{len(told)} faults, {len(told) - len(alive)} killed, {len(alive)} survive: {', '.join(alive)}")
    return int(bool(alive))


def _search(pools: Pools, names: list[str]) -> None:
    specs = list(candidates())
    asked: dict[tuple[str, str], list[Spec]] = defaultdict(list)
    for spec in specs:
        for what in fired(spec):
            asked[what].append(spec)
    print(f"{len(specs)} models; rules that none asks: "
          + ", ".join(sorted({n.partition(" ")[0] for n in FAULTS} - {n for n, _ in asked})), flush=True)  # fmt: skip
    proven: dict[str, dict[str, Any]] = {}
    for name in names:
        rule = name.partition(" ")[0]
        what = {"refuses": "refused", "does": "mixed"}.get(name.split(" ")[1], "asked")
        known = asked.get((rule, what), []) if any(n == rule for n, _ in asked) else specs
        found = _killer(pools, name, known, proven)
        print(f"{name}: {len(known)} models, {'survives' if found is None else found['how']}", flush=True)
        if found is not None:
            KILLERS.write_text(json.dumps(killers() | {name: found}, indent=1) + "\n")


def _killer(pools: Pools, name: str, specs: list[Spec], proven: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    best: dict[str, Any] | None = None
    for start in range(0, min(len(specs), 600), 12):
        batch = specs[start : start + 12]
        fresh = [spec for spec in batch if json.dumps(spec) not in proven]
        if fresh:
            for spec, verdict in zip(fresh, judged(pools, fresh), strict=True):
                proven[json.dumps(spec)] = verdict
        sound = [spec for spec in batch if proven[json.dumps(spec)]["kind"] in ("right", "refused")]
        if not sound:
            continue
        for spec, verdict in zip(sound, judged(pools, sound, check_with, name), strict=True):
            before = proven[json.dumps(spec)]["proven"]
            if is_killed(verdict, before):
                found = {"how": verdict["kind"], "proven": before, "spec": spec}
                if verdict["kind"] == "wrong":
                    found["spec"] = shrunk(pools, spec, "wrong", 24, check_with, name) if len(str(spec)) > 200 else spec
                    return found
                best = best or found
    return best


if __name__ == "__main__":
    sys.exit(main())
