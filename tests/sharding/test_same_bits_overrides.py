"""`same_bits=8` of plans with overrides, and of plans by rules: one, two and four ranks have the same bits."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpkernels as tpk
from tests.ops.same_bits import assert_same
from tests.sharding.test_same_bits import SAME_BITS, small_groups
from tpkernels.nn.digests import json_digest
from tpkernels.testing.spawn import Pools


class Tied(nn.Module):
    """Whose table stays whole only where that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(96, 64), nn.Linear(64, 96, bias=False)
        self.head.weight = self.embed.weight
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return cast(Tensor, self.head(x + self.down(F.relu(self.up(x)))))


def layers(inner: int = 250) -> nn.Module:
    return nn.Sequential(nn.Linear(64, inner), nn.SiLU(), nn.Linear(inner, 64), nn.LayerNorm(64), nn.Linear(64, 64))


PLANS: dict[str, tuple[Any, dict[str, Any]]] = {
    "column and row": (layers, {"0": "column", "2": "row"}),
    "units": (layers, {"0": tpk.sharding.Column(unit=25), "2": tpk.sharding.Row(unit=25)}),
    "gathered and split": (layers, {"0": "column_gather", "2": "row_split", "4": "row_split"}),
    "vocabulary": (Tied, {"embed": "vocabulary", "head": "column_gather"}),
    "a tie that is whole": (Tied, {"embed": "replicate", "head": "replicate"}),
}
"""Overrides of layers that divide into blocks and of others."""


@pytest.mark.gloo
def test_overrides_and_plans_by_rules_have_the_bits_of_one_rank(ranks: Pools) -> None:
    by_hand: list[tuple[str, dict[str, Any]]] = [(name, {"overrides": given}) for name, (_, given) in PLANS.items()]
    by_rules = [(name, {"strategy": "rules"}) for name in ("column and row", "vocabulary")]
    ranks(4).run(check_plans, [*by_hand, *by_rules])


def check_plans(given: list[tuple[str, dict[str, Any]]]) -> None:
    """Outputs, and parameters after a step, on one, two, ... ranks; and near to those of the model itself."""
    for name, how in given:
        make = PLANS[name][0]
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
        x = (x.abs() * 30).long().clamp(max=95)[:, :8] if make is Tied else x
        found = [stepped(make, x, None, 1, how)]
        found += [stepped(make, x, group, degree, how) for degree, group in small_groups(SAME_BITS).items()]
        plain, one, *others = found
        for key, value in one.items():
            torch.testing.assert_close(value, plain[key], rtol=1e-4, atol=1e-5)
            for other in others:
                assert_same(other[key], value, f"{key} of {name}, {how}")


def stepped(make: Any, x: Tensor, group: Any, degree: int, how: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model, options = make(), {"example_inputs": x, "same_bits": SAME_BITS}
    if group is not None:
        plan = tpk.make_plan(model, degree, **how, **options)
        plan = tpk.ShardingPlan.from_json(plan.to_json())
        model = tpk.parallelize(model, group, plan, **options)
    y = model(x)
    (y - 1).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    after = model.state_dict() if group is None else tpk.full_state_dict(model)
    return {"output": y.detach()} | {key: value.detach().clone() for key, value in after.items()}


@pytest.mark.cpu
def test_a_plan_says_its_strategy_and_a_file_from_before_is_read() -> None:
    plan = tpk.make_plan(layers(), 2, strategy="rules")
    assert plan.strategy == "rules" and tpk.ShardingPlan.from_json(plan.to_json()) == plan
    plan = tpk.make_plan(layers(), 2)
    document = json.loads(plan.to_json())
    body = {key: value for key, value in document["plan"].items() if key != "strategy"}
    assert (
        tpk.ShardingPlan.from_json(json.dumps({**document, "version": 6, "plan": body, "digest": json_digest(body)}))
        == plan
    )
    body["strategy"] = "names"
    with pytest.raises(ValueError, match="strategy of a plan has a value of another kind: 'names'"):
        tpk.ShardingPlan.from_json(json.dumps({**document, "plan": body, "digest": json_digest(body)}))
