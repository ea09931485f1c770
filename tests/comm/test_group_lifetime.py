"""A destroyed process group is gone: its state here, its sockets, its threads, also after it failed."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tpkernels.comm import groups
from tpkernels.errors import GroupMismatch

pytestmark = pytest.mark.gloo

GENERATIONS = 3


def _gloo_threads() -> int:
    count = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
            count += path.read_text().startswith("gloo_tcp")
    return count


def _live_and_die(fails: bool) -> list[tuple[int, int]]:
    """After each of several process groups: gloo threads and known groups that are left.  No garbage collection."""
    gc.disable()
    left = []
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank = int(os.environ["RANK"])
    for generation in range(GENERATIONS):
        store = dist.PrefixStore(str(generation), dist.TCPStore(host, port, None, False))
        timeout = datetime.timedelta(seconds=20)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
        x, w = torch.randn(8, 4), torch.randn(3, 4)
        tpk.all_gather_matmul(x, w, dist.group.WORLD)
        if fails:
            dtype = torch.float32 if rank == 0 else torch.float64
            with pytest.raises(GroupMismatch):
                tpk.all_gather_matmul(x.to(dtype), w.to(dtype), dist.group.WORLD)
        dist.destroy_process_group()
        left.append((_gloo_threads(), len(groups._groups)))
    return left


@pytest.mark.usefixtures("forked")
def test_a_destroyed_group_leaves_no_threads_and_no_state() -> None:
    assert tpk.launch(_live_and_die, 2, False, timeout=90) == [[(0, 0)] * GENERATIONS] * 2


@pytest.mark.usefixtures("forked")
def test_a_failed_group_leaves_no_threads_and_no_state_either() -> None:
    per_rank = tpk.launch(_live_and_die, 2, True, timeout=90)
    # The error that pytest.raises holds may keep the last group until the next one is raised, never more than that.
    for left in per_rank:
        assert max(threads for threads, _ in left) <= 1, per_rank
        assert max(known for _, known in left) <= 1, per_rank
