"""``python -m tests.fuzz``: random models on ranks of this machine, against the unsharded model.

Exit code 1 if any was wrong or raised; each of those is printed with its seed, and made smaller.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from pathlib import Path

from tests.fuzz.runner import FAILURES, Summary, fuzz, judged, seeds_of, shrunk
from tpkernels.testing.spawn import Pools


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--models", type=int, default=10000)
    parser.add_argument("--seed", type=int, help="of the run (by default a fresh one, which is printed)")
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="models by their own seeds")
    parser.add_argument("--spec", help="one model as JSON, as printed for a failure")
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--sequence-parallel", action="store_true", help="in every model, not in one of eight")
    parser.add_argument("--shrink", type=int, default=10, help="of how many failures a smaller model is looked for")
    parser.add_argument("--json", type=Path, help="where to write the result")
    given = parser.parse_args()
    worlds = tuple(int(world) for world in given.ranks.split(","))
    pools = Pools(forked=True)
    try:
        if given.spec:
            return _one(pools, json.loads(given.spec))
        run = secrets.randbelow(1_000_000) if given.seed is None else given.seed
        seeds = given.only or seeds_of(run, given.models)
        print(f"{len(seeds)} models, run {run}: --seed {run} repeats it", flush=True)
        return _many(pools, list(seeds), worlds, given)
    finally:
        pools.close()


def _one(pools: Pools, spec: dict[str, object]) -> int:
    (verdict,) = judged(pools, [{"seed": 0, "world": 2, **spec}])
    print(json.dumps(verdict, indent=1))
    return int(verdict["kind"] in FAILURES)


def _many(pools: Pools, seeds: list[int], worlds: tuple[int, ...], given: argparse.Namespace) -> int:
    start, told = time.monotonic(), 0

    def tell(summary: Summary) -> None:
        nonlocal told
        for failure in summary.failures[told:]:
            print(f"seed {failure['seed']} {failure['verdict']['kind']}: {failure['verdict']['detail']}")
            print(f"  --spec '{json.dumps(failure['spec'])}'", flush=True)
        told = len(summary.failures)
        each = (time.monotonic() - start) / max(1, summary.models)
        bad = summary.kinds["wrong"] + summary.kinds["raises"]
        print(f"{summary.models} of {len(seeds)}, {bad} failed, {each:.3f} s each", file=sys.stderr, flush=True)

    changed = {"sequence_parallel": True} if given.sequence_parallel else {}
    summary = fuzz(pools, seeds, worlds, tell, changed=changed)
    seconds = time.monotonic() - start
    for failure in summary.failures[: given.shrink]:
        failure["smaller"] = shrunk(pools, failure["spec"], failure["verdict"])
        (verdict,) = judged(pools, [failure["smaller"]])
        print(f"seed {failure['seed']} {verdict['kind']}: {verdict['detail']}")
        print(f"  --spec '{json.dumps(failure['smaller'])}'", flush=True)
    print(summary.told())
    print(f"{seconds:.0f} s, {seconds / max(1, summary.models):.3f} s per model")
    if given.json:
        result = {"models": summary.models, "kinds": summary.kinds, "styles": summary.styles, "proven": summary.proven,
                  "cut": summary.cut, "untraced": summary.untraced, "sequence_parallel": summary.sequence_parallel,
                  "worlds": summary.worlds, "drawn": summary.drawn, "seconds": seconds,
                  "failures": summary.failures}  # fmt: skip
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(summary.failures))


if __name__ == "__main__":
    sys.exit(main())
