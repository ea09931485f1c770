"""Who a peer is, and whether its process still lives.

On one host the kernel says so: a process descriptor (``pidfd_open``) becomes readable when its process has ended,
reaped or not, and needs no ``/proc`` (``kill(pid, 0)`` cannot tell a zombie from a living process).  ``/proc`` is asked
only where it was seen to speak of this process under the number that it knows itself by.  That fails where another
namespace's ``/proc`` is mounted, or none.  A process that is not listed there may be hidden (``hidepid``) and is then
not taken for dead.  Where neither says anything, and across hosts, a rank counts as alive while its heartbeat in the
group's store advances; see :mod:`tpkernels.comm.monitor`.
"""

from __future__ import annotations

import json
import os
import re
import select
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

__all__ = ["Identity"]

_PROC = Path("/proc")


@dataclass(frozen=True)
class Identity:
    """A process, unique across hosts, containers and reuse of process numbers."""

    host: str
    pid: int
    started: int

    @staticmethod
    def mine() -> Identity:
        return Identity(_host(), os.getpid(), _start_time(os.getpid()) or 0)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Identity:
        """What :meth:`to_json` wrote.

        Raises:
            ValueError, TypeError, KeyError: it did not.
        """
        said = json.loads(text)
        identity = Identity(said["host"], said["pid"], said["started"])
        if (type(identity.host), type(identity.pid), type(identity.started)) != (str, int, int):
            raise ValueError("no identity of a process")
        return identity

    @property
    def is_local(self) -> bool:
        """Whether this process shares our boot and pid namespace, so that the kernel tells about it."""
        return self.host != _UNKNOWN and self.host == _host()

    def is_dead(self) -> bool:
        """Whether the process is known to be gone; always False for a process of another host."""
        if not self.is_local:
            return False
        ended = _has_ended(self.pid)
        if ended is not False:
            return bool(ended) or (ended is None and self._is_dead_by_proc())
        found = _seen(self.pid)  # it lives, unless it is another one with the number of the one that we know
        return found is not None and self.started != 0 and found[1] != self.started

    def _is_dead_by_proc(self) -> bool:
        found = _seen(self.pid)
        if found is None:
            return _shows_all() and not _is_listed(self.pid)
        return found[0] in "ZX" or found[1] != self.started

    def is_stopped(self) -> bool:
        """Whether the process is known to be stopped, by a signal or a debugger, and so cannot answer anybody."""
        found = _seen(self.pid) if self.is_local else None
        return found is not None and found[0] in "Tt" and found[1] == self.started


_UNKNOWN = "a host that does not say who it is"


@cache
def _host() -> str:
    try:
        boot_id = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id}/{os.stat(_PROC / 'self/ns/pid').st_ino}"
    except OSError:  # no /proc
        return _UNKNOWN


def _has_ended(pid: int) -> bool | None:
    """Whether a process of our namespace has ended, reaped or not; None where the kernel does not say."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # no such call here, no descriptors left, or no number of a process
        return None
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(0))
    finally:
        os.close(descriptor)


def _speaks_of_us() -> bool:
    """Whether ``/proc`` knows this process under its own number, and so is that of our namespace."""
    try:
        return os.readlink(_PROC / "self") == str(os.getpid())
    except OSError:
        return False


def _shows_all() -> bool:
    """Whether it hides nobody, and what it does not list is not there."""
    try:
        lines = (_PROC / "self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    options = [line for line in lines if f" {_PROC} " in line and " - proc " in line]
    return _speaks_of_us() and bool(options) and not re.search(r"hidepid=(?!0|off)", options[-1])


def _is_listed(pid: int) -> bool:
    return (_PROC / str(pid)).exists()


def _start_time(pid: int) -> int | None:
    """When a living process started, in ticks since boot; None if it is gone, a zombie, or not to be seen."""
    found = _seen(pid)
    return None if found is None or found[0] in "ZX" else found[1]


def _seen(pid: int) -> tuple[str, int] | None:
    """The state of a process, a letter, and its start time; None where ``/proc`` does not say."""
    if not _speaks_of_us():
        return None
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the command name in parentheses may hold spaces
    return fields[0], int(fields[19])
