"""What the machine refuses (R18): other users, memory, descriptors, address space. All ranks hear of it, none hangs."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.reliability.calls import CALLS, SHARED, make_all
from tests.reliability.crew import Crew, CrewError, Link, Raised, caught, together
from tests.reliability.outcome import Outcome
from tpkernels.backends.shared_memory import rendezvous
from tpkernels.backends.shared_memory.segments import SharedMemory
from tpkernels.gemm.native import native

NOBODY = 65534
TIMEOUT_S = 8.0
WITHIN_S = 60.0
NUM_DESCRIPTOR_SITES = 9


def other_user(count: int, size: int = 2) -> Outcome:
    """A rank of another user: the group runs on `chunked`, and `explain` says why."""
    outcome = Outcome("R18 another user's rank")
    for _ in range(count):
        problem, detail = None, ""
        for reason, error in together(size, _as_other_user, within=WITHIN_S, timeout=TIMEOUT_S):
            detail = f"{reason} {error}"
            if error is not None:
                problem = "the group did not fall back"
            elif "users" not in reason:
                problem = "explain does not say why"
        outcome.add(problem, detail)
    return outcome


def _as_other_user(link: Link) -> tuple[str, str | None]:
    if link.rank == 1:
        os.setuid(NOBODY)
    error, _ = caught(lambda: CALLS["all_gather_matmul"](dist.group.WORLD, link.rank, link.size, 1, "auto"))
    found = tpk.explain("all_gather_matmul", m=64, n=64, k=32, dtype=torch.float32, group=dist.group.WORLD)
    return str(found), error and error.text


# ---------------------------------------------------------------- strangers


def strangers(count: int, size: int = 2) -> Outcome:
    """Processes that find the abstract socket: of another user, of this user without the token, and a flood. They get
    nothing, and the group sets up as if they were not there."""
    outcome = Outcome("R18 strangers")
    for trial in range(count):
        kind = ("another user", "no token", "not a dict", "too deep", "flood")[trial % 5]
        with Crew(size, _disturbed, kind, timeout=TIMEOUT_S, linger=True) as crew:
            try:
                answers = crew.expect("returned", WITHIN_S)
            except CrewError as error:
                outcome.add(f"{kind}: the group did not set up", str(error))
                continue
        got = answers[0].value
        outcome.add(None if got == "nothing" else f"{kind}: the stranger got {got}")
    return outcome


def _disturbed(link: Link, kind: str) -> str:
    """Rank 0's child is the stranger; the other ranks come to the socket when it has done its worst."""
    answer = "nothing"
    if link.rank == 0:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, _stranger(kind).encode())
            os._exit(0)
        os.close(writer)
    else:
        original = rendezvous.Spoke.__init__

        def late(self: Any, *args: Any) -> None:
            time.sleep(0.5)
            original(self, *args)

        rendezvous.Spoke.__init__ = late  # type: ignore[method-assign]
    CALLS["all_reduce"](dist.group.WORLD, link.rank, link.size, 1, SHARED)
    make_all(dist.group.WORLD, link.rank, link.size, 2)
    if link.rank == 0:
        answer = os.read(reader, 1000).decode()
        os.waitpid(child, 0)
    return answer


def _stranger(kind: str) -> str:
    if kind == "another user":
        os.setuid(NOBODY)
    deadline = time.monotonic() + 5.0
    name = ""
    while not name and time.monotonic() < deadline:
        names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@tpkernels" in line]
        # Other groups of this machine may be meeting as well; ours is the youngest.
        name = names[-1] if names else ""
    if not name:
        return "no socket to disturb"
    words = {"no token": b'{"rank": 1, "token": "guess", "error": null}', "not a dict": b"3", "too deep": b"[" * 50000}
    connections = []
    try:
        for _ in range(50 if kind == "flood" else 1):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(0.3)
            connection.connect("\0" + name[1:])
            connections.append(connection)
            if kind in words:
                connection.send(words[kind])
        text, descriptors, _, _ = socket.recv_fds(connections[0], 65536, 16)
        return "nothing" if not text and not descriptors else f"{text!r} and {len(descriptors)} descriptors"
    except OSError:
        time.sleep(0.6 if kind == "flood" else 0.0)
        return "nothing"


# ---------------------------------------------------------------- resources


def descriptors(count: int, size: int = 3) -> Outcome:
    """EMFILE on one rank at each place that needs a descriptor, by allowing 0, 1, 2, ... more when set-up begins."""
    outcome = Outcome("R18 EMFILE")
    sites = set()
    for trial in range(count):
        room, victim = trial // 2 % NUM_DESCRIPTOR_SITES, (0, size - 1)[trial % 2]
        _all_alike(outcome, f"{room} descriptors left on rank {victim}", size, victim, "NOFILE", room, sites)
    outcome.facts["outcomes_by_site"] = sorted(sites)
    return outcome


