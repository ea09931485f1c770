"""Finds the smallest models of the fuzzer that kill a fault, and runs those that are known to.

A fault is killed where a model that is right without it is wrong or raises with it, or where less (or more) of the
model is proven: a rule that refuses what is right is a fault, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.fuzz.judge import Verdict, attempt, check_all
from tests.fuzz.runner import judged
from tests.fuzz.vocabulary import Spec
from tests.mutations.faults import FAULTS
from tpkernels.testing.spawn import Pools

__all__ = ["KILLERS", "check_with", "how_killed", "hunt", "killers", "run_all"]

KILLERS = Path(__file__).with_name("killers.json")


def killers() -> dict[str, dict[str, Any]]:
    """For each fault: the spec that kills it, how, and what is proven without the fault."""
    found: dict[str, dict[str, Any]] = json.loads(KILLERS.read_text())
    return found


def check_with(specs: list[Spec], fault: str) -> list[dict[str, Any]]:
    """Verdicts of this rank with a fault in place."""
    with FAULTS[fault]():
        return check_all(specs)


_SOUND: dict[str, str] = {}
"""What each model's plan is without a fault, in this process."""


def _plans(specs: list[Spec]) -> list[str]:
    """What each plan says, as text; every rank plans its share."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = {i: _told(attempt(spec, world)) for i, spec in enumerate(specs) if i % world == rank}
    shared: list[Any] = [None] * world
    dist.all_gather_object(shared, mine)
    told = {index: text for some in shared for index, text in some.items()}
    return [told[index] for index in range(len(specs))]


def _told(planned: Any) -> str:
    if isinstance(planned, Verdict):
        return f"{planned.kind} {planned.proven}"
    return str([(entry.path, entry.style) for entry in planned[0].entries])


def hunt(fault: str, specs: list[Spec]) -> list[dict[str, Any]]:
    """Verdicts, with the fault, of models whose plan it changes (of all if it changes none); up to the first wrong."""
    fresh = [spec for spec in specs if json.dumps(spec) not in _SOUND]
    _SOUND.update(zip([json.dumps(spec) for spec in fresh], _plans(fresh), strict=True))
    with FAULTS[fault]():
        plans = _plans(specs)
    changed = [i for i, spec in enumerate(specs) if plans[i] != _SOUND[json.dumps(spec)]]
    found: list[dict[str, Any]] = []
    for index in changed or range(min(len(specs), 24)):
        (sound,) = check_all([specs[index]])
        if sound["kind"] not in ("right", "refused"):
            continue
        (verdict,) = check_with([specs[index]], fault)
        found.append({**verdict, "index": index, "proven before": sound["proven"]})
        wrong = torch.tensor([float(verdict["kind"] == "wrong")])
        dist.all_reduce(wrong)
        if float(wrong) or len(found) >= 16:
            break
    return found


def run_all(pools: Pools, names: list[str]) -> dict[str, str]:
    """For each fault: how it was killed ("wrong", "raises", "refused", "less proven"), or "survives"."""
    known, told = killers(), {}
    for name in names:
        if name not in known:
            told[name] = "survives: no model is known to kill it"
            continue
        killer = known[name]
        (verdict,) = judged(pools, [killer["spec"]], check_with, name)
        told[name] = how_killed(verdict, killer["proven"])
    return told


def how_killed(verdict: dict[str, Any], proven: int) -> str:
    """By a verdict with the fault, where ``proven`` modules are columns or rows without it."""
    if verdict["kind"] in ("wrong", "raises"):
        return str(verdict["kind"])
    if verdict["proven"] == proven:
        return "survives"
    return "less proven" if verdict["proven"] < proven else "more proven"
