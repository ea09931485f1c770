"""Which process serves a store, by the sockets that it has."""

from __future__ import annotations

import socket

import pytest

from tpkernels.comm.store_sockets import serves

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(("client_at", "is_served"), [("127.0.0.1", True), ("127.0.0.2", False), (None, False)])
def test_who_listens_at_the_port_serves_the_store_if_its_client_is_on_the_same_host(
    client_at: str | None, is_served: bool
) -> None:
    """gloo listened at the number of the store's port, on another host, whose rank was blamed for the store."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if client_at is None:
            assert serves(port) == is_served
            return
        with socket.create_connection(listener.getsockname(), source_address=(client_at, 0)):
            assert serves(port) == is_served
    assert not serves(port)
