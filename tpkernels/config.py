"""The only reader of the process environment.

The variables of ``torchrun``, ``srun`` and ``mpirun`` describe the job (:mod:`tpkernels.launchers`); the
``TPKERNELS_*`` variables are for people who cannot edit the program that calls us.  Everything else is an argument of
the function it concerns.

==========================  =========================================================================================
``TPKERNELS_CALIBRATE``     ``0``: built-in costs instead of measuring the group once (default ``1``)
``TPKERNELS_BATCH_GLOO``    ``0``: leave gloo's threads in the scheduling class that torch made them in, in which they
                            may take the core from the thread that computes (default ``1``; Linux)
``TPKERNELS_NUM_CHUNKS``    forces the chunk count of ``chunked`` (at most 100) and ``symmetric`` (at most 64); must be
                            equal on all ranks
``TPKERNELS_NCCL_MAX_CTAS``  caps the CTAs of NCCL groups that :func:`tpkernels.init` creates, so that transfers leave
                            the SMs to the GEMM (default: NCCL's own choice)
``TPKERNELS_NCCL_ZERO_CTA``  ``1``: those groups move the chunks of equal shards with copy engines, which take no SM
                            (NCCL 2.28, one host; not run on a GPU yet); must be equal on all ranks
``TPKERNELS_TUNE``          ``1``: tile sizes of ``symmetric`` that no rank's cache has are measured at the first call
                            of their kind, some seconds each (default ``0``: a pure function of the problem); must be
                            equal on all ranks
``TPKERNELS_SAME_BITS``     the largest tensor-parallel degree that is to give the same bits, a power of two: the
                            ``same_bits`` of :func:`tpkernels.init` where that is not given; must be equal on all ranks
``TPKERNELS_CACHE_DIR``     the folder of measured tile sizes, an absolute path (default: the user's cache folder)
``TPKERNELS_CUDA_LIBRARY``  the library of the CUDA kernels, an absolute path: one that was built elsewhere, instead of
                            this installation's ``tpkernels/_cuda.so``
``TPKERNELS_STREAM_WRITES``  ``0``: kernels tell ``symmetric``'s GEMM that a chunk has come, as they do where the
                            driver cannot let streams write words (default ``1``); ranks may differ
``TPKERNELS_JOB_SECRET``    the secret of the job, 16 to 4096 characters, equal on all ranks: what anybody else writes
                            into the store is ignored; :func:`tpkernels.launch` sets it for its ranks
``TPKERNELS_JOB_SECRET_FILE``  an absolute path of a file with the secret that only its owner may read (``chmod 600``),
                            for ``torchrun``, ``srun`` and ``mpirun``; comes first
``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES``  ``1``: torch's own; several ranks of one GPU may share its memory, for
                            experiments
``TORCH_NCCL_*``            torch's own; what :func:`nccl_failures_raise` sets for the groups of :func:`tpkernels.init`,
                            where you have not
==========================  =========================================================================================
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tpkernels import launchers

__all__ = [
    "JOB_SECRET", "JOB_SECRET_FILE", "Config", "agent_serves_store", "be_deterministic", "inherited",
    "is_deterministic", "job_environment", "job_name", "job_secret", "load", "local_rank", "meeting",
    "nccl_failures_raise", "nccl_waits_block", "profiler_says_nothing",
]  # fmt: skip

# How the threads that torch gives an NCCL group treat an operation that fails or takes longer than the time-out; read
# by torch when a group is made.  What stands here is from the source of ProcessGroupNCCL, not from a run.
_NCCL_FAILURES_RAISE = {
    # 2 (CleanUpOnly): the watchdog aborts the communicator and the process goes on.  With torch's default, 3, and with
    # 1 it ends the process, by an exception in a thread that nobody catches.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # 0: no dump of the flight recorder.  The thread that writes one for a failure of any rank does not go back to its
    # work, but ends its process after the time of TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC: all ranks, 8 minutes later.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # The watchdog sleeps four times so many milliseconds before it aborts, to leave time for that dump, with a lock
    # that the next operation needs.  torch's default is 15000: the thread that is to raise waits for a minute.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
# Left as they are.  TORCH_NCCL_BLOCKING_WAIT: every wait would hold up the host, and there would be no watchdog.
# TORCH_NCCL_RETHROW_CUDA_ERRORS: a CUDA error that sticks is not a peer's, and no new group mends it.
# TORCH_NCCL_PROPAGATE_ERROR: our ranks tell each other what failed, with names.  TORCH_NCCL_ENABLE_MONITORING and
# TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC: they end a process whose watchdog hangs in the driver, which nobody else can.
JOB_SECRET, JOB_SECRET_FILE = "TPKERNELS_JOB_SECRET", "TPKERNELS_JOB_SECRET_FILE"
_SECRET_LENGTHS = range(16, 4097)
_OLD_NAMES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "NCCL_ASYNC_ERROR_HANDLING"}


@dataclass(frozen=True)
class Config:
    """Settings of this process, read once per call of :func:`load`."""

    calibrate: bool
    num_chunks: int | None
    nccl_max_ctas: int | None
    overlapping_devices: bool = False
    nccl_zero_cta: bool = False
    tune: bool = False
    cache_dir: Path | None = None
    batch_gloo: bool = True
    cuda_library: Path | None = None
    stream_writes: bool = True
    same_bits: int | None = None


class _Asked:
    """What the program has asked for, which no variable says."""

    deterministic = False


_asked = _Asked()


def be_deterministic(asked: bool) -> None:
    """Whether choices between implementations rest on nothing that is measured: see :func:`tpkernels.init`."""
    _asked.deterministic = asked


def is_deterministic() -> bool:
    return _asked.deterministic


def inherited() -> dict[str, str]:
    """All of this process's environment, for the ranks that it starts."""
    return dict(os.environ)


