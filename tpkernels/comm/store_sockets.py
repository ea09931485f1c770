"""The sockets of this process that belong to a store: whether it serves one, and an end to waits for one.

c10d's clients wait for an answer without a limit, and so does all that c10d asks a store for by itself: when it
connects, makes a process group, or the groups of a mesh.  :func:`answering` gives such a stretch of code a limit: it
shuts down the connections to the store, and c10d raises.  What this library asks a store for has limits of its own
(:mod:`tpkernels.comm.bounded_store`).

libc is asked, because Python's sockets may change what they are made of, and a descriptor is never ours to close.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

__all__ = ["answering", "port_of", "root", "serves"]

_LOOK_AGAIN_S = 0.02
# Without /proc, every number that may be one is tried: the kernel gives out the lowest that is free.
_MOST_DESCRIPTORS = 1 << 12


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)  # Windows refuses that, and must be able to import this


def root(store: Any) -> Any:
    """The store behind the prefixes."""
    return getattr(store, "_underlying_non_prefix_store", store)


def port_of(store: Any) -> int | None:
    """Where a store is served; None for one that is in this process alone."""
    port = getattr(root(store), "port", None)
    return None if port is None else int(port)


def serves(port: int) -> bool:
    """Whether this process serves the store at the port: it listens there, and its client is connected to this host.

    On another host than the store's, gloo may listen at a port of the same number.  To read the kernel's table of
    connections took 17 ms for each group on a busy machine of 24 GiB, where this takes 0.3.
    """
    descriptors = _descriptors()
    if not any(_listens(one) and _port(one, "getsockname") == port for one in descriptors):
        return False
    clients = [one for one in descriptors if _port(one, "getpeername") == port]
    return any(_host(one, "getpeername") == _host(one, "getsockname") for one in clients)


@contextmanager
def answering(port: int | None, limit: float, silent: Callable[[], Exception]) -> Iterator[Callable[[], None]]:
    """End what waits for the store at ``port`` after ``limit`` seconds, and raise what ``silent`` gives.

    Gives what another thread may call to end it at once; c10d's own error is then raised.  Other connections of this
    process to such a port would end as well.
    """
    if port is None:
        yield lambda: None
        return
    done, is_over, is_late = threading.Event(), threading.Event(), threading.Event()

    def end() -> None:
        if not is_over.wait(limit):
            is_late.set()
        while not done.is_set():  # again, for c10d may have connected again
            _shut(port)
            done.wait(_LOOK_AGAIN_S)

    thread = threading.Thread(target=end, name="tpkernels-store-limit", daemon=True)
    thread.start()
    try:
        yield is_over.set
    except RuntimeError as error:
        if is_late.is_set():
            raise silent() from error
        raise
    finally:
        done.set()
        is_over.set()
        thread.join()
    if is_late.is_set():
        raise silent()


def _shut(port: int) -> None:
    for descriptor in _descriptors():
        if _port(descriptor, "getpeername") == port:
            _libc().shutdown(descriptor, socket.SHUT_RDWR)


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        import resource  # Windows has none, and must be able to import this

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return list(range(_MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, _MOST_DESCRIPTORS)))


def _listens(descriptor: int) -> bool:
    listens, size = ctypes.c_int(), ctypes.c_uint32(4)
    failed = _libc().getsockopt(
        descriptor, socket.SOL_SOCKET, socket.SO_ACCEPTCONN, ctypes.byref(listens), ctypes.byref(size)
    )
    return not failed and bool(listens.value)


def _port(descriptor: int, which: str) -> int | None:
    """The port of this end of a TCP socket, or of the other one; None for anything else."""
    name = _name(descriptor, which)
    return None if name is None else int(struct.unpack_from("!H", name, 2)[0])


def _host(descriptor: int, which: str) -> bytes | None:
    """The address of a host, like :func:`_port`."""
    name = _name(descriptor, which)
    if name is None:
        return None
    (family,) = struct.unpack_from("=H", name)
    return name[4:8] if family == socket.AF_INET else name[8:24]


def _name(descriptor: int, which: str) -> bytes | None:
    """A sockaddr_in or sockaddr_in6."""
    name, size = ctypes.create_string_buffer(128), ctypes.c_uint32(128)
    if getattr(_libc(), which)(descriptor, name, ctypes.byref(size)):
        return None
    (family,) = struct.unpack_from("=H", name)
    return name.raw if family in (socket.AF_INET, socket.AF_INET6) else None
