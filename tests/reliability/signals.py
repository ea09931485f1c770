"""Ranks that are stopped (R5), interrupted or forked (R19): signals and processes that are not deaths."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.reliability.calls import CALLS, SHARED, make_all
from tests.reliability.crew import Crew, CrewError, Link, Raised, Said, caught, group_of
from tests.reliability.outcome import Outcome
from tpkernels.backends.shared_memory.segments import SharedMemory
from tpkernels.comm.groups import resolve
from tpkernels.comm.transport import TransportFailure
from tpkernels.errors import CollectiveTimeout

SETTLE_S = 30.0
INTERRUPT_S = 0.2


# ---------------------------------------------------------------- R5: stopped


def stopped(count: int, sizes: tuple[int, ...] = (2, 3), timeout: float = 1.0, implementation: str = SHARED) -> Outcome:
    """R5: SIGSTOP of a rank amid calls; its peers time out and name it; woken, it gets the poison."""
    outcome = Outcome(f"R5 {implementation}", max_s=1.1 * timeout)
    late = Outcome("R5 late rank")
    dice = random.Random(5)
    for trial in range(count):
        size = sizes[trial % len(sizes)]
        victim = dice.randrange(size)
        with Crew(size, _calls_until_error, timeout, implementation) as crew:
            crew.expect("ready", SETTLE_S)
            time.sleep(dice.uniform(0.001, 0.03))
            crew.kill(victim, signal.SIGSTOP)
            try:
                errors = crew.expect("error", SETTLE_S, [rank for rank in range(size) if rank != victim])
                woken = crew.kill(victim, signal.SIGCONT)
                last = crew.expect("error", SETTLE_S, [victim])[0]
            except CrewError as error:
                outcome.add("a rank gave no error", str(error))
                continue
            judged = [_not_a_timeout(said, victim, implementation) for said in errors]
            problem = next((found for found in judged if found is not None), None)
            if problem is None and last.value[0].kind not in ("CollectiveTimeout", "GroupPoisoned"):
                problem = f"the late rank got {last.value[0].kind}"
            outcome.add(problem, repr((victim, errors, last)) if problem else "")
            outcome.latencies_s += [said.value[1] for said in errors]
            late.latencies_s.append(last.at - woken)
    outcome.facts["late rank, from SIGCONT to its error"] = late.latencies()
    return outcome


def stopped_upstream(count: int, timeout: float = 0.5) -> Outcome:
    """R5: ranks wait for each other in a chain whose end is stopped; all blame that end, not the one they wait for."""
    outcome = Outcome("R5 chain", max_s=1.1 * timeout)
    for _ in range(count):
        with Crew(3, _wait_in_a_chain, timeout) as crew:
            crew.expect("ready", SETTLE_S)
            crew.kill(2, signal.SIGSTOP)
            errors = crew.expect("error", SETTLE_S, [0, 1])
        blamed = {said.value[0].ranks for said in errors if said.value[0] is not None}
        named = all("rank 2" in said.value[0].text for said in errors if said.value[0] is not None)
        outcome.add(None if blamed == {(2,)} and named else "blames others than the stopped rank", repr(errors))
        outcome.latencies_s += [said.value[1] for said in errors]
    return outcome


def _wait_in_a_chain(link: Link, timeout: float) -> None:
    """The call of an op in two phases, by hand: rank 2 stops between them, 1 waits for it in the first, 0 for 1."""
    group = group_of(timeout=timeout)
    make_all(group, link.rank, link.size, 0)
    shared = resolve(group).resources[SharedMemory.name].segments
    assert shared is not None
    dist.barrier()

    def call() -> None:
        with shared.call(7, "two phases"):
            shared.channel.signal()
            if link.rank == 2:
                link.say("ready")
                time.sleep(60)
            link.say("ready")
            shared.channel.wait(link.rank + 1, 2)

    start = time.monotonic()
    error, at = caught(lambda: _named(call))
    link.say("error", (error, at - start))
    time.sleep(0.5)


def _named(call: Callable[[], None]) -> None:
    """What the ops do with the transport's failure: raise what it says of the ranks."""
    try:
        call()
    except TransportFailure as failure:
        raise CollectiveTimeout(str(failure), ranks=failure.ranks) from failure


def _calls_until_error(link: Link, timeout: float, implementation: str) -> None:
    group = group_of(timeout=timeout)
    make_all(group, link.rank, link.size, 0, implementation)
    dist.barrier()
    link.say("ready")
    while True:
        for name, call in CALLS.items():
            start = time.monotonic()
            error, at = caught(lambda call=call: call(group, link.rank, link.size, 1, implementation))
            if error is not None:
                link.say("error", (error, at - start, name))
                time.sleep(0.5)  # a survivor that leaves at once must not be what the others notice
                return


def _not_a_timeout(said: Said, victim: int, implementation: str = SHARED) -> str | None:
    error: Raised = said.value[0]
    if error.kind != "CollectiveTimeout":
        return f"{error.kind} instead of CollectiveTimeout"
    if error.ranks != (victim,):
        return "blames others than the stopped rank"
    op = str(said.value[2]).removeprefix("large_")
    names = f"rank {victim}" in error.text or f"rank(s) [{victim}]" in error.text
    if not names:
        return f"the message does not name rank {victim}"
    for word in ("epoch", op) if implementation == SHARED else (op,):
        if word not in error.text:
            return f"the message does not name {'the op' if word == op else word}"
    return None


