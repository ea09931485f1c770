"""Plan files whose digest is right and whose values nobody has written: a ValueError, or a plan that can be used."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import tpkernels as tpk
from tpkernels.nn.digests import json_digest

pytestmark = pytest.mark.cpu

ODD: tuple[Any, ...] = (
    None, True, -1, 1.5, 1e400, 10**400, "", "9" * 5000, [], {}, [[]], [None], {"a": 1}, {"": None},
)  # fmt: skip


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from _paths(value[key], (*path, key))


def test_a_plan_file_with_an_odd_value_anywhere_is_refused_or_can_be_used(full: bool) -> None:
    """With a digest that is right; 2 s, and each tenth of them without --full."""
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8))
    document = json.loads(tpk.make_plan(model, 2).to_json())
    cases = [(path, odd) for path in _paths(document["plan"]) if path for odd in ODD]
    refused = 0
    for path, odd in cases if full else cases[::10]:
        body = copy.deepcopy(document["plan"])
        place = body
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = odd
        text = json.dumps(document | {"plan": body})
        try:
            text = json.dumps(document | {"plan": body, "digest": json_digest(body)})
            plan = tpk.ShardingPlan.from_json(text)
            plan.validate(model)
        except ValueError:
            refused += 1
            continue
        assert str(plan) and plan.to_json(), path
    assert refused > 20
    for nested in ("[" * 100_000, '{"a":' * 100_000):
        with pytest.raises(ValueError, match="must be JSON"):
            tpk.ShardingPlan.from_json(nested)
