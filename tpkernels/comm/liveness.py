"""Who a peer is, and whether its process still lives.

On one host the answer comes from ``/proc`` (``kill(pid, 0)`` cannot tell a zombie from a living process).  Across hosts
a rank counts as alive while its heartbeat in the group's store advances; see :mod:`tpkernels.comm.monitor`.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

__all__ = ["Identity"]


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
        return Identity(**json.loads(text))

    @property
    def is_local(self) -> bool:
        """Whether this process shares our boot and pid namespace, so that ``/proc`` tells about it."""
        return self.host == _host()

    def is_dead(self) -> bool:
        """Whether the process is known to be gone; always False for a process of another host."""
        try:
            return self.is_local and _start_time(self.pid) != self.started
        except OSError:  # we cannot look (no descriptors left, perhaps): that says nothing about the peer
            return False

    def is_stopped(self) -> bool:
        """Whether the process is known to be stopped, by a signal or a debugger, and so cannot answer anybody."""
        try:
            found = _state(self.pid) if self.is_local else None
        except OSError:
            return False
        return found is not None and found[0] in "Tt" and found[1] == self.started


@cache
def _host() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{os.stat('/proc/self/ns/pid').st_ino}"


def _start_time(pid: int) -> int | None:
    """Start time of a living process in clock ticks since boot, None for one that is gone or a zombie."""
    found = _state(pid)
    return None if found is None or found[0] in "ZX" else found[1]


def _state(pid: int) -> tuple[str, int] | None:
    """The state of a process, a letter, and its start time; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the command name in parentheses may hold spaces
    return fields[0], int(fields[19])
