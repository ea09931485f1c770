"""How the ranks of one host hand each other the descriptors of their shared memory.

A star over a Unix socket in the abstract namespace (no file, so nothing to leave behind): rank 0 listens, every other
rank connects and hands over its data segment, rank 0 answers with the control segment and everybody's data segments,
each rank opens its channel, and rank 0 tells the common verdict.  The kernel vouches for the peer's user
(``SO_PEERCRED``), a token from the group's store for its group.

Every step says what went wrong instead of going on, so all ranks refuse for the same reason or none does.  A peer that
dies closes its socket and is named at once; every wait also ends with the group's timeout.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Hub", "Limits", "Lost", "Spoke", "close_all", "closing"]

_MESSAGE_BYTES = 64 * 1024
_POLL_S = 0.02


class Lost(RuntimeError):
    """Ranks went away or did not come during the rendezvous."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


@dataclass
class Limits:
    """When to give up: at ``deadline`` (``time.monotonic``), or when ranks are ``gone``: they died, or failed.

    They are looked for every 20 ms, however many messages come meanwhile: to look after each of 64 ranks whenever
    another one's message had come took 2,000 requests to the group's store.
    """

    deadline: float
    gone: Callable[[Sequence[int]], list[int]] = field(default=lambda ranks: [])
    """Which of these ranks."""
    _next_look: float = 0.0

    def check(self, missing: Sequence[int]) -> None:
        now = time.monotonic()
        if missing and now >= self._next_look:
            self._next_look = now + _POLL_S
            gone = self.gone(missing)
            if gone:
                raise Lost(f"rank(s) {gone} died or failed while the group set up shared memory", gone)
        if now > self.deadline:
            raise Lost(f"rank(s) {list(missing)} did not come to set up shared memory in time", missing)


