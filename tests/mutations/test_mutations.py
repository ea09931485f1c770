"""Seeded faults of the planner are killed; all of them with ``--full`` or ``python -m tests.mutations``."""

from __future__ import annotations

import pytest

from tests.mutations.faults import FAULTS
from tests.mutations.floors import check
from tests.mutations.search import killers, run_all
from tests.mutations.unreachable import UNREACHABLE
from tpkernels.testing.spawn import Pools

SLICE = (
    "_softmax refuses nothing",
    "slice refuses nothing",
    "mm does not tell what it mixes",
    "native_layer_norm does not tell what it mixes",
    "pointwise ops do not tell what they mix",
    "sum refuses nothing, nor does the rest",
    "gradients of partial parameters are not planned",
    "gradients of replicated parameters are not summed",
    "a row's bias is added by every rank",
    "a row does not sum",
    "a column's input gradient is not summed",
    "a split input's gradient is not gathered",
)


@pytest.mark.gloo
def test_every_fault_is_killed(ranks: Pools, full: bool) -> None:
    names = [name for name in FAULTS if name not in UNREACHABLE] if full else list(SLICE)
    told = run_all(ranks, names)
    assert not {name: how for name, how in told.items() if how.startswith("survives")}


@pytest.mark.cpu
def test_every_fault_has_a_model_that_kills_it_or_a_reason() -> None:
    assert not set(FAULTS) - set(killers()) - set(UNREACHABLE)
    assert not set(UNREACHABLE) - set(FAULTS)
    assert not set(killers()) - set(FAULTS)


@pytest.mark.cpu
def test_every_fault_can_be_seeded() -> None:
    """One whose target was renamed would raise, and count as killed."""
    for seeded in FAULTS.values():
        with seeded():
            pass


@pytest.mark.cpu
def test_every_edit_of_a_floor_finds_its_line() -> None:
    check()
