"""Which job a process belongs to, by what its launcher has put into the environment.

Owns: the variables of ``torchrun`` and of those who set the same ones (Ray Train, Kubeflow's PyTorchJob), Open MPI,
MVAPICH2, MPICH and Intel MPI (Hydra), Slurm's ``srun`` and bare PMI, in this order, and where the ranks of a job meet.
The order matters: ``mpirun`` inside a Slurm allocation starts its daemons by ``srun``, so that its ranks see Slurm's
variables of a daemon, which say nothing of the rank.

Kubeflow speaks of pods.  Its PyTorchJob gives each pod ``RANK`` and ``WORLD_SIZE``, which are those of a process only
where each pod runs one.  For several, and in a TrainJob always, ``torchrun`` reads the ``PET_*`` variables, and
what it starts has a ``LOCAL_RANK``.

A process that is alone, started by a launcher or not, is no job: it may start ranks of its own.  That includes a shell
or a script inside a Slurm allocation (``salloc``, ``sbatch``): ``SLURM_NTASKS`` tells what was asked for, and only
``SLURM_STEP_ID`` that ``srun`` has started this process.

Refuses: half of what ``torchrun`` sets, numbers that are none or contradict each other, a job over several hosts whose
first one is not known, a process of a pod that its job counts otherwise.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Job", "Meeting", "first_host", "job_of", "meeting_of"]

Environ = Mapping[str, str]

LOOPBACK = "127.0.0.1"
PORTS = range(16384, 32768)
"""Where derived ports lie: below those that Linux gives to outgoing connections."""
SPECIAL_STEPS = 0xFFFFFFF0
"""Slurm's steps from this number on (batch script, interactive shell, daemons) are not made of tasks."""
HYDRA = ("hydra_pmi_proxy", "hydra_bstrap_pr")
"""Names of Hydra's daemon on each host, as /proc cuts them to 15 characters."""


@dataclass(frozen=True)
class Job:
    """A rank's place in a job of several, and what started it."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launcher: str = "torchrun"
    name: str | None = None
    """What all ranks of the job, and no other job on the host, can name."""


@dataclass(frozen=True)
class Meeting:
    """Where rank 0 waits for the others."""

    host: str
    port: int
    derived_from: str | None
    """What the port was computed from; None if ``MASTER_PORT`` says it."""


@dataclass(frozen=True)
class _Variables:
    launcher: str
    rank: str
    world_size: str
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    name: tuple[str, ...] = ()


_MPI = (
    _Variables(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Variables(
        "MVAPICH2",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Variables("Hydra", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",)),
)
_PMI = _Variables(
    "PMI", "PMI_RANK", "PMI_SIZE", ("PMI_LOCAL_RANK", "LOCAL_RANK"), ("PMI_LOCAL_SIZE", "LOCAL_WORLD_SIZE")
)


def job_of(environ: Environ) -> Job | None:
    """The job that this process is a rank of; None if it is alone.

    Raises:
        ValueError: variables that contradict each other, or do not say how many ranks there are.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _kubeflow(environ) if _is_pod(environ) else _torchrun(environ)
    found = next((_of_mpi(kind, environ) for kind in _MPI if {kind.rank, *kind.local_rank} <= environ.keys()), None)
    if found is None:
        found = _of_slurm(environ)
    if found is None and _PMI.rank in environ and _PMI.world_size in environ:
        found = _of_mpi(_PMI, environ)
    given = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if found is None:
        _check_alone(environ, given)
        return None
    for name, value in (("RANK", found.rank), ("WORLD_SIZE", found.world_size)):
        if name in given and _number(environ, name) != value:
            raise ValueError(
                f"{name}={environ[name]}, but {found.launcher} says {value}: unset {name}, or set both RANK and "
                "WORLD_SIZE, which come first"
            )
    return found if found.world_size > 1 else None


def _torchrun(environ: Environ) -> Job:
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_rank = _number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank
    size = _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else world_size
    return _checked(Job(rank, local_rank, world_size, size), "RANK", "WORLD_SIZE")


