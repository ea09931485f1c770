"""Calls that wait in compiled code end with Ctrl-C and with the process, whatever peers do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.comm.test_job_store import started
from tests.reliability.crew import Crew, Link, Raised, caught, group_of
from tpkernels.comm import interrupts, monitor

pytestmark = pytest.mark.gloo

SETTLE_S = 60.0
LIMIT_S = 1.5
"""Of an idle machine it takes 0.03 s; the peer stays away for much longer."""
AWAY_S = 8.0


def _matmul(group: Any, implementation: str) -> torch.Tensor:
    return tpk.all_gather_matmul(torch.ones(4, 8), torch.ones(5, 8), group, implementation=implementation)


def _interrupted(link: Link, implementation: str, meets: bool, handled: bool) -> tuple[Raised | None, float] | None:
    """Rank 0 waits for rank 1, and gets SIGINT; with a handler of its own it goes on."""
    got: list[int] = []
    signal.signal(signal.SIGINT, (lambda number, frame: got.append(number)) if handled else signal.default_int_handler)
    group = group_of(timeout=60.0)
    if meets:
        _matmul(group, implementation)
    if link.rank == 1:
        link.say("ready")
        time.sleep(AWAY_S if not handled else 1.5)
        caught(lambda: _matmul(group, implementation))
        return None
    monitor._look_at_all = lambda watches: time.sleep(AWAY_S)  # a store that is slow to answer
    link.say("ready")
    error, at = caught(lambda: _matmul(group, implementation))
    assert bool(got) == handled
    return error, at


@pytest.mark.parametrize(("implementation", "meets"), [("unfused", True), ("chunked", True), ("chunked", False)])
def test_ctrl_c_ends_a_wait_for_a_peer_at_once(implementation: str, meets: bool) -> None:
    with Crew(2, _interrupted, implementation, meets, False, linger=True) as crew:
        crew.expect("ready", SETTLE_S)
        time.sleep(0.5)  # it is in its call
        sent = crew.kill(0, signal.SIGINT)
        error, at = crew.expect("returned", SETTLE_S, [0])[0].value
    assert error is not None and error.kind == "KeyboardInterrupt", error
    assert at - sent < LIMIT_S


def test_a_handler_of_the_programs_own_lets_the_call_go_on() -> None:
    with Crew(2, _interrupted, "chunked", True, True, linger=True) as crew:
        crew.expect("ready", SETTLE_S)
        time.sleep(0.3)
        crew.kill(0, signal.SIGINT)
        error, _ = crew.expect("returned", SETTLE_S, [0])[0].value
    assert error is None, error


def _fork_and_signal(link: Link) -> bool:
    """A forked child's SIGINT is not its parent's, whose call goes on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    group = group_of(timeout=60.0)
    _matmul(group, "chunked")
    if link.rank == 0:
        ended: list[int] = []
        interrupts.end_call_of_main_thread = lambda: ended.append(1)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGINT, lambda number, frame: None)
            os.kill(os.getpid(), signal.SIGINT)
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.2)
        assert not ended
    else:
        time.sleep(0.3)
    return float(_matmul(group, "chunked")[0, 0]) == 8.0


def test_a_childs_signal_ends_no_call_of_its_parent() -> None:
    with Crew(2, _fork_and_signal, linger=True) as crew:
        assert all(said.value for said in crew.expect("returned", SETTLE_S))


# ---------------------------------------------------------------- the end of the process

_SCRIPT = """
import sys, threading, time, torch, torch.distributed as dist, tpkernels as tpk
from tpkernels.comm.groups import resolve
mesh = tpk.init(timeout=60)
group = mesh["tp"]
def call():
    return tpk.all_gather_matmul(torch.ones(4, 8), torch.ones(5, 8), group, implementation=sys.argv[1])
call()
threading.Thread(target=call, daemon=True).start()
while resolve(group).in_flight is None:
    time.sleep(0.005)
time.sleep(0.1)
class Late:
    def __del__(self, sleep=time.sleep):
        sleep(2.0)  # the interpreter is going; the peer's chunk comes meanwhile
late = Late()
dist.distributed_c10d._get_default_store().set("ends", "")
print("ends", flush=True)
"""


def _come_late(connection: Any, environ: dict[str, str]) -> None:
    os.environ.update(environ)
    group = tpk.init(timeout=60)["tp"]
    _matmul(group, environ["IMPLEMENTATION"])
    dist.distributed_c10d._get_default_store().wait(["ends"])
    time.sleep(0.5)
    caught(lambda: _matmul(group, environ["IMPLEMENTATION"]))
    connection.send("came late")


@pytest.mark.sample(1)
@pytest.mark.parametrize("implementation", ["shared_memory", "chunked"])
def test_a_process_that_ends_with_a_daemon_thread_in_a_call_is_not_terminated(implementation: str) -> None:
    """C++ ended it with SIGABRT, "terminate called without an active exception"."""
    agent = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "IMPLEMENTATION": implementation, "TPKERNELS_CALIBRATE": "0"}
    said: list[object] = []
    peer = threading.Thread(
        target=lambda: said.extend(started([common | {"RANK": "1", "LOCAL_RANK": "1"}], _come_late))
    )
    peer.start()
    environ = os.environ | common | {"RANK": "0", "LOCAL_RANK": "0"}
    command = [sys.executable, "-c", _SCRIPT, implementation]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    peer.join(SETTLE_S)
    assert done.returncode == 0 and done.stdout == "ends\n", done
    assert "terminate" not in done.stderr, done.stderr


# ---------------------------------------------------------------- the descriptor


@pytest.mark.cpu
def test_a_wake_up_descriptor_of_somebody_else_is_left_to_him() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        interrupts.listen()
        assert signal.set_wakeup_fd(-1) == writer
        interrupts.listen()
        mine = signal.set_wakeup_fd(-1)
        assert mine not in (-1, writer)
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
