"""``python -m tests.mutations``: every seeded fault of the planner, against the model that is known to kill it.

With ``--search``: look for such models for the faults that have none, and write them down.
Exit code 1 if any survives.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from tests.fuzz.judge import merged
from tests.fuzz.runner import judged
from tests.fuzz.vocabulary import Spec
from tests.mutations.faults import FAULTS
from tests.mutations.hints import candidates, likely
from tests.mutations.search import KILLERS, check_with, how_killed, hunt, killers, run_all
from tests.mutations.unreachable import UNREACHABLE
from tpkernels.testing.spawn import Pools, RanksFailed


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
    for name in names:
        found, tried = None, 0
        for specs in (likely(name), candidates(name)):
            for world in sorted({spec["world"] for spec in specs}):
                here = [spec for spec in specs if spec["world"] == world]
                if found is None:
                    found, tried = _killer(pools, name, here), tried + len(here)
        print(f"{name}: {tried} models, {'survives' if found is None else found['how']}", flush=True)
        if found is not None:
            KILLERS.write_text(json.dumps(killers() | {name: found}, indent=1) + "\n")


def _killer(pools: Pools, name: str, specs: list[Spec]) -> dict[str, Any] | None:
    """What kills a fault: rather by being wrong than by raising, and rather so than by a plan that proves less."""
    try:
        results = pools(specs[0]["world"]).run(hunt, name, specs, timeout=600)
    except RanksFailed:  # the fault brings ranks out of step: one model after the other
        for spec in specs:
            (sound,) = judged(pools, [spec])
            (verdict,) = judged(pools, [spec], check_with, name)
            how = how_killed(verdict, sound["proven"])
            if sound["kind"] in ("right", "refused") and how != "survives":
                return {"how": how, "proven": sound["proven"], "spec": spec}
        return None
    found: dict[str, dict[str, Any]] = {}
    for tries in zip(*results, strict=True):
        index, proven = tries[0]["index"], tries[0]["proven before"]
        how = how_killed(merged(list(tries)), proven)
        found.setdefault(how, {"how": how, "proven": proven, "spec": specs[index]})
    return next((found[how] for how in ("wrong", "raises", "less proven", "more proven") if how in found), None)


if __name__ == "__main__":
    sys.exit(main())
