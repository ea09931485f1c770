"""Attention that takes heads apart, looks at windows of keys, or reads a large table of short rows, is cut by heads."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import tpkernels as tpk
from tests.models.compare import differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.by_value import LIMIT, problems
from tests.planning.heads_apart import HEADS, WIDTH, Apart, Cache, Numbered
from tpkernels.errors import UnprovenCallWarning
from tpkernels.planning.styles import Column, Replicate, Row
from tpkernels.testing.spawn import Pools

X = torch.zeros(2, 5, WIDTH)
HALVES = (WIDTH // 2,) * 2


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["pairs", "kernel", "windows", "turned"])
def test_heads_are_cut(how: str) -> None:
    plan = tpk.make_plan(Apart(how), 2, example_inputs=X)
    column = Column(segments=HALVES) if how in ("pairs", "kernel") else Column()
    assert plan["query"].style == plan["key"].style == plan["value"].style == column and plan["out"].style == Row()
    if how == "turned":
        assert plan["places"].style == Replicate(sequence_parallel=True), "no head could do with a part of its rows"
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan


@pytest.mark.cpu
def test_a_rank_is_given_its_heads_of_constants_in_a_tuple() -> None:
    plan = tpk.make_plan(Numbered(), 2, example_inputs=X)
    assert plan.arguments == {"attention.turns[0]": (0, HEADS), "attention.turns[1]": (0, HEADS)}
    assert plan["attention.out"].style == Row() and not plan.attributes
    again = tpk.ShardingPlan.from_json(plan.to_json())
    assert again == plan and again.cut_arguments == {"attention": dict.fromkeys(("turns[0]", "turns[1]"), (0, HEADS))}
    plan.validate(Numbered())


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["keys in halves", "windows of heads"])
def test_what_only_looks_so_is_gathered(how: str) -> None:
    """Halves of the keys would stand beside queries of other heads, and a rank has no window over all heads."""
    plan = tpk.make_plan(Apart(how), 2, example_inputs=X)
    assert plan["out"].style == Column(gather_output=True)


def by_value(*hows: str) -> list[str]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)
        models = {how: Apart(how) for how in hows} | {"numbered": Numbered()}
        rows = {"numbered": "attention.out"}
        return [
            problem for how, model in models.items()
            for problem in problems(how, model, torch.randn(2, 5, WIDTH).double(), rows.get(how, "out"))
        ]  # fmt: skip


@pytest.mark.gloo
def test_they_compute_and_train_as_the_unsharded_model(ranks: Pools) -> None:
    assert ranks(2).run(by_value, "kernel", "windows", "turned", timeout=LIMIT_S) == [[], []]


def kept() -> list[str]:
    """What differs in the second call with a cache, or is warned of; and that nobody takes its parts for all heads."""
    torch.manual_seed(0)
    plain = Apart("kernel").double().eval()
    model = tpk.parallelize(copy.deepcopy(plain), tp_mesh(), example_inputs=X.double())
    caches, found = (Cache(), Cache()), []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", UnprovenCallWarning)
        for x in (torch.randn(2, 5, WIDTH).double(), torch.randn(2, 1, WIDTH).double()):
            outputs = [net(x, cache=cache) for net, cache in zip((model, plain), caches, strict=True)]
            found += [problem] if (problem := differs(*outputs, LIMIT)) else []
    try:
        found.append(f"keys are read as {caches[0].keys}")
    except RuntimeError as error:
        found += [] if "no DTensor describes parts of several runs" in str(error) else [str(error)]
    return found


@pytest.mark.gloo
def test_a_cache_of_heads_that_are_taken_apart_goes_back_to_the_model(ranks: Pools) -> None:
    assert ranks(2).run(kept, timeout=LIMIT_S) == [[], []]
