"""gloo's threads leave the core to the thread that computes, unless somebody wants it otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import tpkernels as tpk
from tests.ops.support import new_group
from tpkernels.comm import gloo_threads
from tpkernels.testing.spawn import Pools

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="SCHED_BATCH is a scheduling class of Linux"),
]


def classes() -> dict[int, int]:
    """Scheduling class of each gloo thread of this process."""
    tasks = Path("/proc/self/task").iterdir()
    threads = [int(task.name) for task in tasks if task.joinpath("comm").read_text().startswith("gloo")]
    return {thread: os.sched_getscheduler(thread) for thread in threads}


def seen(setting: str) -> dict[str, set[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPKERNELS_BATCH_GLOO", setting)
        before = classes()
        with new_group() as group:
            made = classes().keys() - before.keys()
            found = {"made": {classes()[thread] for thread in made}}
            tpk.all_gather(torch.ones(2, 2), group, implementation="unfused")
            found["after a call"] = {classes()[thread] for thread in made}
            with gloo_threads.as_torch_made_them():
                found["as torch made them"] = {classes()[thread] for thread in made}
            found["afterwards"] = {classes()[thread] for thread in made}
            os.sched_setscheduler(next(iter(made)), os.SCHED_IDLE, os.sched_param(0))
            gloo_threads.settle()
            found["of somebody's choice"] = {classes()[next(iter(made))]}
        return found


@pytest.mark.skipif(torch.__version__ < "2.12", reason="gloo's threads have no name in torch 2.11")
def test_threads_of_a_group_that_ops_use_do_not_preempt(ranks: Pools) -> None:
    other, batch = {os.SCHED_OTHER}, {os.SCHED_BATCH}
    expected = {"made": other, "after a call": batch, "as torch made them": other, "afterwards": batch}
    for found in ranks(2).run(seen, "1"):
        assert found == expected | {"of somebody's choice": {os.SCHED_IDLE}}
    for found in ranks(2).run(seen, "0"):
        assert found == dict.fromkeys(expected, other) | {"of somebody's choice": {os.SCHED_IDLE}}
