"""What a program starts with: the job's process group, its mesh, and the options of groups that are ours.

Reads the place where ranks meet through :mod:`tpkernels.config`; assumes that every rank of the job comes.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpkernels import config
from tpkernels.comm.company import together
from tpkernels.comm.groups import resolve
from tpkernels.comm.job_store import TORCHRUN_TIMEOUT, in_time, meet_as_torchrun, meet_at
from tpkernels.comm.store_sockets import port_of
from tpkernels.gemm import canonical
from tpkernels.launchers import Job
from tpkernels.packages import check_platform

__all__ = ["init", "new_group"]


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
            ``TPKERNELS_SAME_BITS``, or none.  Calls that cannot give them raise.  The process computes with one thread.

    Examples:
        >>> mesh = tpk.init()
        >>> mesh.mesh_dim_names, mesh["tp"].size()
        (('dp', 'tp'), 2)

    Raises:
        ValueError: ``dp * tp`` is not the number of ranks; variables of launchers that contradict each other, or do not
            say where the ranks meet; ``same_bits`` is no power of two or no multiple of ``tp``, or ``dp`` is
            no power of two beside it.
        PeerLost: the store at which the ranks meet does not answer; names rank 0, where that serves it. Or a rank was
            stopped or cut off as the ranks connected; names it.
        UnsupportedPlatform: this is not Linux.
    """
    check_platform()
    was = config.is_deterministic()
    if deterministic is not None:
        config.be_deterministic(deterministic)
    try:
        return _join(tp, dp, device, timeout, same_bits)
    except BaseException:
        config.be_deterministic(was)  # no job was joined, and none of the next one is decided
        raise


def _join(
    tp: int | None,
    dp: int | None,
    device: str | None,
    timeout: float | datetime.timedelta | None,
    same_bits: int | None,
) -> DeviceMesh:
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
    meeting = dist.distributed_c10d._get_default_store()

    def make() -> DeviceMesh:
        return init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp"), backend_override=override)

    rank, limit = dist.get_rank(), _limit(timeout)
    if device == "cpu":
        return together(make, "mesh", meeting, rank, dist.get_world_size(), limit)
    with in_time(port_of(meeting), rank, limit):
        return make()


def _limit(timeout: float | datetime.timedelta | None) -> datetime.timedelta:
    """How long c10d itself waits for a rank."""
    if timeout is None:
        return TORCHRUN_TIMEOUT
    return timeout if isinstance(timeout, datetime.timedelta) else datetime.timedelta(seconds=timeout)


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
    rank, size = (0, 1) if environment is None else (environment.rank, environment.world_size)
    store, limit = options.get("store"), _limit(timeout)
    if device == "cpu":

        def make() -> None:
            dist.init_process_group("gloo", **options)

        together(make, "group", store, rank, size, limit, undo=dist.destroy_process_group)
        return
    with in_time(port_of(store), rank, limit):  # NCCL does not connect now, and takes the device of this thread
        dist.init_process_group("nccl", **options)


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
