"""Process groups as the ops see them.

A :class:`Group` adds to a c10d ``ProcessGroup`` what the ops need: the call number that all ranks share, the calls that
were agreed on, the first failure (poison), and a lock, because collectives of one group must not interleave.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from tpkernels import config
from tpkernels.comm import gloo_threads
from tpkernels.comm.bounded_store import BoundedStore
from tpkernels.comm.device_backends import DeviceBackends
from tpkernels.comm.job_identity import JobIdentity
from tpkernels.comm.trail import Trail
from tpkernels.comm.works import Works
from tpkernels.errors import CommunicationError, GroupPoisoned, PeerLost
from tpkernels.gemm import canonical

if TYPE_CHECKING:
    from tpkernels.comm.liveness import Identity

__all__ = [
    "Group", "GroupLike", "InFlight", "all_groups", "group_name", "group_size", "live_groups",
    "process_group", "resolve",
]  # fmt: skip

GroupLike = dist.ProcessGroup | DeviceMesh

# Agreed calls kept per group, fewer than message tags can name.  All ranks make the same calls and so evict alike.
MAX_AGREED = 4000


class InFlight(NamedTuple):
    """The call that this rank is in, for the monitor and for error messages."""

    call: int
    signature: Hashable
    since: float


@dataclass
class Group:
    """State of one process group in this process; obtained from :func:`resolve`, never built by hand.

    It does not keep the process group alive: a destroyed group takes its state with it.
    """

    reference: weakref.ReferenceType[dist.ProcessGroup]
    name: str
    rank: int
    size: int
    backends: DeviceBackends
    timeout: float
    store: Any
    job: JobIdentity
    lock: threading.RLock = field(default_factory=threading.RLock)
    calls: int = 1  # call 0 is the one in which the ranks meet
    agreed: OrderedDict[Hashable, Any] = field(default_factory=OrderedDict)
    checked: dict[Hashable, Any] = field(default_factory=dict)
    """Calls whose arguments this rank has checked, with what they have settled, by the arguments' facts."""
    agreements: int = 0
    in_flight: InFlight | None = None
    since: float | None = None
    """When the call was made that the ranks agree on, or have agreed on just now; None in calls that they knew."""
    started: dict[int, Hashable] = field(default_factory=dict)
    """Signatures of earlier calls whose transfers are posted but not waited for yet."""
    poison: CommunicationError | None = None
    verdict: CommunicationError | None = None
    """What the monitor found out before it aborted the transport: about the call in flight, or about earlier ones."""
    trail: Trail | None = None
    """The calls of this rank, where messages of different calls could match; see :mod:`tpkernels.comm.call_order`."""
    works: Works | None = None
    """What this rank has started on a device and nobody waits for on the host; see :mod:`tpkernels.comm.works`."""
    aborted: bool = False
    """Whether the communicator of the device's backend was ended, which happens once."""
    key: str | None = None
    """Prefix of this incarnation's keys in the store; set when the ranks first meet."""
    card: torch.Tensor | None = None
    """What this rank has told its peers about itself."""
    unsent: list[Any] = field(default_factory=list)
    """Transfers of the card that nobody waits for; gloo forgets a send whose handle is gone."""
    visits: tuple[int, ...] = ()
    """How many groups each rank has come to with this store: tells what it says here from what it said of another."""
    peers: tuple[Identity, ...] = ()
    watch: Any | None = None
    """The compiled core's; see :mod:`tpkernels.comm.watchdog`."""
    heard: dict[int, tuple[str, float]] = field(default_factory=dict)
    """The last heartbeat of each rank and when it was first read; see :mod:`tpkernels.comm.heartbeats`."""
    listened: float = 0.0
    """When they were last read."""
    missed: tuple[int, tuple[int, ...]] = (0, ())
    """A call that waits, and the ranks that had not come to it when the store was last read."""
    store_host: int | None = None
    """The rank whose process serves the store; None where that is nobody's."""
    links: dict[str, dict[str, float]] = field(default_factory=dict)
    """This rank's measured costs of the link and of the resources, by the type of the tensors' device."""
    resources: dict[str, Any] = field(default_factory=dict)
    """What the backends own in this group, by name; see :mod:`tpkernels.comm.resources`."""
    costs: dict[tuple[str, torch.dtype, bool], Any] = field(default_factory=dict)
    """Costs that the ranks agreed on, by the type of the tensors' device, their dtype, and whether the GEMM
    widens it."""
    same_bits: int = 0
    """The largest degree whose bits its ops give, see :mod:`tpkernels.comm.same_bits`; 0: that of each degree."""

    _control: tuple[Any, BoundedStore] | None = None

    @property
    def control(self) -> BoundedStore:
        """The store, for whoever talks about calls: requests end after the group's timeout at the latest."""
        if self._control is None or self._control[0] is not self.store:
            self._control = self.store, BoundedStore(self.store, self.timeout, self.job.seal(self.name))
        return self._control[1]

    @property
    def pg(self) -> dist.ProcessGroup:
        pg = self.reference()
        if pg is None:
            raise RuntimeError(f"process group {self.name!r} was destroyed")
        return pg

    def raise_if_poisoned(self) -> None:
        if self.poison is not None:
            raise GroupPoisoned(
                f"rank {self.rank}: group {self.name!r} failed earlier and cannot be used any more; make a new group. "
                f"First failure: {type(self.poison).__name__}: {self.poison}",
                ranks=self.poison.ranks,
            ) from self.poison

    @property
    def co_located(self) -> bool:
        """Whether all ranks were proved to run on this host (known once the ranks have met)."""
        return bool(self.peers) and all(peer.is_local for peer in self.peers)

    def enter(self, call: int, signature: Hashable) -> None:
        self.in_flight = InFlight(call, signature, time.monotonic())
        if self.watch is not None:
            self.watch.enter()

    def leave(self, outer: InFlight | None) -> None:
        """The call that was entered has ended, and so ``outer``, which it was a part of, is in flight, if any was."""
        self.in_flight = outer
        if self.watch is not None and outer is None:
            self.watch.leave()

    def is_overdue(self) -> bool:
        """Whether a call that the ranks had to agree on has lasted for a time-out, though none of its steps has."""
        return self.since is not None and time.monotonic() - self.since > self.timeout

    def remember(self, signature: Hashable, plan: Any) -> None:
        self.agreed[signature] = plan
        if len(self.agreed) > MAX_AGREED:
            self.agreed.popitem(last=False)
            self.checked.clear()  # they must not remember what the ranks have forgotten

    def keep_same_bits(self, same_bits: int) -> None:
        """From now on ops give the same bits at each degree that divides ``same_bits``; this process has one thread.

        All ranks of the group call it between the same ops; a number that cannot be is a ValueError.
        """
        canonical.check_blocks(same_bits, self.size)
        torch.set_num_threads(1)
        with self.lock:
            self.agreed.clear()  # calls that were agreed on run in another way from here on
            self.checked.clear()
            self.same_bits = same_bits
        groups_of_same_bits.add(self.name)

    def keep_checked(self, facts: Hashable, call: Any) -> None:
        if len(self.checked) >= MAX_AGREED:
            self.checked.clear()  # the arguments of the next call of each kind are checked again
        self.checked[facts] = call


