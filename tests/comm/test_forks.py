"""Children that a rank forks: they have none of its threads and share its sockets, so their calls raise at once."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.reliability.crew import Crew, Link, caught
from tpkernels.comm.groups import resolve

pytestmark = pytest.mark.gloo

SETTLE_S = 30.0


def _reduce(group: Any) -> torch.Tensor:
    return tpk.all_reduce(torch.ones(3, 5), group, implementation="unfused")


def _fork_amid_a_call(link: Link) -> tuple[str, float] | None:
    """Rank 1 forks while one of its threads holds the group's lock, in a call that waits for rank 0."""
    group = dist.group.WORLD
    _reduce(group)
    if link.rank == 0:
        link.hear(SETTLE_S)
        _reduce(group)
        return None
    thread = threading.Thread(target=_reduce, args=(group,))
    thread.start()
    while resolve(group).in_flight is None:
        time.sleep(0.005)
    reader, writer = os.pipe()
    start = time.monotonic()
    if os.fork() == 0:
        error, _ = caught(lambda: _reduce(group))
        os.write(writer, f"{error}".encode())
        os._exit(0)
    os.close(writer)
    os.set_blocking(reader, False)
    said = b""
    while not said and time.monotonic() - start < 5.0:
        time.sleep(0.01)
        try:
            said = os.read(reader, 65536)
        except BlockingIOError:
            continue
    seconds = time.monotonic() - start
    link.say("forked")
    thread.join(SETTLE_S)
    assert not thread.is_alive() and resolve(group).poison is None, "the parent goes on"
    return said.decode(), seconds


def test_a_child_that_was_forked_amid_a_call_raises_at_once_and_its_parent_goes_on() -> None:
    with Crew(2, _fork_amid_a_call, linger=True) as crew:
        crew.expect("forked", SETTLE_S, [1])
        crew.tell(0, "come")
        text, seconds = crew.expect("returned", SETTLE_S, [1])[0].value
    assert "GroupPoisoned" in text and "was forked from the one" in text, text
    assert seconds < 2.0
