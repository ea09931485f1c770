"""A save that is cut short after any of its steps, by a kill or a loss of power, is whole or says that it is none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.injection.hooks import library
from tests.injection.replay import Step, after_power_loss, read, replay
from tests.injection.saving import is_whole_export, is_whole_snapshot, save_once
from tests.nn.reference import LIMIT_S
from tpkernels.testing.spawn import Pools

pytest.importorskip("safetensors", reason="the package safetensors is missing")

WHOLE = {"snapshot": is_whole_snapshot, "pretrained": is_whole_export}


@pytest.mark.gloo
@pytest.mark.parametrize("how", WHOLE)
@pytest.mark.slow("10 s: a save that ends after each of its writes")
def test_a_save_that_ends_anywhere_is_whole_or_none_and_whole_when_it_has_returned(
    how: str, ranks: Pools, tmp_path: Path, full: bool
) -> None:
    below, records = tmp_path / "below", tmp_path / "records"
    for folder in (below, records):
        folder.mkdir()
    ranks(2).run(save_once, how, str(library()), str(below), str(records), timeout=LIMIT_S)
    steps = read(records.iterdir())
    assert {step.what for step in steps} >= {"write", "fsync", "rename"}, steps

    def left(kept: list[Step]) -> str:
        target = tmp_path / "again"
        target.mkdir()
        replay(kept, below, target)
        found = WHOLE[how](target / "saved", 3.0)
        shutil.rmtree(target)
        return found

    some = [end for end in range(len(steps) + 1) if full or end % 3 == 0 or steps[end - 1].what == "rename"]
    for end in dict.fromkeys([*some, len(steps)]):
        for what, kept in {
            "killed": steps[:end],
            "without power": after_power_loss(steps[:end], keeps_names=False),
            "without power, names kept": after_power_loss(steps[:end], keeps_names=True),
        }.items():
            found = left(kept)
            assert found in ("none", "whole"), (what, end, steps[:end][-1:], found)
            if end == len(steps):
                assert found == "whole", (what, [(step.what, step.path, step.to) for step in steps])
