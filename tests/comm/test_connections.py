"""The sockets of a gloo group are found among those of the process, or nobody says that they were."""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import ExitStack

import pytest

from tpkernels.comm import connections
from tpkernels.comm.connections import Connection

pytestmark = pytest.mark.cpu

CARD = 4096


def _connected(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = stack.enter_context(socket.create_connection(server.getsockname()))
        return mine, stack.enter_context(server.accept()[0])


def test_sockets_behind_one_epoll_descriptor_that_brought_the_cards_are_the_groups() -> None:
    with ExitStack() as stack:
        sets = [[_connected(stack) for _ in range(2)] for _ in range(2)]
        for one in sets:
            poller = stack.enter_context(select.epoll())
            for mine, _ in one:
                poller.register(mine, select.EPOLLIN)
        before = connections.received()
        for (_, theirs), size in zip(sets[0], (CARD, CARD + 100), strict=True):
            theirs.sendall(bytes(size))
        sets[1][0][1].sendall(bytes(CARD))  # the other ones have heard of one peer only
        found, deadline = (), time.monotonic() + 10.0
        while not found and time.monotonic() < deadline:  # until they have come
            after = connections.received()
            found = connections.of_group(before, after, 2, CARD)
        assert sorted(one.descriptor for one in found) == sorted(mine.fileno() for mine, _ in sets[0])
        # Of a larger group, or where two have met at once, nobody knows.
        assert connections.of_group(before, after, 3, CARD) == ()
        assert connections.of_group(before, after, 2, 2 * CARD) == ()
        sets[1][1][1].sendall(bytes(CARD))
        deadline = time.monotonic() + 10.0
        while connections.of_group(before, connections.received(), 2, CARD) and time.monotonic() < deadline:
            pass
        assert connections.of_group(before, connections.received(), 2, CARD) == ()


def test_looking_keeps_no_descriptor() -> None:
    with ExitStack() as stack:
        poller = stack.enter_context(select.epoll())
        poller.register(os.eventfd(0), select.EPOLLIN)  # no socket, as that by which gloo wakes its thread
        poller.register(stack.enter_context(socket.create_server(("127.0.0.1", 0))), select.EPOLLIN)
        poller.register(_connected(stack)[0], select.EPOLLIN)
        before = len(os.listdir("/proc/self/fd"))
        assert [len(sockets) for number, sockets in connections.received().items() if number == poller.fileno()] == [1]
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_number_that_another_socket_has_got_is_another_connection() -> None:
    with ExitStack() as stack:
        poller = stack.enter_context(select.epoll())
        first, _ = _connected(stack)
        poller.register(first, select.EPOLLIN)
        (before,) = (one for group in connections.received().values() for one in group if one[0] == first.fileno())
        second, _ = _connected(stack)
        os.dup2(second.fileno(), first.fileno())
        poller.register(first, select.EPOLLIN)
        (after,) = (one for group in connections.received().values() for one in group if one[0] == first.fileno())
    assert isinstance(before, Connection) and before.descriptor == after.descriptor and before.cookie != after.cookie
