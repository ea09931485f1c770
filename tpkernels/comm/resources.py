"""What backends own in a group (memory that ranks share, channels, registered buffers), and the one protocol for it.

A backend registers the kinds of resources that it needs (:func:`register`) where it registers its implementations.
Every group then has one :class:`Resource` of each kind, in ``Group.resources`` by name.  Calls, agreement, monitor and
dispatch go through this protocol and know no kind: they have resources set up when a signature is new, ask why the
ranks have none, measure them, and tell them that the group has failed.

Assumes that all ranks have registered the same kinds when they make a call that is new to the group; where they have
not, every rank raises ``GroupMismatch``.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from tpkernels.errors import CommunicationError, GroupMismatch

if TYPE_CHECKING:
    from tpkernels.comm.groups import Group

__all__ = [
    "UNTRIED", "Resource", "Standing", "check_kinds", "check_setup", "ensure", "held", "kinds", "register", "settings",
    "standings",
]  # fmt: skip

UNTRIED = "the ranks have not met yet"


class Standing(NamedTuple):
    """Whether the ranks of a group have a resource for tensors on one type of device; equal on all ranks."""

    name: str
    refusal: str | None = None
    """Why they do not have it; None if they do."""
    features: frozenset[str] = frozenset()
    """What it can do that not every one of its kind can."""


class Resource(ABC):
    """What a backend owns in one group of this process; made without arguments when the group needs it first.

    Methods are called by the thread that makes the group's calls, but for :meth:`abort` and :meth:`tick`, which the
    monitor's thread calls.  None of them is on the path of a call that was made before: a backend takes what it needs
    from ``group.resources[name]``.
    """

    name: ClassVar[str]
    """Names the kind in ``Group.resources``, ``Problem.resources`` and messages."""

    @classmethod
    def settings(cls) -> dict[str, Any]:
        """What this process has set that must be equal on all ranks, by the names of the variables; as JSON has it.

        Compared at each call that is new to a group: a difference raises ``GroupMismatch`` on every rank.
        """
        return {}

    def check_setup(self, group: Group, what: str, device: torch.device) -> None:
        """Refuse the call ``what`` before anything is sent, if this is no moment to set the resource up.

        Raises:
            UnsupportedProblem: on every rank alike; the group goes on.
        """
        return None

    @abstractmethod
    def ensure(self, group: Group, call: int, device: torch.device) -> None:
        """Set the resource up unless that was tried before, with tensors on ``device`` in mind.

        Collective: called on every rank, in the same order, when a signature is new to the group.  Afterwards every
        rank has the resource, or the same :meth:`refusal`.

        Raises:
            TransportFailure, PeerLost, CollectiveTimeout: a rank went away meanwhile.
        """

    @abstractmethod
    def refusal(self, device: str) -> str | None:
        """Why tensors on this type of device cannot use it, the same on all ranks; None if they can."""

    def features(self, device: str) -> frozenset[str]:
        """What implementations may know of it in their choices beside that it is there; the same on all ranks."""
        return frozenset()

    def link_costs(self, group: Group, device: torch.device, link: Mapping[str, float]) -> dict[str, float]:
        """What this rank measures of it, by name: fields of :class:`tpkernels.dispatch.Costs`, or names of its own.

        Collective, once per group and type of device, and only where costs are measured; ``link`` has the costs that
        were measured before.  A name of its own ends with ``_us`` for a time, else with ``_gbytes`` or ``_gflops``: it
        says whether the largest or the smallest value of the ranks is agreed on.

        Raises:
            TransportFailure: a peer did not answer.
        """
        return {}

    def gemm_costs(self, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
        """The same of a GEMM that only this resource's backend can run; not collective, once per dtype as well."""
        return {}

    @classmethod
    def costs_text(cls, own: Mapping[str, float]) -> str:
        """What ``explain`` says of the costs with names of its own, in a few words; empty: nothing."""
        return ""

    def poison(self, error: CommunicationError) -> None:
        """The group has failed: tell peers that may be waiting in this resource, and end waits of our own."""
        return None

    def abort(self) -> None:
        """Make the wait of the call in flight fail now, if the host waits in this resource."""
        return None

    def tick(self, group: Group, has_lost_a_peer: Callable[[], bool]) -> None:
        """Look after what nobody waits for: some four times a second while the group has not failed.

        ``has_lost_a_peer`` asks whether a peer has died or failed; it reads the group's store.
        """
        return None

    def close(self, group: Group) -> None:
        """The process group is gone, and makes no more calls: free what the garbage collector would not."""
        return None


_kinds: dict[str, type[Resource]] = {}


def register(kind: type[Resource]) -> None:
    """Have every group own one of this kind; a name may be taken once."""
    if kind.name in _kinds:
        raise ValueError(f"there is a kind of resource named {kind.name!r} already")
    _kinds[kind.name] = kind


def kinds() -> list[type[Resource]]:
    """Registered kinds in order of registration, which is that of their set-up."""
    return list(_kinds.values())


def held(group: Group) -> list[Resource]:
    """What the group has, in the order of :func:`kinds`, which is the same on all ranks."""
    return [group.resources[kind.name] for kind in kinds() if kind.name in group.resources]


def settings() -> dict[str, Any]:
    """Those of all kinds; see :meth:`Resource.settings`."""
    return {name: value for kind in kinds() for name, value in kind.settings().items()}


def check_setup(group: Group, what: str, device: torch.device) -> None:
    """Before the ranks talk about a call that is new: see :meth:`Resource.check_setup`."""
    for resource in _all(group):
        resource.check_setup(group, what, device)


def check_kinds(group: Group, call: int, registered: Sequence[Any]) -> None:
    """``registered``: the names that each rank has told the others.

    Raises:
        GroupMismatch: they are not the same everywhere, so that some ranks would wait for others in a set-up.
    """
    if any(names != registered[0] for names in registered):
        raise GroupMismatch(
            f"rank {group.rank}, call {call}: the ranks have registered different resources: {list(registered)}; "
            "import the same backends on every rank"
        )


def ensure(group: Group, call: int, device: torch.device) -> None:
    """Set up what the group does not have yet.  Collective; see :meth:`Resource.ensure`."""
    for resource in _all(group):
        resource.ensure(group, call, device)


def standings(group: Group, device: str) -> tuple[Standing, ...]:
    """What the group has for tensors on this type of device; equal on all ranks."""
    return tuple(
        Standing(one.name, why, one.features(device) if why is None else frozenset())
        for one, why in ((resource, resource.refusal(device)) for resource in held(group))
    )


def _close(resource: Resource, group: Group) -> None:
    group.checked.clear()  # what calls have settled may hold the resource
    resource.close(group)


def _all(group: Group) -> list[Resource]:
    """One of each kind, made here where the group has none."""
    for kind in kinds():
        if kind.name not in group.resources:
            made = group.resources[kind.name] = kind()
            # Closed with the process group, even if the monitor still looks at its state.
            weakref.finalize(group.pg, _close, made, group).atexit = False
    return held(group)
