"""Process groups as the ops see them, and the mesh that a program starts with.

A :class:`Group` adds to a c10d ``ProcessGroup`` what the ops need: the call number that all ranks share, the calls that
were agreed on, the first failure (poison), and a lock, because collectives of one group must not interleave.
"""

from __future__ import annotations

import datetime
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from tpkernels import config
from tpkernels.comm import gloo_threads
from tpkernels.comm.bounded_store import BoundedStore
from tpkernels.comm.device_backends import DeviceBackends
from tpkernels.comm.job_identity import JobIdentity
from tpkernels.comm.job_store import meet_as_torchrun, meet_at
from tpkernels.comm.trail import Trail
from tpkernels.comm.works import Works
from tpkernels.errors import CommunicationError, GroupPoisoned, PeerLost
from tpkernels.gemm import canonical
from tpkernels.launchers import Job
from tpkernels.packages import check_platform

if TYPE_CHECKING:
    from tpkernels.comm.liveness import Identity

__all__ = [
    "Group", "GroupLike", "InFlight", "all_groups", "group_name", "group_size", "init", "live_groups", "new_group",
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
        _seen[key] = (weakref.ref(group, lambda gone: _forget_seen(key, gone)), state)
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
    reference = weakref.ref(pg, lambda gone: _forget(name, gone))
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
        group.lock, group._control, group.in_flight = threading.RLock(), None, None
        group.poison = group.poison or PeerLost(
            f"rank {group.rank}: this process was forked from the one that is in group {group.name!r}, and cannot take "
            "part in its calls"
        )


os.register_at_fork(after_in_child=_disown)


def all_groups() -> list[Group]:
    """Groups of this process, whether their ranks have met or not."""
    return [group for group in list(_groups.values()) if group.reference() is not None]


def live_groups() -> list[Group]:
    """Groups of this process whose ranks have met."""
    return [group for group in all_groups() if group.key is not None]


def _forget_seen(key: int, gone: weakref.ReferenceType[GroupLike]) -> None:
    if key in _seen and _seen[key][0] is gone:
        del _seen[key]


def _forget(name: str, gone: weakref.ReferenceType[dist.ProcessGroup]) -> None:
    for key, (_, state) in list(_seen.items()):  # a mesh may outlive its group
        if state.reference is gone:
            del _seen[key]
    if name in _groups and _groups[name].reference is gone:
        del _groups[name]


def _timeout_seconds(pg: dist.ProcessGroup, backends: DeviceBackends) -> float:
    """c10d gives all backends of a group one time-out; some do not tell it."""
    for device in backends.by_device:
        options = getattr(pg._get_backend(torch.device(device)), "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            return float(timeout.total_seconds())
    return 1800.0


def init(
    tp: int | None = None,
    dp: int | None = None,
    *,
    device: str | None = None,
    timeout: float | datetime.timedelta | None = None,
    deterministic: bool | None = None,
    same_bits: int | None = None,
) -> DeviceMesh:
    """Join the job and return its mesh with axes ``("dp", "tp")``.

    Reads what ``torchrun``, :func:`tpkernels.launch`, Slurm's ``srun`` or an ``mpirun`` put into the environment
    (:mod:`tpkernels.launchers`); a process that no launcher started is a job of one rank.  Uses the process group that
    exists, or makes one: NCCL with CUDA devices, gloo otherwise.

    Args:
        tp: ranks that share one layer; default: all ranks that ``dp`` leaves.
        dp: replicas; default: ``world_size // tp``.
        device: ``"cpu"`` or ``"cuda"``; default: CUDA where this process sees a GPU.
        timeout: seconds after which a wait for a peer fails; default: c10d's (30 minutes for gloo).
        deterministic: a second launch with the same inputs, ranks, threads and machine gives the same bits: ``"auto"``
            chooses by built-in costs.  False, the default: by costs that each launch measures, so that two launches
            may choose otherwise, and their results differ in the last bits.  Holds for all groups of the process;
            equal on all ranks; None leaves it as it was.
        same_bits: the largest tensor-parallel degree, a power of two, that gives the same bits as this one; default:
            ``TPKERNELS_SAME_BITS``, or none.  What cannot raises.  This process then computes with one thread.

    Examples:
        >>> mesh = tpk.init()
        >>> mesh.mesh_dim_names, mesh["tp"].size()
        (('dp', 'tp'), 2)

    Raises:
        ValueError: ``dp * tp`` is not the number of ranks; variables of launchers that contradict each other, or do not
            say where the ranks meet; ``same_bits`` is no power of two or no multiple of ``tp``, or ``dp`` is not 1.
        UnsupportedPlatform: this is not Linux.
    """
    check_platform()
    if deterministic is not None:
        config.be_deterministic(deterministic)
    environment = None if dist.is_initialized() else config.job_environment()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")
    world_size = dist.get_world_size() if dist.is_initialized() else environment.world_size if environment else 1
    dp, tp = _mesh_shape(world_size, dp, tp)
    same_bits = config.load().same_bits if same_bits is None else same_bits
    if same_bits is not None:
        canonical.check_job(same_bits, dp, tp, device)
    with config.nccl_failures_raise() if device == "cuda" else nullcontext():
        mesh = _make_mesh(device, environment, dp, tp, timeout)
    if same_bits is not None:
        resolve(mesh["tp"]).keep_same_bits(same_bits)
    return mesh


def _make_mesh(
    device: str, environment: Job | None, dp: int, tp: int, timeout: float | datetime.timedelta | None
) -> DeviceMesh:
    if not dist.is_initialized():
        _init_process_group(device, environment, timeout)
    elif device == "cuda" and not torch.cuda.is_initialized():
        # Nobody has chosen a GPU yet. A mesh would, by this number, also in a process that is shown one GPU alone.
        local_rank = config.local_rank()
        if local_rank is not None:
            torch.cuda.set_device(_own_gpu(local_rank))
    # Groups of a mesh do not inherit the options of the default group. One axis of all ranks *is* the default group.
    # Each has options of its own, into which c10d writes the group's name.
    own = device == "cuda" and dp > 1 and tp > 1
    override: Any = {axis: ("nccl", _nccl_options(timeout)) for axis in ("dp", "tp")} if own else None
    return init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp"), backend_override=override)


def new_group(ranks: Sequence[int], device: str, timeout: float) -> dist.ProcessGroup:
    """A group of some ranks with the options that :func:`init` gives its own; every rank of the job calls it."""
    options = _nccl_options(timeout) if device == "cuda" else None
    with config.nccl_failures_raise() if device == "cuda" else nullcontext():
        group: dist.ProcessGroup = dist.new_group(
            list(ranks),
            timeout=datetime.timedelta(seconds=timeout),
            backend="nccl" if device == "cuda" else "gloo",
            pg_options=options,
        )
    return group


def _mesh_shape(world_size: int, dp: int | None, tp: int | None) -> tuple[int, int]:
    asked = {"dp": dp, "tp": tp}
    for name, value in asked.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if tp is None:
        tp = world_size // (dp or 1)
    if dp is None:
        dp = world_size // tp if tp else 0
    if dp * tp != world_size:
        given = " x ".join(f"{name} ({value})" for name, value in asked.items() if value is not None)
        raise ValueError(f"{given} must be the number of ranks ({world_size}), or divide it")
    return dp, tp


def _init_process_group(
    device: str,
    environment: Job | None,
    timeout: float | datetime.timedelta | None,
) -> None:
    if timeout is not None and not isinstance(timeout, datetime.timedelta):
        timeout = datetime.timedelta(seconds=timeout)
    options: dict[str, Any] = {"timeout": timeout} if timeout is not None else {}
    if device == "cuda":
        torch.cuda.set_device(_own_gpu(environment.local_rank if environment else 0))
        options["pg_options"] = _nccl_options(timeout)
    if environment is None:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    else:
        place, meet = config.meeting(environment), meet_at
        if place is None:
            place, meet = config.torchrun_meeting(), meet_as_torchrun
        if place is not None:
            store = meet(place, environment, timeout)
            options |= {"store": store, "rank": environment.rank, "world_size": environment.world_size}
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **options)


def _own_gpu(local_rank: int) -> int:
    """The number by which a rank of this host calls its GPU: a process may be shown all of them, or only its own.

    Raises:
        ValueError: it is shown none.
    """
    visible = torch.cuda.device_count()
    if visible == 0:
        raise ValueError(
            "device is 'cuda', but this process sees no GPU: there is none, CUDA_VISIBLE_DEVICES hides it, or torch is "
            "built without CUDA; `tpkernels doctor` says more, and device='cpu' needs none"
        )
    return local_rank % visible


def _nccl_options(timeout: float | datetime.timedelta | None) -> Any:
    """Options of an NCCL group whose transfers run beside GEMMs.

    High priority: a GEMM that is already running leaves its next free SM to a transfer that is posted now. With equal
    priority the transfer's CTAs wait behind all of the GEMM's, and nothing overlaps from the second chunk on.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
        options._timeout = datetime.timedelta(seconds=seconds)  # a mesh takes the time-out of its groups from here
    settings = config.load()
    if settings.nccl_max_ctas is not None:
        options.config.max_ctas = settings.nccl_max_ctas
    if settings.nccl_zero_cta:
        zero = getattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO", None)
        if zero is None:
            raise ValueError(f"TPKERNELS_NCCL_ZERO_CTA needs NCCL 2.28, which torch {torch.__version__} does not have")
        settings_of_nccl: Any = options.config  # its type does not name all that it has
        settings_of_nccl.cta_policy = zero
    return options
