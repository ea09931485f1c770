"""Whole models, planned and parallelized, against the unsharded ones: by value, for every family and for strangers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import tpkernels as tpk
from tests.models import zoo
from tests.models.compare import LIMIT, compare_models, compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.leaking import Leaking
from tpkernels.testing.spawn import Pools

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")

pytestmark = pytest.mark.gloo

WHOLE = {"sequence_parallel": False}
CUT = {"sequence_parallel": True}
SOME = {
    3: ("gpt2 10", "qwen2", "conv_lstm"),
    4: ("opt 10", "qwen2", "conv_lstm"),
}
"""Families at numbers of ranks that their heads do not divide; all of them with ``--full``."""
SAMPLE = {2: ("bloom",), 3: ("gemma",), 4: ("stablelm",)}
"""Of the architectures that nothing knows; all of them with ``--full``."""


def found(ranks: Pools, world: int, cases: list[tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What rank 0's plans say, after checking that every rank's values are right."""
    results = ranks(world).run(compare_models, cases, timeout=3 * LIMIT_S)
    wrong = {
        f"{name} {options} on rank {rank}": result["wrong"][:4]
        for rank, mine in enumerate(results)
        for (name, options), result in zip(cases, mine, strict=True)
        if result["wrong"]
    }
    assert not wrong, wrong
    for (name, _), result in zip(cases, results[0], strict=True):
        # Packed and uneven cuts differ by a few rows between ranks; the mean is exact.
        assert sum(result["held"]) == result["full"] + (world - 1) * result["replicated"] + result["free"], name
    return {name: result for (name, _), result in zip(cases, results[0], strict=True)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [3, 2, 4])
def test_families_compute_what_the_unsharded_model_computes(ranks: Pools, world: int, full: bool) -> None:
    even = [name for name in (*tuple(zoo.FAMILIES)[::2], *zoo.PLAIN) if not name.endswith(" 10")]
    names = (*zoo.FAMILIES, *zoo.UNEVEN, *zoo.PLAIN) if full else even if world == 2 else SOME[world]
    plans = found(ranks, world, [(name, WHOLE) for name in names])
    styles = {name: set(plan["styles"].values()) for name, plan in plans.items()}
    assert not {name for name, found in styles.items() if "Row" not in found}
    assert ("CopiedHeads" in styles["qwen2"]) is (world > 2)
    assert all("Heads" in styles[name] for name in ("transformer", "transformer 10") if name in styles)
    assert plans["conv_lstm"]["styles"]["lstm"] == "Replicate" and plans["conv_lstm"]["styles"]["conv"] == "Channels"


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_families_with_a_residual_cut_along_the_sequence(ranks: Pools, world: int, full: bool) -> None:
    names = {2: ("roberta", "llama", "transformer"), 3: ("llama", "t5 10"), 4: ("gpt2 10", "mistral")}[world]
    if full:
        names = (*zoo.FAMILIES, *zoo.UNEVEN, "transformer", "transformer 10")
    for name, plan in found(ranks, world, [(name, CUT) for name in names]).items():
        assert plan["sequence"], f"{name}: {plan['notes']}"
        gathers = world == 3 and name == "t5"  # a bias for each of four heads
        assert bool(plan["whole"]) is (name.startswith("transformer") or gathers), name


@pytest.mark.full("test_architectures.py has one of them")
@pytest.mark.parametrize("world", [2, 3, 4])
def test_architectures_that_nothing_knows_come_out_right(ranks: Pools, world: int, full: bool) -> None:
    names = tuple(zoo.OTHERS) if full else SAMPLE[world]
    cases = [(name, options) for name in names for options in ([WHOLE, CUT] if full else [WHOLE])]
    if world == 2 and not full:
        cases.append(("gemma", CUT))
    found(ranks, world, cases)


def test_what_has_misled_the_planner_comes_out_right(ranks: Pools) -> None:
    plans = found(ranks, 2, [(name, options) for name in zoo.TRAPS for options in (WHOLE, CUT)])
    assert all("Row" in plan["styles"].values() and plan["sequence"] for plan in plans.values())


def cut_what_must_not_be_cut(how: str) -> list[str]:
    """The fault: features that meet those of other ranks are cut all the same."""
    torch.manual_seed(1)
    plain = Leaking(how).double()
    model = copy.deepcopy(plain)
    plan = tpk.make_plan(model, tp_mesh(), example_inputs=torch.zeros(5, 6, dtype=torch.float64))
    wrong_plan = {"up": "column", "down": "row"} if how != "none" else plan
    tpk.parallelize(model, tp_mesh(), wrong_plan)
    x = torch.randn(5, 6, dtype=torch.float64)
    for net in (plain, model):
        net(x).square().sum().backward()
    problem = differs(model(x), plain(x), LIMIT[False])
    return compare_tensors(model, plain, LIMIT[False]) + ([problem] if problem else [])


def faults(hows: tuple[str, ...]) -> list[list[str]]:
    return [cut_what_must_not_be_cut(how) for how in hows]


@pytest.mark.slow("2 s: that the comparison can fail")
def test_the_comparison_catches_plans_that_cut_what_must_not_be_cut(ranks: Pools) -> None:
    hows = ("none", "softmax", "sum", "roll", "size", "flip")
    fine, *faulty = ranks(2).run(faults, hows, timeout=LIMIT_S)[0]
    assert not fine
    assert all(faulty), dict(zip(hows[1:], faulty, strict=True))