groups_of_same_bits: set[str] = set()
"""Names of groups for which ``same_bits`` was ever turned on: while there are none, nobody asks further."""
_groups: dict[str, Group] = {}
_seen: dict[int, tuple[weakref.ReferenceType[GroupLike], Group]] = {}
"""States by the identity of what users named them with: to ask a mesh for its group takes as long as a small GEMM."""


def process_group(group: GroupLike | str) -> dist.ProcessGroup:
    """The c10d group behind a ``ProcessGroup``, a one-dimensional ``DeviceMesh`` or a group's name.

    Raises:
        ValueError: a mesh of several axes, or something that is no group.
    """
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a DeviceMesh with axes {group.mesh_dim_names or group.ndim}; pass one axis, "
                'for example mesh["tp"]'
            )
        return group.get_group()
    if isinstance(group, str):
        return _registered(group.rpartition("@")[0] or group)
    raise ValueError(f"group must be a ProcessGroup or a one-dimensional DeviceMesh, got {type(group).__name__}")


def _registered(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(cast(Any, name))  # its NewType of str exists only from torch 2.13 on


def group_name(group: GroupLike) -> str:
    """The name by which ``torch.ops.tpkernels`` find the group; it ends with ``@`` and this process's rank.

    Shapes depend on the rank when shards are uneven, and ranks of one host share the caches of compiled code: graphs of
    two ranks must not look alike.
    """
    pg = process_group(group)
    return f"{pg.group_name}@{pg.rank()}"


def resolve(group: GroupLike | str) -> Group:
    """The state that belongs to a group; the same object for every call of this process."""
    seen = _seen.get(id(group))
    if seen is not None:  # of a group that lives: whatever ends takes its entries with it
        return seen[1]
    state = _resolve(process_group(group))
    if not isinstance(group, str):
        key = id(group)
        _seen[key] = (weakref.ref(group, partial(_forget_seen, key)), state)
    return state


def group_size(group: GroupLike) -> int:
    """How many ranks it has.  Of a group that was seen before c10d need not be asked: a mesh took 2.8 us (Intel Xeon).

    Dynamo follows what c10d says of a group, and nothing that :func:`resolve` asks for when it sees one first.
    """
    return process_group(group).size() if is_dynamo_compiling() else resolve(group).size


def _resolve(pg: dist.ProcessGroup) -> Group:
    name = str(pg.group_name)
    known = _groups.get(name)
    if known is not None and known.reference() is pg:
        return known
    reference = weakref.ref(pg, partial(_forget, name))
    backends = DeviceBackends.of(pg)
    timeout, job = _timeout_seconds(pg, backends), JobIdentity.of_this_process()
    created = Group(reference, name, pg.rank(), pg.size(), backends, timeout, pg.get_group_store(), job)
    if backends.match_by_order:
        created.trail = Trail()
        created.works = None if config.nccl_waits_block() else Works()
    _groups[name] = created
    gloo_threads.settle()
    return created


def _disown() -> None:
    """In a forked child, which has none of its parent's threads and shares its sockets: calls raise at once.

    The locks are new, because a thread that does not exist here may hold them.
    """
    for group in list(_groups.values()):
        group.lock, group._control, group.in_flight, group.watch = threading.RLock(), None, None, None
        group.poison = group.poison or PeerLost(
            f"rank {group.rank}: this process was forked from the one that is in group {group.name!r}, and cannot take "
            "part in its calls"
        )


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_disown)


