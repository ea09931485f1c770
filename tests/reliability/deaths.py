"""Ranks that are killed: in the middle of calls (R1, R2), while the group sets up its memory (R3), all at once (R4)."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.reliability.calls import SHARED, make_all
from tests.reliability.crew import Crew, CrewError, Link, Raised, Said, caught
from tests.reliability.outcome import Outcome
from tpkernels.backends.shared_memory import rendezvous
from tpkernels.backends.shared_memory import segments as shared_segments
from tpkernels.comm import agreement

SETTLE_S = 30.0  # starting ranks and their first calls, on a busy machine
TIMEOUT_S = 10.0


def mid_op(count: int, size: int = 2, implementation: str = SHARED) -> Outcome:
    """R1 (and R2 with `chunked`): SIGKILL of a rank while all ranks make calls as fast as they can."""
    shared = implementation == SHARED
    row = f"R1 world {size}" if shared else f"R2 world {size} {implementation}"
    outcome = Outcome(row, p99_s=0.05 if shared else None, max_s=1.0 if shared else TIMEOUT_S)
    dice = random.Random(size)
    for _ in range(count):
        victim = dice.randrange(size)
        with Crew(size, _until_error, implementation, timeout=TIMEOUT_S) as crew:
            crew.expect("ready", SETTLE_S)
            time.sleep(dice.uniform(0.001, 0.04))
            died = crew.kill(victim)
            _judge(outcome, crew, victim, died)
    return outcome


def _until_error(link: Link, implementation: str) -> None:
    group = dist.group.WORLD
    make_all(group, link.rank, link.size, 0, implementation)
    dist.barrier()
    link.say("ready")
    _call_until_error(link, implementation)


def _call_until_error(link: Link, implementation: str) -> None:
    def work() -> None:
        for salt in range(10**9):
            make_all(dist.group.WORLD, link.rank, link.size, salt, implementation)

    error, at = caught(work)
    link.say("error", error, at)


def _judge(outcome: Outcome, crew: Crew, victim: int, died: float) -> None:
    """Every survivor must raise PeerLost that blames exactly the victim; the time counts from the kill."""
    survivors = [rank for rank in range(crew.size) if rank != victim]
    try:
        errors = crew.expect("error", 3 * TIMEOUT_S, survivors)
    except CrewError as error:
        outcome.add("a survivor gave no error", str(error))
        return
    problem = next((found for said in errors if (found := _wrong(said, victim)) is not None), None)
    outcome.add(problem, repr(errors) if problem else "")
    outcome.latencies_s += [said.at - died for said in errors]


def _wrong(said: Said, victim: int) -> str | None:
    error: Raised | None = said.value
    if error is None:
        return "no error"
    if error.kind != "PeerLost":
        return f"{error.kind} instead of PeerLost"
    if error.ranks != (victim,):
        return "blames others than the victim"
    if f"rank {said.rank}" not in error.text:
        return "the message does not name the rank that raises"
    return None


# ---------------------------------------------------------------- during rendezvous

# (function, whether the victim dies before or after it runs), by side
_HUB_STEPS: tuple[tuple[Any, str], ...] = (
    (rendezvous.Hub, "__init__"),
    (rendezvous.Hub, "collect"),
    (rendezvous.Hub, "_hello"),
    (rendezvous.Hub, "tell"),
    (rendezvous.Hub, "reports"),
)
_SPOKE_STEPS: tuple[tuple[Any, str], ...] = (
    (rendezvous.Spoke, "__init__"),
    (rendezvous.Spoke, "hello"),
    (rendezvous.Spoke, "receive"),
    (rendezvous.Spoke, "report"),
)
_BOTH: tuple[tuple[Any, str], ...] = (
    (agreement, "meet"),
    (agreement, "exchange_records"),
    (shared_segments.SharedMemory, "ensure"),
    (shared_segments, "_open"),
)


def steps(victim: int) -> list[tuple[Any, str, bool]]:
    """Where a victim can die in a rendezvous: owner and name of a function, and whether before or after it."""
    places = (*_BOTH, *(_HUB_STEPS if victim == 0 else _SPOKE_STEPS))
    return [(owner, name, before) for owner, name in places for before in (True, False)]


def in_rendezvous(count: int, size: int = 3, implementation: str = SHARED) -> Outcome:
    """R3: SIGKILL at every step of the rendezvous in turn, and in every second trial at a random moment.

    Survivors leave as soon as they have raised, as ranks of a failed job do, while others may still look for a culprit.
    """
    outcome = Outcome(f"R3 {implementation}", p99_s=0.05 if implementation == SHARED else None, max_s=1.0)
    dice = random.Random(3)
    places = [(victim, step) for victim in (0, size - 1) for step in range(len(steps(victim)))]
    for trial in range(count):
        victim, step = places[trial // 2 % len(places)]
        at_random = trial % 2 == 1
        with Crew(size, _first_call, victim, None if at_random else step, implementation, timeout=TIMEOUT_S) as crew:
            crew.expect("ready", SETTLE_S)
            if at_random:
                time.sleep(dice.uniform(0.0, 0.04))
                died = crew.kill(victim)
            else:
                try:
                    died = crew.expect("dies", SETTLE_S, [victim])[0].at
                except CrewError as error:
                    outcome.add("the victim did not come to its step", str(error))
                    continue
            _judge(outcome, crew, victim, died)
    return outcome


def _first_call(link: Link, victim: int, step: int | None, implementation: str) -> None:
    if step is not None and link.rank == victim:
        owner, name, before = steps(victim)[step]
        _die_at(link, owner, name, before)
    dist.barrier()
    link.say("ready")
    _call_until_error(link, implementation)


def _die_at(link: Link, owner: Any, name: str, before: bool) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def deadly(*args: Any, **options: Any) -> Any:
        if before:
            link.die()
        result = original(*args, **options)
        link.die()
        return result

    setattr(owner, name, deadly)


# ---------------------------------------------------------------- everybody


def whole_group(count: int, sizes: tuple[int, ...] = (2, 3, 4), implementation: str = SHARED) -> Outcome:
    """R4: SIGKILL of all ranks at a random moment of their life; nothing may be left."""
    outcome = Outcome(f"R4 {implementation}")
    dice = random.Random(4)
    before, memory = _leftovers(), _shared_kbytes()
    for trial in range(count):
        size = sizes[trial % len(sizes)]
        with Crew(size, _until_error, implementation, timeout=TIMEOUT_S) as crew:
            pids = crew.pids
            if trial % 3:  # in calls, else somewhere between birth and the first calls
                crew.expect("ready", SETTLE_S)
            time.sleep(dice.uniform(0.0, 0.25 if trial % 3 == 0 else 0.03))
            for rank in range(size):
                crew.kill(rank)
            ended = crew.join()
        left = _settled(lambda: _leftovers() - before)
        stray = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        if stray or not ended:
            outcome.add("processes are left", str(stray))
        else:
            outcome.add("files, sockets or segments are left" if left else None, str(left))
    # A fact and no judgement: all that runs on the machine shares this figure.
    outcome.facts["shared_memory_growth_kbytes"] = _shared_kbytes() - memory
    return outcome


def _leftovers() -> set[str]:
    """Names in /dev/shm, and abstract sockets, that carry our name and that no process alive holds; segments that one
    of our processes holds.

    Other groups of this machine may be meeting just now; their sockets are held. Stray ranks are looked for by pid.
    """
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "@tpkernels" in line]
    sockets = {row[-1]: f"socket:[{row[-2]}]" for row in rows}
    held = _held_sockets() if sockets else set()
    named = {name for name in os.listdir("/dev/shm") if "tpk" in name}
    return named | {name for name, socket in sockets.items() if socket not in held} | held_segments()


def held_segments() -> set[str]:
    """Segments that processes of our process group have open or mapped: nothing else keeps anonymous memory alive."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may end meanwhile, or be another user's
            if os.getpgid(int(process.name)) != os.getpgrp():
                continue
            maps = (process / "maps").read_text().splitlines()
            found |= {f"segment {line.split()[4]}" for line in maps if "memfd:tpkernels" in line}
            for descriptor in (process / "fd").iterdir():
                if "memfd:tpkernels" in os.readlink(descriptor):
                    found.add(f"segment {descriptor.stat().st_ino}")
    return found


def _held_sockets() -> set[str]:
    found = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            found.add(os.readlink(descriptor))
    return found


def _settled(look: Callable[[], set[str]], seconds: float = 2.0) -> set[str]:
    deadline = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _shared_kbytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["Shmem"].split()[0])


OVER_GLOO = {name: partial(mid_op, size=3, implementation=name) for name in ("chunked", "unfused")}
