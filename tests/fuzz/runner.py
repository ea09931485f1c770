"""Many random models on persistent ranks: batches, ranks that die or hang, and smaller models that fail alike.

A batch that does not come back (a rank died, or hung past the deadline) is run again model by model, so that the one to
blame is named; the pool starts again by itself.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.fuzz.judge import Verdict, check_all, merged
from tests.fuzz.model import draw_spec
from tests.fuzz.vocabulary import Spec
from tpkernels.testing.spawn import Pools, RanksFailed

__all__ = ["FAILURES", "Summary", "fuzz", "judged", "kinds_in", "seeds_of", "shrunk"]

BATCH = 24
BATCH_S, MODEL_S = 600.0, 90.0
FAILURES = ("wrong", "raises")


def seeds_of(run: int, count: int) -> range:
    """Of the models of one run; no two runs share any."""
    return range(run * 1_000_000, run * 1_000_000 + count)


def judged(pools: Pools, specs: Sequence[Spec], check: Callable[..., Any] = check_all, *given: Any) -> list[Any]:
    """Verdicts in the order of the specs, all for one number of ranks."""
    world, done = specs[0]["world"], list[dict[str, Any]]()
    while len(done) < len(specs):
        rest = list(specs[len(done) :])
        try:
            results = pools(world).run(check, rest, *given, timeout=BATCH_S if len(rest) > 1 else MODEL_S)
        except RanksFailed as error:
            if len(rest) == 1:
                first = error.failures[0]
                told = f"{type(first.exception).__name__}: {str(first.exception)[:300]}"
                done.append(asdict(Verdict("raises", f"rank {first.rank}: {told}")))
                continue
            for spec in rest:
                done += judged(pools, [spec], check, *given)
            break
        count = min(map(len, results))
        done += [merged([result[index] for result in results]) for index in range(count)]
        if count < len(rest):
            pools(world).renew()  # ranks fell out of step: what is under way belongs to no call
    return done


@dataclass
class Summary:
    """What became of the models of a run."""

    kinds: Counter[str] = field(default_factory=Counter)
    styles: Counter[str] = field(default_factory=Counter)
    worlds: Counter[int] = field(default_factory=Counter)
    drawn: Counter[str] = field(default_factory=Counter)
    """Kinds of blocks and ops."""
    proven: int = 0
    cut: int = 0
    untraced: int = 0
    sequence_parallel: int = 0
    lost: int = 0
    """Whose parts could not be followed into a row while they ran."""
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, spec: Spec, verdict: dict[str, Any]) -> None:
        self.kinds[verdict["kind"]] += 1
        self.worlds[spec["world"]] += 1
        self.styles.update(verdict["styles"])
        self.proven += verdict["proven"] > 0
        self.cut += any(not name.startswith("Replicate") for name in verdict["styles"])
        self.untraced += verdict["untraced"]
        self.sequence_parallel += verdict["sequence_parallel"]
        self.lost += not verdict["followed"]
        self.drawn.update(kinds_in(spec))
        if verdict["kind"] in FAILURES:
            self.failures.append({"seed": spec["seed"], "verdict": verdict, "spec": spec})

    @property
    def models(self) -> int:
        return sum(self.kinds.values())

    def told(self) -> str:
        count = max(1, self.models)
        styles = ", ".join(f"{name} {number}" for name, number in self.styles.most_common())
        lines = [
            f"{self.models} models of {len(self.drawn)} kinds of blocks and ops on "
            + ", ".join(f"{world} ranks ({number})" for world, number in sorted(self.worlds.items())),
            f"cut at all {self.cut} ({100 * self.cut // count} %), with a column and row proven {self.proven} "
            f"({100 * self.proven // count} %), along the sequence {self.sequence_parallel}, "
            f"without data flow {self.untraced}, not followed while they ran {self.lost}",
            f"right {self.kinds['right']}, refused {self.kinds['refused']}, no model {self.kinds['invalid']}, "
            f"decided by a rounding {self.kinds['a tie']}, "
            f"WRONG {self.kinds['wrong']}, RAISING {self.kinds['raises']}",
            f"modules: {styles}",
        ]
        return "\n".join(lines)


def kinds_in(value: Any) -> Iterator[str]:
    """The kinds that a spec names."""
    if isinstance(value, dict):
        if "is" in value:
            yield value["is"]
        for item in value.values():
            yield from kinds_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from kinds_in(item)


def fuzz(
    pools: Pools,
    seeds: Sequence[int],
    worlds: tuple[int, ...],
    tell: Callable[[Summary], None] = lambda summary: None,
    *,
    small: bool = False,
    changed: Mapping[str, Any] = {},
) -> Summary:
    """Judge the models of ``seeds``, with what is ``changed`` in all of them; ``tell`` is called after every batch."""
    summary = Summary()
    waiting: dict[int, list[Spec]] = {world: [] for world in worlds}
    for seed in seeds:
        spec = {**draw_spec(seed, worlds, small), **changed}
        batch = waiting[spec["world"]]
        batch.append(spec)
        if len(batch) == BATCH:
            _add(summary, pools, batch)
            tell(summary)
    for batch in waiting.values():
        if batch:
            _add(summary, pools, batch)
            tell(summary)
    return summary


def _add(summary: Summary, pools: Pools, batch: list[Spec]) -> None:
    for spec, verdict in zip(batch, judged(pools, batch), strict=True):
        summary.add(spec, verdict)
    batch.clear()


# ---------------------------------------------------------------- smaller


def alike(verdict: dict[str, Any]) -> tuple[str, str]:
    """What must stay the same of a failure: wrong, or which exception."""
    exception = verdict["detail"].partition("]: ")[2][:40] if verdict["kind"] == "raises" else ""
    return verdict["kind"], exception


def shrunk(
    pools: Pools,
    spec: Spec,
    failed: dict[str, Any],
    most: int = 400,
    check: Callable[..., Any] = check_all,
    *given: Any,
) -> Spec:
    """A smaller spec that fails as ``spec`` did by the verdict ``failed``."""
    spent = 0
    while spent < most:
        for batch in _batches(smaller(spec), 12):
            spent += len(batch)
            verdicts = judged(pools, batch, check, *given)
            found = next((c for c, v in zip(batch, verdicts, strict=True) if alike(v) == alike(failed)), None)
            if found is not None:
                spec = found
                break
            if spent >= most:
                return spec
        else:
            return spec
    return spec


def _batches(specs: Iterator[Spec], size: int) -> Iterator[list[Spec]]:
    batch: list[Spec] = []
    for spec in specs:
        if batch and spec["world"] != batch[0]["world"]:
            yield batch
            batch = []
        batch.append(spec)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


SIMPLER: dict[str, Any] = {"world": [2], "stem": ["floats"], "head": ["none"], "output": ["tensor"], "norm": ["none"]}
KEPT = ("seed", "world", "is", "blocks")


def smaller(spec: Spec) -> Iterator[Spec]:
    """Specs with one thing less, or simpler; the largest steps first."""
    paths = list(_paths(spec, ()))
    for path in sorted(paths, key=len):
        owner: Any = spec
        for key in path[:-1]:
            owner = owner[key]
        if isinstance(owner, list) or path[-1] not in KEPT:
            made = copy.deepcopy(spec)
            target: Any = made
            for key in path[:-1]:
                target = target[key]
            if path[-1] == "again" or not (isinstance(owner, list) and path[-2] == "override"):
                del target[path[-1]]
                yield made
    if spec["world"] != 2:
        yield {**copy.deepcopy(spec), "world": 2}


def _paths(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from _paths(item, (*path, key))