# ---------------------------------------------------------------- R19: SIGINT


def interrupted(count: int, implementation: str = SHARED) -> Outcome:
    """R19: SIGINT at a rank whose peer is late (every other trial), or amid quick calls."""
    outcome = Outcome(f"R19 SIGINT {implementation}", max_s=INTERRUPT_S)
    dice = random.Random(19)
    for trial in range(count):
        waits = trial % 2 == 0
        with Crew(2, _wait_for_interrupt, waits, implementation) as crew:
            crew.expect("ready", SETTLE_S)
            time.sleep(dice.uniform(0.05, 0.2))
            sent = crew.kill(0, signal.SIGINT)
            try:
                here, there = crew.expect("error", SETTLE_S)
            except CrewError as error:
                outcome.add("a rank gave no error", str(error))
                continue
            problem = None
            if here.value is None or here.value.kind != "KeyboardInterrupt":
                problem = f"the interrupted rank got {here.value and here.value.kind}"
            elif there.value.kind != "PeerLost" or there.value.ranks != (0,):
                problem = "the peer does not blame the interrupted rank"
            outcome.add(problem, repr((here, there)) if problem else "")
            outcome.latencies_s.append(here.at - sent)
    return outcome


def _wait_for_interrupt(link: Link, waits: bool, implementation: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    group = dist.group.WORLD
    make_all(group, link.rank, link.size, 0, implementation)
    dist.barrier()

    def work() -> None:
        if waits and link.rank == 1:
            time.sleep(0.6)
        for salt in range(10**9):
            make_all(group, link.rank, link.size, salt, implementation)

    try:
        link.say("ready")
        error, at = caught(work)
    except KeyboardInterrupt as late:  # between our two statements
        error, at = Raised.of(late), time.monotonic()
    link.say("error", error, at)


# ---------------------------------------------------------------- R19: fork


def forked(count: int, implementation: str = SHARED) -> Outcome:
    """R19: a forked child that calls in gets an error and harms nobody, nor does its life hide its parent's death."""
    outcome = Outcome(f"R19 fork {implementation}", p99_s=0.05 if implementation == SHARED else None, max_s=1.0)
    for _ in range(count):
        with Crew(2, _fork_and_go_on, implementation) as crew:
            child = None
            try:
                crew.expect("ready", SETTLE_S)
                child, report = crew.expect("child", SETTLE_S, [1])[0].value
                crew.expect("went on", SETTLE_S)
                died = crew.kill(1)
                error = crew.expect("error", SETTLE_S, [0])[0]
                alive = _is_running(child)
            except CrewError as error:
                outcome.add("a rank gave no word", str(error))
                continue
            finally:
                if child is not None and _is_running(child):
                    os.kill(child, signal.SIGKILL)
            problem = None
            if not report.startswith("raised") or "forked" not in report:
                problem = "the child's call did not raise an error about forks"
            elif error.value is None or error.value.kind != "PeerLost" or error.value.ranks != (1,):
                problem = "the parent's death was not noticed"
            elif not alive:
                problem = "the child did not outlive its parent: nothing was tested"
            outcome.add(problem, repr((report, error)) if problem else "")
            outcome.latencies_s.append(error.at - died)
    return outcome


def _fork_and_go_on(link: Link, implementation: str) -> None:
    group = dist.group.WORLD
    make_all(group, link.rank, link.size, 0, implementation)
    tpk.all_reduce(torch.ones(4, 32), group, implementation=_collective(implementation))
    dist.barrier()
    link.say("ready")
    if link.rank == 1:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _in_child(writer, group, implementation)
        os.close(writer)
        link.say("child", (child, _read_line(reader, 10.0)))
    for salt in range(50):  # the group is as good as before
        make_all(group, link.rank, link.size, salt, implementation)
    link.say("went on")
    error, at = caught(lambda: _forever(group, link, implementation))
    link.say("error", error, at)


def _in_child(writer: int, group: Any, implementation: str) -> None:
    """Calls in with a known signature, says what came of it, and lives on."""
    error, _ = caught(lambda: tpk.all_reduce(torch.ones(4, 32), group, implementation=_collective(implementation)))
    os.write(writer, f"{'returned' if error is None else f'raised {error}'}\n".encode())
    time.sleep(60)
    os._exit(0)


def _read_line(fd: int, timeout: float) -> str:
    os.set_blocking(fd, False)
    deadline, text = time.monotonic() + timeout, b""
    while b"\n" not in text and time.monotonic() < deadline:
        try:
            text += os.read(fd, 65536)
        except BlockingIOError:
            time.sleep(0.01)
    return text.decode() or "silence"


def _collective(implementation: str) -> str:
    return "unfused" if implementation == "chunked" else implementation  # nothing to overlap with


def _forever(group: Any, link: Link, implementation: str) -> None:
    for salt in range(10**9):
        make_all(group, link.rank, link.size, salt, implementation)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