def _is_pod(environ: Environ) -> bool:
    """Whether Kubeflow's variables stand alone: ``torchrun``, which reads them, gives what it starts a LOCAL_RANK."""
    return "PET_NNODES" in environ and "LOCAL_RANK" not in environ


def _kubeflow(environ: Environ) -> Job:
    """One process in each pod of a PyTorchJob."""
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    pods = environ["PET_NNODES"]
    if pods != str(world_size):
        raise ValueError(
            f"PET_NNODES={pods} and WORLD_SIZE={world_size}: this PyTorchJob does not run one process in each of "
            "a fixed number of pods, and RANK is the pod's. Start the program with torchrun, without --nnodes and "
            "--nproc-per-node, which it reads from PET_NNODES and PET_NPROC_PER_NODE"
        )
    return _checked(Job(rank, 0, world_size, 1), "RANK", "WORLD_SIZE")


def _of_mpi(kind: _Variables, environ: Environ) -> Job:
    rank, world_size = _number(environ, kind.rank), _number(environ, kind.world_size)
    if world_size == 1:
        return Job(0, 0, 1, 1, kind.launcher)
    local_rank, size = (_first(environ, names) for names in (kind.local_rank, kind.local_world_size))
    if local_rank is None:
        raise ValueError(
            f"{kind.rank}={rank} and {kind.world_size}={world_size}, but none of {list(kind.local_rank)} says which "
            "rank of this host this is: export LOCAL_RANK and LOCAL_WORLD_SIZE, or start the ranks with torchrun"
        )
    name = next((environ[name] for name in kind.name if name in environ), None)
    return _checked(Job(rank, local_rank, world_size, size or 0, kind.launcher, name), kind.rank, kind.world_size)


