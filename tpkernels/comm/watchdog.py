"""What looks after a group's calls while Python cannot: a thread of the compiled core (``csrc/cpu/watchdog.h``).

The monitor (:mod:`tpkernels.comm.monitor`) is a Python thread, and stands still while another one keeps the
interpreter's lock: in compiled code that does not give it up, for as long as that takes.  The core's thread needs no
lock.  When a peer of this host has died and a call is in flight long after that, it shuts down the group's connections,
so that waits in gloo end, here and at the peers.  The call raises when Python goes on.  Waits in shared memory look
around by themselves, whatever the interpreter does (``csrc/README.md``).

Refuses where there is no compiled core, where the kernel has no process descriptors, and where the group's connections
could not be told from others: there the monitor alone ends such waits.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tpkernels.comm import connections
from tpkernels.gemm.native import native, why_not

if TYPE_CHECKING:
    from tpkernels.comm.groups import Group

__all__ = ["guard", "refusal"]

# The monitor acts within a second; gloo's own time-outs, after the group's.
GRACE_S = 1.5
_log = logging.getLogger(__name__)


def refusal() -> str | None:
    """Why this process has no watchdog outside of the interpreter; None if it can have one."""
    module = native()
    if module is None:
        return why_not()
    try:
        module.Watch([], [], GRACE_S)
    except OSError as error:
        return f"the kernel refuses: {error}"
    return None


def guard(group: Group, before: connections.Received, card_bytes: int) -> Any | None:
    """The core's watch of a group whose ranks have just met, if there can be one; it ends when nobody holds it.

    ``before``: what had come on this process's connections before each peer sent a card of ``card_bytes``.
    """
    module = native()
    if module is None or group.backends.serving("cpu") != "gloo" or group.size == 1:
        return None
    mine = connections.of_group(before, connections.received(), group.size - 1, card_bytes)
    others = [(rank, peer) for rank, peer in enumerate(group.peers) if rank != group.rank]
    local = [(rank, peer.pid) for rank, peer in others if peer.is_local]
    if not mine or not local:
        return None
    try:
        return module.Watch(local, mine, min(GRACE_S, 0.5 * group.timeout))
    except OSError as error:
        _log.debug("tpkernels: no watch of the core for group %r: %s", group.name, error)
        return None