def load(environ: Mapping[str, str] = os.environ) -> Config:
    """Read the ``TPKERNELS_*`` variables.

    Raises:
        ValueError: a variable has a value that is not of its kind.
    """
    return Config(
        calibrate=_flag(environ, "TPKERNELS_CALIBRATE", default=True) and not _asked.deterministic,
        num_chunks=_positive(environ, "TPKERNELS_NUM_CHUNKS", limit=100),
        nccl_max_ctas=_positive(environ, "TPKERNELS_NCCL_MAX_CTAS"),
        nccl_zero_cta=_flag(environ, "TPKERNELS_NCCL_ZERO_CTA", default=False),
        tune=_flag(environ, "TPKERNELS_TUNE", default=False) and not _asked.deterministic,
        cache_dir=_path(environ, "TPKERNELS_CACHE_DIR"),
        cuda_library=_path(environ, "TPKERNELS_CUDA_LIBRARY"),
        stream_writes=_flag(environ, "TPKERNELS_STREAM_WRITES", default=True),
        batch_gloo=_flag(environ, "TPKERNELS_BATCH_GLOO", default=True),
        same_bits=_positive(environ, "TPKERNELS_SAME_BITS"),
        overlapping_devices=environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1",
    )


def job_environment(environ: Mapping[str, str] = os.environ) -> launchers.Job | None:
    """The rank's place in the job that ``torchrun``, ``srun`` or ``mpirun`` has started; None in a process alone.

    Raises:
        ValueError: variables that contradict each other.
    """
    return launchers.job_of(environ)


def job_name(environ: Mapping[str, str] = os.environ) -> str | None:
    """What the launcher calls the job, where it tells its ranks; those of another job are told another one."""
    run = environ.get("TORCHELASTIC_RUN_ID", "none")  # torchrun's default for a rendezvous without an id
    if run != "none":
        return f"torchrun's run {run}"
    try:
        job = launchers.job_of(environ)
    except ValueError:
        return None  # whoever needs the job says what is wrong with it
    return None if job is None or job.name is None else f"{job.launcher}'s job {job.name}"


def job_secret(environ: Mapping[str, str] = os.environ) -> bytes | None:
    """The secret of this job; None where nobody gave it one.  No message has it.

    Raises:
        ValueError: it is too short or too long, or its file cannot be read, is no file, or is open to others.
    """
    path = _path(environ, JOB_SECRET_FILE)
    name, found = (
        (JOB_SECRET, environ.get(JOB_SECRET, "").encode())
        if path is None
        else (f"{JOB_SECRET_FILE} ({path})", _private(path))
    )
    found = found.strip()
    if path is None and not found:
        return None
    if len(found) not in _SECRET_LENGTHS:
        limits = f"{_SECRET_LENGTHS.start} to {_SECRET_LENGTHS.stop - 1}"
        raise ValueError(f"{name} must have {limits} characters, it has {len(found)}: openssl rand -hex 32 makes one")
    return found


