"""Whether a peer of this host lives: by the kernel, and by /proc only where it speaks of these processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tpkernels.comm import liveness
from tpkernels.comm.liveness import Identity

pytestmark = pytest.mark.cpu


@pytest.fixture
def peer() -> Iterator[tuple[Identity, subprocess.Popen[bytes]]]:
    """A process of this user that lives, and what it would say of itself."""
    process = subprocess.Popen(["sleep", "60"])
    started = liveness._start_time(process.pid)
    assert started is not None
    try:
        yield replace(Identity.mine(), pid=process.pid, started=started), process
    finally:
        process.kill()
        process.wait()


def no_descriptors_of_processes(pid: int, flags: int = 0) -> int:
    raise OSError(errno.ENOSYS, "not here")


def proc_of(folder: Path, *, myself: str, options: str = "rw") -> Path:
    """A /proc without any peer."""
    (folder / "self-of").mkdir()
    (folder / "self-of" / "mountinfo").write_text(f"1 2 0:5 / {folder} {options} - proc proc {options}\n")
    (folder / myself).symlink_to("self-of") if myself != "self-of" else None
    (folder / "self").symlink_to(myself)
    return folder


def kill(process: subprocess.Popen[bytes], *, reap: bool) -> None:
    process.kill()
    if reap:
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("descriptors", [True, False])
@pytest.mark.parametrize("reap", [True, False])
def test_a_process_is_dead_as_soon_as_it_has_ended_reaped_or_not(
    peer: tuple[Identity, subprocess.Popen[bytes]], descriptors: bool, reap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity, process = peer
    if not descriptors:
        monkeypatch.setattr(os, "pidfd_open", no_descriptors_of_processes)
    assert not identity.is_dead()
    assert replace(identity, started=identity.started - 1).is_dead(), "another process has its number now"
    kill(process, reap=reap)
    assert identity.is_dead()


@pytest.mark.parametrize("what", ["none", "another namespace's", "hides"])
def test_a_proc_that_does_not_speak_of_a_live_peer_is_not_believed(
    peer: tuple[Identity, subprocess.Popen[bytes]], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity, process = peer
    assert identity.is_local  # which is known from here on
    proc = {
        "none": lambda: tmp_path / "none",
        "another namespace's": lambda: proc_of(tmp_path, myself=str(os.getpid() + 1)),
        "hides": lambda: proc_of(tmp_path, myself=str(os.getpid()), options="rw,hidepid=invisible"),
    }[what]()
    monkeypatch.setattr(liveness, "_PROC", proc)
    for without in (False, True):
        if without:
            monkeypatch.setattr(os, "pidfd_open", no_descriptors_of_processes)
        assert not identity.is_dead() and not identity.is_stopped()
    monkeypatch.undo()
    monkeypatch.setattr(liveness, "_PROC", proc)
    kill(process, reap=False)
    assert identity.is_dead(), "the kernel says so without /proc"


def test_a_stopped_process_is_not_dead(peer: tuple[Identity, subprocess.Popen[bytes]]) -> None:
    identity, process = peer
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 5.0
    while not identity.is_stopped() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert identity.is_stopped() and not identity.is_dead()


def test_a_host_that_does_not_say_who_it_is_is_no_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(liveness, "_PROC", tmp_path)
    monkeypatch.setattr(liveness, "_host", liveness._host.__wrapped__)
    assert not Identity(liveness._host(), os.getpid(), 0).is_local


@pytest.mark.parametrize("text", ["[]", "{}", "1", '{"host": 1, "pid": 2, "started": 3}', '{"host": "a", "pid": "b"}'])
def test_what_no_process_says_of_itself_is_no_identity(text: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        Identity.from_json(text)
    mine = Identity.mine()
    assert Identity.from_json(mine.to_json()) == mine and mine.started > 0