def _of_slurm(environ: Environ) -> Job | None:
    """The place in the step that ``srun`` has started; None outside of steps."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    if step is None or "SLURM_PROCID" not in environ or not step.isdecimal() or int(step) >= SPECIAL_STEPS:
        return None
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    rank, world_size = _number(environ, "SLURM_PROCID"), _number(environ, size)
    local_rank = _number(environ, "SLURM_LOCALID") if "SLURM_LOCALID" in environ else rank
    name = f"{environ.get('SLURM_JOB_ID', '')}.{step}"
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE")
    local = world_size if _nodes(environ) == 1 else 0
    if tasks is not None and "SLURM_NODEID" in environ:
        counts, node = _tasks_per_node(tasks), _number(environ, "SLURM_NODEID")
        if node >= len(counts):
            raise ValueError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE={tasks} has {len(counts)} nodes")
        local = counts[node]
    return _checked(Job(rank, local_rank, world_size, local, "Slurm", name), "SLURM_PROCID", size)


def _check_alone(environ: Environ, given: list[str]) -> None:
    """Nobody says that there are other ranks; refuse half a statement."""
    if "PMIX_RANK" in environ and "SLURM_JOB_ID" not in environ:
        raise ValueError(
            f"PMIX_RANK={environ['PMIX_RANK']}, but nothing says how many ranks there are: export RANK=$PMIX_RANK and "
            "WORLD_SIZE (and MASTER_ADDR, MASTER_PORT) in what is started, or start the ranks with torchrun"
        )
    if _is_pod(environ) and environ["PET_NNODES"] != "1":
        raise ValueError(
            f"PET_NNODES={environ['PET_NNODES']} says that this pod is one of several, but RANK and WORLD_SIZE are not "
            "set: start the program with torchrun, which reads the PET_* variables, or unset PET_NNODES"
        )
    if given and (given[0] == "RANK" or environ["WORLD_SIZE"] != "1"):
        missing = "WORLD_SIZE" if given == ["RANK"] else "RANK"
        raise ValueError(
            f"{given[0]}={environ[given[0]]} is set, but {missing} is not: export both (and MASTER_ADDR, MASTER_PORT), "
            f"start the ranks with torchrun --nproc-per-node N, or unset {given[0]}"
        )


def _checked(job: Job, rank: str, world_size: str) -> Job:
    if not 0 <= job.rank < job.world_size:
        raise ValueError(f"{rank}={job.rank} must be at least 0 and below {world_size}={job.world_size}")
    return job


def _number(environ: Environ, name: str) -> int:
    text = environ.get(name)
    if text is None or not text.isdecimal():
        raise ValueError(f"{name} must be a whole number, got {text!r}")
    return int(text)


def _first(environ: Environ, names: tuple[str, ...]) -> int | None:
    return next((_number(environ, name) for name in names if name in environ), None)


# --- where the ranks meet ---------------------------------------------------------------------------------------------


def meeting_of(job: Job, environ: Environ) -> Meeting:
    """Where rank 0 of a job that ``torchrun`` did not start waits.

    ``MASTER_ADDR`` and ``MASTER_PORT`` say it, and what they leave open is derived: on one host
    over the loopback, on several under Slurm at the first host of the step; the port is a function of the job's name.

    Raises:
        ValueError: it cannot be derived; the message has the commands.
    """
    host = environ.get("MASTER_ADDR") or _host(job, environ)
    if "MASTER_PORT" in environ:
        return Meeting(host, _number(environ, "MASTER_PORT"), None)
    name = job.name if job.name is not None else _hydra_of(Path("/proc"))
    if name is None:
        raise ValueError(
            f"{job.launcher} started {job.world_size} ranks, but nothing that they share names the job, from which a "
            "port could be derived: export MASTER_PORT=29500 (any free port) before the launch"
        )
    digest = hashlib.blake2b(f"{job.launcher} {name}".encode(), digest_size=8).digest()
    return Meeting(host, PORTS[int.from_bytes(digest) % len(PORTS)], f"{job.launcher}'s job {name}")


def _host(job: Job, environ: Environ) -> str:
    if job.local_world_size == job.world_size:
        return LOOPBACK
    if job.launcher == "Slurm":
        names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        nodes = next((environ[name] for name in names if environ.get(name)), None)
        if nodes is not None:
            return first_host(nodes)
        missing = f"none of {list(names)} is"
        command = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500'
    else:
        missing, command = "MASTER_ADDR is not", "export MASTER_ADDR=$(hostname) MASTER_PORT=29500"
        if job.launcher == "Open MPI":
            command += ", and pass both on: mpirun -x MASTER_ADDR -x MASTER_PORT ..."
    raise ValueError(
        f"{job.launcher} started {job.world_size} ranks, {job.local_world_size or 'an unknown number'} of them on this "
        f"host, and {missing} set, which would say where rank 0 is. Before the launch, on rank 0's host: {command}; or "
        "start the ranks with torchrun --nnodes ... --rdzv-endpoint HOST:PORT ..."
    )


def first_host(nodes: str) -> str:
    """The first of Slurm's list of hosts: ``a[03-05,9]b,c`` is a03b, a04b, a05b, a9b, c.

    Raises:
        ValueError: not such a list.
    """
    name, end = "", 0
    for match in re.finditer(r"([^\[\],]+)|\[([^\[\]]+)\]", nodes.strip()):
        if match.start() != end:
            break
        end = match.end()
        name += match[1] or re.split("[-,]", match[2])[0]
    if not name or (end < len(nodes.strip()) and nodes.strip()[end] != ","):
        raise ValueError(f"{nodes!r} is not a list of hosts as Slurm writes it, such as node[01-04,07]")
    return name


def _nodes(environ: Environ) -> int | None:
    return _first(environ, ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"))


def _tasks_per_node(text: str) -> list[int]:
    """``4(x2),3`` is 4, 4, 3."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE must be numbers such as 4(x2),3, got {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _hydra_of(proc: Path) -> str | None:
    """Hydra's daemon that has started this process: it tells its ranks nothing else that they have in common."""
    pid = "self"
    while pid not in ("0", "1"):
        try:
            text = (proc / pid / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        start, end = text.index("("), text.rindex(")")
        if text[start + 1 : end] in HYDRA:
            return f"{text[start + 1 : end]} {text[:start].strip()}"
        pid = text[end + 1 :].split()[1]
    return None
