"""Which sockets of this process are a gloo group's connections to its peers.

torch does not say.  But gloo gives each group an epoll descriptor of its own, which the kernel lists with the sockets
behind it, and when the ranks of a group meet, each of its connections brings a card of a known size
(:mod:`tpkernels.comm.meeting`).  So the sockets behind the one descriptor where so much has come on each of them are
the group's.  Where that is not one descriptor exactly, because two groups have met at once, or because the system does
not show it, nobody knows.

Owns nothing: a socket's number is gloo's to close, and its cookie tells whether it is still the same.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["Connection", "Received", "of_group", "received"]

_FDINFO = Path("/proc/self/fdinfo")
_BEHIND = re.compile(r"^tfd:\s+(\d+)", re.MULTILINE)
_EPOLL = "anon_inode:[eventpoll]"
# struct tcp_info: tcpi_bytes_received, since Linux 4.1.
_BYTES_RECEIVED, _TCP_INFO_BYTES = 128, 136
_SO_COOKIE = 57


class Connection(NamedTuple):
    """A connected TCP socket: its number here, and the kernel's, which no other one ever gets."""

    descriptor: int
    cookie: int


Received = Mapping[int, Mapping[Connection, int]]
"""The bytes that have come on connected sockets, by the epoll descriptor that they are behind."""


def received() -> Received:
    """What has come until now; empty where the system does not show it."""
    found: dict[int, dict[Connection, int]] = {}
    with suppress(OSError):  # no /proc
        for name in os.listdir(_FDINFO):
            with suppress(OSError):  # descriptors come and go
                if os.readlink(f"/proc/self/fd/{name}") == _EPOLL:
                    behind = _BEHIND.findall((_FDINFO / name).read_text())
                    found[int(name)] = dict(one for number in behind if (one := _connection(int(number))))
    return found


def _connection(descriptor: int) -> tuple[Connection, int] | None:
    # A copy of our own for the moment: Python's object closes what it was given.
    mine = os.dup(descriptor)
    try:
        one = socket.socket(fileno=mine)
    except OSError:  # it is no socket
        os.close(mine)
        return None
    with one, suppress(OSError):  # it is not connected, or not by TCP
        one.getpeername()
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) == _TCP_INFO_BYTES:
            cookie = struct.unpack("Q", one.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8))[0]
            return Connection(descriptor, cookie), struct.unpack_from("Q", info, _BYTES_RECEIVED)[0]
    return None


def of_group(before: Received, after: Received, peers: int, at_least: int) -> tuple[Connection, ...]:
    """The connections of a group with so many peers, each of whom has sent ``at_least`` so many bytes in between."""
    matches = [
        tuple(sockets)
        for descriptor, sockets in after.items()
        if len(sockets) == peers
        and all(count - before.get(descriptor, {}).get(one, 0) >= at_least for one, count in sockets.items())
    ]
    return matches[0] if len(matches) == 1 else ()
