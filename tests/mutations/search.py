"""Finds the smallest models of the fuzzer that kill a fault, and runs those that are known to.

A fault is killed where a model that is right without it is wrong or raises with it, or where less (or more) of the
model is proven: a rule that refuses what is right is a fault, too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from tests.fuzz.attention import SCORES
from tests.fuzz.judge import check_all, plan_for
from tests.fuzz.model import build_model
from tests.fuzz.runner import judged
from tests.fuzz.vocabulary import BLOCKS, FEATURES, HEADS, Sizes, Spec
from tests.mutations.faults import FAULTS
from tpkernels.sharding import rules
from tpkernels.sharding.layout import Unproven
from tpkernels.testing.spawn import Pools

__all__ = ["KILLERS", "candidates", "check_with", "fired", "is_killed", "killers", "run_all"]

KILLERS = Path(__file__).with_name("killers.json")


def killers() -> dict[str, dict[str, Any]]:
    """For each fault: the spec that kills it, how, and what is proven without the fault."""
    found: dict[str, dict[str, Any]] = json.loads(KILLERS.read_text())
    return found


def check_with(specs: list[Spec], fault: str) -> list[dict[str, Any]]:
    """Verdicts of this rank with a fault in place."""
    with FAULTS[fault]():
        return check_all(specs)


def check_faults(pairs: list[tuple[Spec, str]]) -> list[dict[str, Any]]:
    """One verdict for each pair of a spec and a fault, in one call of the ranks."""
    verdicts = []
    for spec, fault in pairs:
        verdicts += check_with([spec], fault)
    return verdicts


def is_killed(verdict: dict[str, Any], proven: int) -> bool:
    return verdict["kind"] in ("wrong", "raises") or verdict["proven"] != proven


def run_all(pools: Pools, names: list[str]) -> dict[str, str]:
    """For each fault: how it was killed ("wrong", "raises", "refused", "less proven"), or "survives"."""
    known, told = killers(), {}
    for name in names:
        if name not in known:
            told[name] = "survives: no model is known to kill it"
            continue
        killer = known[name]
        (verdict,) = judged(pools, [killer["spec"]], check_with, name)
        told[name] = _how(verdict, killer["proven"])
    return told


def _how(verdict: dict[str, Any], proven: int) -> str:
    if not is_killed(verdict, proven):
        return "survives"
    if verdict["kind"] in ("wrong", "raises"):
        return str(verdict["kind"])
    return "less proven" if verdict["proven"] < proven else "more proven"


# ---------------------------------------------------------------- where to look


def candidates() -> Iterator[Spec]:
    """Small models, each of one block with one op or option."""
    rng = random.Random(0)
    sizes = Sizes(2, 4, 8)

    def spec(block: Spec, **more: Any) -> Spec:
        return {"seed": 0, "world": 2, "blocks": [block], **more}

    for name, kind in FEATURES.items():
        for options in _drawn(kind, rng, sizes.of(16)):
            item = {"is": name, **options, **({"ops": [{"is": "relu"}]} if "ops" in options else {})}
            yield spec({"is": "mlp", "hidden": 16, "ops": [item]})
    for layout in ("bshd", "bhsd"):
        for name, kind in HEADS.items():
            for options in _drawn(kind, rng, sizes.of(16, 4, layout)):
                item = {"is": name, **options}
                yield spec({"is": "mlp", "hidden": 16, "ops": [
                    {"is": "in_heads", "heads": 4, "layout": layout, "ops": [item]}]})  # fmt: skip
    for how in ("minus_one", "attribute", "unflatten", "split", "hidden", "heads_last"):
        yield spec({"is": "mlp", "hidden": 16, "ops": [{"is": "in_heads", "heads": 4, "how": how}]})
    for scores in SCORES:
        for kernel in ("sdpa", "matmul", "einsum", "gqa", "baddbmm", "linear"):
            for kv in (4, 2, 1):
                yield spec({"is": "attention", "heads": 4, "kv_heads": kv, "scores": scores, "kernel": kernel})
    for packing in ("chunk", "three_first", "heads_first", "split", "slices"):
        yield spec({"is": "packed_attention", "heads": 4, "packing": packing})
    for name, kind in BLOCKS.items():
        for _ in range(12):
            for options in _drawn(kind, rng, sizes)[:1]:
                plain = {key: [] if key in ("ops", "inner", "other", "gate_ops") and isinstance(value, list) else value
                         for key, value in options.items()}  # fmt: skip
                yield spec({"is": name, **plain})
    yield spec({"is": "mlp", "hidden": 16, "bias": True}, stem="ids", head="tied")
    yield spec({"is": "mlp", "hidden": 16, "bias": True}, stem="linear", head="linear")
    yield spec({"is": "attention", "gives": True, "heads": 4})
    yield spec({"is": "mlp", "hidden": 16, "bias": True}, override=[0.0, "row_split"])


def _drawn(kind: Any, rng: random.Random, sizes: Sizes) -> list[Spec]:
    found: list[Spec] = []
    for _ in range(10):
        options = kind.draw(rng, sizes)
        if options is not None and options not in found:
            found.append(options)
    return found


def fired(spec: Spec) -> set[tuple[str, str]]:
    """Which rules were asked while ``spec`` was planned: ``(name, "asked" | "refused" | "mixed")``."""
    seen: set[tuple[str, str]] = set()

    def watching(name: str, rule: Any) -> Any:
        def watched(call: rules.Call) -> Any:
            seen.add((name, "asked"))
            mix = call.mix

            def told(index: int) -> None:
                seen.add((name, "mixed"))
                mix(index)

            call.mix = told
            try:
                return rule(call)
            except Unproven:
                seen.add((name, "refused"))
                raise

        return watched

    watched = {packet: watching(str(packet).rpartition(".")[2], rule) for packet, rule in rules.RULES.items()}
    with mock.patch.dict(rules.RULES, watched), suppress(ValueError):
        plan_for(build_model(spec), spec["world"], spec)
    return seen
