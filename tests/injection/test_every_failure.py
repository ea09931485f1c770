"""Every system call of saving and loading fails once: the state is then what it was, or complete, on all ranks."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.injection.hooks import Calls, library
from tests.injection.saving import load_with_failures, save_with_failures
from tests.nn.reference import LIMIT_S
from tpkernels.testing.spawn import Pools

pytest.importorskip("safetensors", reason="the package safetensors is missing")

pytestmark = pytest.mark.gloo


@pytest.mark.sample(2)
@pytest.mark.parametrize(("how", "victim"), [("snapshot", 0), ("pretrained", 0), ("snapshot", 1)])  # the writers
@pytest.mark.slow("9 s: a save of which each call fails")
def test_a_save_of_which_any_call_on_a_file_fails_is_an_error_on_all_ranks_or_whole(
    how: str, victim: int, ranks: Pools, tmp_path: Path
) -> None:
    per_rank = ranks(2).run(
        save_with_failures, how, str(library()), str(tmp_path), victim, int(Calls.FILES), errno.ENOSPC, timeout=LIMIT_S
    )
    mine = per_rank[victim]
    assert len(mine) > 5 and mine[-1][:2] == ("", "saved"), mine[-1]
    for other, own in zip(per_rank[1 - victim], mine, strict=True):
        assert (other[1] == "saved") == (own[1] == "saved"), (other, own)
    for failed, said, left in mine:
        assert left in ("none", "whole"), (failed, said, left)
        assert said != "saved" or left == "whole", (failed, said, left)


@pytest.mark.sample(1)  # how files are read, not which
@pytest.mark.parametrize("how", ["snapshot", "pretrained"])
@pytest.mark.slow("2 s")
def test_a_load_of_which_any_call_on_a_file_fails_changes_nothing_or_everything(
    how: str, ranks: Pools, tmp_path: Path
) -> None:
    per_rank = ranks(2).run(
        load_with_failures, how, str(library()), str(tmp_path), 1, int(Calls.FILES), timeout=LIMIT_S
    )
    mine = per_rank[1]
    assert len(mine) > 3 and mine[-1][:2] == ("", "loaded"), mine[-1]
    for found in per_rank:
        for _, said, held in found:
            assert held == ({3.0} if said == "loaded" else {1.0}), (said, held)
    for here, there in zip(*per_rank, strict=True):
        assert (here[1] == "loaded") == (there[1] == "loaded"), (here, there)
