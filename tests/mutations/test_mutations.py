"""Seeded faults of the planner are killed; all of them with ``--full`` or ``python -m tests.mutations``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.mutations.edits import EDITS
from tests.mutations.faults import FAULTS
from tests.mutations.floors import ROOT, check
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
    names = [name for name in FAULTS if name not in UNREACHABLE] if full else list(SLICE[::2])
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


@pytest.mark.cpu
def test_what_is_filed_of_an_edit_is_a_test_that_is_there() -> None:
    """And one that the loop runs. Mended by: python -m tests.mutations.floors NAME --out tests/mutations/floors.json"""
    filed = json.loads(Path(__file__).with_name("floors.json").read_text())
    assert set(filed) == {edit.name for edit in EDITS}
    for name, told in filed.items():
        file, _, test = told["by"].partition("::")
        before, found, _ = (ROOT / file).read_text().partition(f"\ndef {test.partition('[')[0]}(")
        assert told["outcome"] == "killed" and found, name
        marks = f"{before}\n".rpartition("\n\n\n")[2]
        assert "\n@pytest.mark.slow(" not in f"\n{marks}", f"{name}: CI alone would notice it: {told['by']} is slow"
