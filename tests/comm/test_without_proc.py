"""Ranks that see no /proc: calls go on, nobody is declared dead, and whoever dies is named."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest
import torch

import tpkernels as tpk
from tests.reliability.crew import Crew, Link, Raised, caught, group_of
from tpkernels.comm.groups import resolve

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can take /proc away"),
]

SETTLE_S = 20.0
TIMEOUT_S = 1.5
_NEWNS, _PRIVATE, _DETACH = 0x20000, 0x44000, 2


def _take_proc_away() -> None:
    """From this thread, and from those that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    for done in (
        libc.unshare(_NEWNS),
        libc.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE), None),
        libc.umount2(b"/proc", _DETACH),
    ):
        if done != 0:
            raise OSError(ctypes.get_errno(), "no namespace without /proc")


def _calls(link: Link) -> None:
    _take_proc_away()
    group: Any = group_of(timeout=TIMEOUT_S)

    def call() -> torch.Tensor:
        return tpk.all_reduce(torch.ones(2, 3) * (link.rank + 1), group)

    assert not os.path.exists("/proc/self") and call().tolist() == [[3.0] * 3] * 2
    link.say("ready", resolve(group).co_located)
    if link.rank == 1:
        link.hear(SETTLE_S)
        link.die()
    link.say("error", caught(call))


def test_calls_go_on_without_proc_and_a_death_is_named_in_time() -> None:
    """The first call raised FileNotFoundError."""
    with Crew(2, _calls) as crew:
        assert [said.value for said in crew.expect("ready", SETTLE_S)] == [False, False]
        crew.tell(1, "die")
        died = crew.expect("dies", SETTLE_S, [1])[0].at
        error, at = crew.expect("error", SETTLE_S, [0])[0].value
    assert isinstance(error, Raised) and (error.kind, error.ranks) == ("PeerLost", (1,)), error
    assert at - died < 1.1 * TIMEOUT_S + 0.3, at - died
