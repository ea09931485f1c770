"""Optional record of what one call did and when; off unless somebody is recording.

Backends wrap their GEMMs, waits and reductions in :func:`span` and mark transfers with :func:`mark`.  Times are
``time.monotonic_ns``, which all processes of one host share.  A *send* or *recv* interval runs from the moment the
transfer was posted to the moment a wait observed it complete, so it is an upper bound of the time on the wire.  On
CUDA the intervals are those of the host that enqueues work; use ``torch.profiler`` for device time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Event", "Kind", "Timeline", "active", "now", "record", "recording", "span"]

Kind = Literal["gemm", "send", "recv", "reduce", "wait"]


@dataclass(frozen=True)
class Event:
    """One interval; ``chunk`` and ``peer`` are -1 where they do not apply."""

    name: str
    kind: Kind
    start_ns: int
    end_ns: int
    chunk: int = -1
    peer: int = -1


@dataclass
class Timeline:
    """Events of this process in the order in which they ended."""

    events: list[Event] = field(default_factory=list)


_current: Timeline | None = None


def active() -> bool:
    """Whether somebody records."""
    return _current is not None


now = time.monotonic_ns


def record(name: str, kind: Kind, start_ns: int, *, chunk: int = -1, peer: int = -1) -> None:
    """Add an interval that ends now."""
    if _current is not None:
        _current.events.append(Event(name, kind, start_ns, now(), chunk, peer))


_NOTHING: AbstractContextManager[None] = nullcontext()


def span(name: str, kind: Kind, *, chunk: int = -1, peer: int = -1) -> AbstractContextManager[None]:
    """Context that records the interval it encloses; nearly free while nobody records."""
    return _NOTHING if _current is None else _span(name, kind, chunk, peer)


@contextmanager
def _span(name: str, kind: Kind, chunk: int, peer: int) -> Iterator[None]:
    start = now()
    try:
        yield
    finally:
        record(name, kind, start, chunk=chunk, peer=peer)


@contextmanager
def recording() -> Iterator[Timeline]:
    """Record every tpkernels call of this process until the context ends; recordings do not nest."""
    global _current
    if _current is not None:
        raise RuntimeError("a timeline is being recorded already")
    _current = Timeline()
    try:
        yield _current
    finally:
        _current = None