def _private(path: Path) -> bytes:
    """What is in a file that belongs to this user and that nobody else can open."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # to open a pipe would wait for a writer
    except OSError as error:
        raise ValueError(f"{JOB_SECRET_FILE} ({path}) cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{JOB_SECRET_FILE} ({path}) must be a regular file")
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ValueError(
                f"{JOB_SECRET_FILE} ({path}) must belong to user {os.getuid()} and be closed to all others, it belongs "
                f"to user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):04o}: chmod 600"
            )
        return os.read(descriptor, _SECRET_LENGTHS.stop + 2)  # with the end of the line
    finally:
        os.close(descriptor)


def local_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """What torch's meshes take for the number of this process's GPU; None where it is not set.

    Raises:
        ValueError: it is no number.
    """
    value = environ.get("LOCAL_RANK")
    if value is None:
        return None
    if not value.isdecimal():
        raise ValueError(f"LOCAL_RANK must be a number of at least 0, got {value!r}")
    return int(value)


def meeting(job: launchers.Job, environ: Mapping[str, str] = os.environ) -> launchers.Meeting | None:
    """Where the job's ranks meet; None under ``torchrun``, which c10d knows by itself.

    Raises:
        ValueError: several hosts, and nothing says which is rank 0's.
    """
    return None if job.launcher == "torchrun" else launchers.meeting_of(job, environ)


def agent_serves_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the store of ``env://`` belongs to torchrun's agent, or to our parent, and not to rank 0."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def torchrun_meeting(environ: Mapping[str, str] = os.environ) -> launchers.Meeting | None:
    """Where ``torchrun`` tells ranks to meet; None where it does not say so, of which c10d's error tells more."""
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT", "")
    return launchers.Meeting(host, int(port), None) if host and port.isdecimal() else None


@contextmanager
def nccl_failures_raise(environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """NCCL groups that are made inside leave it to us to raise: torch does not end the process when they fail.

    Only here, because for other groups torch's own choice is the safe one: nobody watches what they compute.  A
    variable that the user has set stays.  ``torchrun`` sets the first one to 1 for every rank whose user has not, so
    there 1 does not count as set; 3 ends the process as well.

    A group that the user has made keeps torch's settings, and then it depends on who comes first.  The monitor finds a
    peer that died on this host, a rank that does not come, and calls in another order: the process lives.  A failure
    that NCCL itself reports, as of a connection, is torch's: our error comes about a minute before the process ends.
    Set the three variables before the group is made to keep it.  A default group that existed before
    :func:`tpkernels.init` is such a group, also where an axis of the mesh is made of it; its thread may hear of
    failures of other groups, and end the process minutes later.
    """
    ours = dict(_NCCL_FAILURES_RAISE)
    for name in _NCCL_FAILURES_RAISE:
        found = environ.get(name, environ.get(_OLD_NAMES.get(name, name)))
        by_torchrun = name == "TORCH_NCCL_ASYNC_ERROR_HANDLING" and found == "1" and "TORCHELASTIC_RUN_ID" in environ
        if found is not None and not by_torchrun:
            del ours[name]
    before = {name: environ.get(name) for name in ours}
    environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del environ[name]
            else:
                environ[name] = value


def nccl_waits_block(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the waits of NCCL groups hold the host up: torch then has no thread that knows which works have ended."""
    value = environ.get("TORCH_NCCL_BLOCKING_WAIT", environ.get("NCCL_BLOCKING_WAIT", "0"))
    return value.lower() in ("1", "y", "yes", "t", "true")


def _flag(environ: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = environ.get(name)
    if value is None or value == "":
        return default
    if value not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {value!r}")
    return value == "1"


def _path(environ: Mapping[str, str], name: str) -> Path | None:
    value = environ.get(name)
    if value is None or value == "":
        return None
    if not Path(value).is_absolute():
        raise ValueError(f"{name} must be an absolute path, got {value!r}")
    return Path(value)


def _positive(environ: Mapping[str, str], name: str, limit: int | None = None) -> int | None:
    value = environ.get(name)
    if value is None or value == "":
        return None
    if not value.isdecimal() or int(value) == 0:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if limit is not None and int(value) > limit:
        raise ValueError(f"{name} must be at most {limit}, got {value}")
    return int(value)


def profiler_says_nothing(environ: MutableMapping[str, str] = os.environ) -> None:
    """Kineto reports no start and stop of its own on stderr, unless the user has set how much it says.

    It reads the variable when it is first used.  99 is above every level that it has.
    """
    environ.setdefault("KINETO_LOG_LEVEL", "99")