def all_groups() -> list[Group]:
    """Groups of this process, whether their ranks have met or not."""
    return [group for group in list(_groups.values()) if group.reference() is not None]


def live_groups() -> list[Group]:
    """Groups of this process whose ranks have met, or to whose meeting it has come."""
    return [group for group in all_groups() if group.key is not None or group.visits]


# These two may run when the interpreter ends and this module's names are gone: they take what they need with them.


def _forget_seen(
    key: int,
    gone: weakref.ReferenceType[GroupLike],
    seen: dict[int, tuple[weakref.ReferenceType[GroupLike], Group]] = _seen,
) -> None:
    if key in seen and seen[key][0] is gone:
        del seen[key]


def _forget(
    name: str,
    gone: weakref.ReferenceType[dist.ProcessGroup],
    groups: dict[str, Group] = _groups,
    seen: dict[int, tuple[weakref.ReferenceType[GroupLike], Group]] = _seen,
    of_same_bits: set[str] = groups_of_same_bits,
) -> None:
    for key, (_, state) in list(seen.items()):  # a mesh may outlive its group
        if state.reference is gone:
            del seen[key]
    if name in groups and groups[name].reference is gone:
        del groups[name]
        of_same_bits.discard(name)


def _timeout_seconds(pg: dist.ProcessGroup, backends: DeviceBackends) -> float:
    """c10d gives all backends of a group one time-out; some do not tell it."""
    for device in backends.by_device:
        options = getattr(pg._get_backend(torch.device(device)), "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            return float(timeout.total_seconds())
    return 1800.0
