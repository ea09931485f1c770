"""What ranks tell each other while they agree (R20): JSON and never pickle, and rubbish is an error on all ranks."""

from __future__ import annotations

import pickle
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tpkernels
from tests.reliability.calls import SHARED, make_all
from tests.reliability.crew import CrewError, Link, caught, together
from tests.reliability.outcome import Outcome
from tpkernels.backends.shared_memory import rendezvous
from tpkernels.comm import agreement

TIMEOUT_S = 8.0
RUBBISH = (
    b"",
    b"\x80\x04\x95",  # the start of a pickle
    b"3",
    b"null",
    b"[]",
    b"{}",
    b'{"rank": 1}',
    b"{" * 2000,
    b"[" * 40000,
    b"\xff\xfe\x00",
)
PLACES = ("record", "costs record", "hello", "report", "answer")


def no_pickle(count: int) -> Outcome:
    """No module of the exchange imports pickle or marshal, and none is called while ranks meet, agree and fail."""
    outcome = Outcome("R20 no pickle")
    package = Path(tpkernels.__file__).parent
    sources = [path for part in ("comm", "ops", "backends") for path in (package / part).rglob("*.py")]
    forbidden = re.compile(r"^\s*(import|from)\s+(pickle|marshal|shelve|dill)\b|torch\.load|_object\(", re.MULTILINE)
    for path in sources:
        found = forbidden.search(path.read_text())
        outcome.add(f"{path.name} uses pickle" if found else None, found.group(0) if found else "")
    for _ in range(count):
        for problem in together(2, _without_pickle, within=60.0):
            outcome.add(problem)
    return outcome


def _without_pickle(link: Link) -> str | None:
    called: list[str] = []
    with pytest.MonkeyPatch.context() as patch:  # the trial itself is told by pickle
        for name in ("loads", "load", "dumps", "dump"):
            patch.setattr(pickle, name, lambda *args, name=name, **options: called.append(name))
        make_all(dist.group.WORLD, link.rank, link.size, 1)
    return f"pickle.{called[0]} was called" if called else None


def corrupt(count: int, size: int = 3) -> Outcome:
    """Rubbish of each kind from one rank at each place of the exchange: all raise, and none waits for its time-out.

    A record in the store that is rubbish counts as none, because anybody may have written it: its readers wait for the
    rank's own one, until the time-out.
    """
    outcome = Outcome("R20 corrupt records")
    for trial in range(count):
        # Another kind at each place, so that a slice has many of both; the full count has every kind at every place.
        place, turn = PLACES[trial % len(PLACES)], trial // len(PLACES)
        rubbish = RUBBISH[(turn + 2 * trial) % len(RUBBISH)]
        what = f"{place} {rubbish[:12]!r}"
        try:
            found = together(size, _with_rubbish, place, rubbish, within=3 * TIMEOUT_S, timeout=TIMEOUT_S)
        except CrewError as error:
            outcome.add(f"{what}: a rank gave no answer", str(error))
            continue
        raised = [error is not None for error, _ in found]
        limit = 1.1 * TIMEOUT_S + 0.5 if place in ("record", "costs record") else TIMEOUT_S / 2
        slow = max(seconds for _, seconds in found) > limit
        problem = f"{what}: a rank waited for the time-out" if slow else None
        if not all(raised):
            problem = f"{what}: {raised.count(False)} of {size} ranks got a result"
        outcome.add(problem, repr(found))
        outcome.latencies_s += [seconds for _, seconds in found]
    return outcome


def _with_rubbish(link: Link, place: str, rubbish: bytes) -> tuple[Any, float]:
    if place == "answer":
        if link.rank == 0:
            _replace_messages(rubbish, lambda message: "segments" in message)
    elif link.rank == link.size - 1:
        if place in ("record", "costs record"):
            _replace_records(rubbish, "call" if place == "record" else "shared memory")
        else:
            _replace_messages(rubbish, lambda message: ("rank" in message) == (place == "hello"))
    start = time.monotonic()
    error, at = caught(lambda: _any_error(link))
    return error, at - start


def _any_error(link: Link) -> None:
    try:
        make_all(dist.group.WORLD, link.rank, link.size, 1, SHARED)
    except (TypeError, KeyError, AttributeError) as error:
        raise RuntimeError(f"{error!r}") from error


def _replace_records(rubbish: bytes, part: str) -> None:
    original = agreement.publish

    def publish(group: Any, call: int, record: Any, part_of: str = "call", **options: Any) -> None:
        part_of = options.get("part", part_of)
        if (record.signature == "shared memory") == (part == "shared memory"):
            group.store.set(f"{group.key}/{part_of}/{call}/{group.rank}", rubbish)
        else:
            original(group, call, record, part_of)

    agreement.publish = publish


def _replace_messages(rubbish: bytes, matches: Any) -> None:
    original = rendezvous._send

    def send(to: socket.socket, message: dict[str, Any], descriptors: Any) -> None:
        if matches(message):
            socket.send_fds(to, [rubbish or b" "], list(descriptors))
        else:
            original(to, message, descriptors)

    rendezvous._send = send
