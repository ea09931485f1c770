"""How the kernel schedules gloo's threads, which move the bytes of a group beside the thread that computes.

A thread that wakes takes the core from whoever runs there, and on a busy host that is often this rank's own thread in
the middle of posting a transfer, holding its connection's lock.  gloo only *tries* that lock and asks epoll again at
once, so it spins until the kernel's next tick gives the core back: 4 ms on kernels of 250 Hz, in every third or second
exchange of ranks with a core each, with plain ``isend`` and ``irecv`` as well.  Threads of the class ``SCHED_BATCH``
get the same share of a core but never take it on waking, which ends this: an exchange of 4 KiB takes 0.07 ms where it
took 1.8 (mean of 300, two ranks pinned to two cores, torch 2.13).

Assumes: gloo's threads bear the name they have in torch 2.13. Those of 2.11 have none and are left alone, as is
everything where the system has no such class, or no ``/proc`` that shows the threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tpkernels import config

__all__ = ["as_torch_made_them", "settle"]

_NAME = "gloo_tcp_loop"
_settled: set[int] = set()


def settle() -> None:
    """Put the gloo threads of this process into the class that does not preempt; for whenever a group is new."""
    _settled.clear()
    if not hasattr(os, "SCHED_BATCH") or not config.load().batch_gloo:
        return
    try:
        tasks = list(Path("/proc/self/task").iterdir())
    except FileNotFoundError:  # no /proc, or another namespace's
        return
    for task in tasks:
        with suppress(FileNotFoundError, ProcessLookupError):  # threads come and go
            if task.joinpath("comm").read_text().strip() != _NAME:
                continue
            thread = int(task.name)
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:  # another one was somebody's choice
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
            if os.sched_getscheduler(thread) == os.SCHED_BATCH:
                _settled.add(thread)


@contextmanager
def as_torch_made_them() -> Iterator[None]:
    """The scheduling that a program has without us: for the baselines of benchmarks."""
    _move("SCHED_OTHER")
    try:
        yield
    finally:
        _move("SCHED_BATCH")


def _move(policy: str) -> None:
    for thread in tuple(_settled):
        try:
            os.sched_setscheduler(thread, getattr(os, policy), os.sched_param(0))
        except ProcessLookupError:
            _settled.discard(thread)