def address_space(count: int, size: int = 2) -> Outcome:
    """mmap fails on one rank: every rank refuses shared memory for the same reason, and the group runs on."""
    outcome = Outcome("R18 mmap")
    sites: set[str] = set()
    for trial in range(count):
        room = (1 << 28, 1 << 36, 3 << 35)[trial // 2 % 3]  # not one segment, one, one and a half
        _all_alike(outcome, f"{room >> 20} MiB left", size, (0, size - 1)[trial % 2], "AS", room, sites)
    outcome.facts["outcomes_by_site"] = sorted(sites)
    return outcome


def _all_alike(outcome: Outcome, what: str, size: int, victim: int, limit: str, room: int, sites: set[str]) -> None:
    """All ranks must have worked, by the same implementation, or all must have raised; soon in any case."""
    try:
        found = together(size, _starved, victim, limit, room, within=3 * TIMEOUT_S, timeout=TIMEOUT_S)
    except CrewError as error:
        outcome.add(f"{what}: a rank gave no answer", str(error))
        return
    problem = None
    states = {state for state, _, _ in found}
    if len(states) > 1:
        problem = f"{what}: ranks differ"
    elif max(seconds for _, _, seconds in found) > TIMEOUT_S / 2:
        problem = f"{what}: a rank waited for the time-out"
    sites.add(f"{what}: {found[0][0]}")
    outcome.add(problem, repr(found))
    outcome.latencies_s += [seconds for _, _, seconds in found]


def _starved(link: Link, victim: int, limit: str, room: int) -> tuple[str, str, float]:
    """What came of the first call on this rank: 'shared', 'without shared memory' or 'raised', with its reason."""
    original = SharedMemory.ensure
    restored: list[Callable[[], None]] = []

    def ensure(memory: SharedMemory, group: Any, call: int, device: Any) -> None:
        dist.barrier()
        if link.rank == victim:
            restored.append(_restrict(limit, room))
        try:
            original(memory, group, call, device)
        finally:
            for restore in restored:
                restore()

    SharedMemory.ensure = ensure  # type: ignore[method-assign]
    start = time.monotonic()
    error, at = caught(lambda: CALLS["all_gather_matmul"](dist.group.WORLD, link.rank, link.size, 1, "auto"))
    if error is not None:
        return "raised", f"{error.kind}: {error.text}", at - start
    from tpkernels.comm.groups import resolve

    reason = resolve(dist.group.WORLD).resources[SharedMemory.name].refusal("cpu")
    make_all(dist.group.WORLD, link.rank, link.size, 2, "auto")
    return ("shared" if reason is None else "without shared memory"), str(reason), at - start


def _restrict(limit: str, room: int) -> Callable[[], None]:
    number = getattr(resource, f"RLIMIT_{limit}")
    before = resource.getrlimit(number)
    if limit == "NOFILE":
        # A new descriptor takes the lowest free number, and the limit is on numbers: count free ones.
        folder = Path("/proc/self/fd")
        used = {int(name) for name in os.listdir(folder) if (folder / name).exists()}
        free = [number for number in range(4096) if number not in used]
        in_use = free[room]
    elif limit == "AS":
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + room
    else:
        in_use = room
    resource.setrlimit(number, (in_use, before[1]))
    return lambda: resource.setrlimit(number, before)


def growth_refused(count: int, size: int = 3) -> Outcome:
    """A workspace that cannot grow on one rank (EFBIG): all ranks raise the same, and the group works on."""
    outcome = Outcome("R18 growth")
    for trial in range(count):
        found = together(size, _no_room, trial % size, within=WITHIN_S, timeout=TIMEOUT_S)
        texts = {error.text if error else None for error, _ in found}
        kinds = {error.kind if error else None for error, _ in found}
        problem = None
        if kinds != {"UnsupportedProblem"} or len(texts) != 1:
            problem = "ranks differ, or another error"
        elif "EFBIG" not in str(texts) or f"rank {trial % size}" not in str(texts):
            problem = "the error does not say which rank has no room, or why"
        elif not all(works for _, works in found):
            problem = "the group does not work on"
        outcome.add(problem, repr(found))
    return outcome


def _no_room(link: Link, victim: int) -> tuple[Raised | None, bool]:
    group = dist.group.WORLD
    CALLS["all_reduce"](group, link.rank, link.size, 1, SHARED)
    restore = _restrict("FSIZE", 1 << 20) if link.rank == victim else lambda: None
    error, _ = caught(lambda: _gather_much(group, link, 2))
    restore()
    again, _ = caught(lambda: make_all(group, link.rank, link.size, 3))
    large, _ = caught(lambda: _gather_much(group, link, 4))
    return error, again is None and large is None


def _gather_much(group: Any, link: Link, salt: int) -> None:
    """Stages 8 MiB, more than any other call here."""
    y = tpk.all_gather(torch.full((1 << 15, 64), float(link.rank + salt)), group, implementation=SHARED)
    if any(not bool((y[rank << 15 : (rank + 1) << 15] == rank + salt).all()) for rank in range(link.size)):
        raise RuntimeError("wrong output")


def full_memory(count: int) -> Outcome:
    """ENOSPC: a segment of huge pages on a machine that has none to give. The channel says so and stays as it was."""
    import errno
    import fcntl

    outcome = Outcome("R18 ENOSPC")
    module: Any = native()
    for _ in range(count):
        control = module.make_control(1)
        data = os.memfd_create("tpkernels-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
        try:
            fcntl.fcntl(data, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            channel = module.Channel(0, 1, control, [data], 1.0, 0.0)
            failed = channel.grow(1 << 31)
        finally:
            with suppress(OSError):
                os.close(control)
            os.close(data)
        codes = [errno.errorcode.get(code) for _, code in failed]
        good = codes in (["ENOSPC"], ["ENOMEM"]) and channel.capacity == 0
        outcome.facts["errno"] = codes
        outcome.add(None if good else "no error of the reservation", repr(failed))
    return outcome