class Hub:
    """Rank 0's side."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.address = f"\0tpkernels-{secrets.token_hex(16)}"
        self.token = secrets.token_hex(16)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._listener.bind(self.address)
        self._listener.listen(size)
        self._peers: dict[int, socket.socket] = {}

    def close(self) -> None:
        self._listener.close()
        for peer in self._peers.values():
            peer.close()

    def collect(self, limits: Limits) -> dict[int, int | str]:
        """Every other rank's data descriptor, or the reason why it has none."""
        found: dict[int, int | str] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while len(found) < self.size - 1:
                for key, _ in selector.select(_POLL_S):
                    assert isinstance(key.fileobj, socket.socket)
                    if key.fileobj is self._listener:
                        self._admit(selector, limits)
                        continue
                    selector.unregister(key.fileobj)
                    arrived = self._hello(key.fileobj)
                    if arrived is not None:
                        rank, found[rank] = arrived[0], arrived[1]
                limits.check([rank for rank in range(1, self.size) if rank not in found])
        return found

    def tell(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """To all ranks; one that is gone is noticed by :meth:`reports` or by the first call."""
        for peer in self._peers.values():
            with suppress(OSError):
                _send(peer, message, descriptors)

    def reports(self, limits: Limits) -> dict[int, str | None]:
        """What each rank says of opening its channel: None or its reason."""
        found: dict[int, str | None] = {}
        for rank, peer in self._peers.items():
            message, _ = _receive(peer, 0, limits, rank)
            found[rank] = message["error"]
        return found

    def _admit(self, selector: selectors.BaseSelector, limits: Limits) -> None:
        connection, _ = self._listener.accept()
        if _peer_uid(connection) != os.getuid():
            connection.close()  # another user's process: it gets nothing, and nobody waits for it
            return
        connection.settimeout(max(0.01, limits.deadline - time.monotonic()))
        selector.register(connection, selectors.EVENT_READ)

    def _hello(self, connection: socket.socket) -> tuple[int, int | str] | None:
        """Who that is and its descriptor; None for a stranger, and for a rank that died (whose absence is noticed).

        What goes wrong on our own side (no descriptors left) is raised: the peer behind that connection is no stranger.
        """
        try:
            message, descriptors = _receive_now(connection, 1)
        except (ConnectionError, TimeoutError, ValueError):
            connection.close()
            return None
        rank = message.get("rank")
        known = isinstance(rank, int) and 1 <= rank < self.size and rank not in self._peers and "error" in message
        if message.get("token") != self.token or not known:
            connection.close()
            close_all(descriptors)
            return None
        assert isinstance(rank, int)
        self._peers[rank] = connection
        if message["error"] is not None:
            return rank, str(message["error"])
        return rank, descriptors[0] if descriptors else "its descriptor did not arrive (too many open files?)"


class Spoke:
    """Every other rank's side."""

    def __init__(self, rank: int, address: str, token: str, limits: Limits) -> None:
        self.rank, self._token, self._limits = rank, token, limits
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._socket.settimeout(max(0.01, limits.deadline - time.monotonic()))
        try:
            self._connect(address)
        except OSError as error:
            self._socket.close()
            raise Lost(f"rank 0 is not listening for the group's shared memory: {error}", (0,)) from error
        except Lost:
            self._socket.close()
            raise
        if _peer_uid(self._socket) != os.getuid():
            self._socket.close()
            raise Lost("the process that listens for the group's shared memory belongs to another user", (0,))

    def close(self) -> None:
        self._socket.close()

    def hello(self, descriptor: int | None, error: str | None) -> None:
        message = {"rank": self.rank, "token": self._token, "error": error}
        self._send(message, [] if descriptor is None else [descriptor])

    def receive(self, num_descriptors: int) -> tuple[dict[str, Any], list[int]]:
        return _receive(self._socket, num_descriptors, self._limits, 0)

    def report(self, error: str | None) -> None:
        self._send({"error": error}, [])

    def _connect(self, address: str) -> None:
        while True:
            try:
                return self._socket.connect(address)
            except BlockingIOError:  # the queue is full, of strangers perhaps; with a time-out, connect does not wait
                self._limits.check([0])
                time.sleep(0.005)

    def _send(self, message: dict[str, Any], descriptors: Sequence[int]) -> None:
        try:
            _send(self._socket, message, descriptors)
        except OSError as error:
            raise Lost(f"rank 0 went away while the group set up shared memory: {error}", (0,)) from error


@contextmanager
def closing(*descriptors: int) -> Iterator[None]:
    """Close descriptors on the way out: what they refer to lives on in the mappings."""
    try:
        yield
    finally:
        close_all(descriptors)


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _send(to: socket.socket, message: dict[str, Any], descriptors: Sequence[int]) -> None:
    socket.send_fds(to, [json.dumps(message).encode()], list(descriptors))


def _receive(peer: socket.socket, num_descriptors: int, limits: Limits, rank: int) -> tuple[dict[str, Any], list[int]]:
    """One message of ``rank``, waiting for it."""
    with selectors.DefaultSelector() as selector:
        selector.register(peer, selectors.EVENT_READ)
        while not selector.select(_POLL_S):
            limits.check([rank])
    try:
        return _receive_now(peer, num_descriptors)
    except (OSError, ValueError) as error:
        raise Lost(f"rank {rank} went away while the group set up shared memory: {error}", (rank,)) from error


def _receive_now(peer: socket.socket, num_descriptors: int) -> tuple[dict[str, Any], list[int]]:
    """The message that is there.  Raises ``ValueError`` for the end of the connection and for what is no message."""
    text, descriptors, _, _ = socket.recv_fds(peer, _MESSAGE_BYTES, max(1, num_descriptors), socket.MSG_CMSG_CLOEXEC)
    if not text:
        close_all(descriptors)
        raise ValueError("the connection was closed")
    try:
        return _parse(text), descriptors
    except ValueError:
        close_all(descriptors)
        raise


def _parse(text: bytes) -> dict[str, Any]:
    """A JSON object; ``ValueError`` for everything else that a stranger may send."""
    try:
        message = json.loads(text)
    except RecursionError as error:
        raise ValueError("a message is nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError(f"a message must be an object, got {type(message).__name__}")
    return message


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
