"""Processes with the environments of srun and mpirun find each other, and strangers do not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tpkernels.comm import job_store, startup
from tpkernels.errors import PeerLost
from tpkernels.launchers import job_of, meeting_of
from tpkernels.testing.spawn import fork_server

pytestmark = pytest.mark.gloo

LIMIT_S = 60.0
LATE_S = 0.2
"""How much later than the others rank 0 makes a second group: they must not take its first address for the second."""


def slurm(rank: int, world_size: int, job: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(world_size),
        "SLURM_STEP_TASKS_PER_NODE": str(world_size),
        "SLURM_STEP_NODELIST": "here",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def open_mpi(rank: int, world_size: int, job: str) -> dict[str, str]:
    names = {"RANK": rank, "SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_SIZE": world_size}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()} | {"OMPI_MCA_ess_base_jobid": job}


def hydra(rank: int, world_size: int, job: str) -> dict[str, str]:
    names = {"PMI_RANK": rank, "PMI_SIZE": world_size, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": world_size}
    return {name: str(value) for name, value in names.items()}


def pytorchjob(rank: int, world_size: int, job: str) -> dict[str, str]:
    """A pod of Kubeflow's PyTorchJob, all of them on this host."""
    names = {"RANK": rank, "WORLD_SIZE": world_size, "PET_NODE_RANK": rank, "PET_NNODES": world_size}
    return {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(connection: object, environ: dict[str, str], groups: int = 2) -> None:
    """A process with this environment, as ``srun`` starts it, but without the time that imports take."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(environ)
    try:
        said = []
        for number in range(groups):  # a job may leave its group and make another one
            if number and said[0][0] == 0:
                time.sleep(LATE_S)
            mesh = tpk.init(timeout=8.0)
            y = tpk.all_reduce(torch.full((2, 3), float(dist.get_rank() + 1)), mesh["tp"])
            said.append((dist.get_rank(), dist.get_world_size(), float(y[0, 0])))
            dist.destroy_process_group()
        connection.send(said)  # type: ignore[attr-defined]
    except Exception as error:  # noqa: BLE001 - the test reads it
        connection.send(f"{type(error).__name__}: {error}")  # type: ignore[attr-defined]


def train_with_ray(connection: object, environ: dict[str, str]) -> None:
    """A worker of ray.train's TorchTrainer, without Ray: what its ``torch/config.py`` does before it calls the loop."""
    os.environ.update(environ)
    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    dist.init_process_group("gloo", "env://", timedelta(seconds=1800), world_size, rank)
    group = dist.group.WORLD
    mesh = tpk.init(tp=2)  # the loop begins
    y = tpk.all_reduce(torch.full((2, 3), float(rank + 1)), mesh["tp"])
    connection.send((group is dist.group.WORLD, tuple(mesh.shape), float(y[0, 0])))  # type: ignore[attr-defined]
    dist.destroy_process_group()


def started(environs: list[dict[str, str]], run: Callable[[object, dict[str, str]], None] = run) -> list[object]:
    """What processes with these environments say, in order."""
    context, answers, processes = fork_server(), [], []
    for environ in environs:
        mine, theirs = context.Pipe()
        process = context.Process(target=run, args=(theirs, environ), daemon=True)
        process.start()
        theirs.close()
        answers.append(mine)
        processes.append(process)
    try:
        return [mine.recv() if mine.poll(LIMIT_S) else "silence" for mine in answers]
    finally:
        for process in processes:
            process.join(LIMIT_S)
            process.kill()


def test_ranks_of_each_launcher_find_each_other(full: bool) -> None:
    for make, world_size in ((slurm, 2), (open_mpi, 3), (pytorchjob, 2), *(((hydra, 2),) if full else ())):
        environs = [make(rank, world_size, f"meet{os.getpid()}") for rank in range(world_size)]
        if make in (hydra, pytorchjob):
            port = {"MASTER_PORT": str(free_port())}
            environs = [environ | port for environ in environs]
        total = world_size * (world_size + 1) / 2
        found = started(environs)
        assert found == [[(rank, world_size, total)] * 2 for rank in range(world_size)], make.__name__


def test_a_job_of_torchrun_leaves_its_group_and_makes_others() -> None:
    """The agent's store outlives the groups: without keys of their own, one of five later groups fails to connect."""
    groups, options = 6, {"is_master": True, "wait_for_workers": False}
    agent = dist.TCPStore("127.0.0.1", 0, 2, **options)  # type: ignore[attr-defined]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(agent.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environs = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    assert started(environs, partial(run, groups=groups)) == [[(rank, 2, 3.0)] * groups for rank in range(2)]


def test_workers_of_ray_keep_the_group_that_ray_has_made() -> None:
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "ACCELERATE_TORCH_DEVICE": "cpu"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environs = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    assert started(environs, train_with_ray) == [(True, (1, 2), 3.0)] * 2


def test_two_jobs_on_one_host_do_not_meet() -> None:
    jobs = [[slurm(rank, 2, f"{job}{os.getpid()}") for rank in range(2)] for job in ("a", "b")]
    assert started(jobs[0] + jobs[1]) == [[(rank, 2, 3.0)] * 2 for rank in (0, 1, 0, 1)]


def test_a_port_that_is_taken_is_an_error_of_all_ranks_with_the_way_out() -> None:
    environs = [slurm(rank, 2, f"taken{os.getpid()}") for rank in range(2)]
    job = job_of(environs[0])
    assert job is not None
    place = meeting_of(job, environs[0])
    options = {"is_master": True, "wait_for_workers": False}
    other = dist.TCPStore("127.0.0.1", place.port, 2, **options)  # type: ignore[attr-defined]
    other.set("tpkernels/job", "another job")
    first, second = started(environs)
    assert f"rank 0 cannot serve the ranks at 127.0.0.1:{place.port}" in str(first)
    assert "rank 1 of the job" in str(second) and "met another job" in str(second) and "'another job'" in str(second)
    for said in (first, second):
        assert "Slurm's job taken" in str(said) and "export MASTER_PORT" in str(said)


@pytest.mark.full("two interpreters; forked ranks join above")
def test_new_interpreters_join_the_job_of_their_environment() -> None:
    script = (
        "import tpkernels as tpk, torch; mesh = tpk.init(timeout=60)\n"
        "print(tpk.all_reduce(torch.ones(2) * (mesh.get_rank() + 1), mesh['tp'])[0].item(), mesh.size())"
    )
    plain = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}

    def start(rank: int) -> str:
        environ = plain | open_mpi(rank, 2, f"new{os.getpid()}")
        done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120)
        return done.stdout + done.stderr[-2000:]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(start, range(2))) == ["3.0 2\n"] * 2


# ---------------------------------------------------------------- rank 0, which serves the store, is stopped meanwhile

TIMEOUT_S = 1.0
WAITS_S = 0.3
"""So long a rank waits until Ctrl-C comes."""
INTERRUPT_S = 3.0
"""Of an idle machine it takes 0.05 s."""
STAGES = {
    "the store is reached": (startup, "meet_as_torchrun", pytorchjob),
    "places are taken": (job_store, "_take_place", slurm),
    "the group is made": (dist, "init_process_group", pytorchjob),
    "its axes are made": (startup, "init_device_mesh", slurm),
}


def meet_and_wait(connection: object, environ: dict[str, str]) -> None:
    os.environ.update(environ)
    tpk.init(timeout=LIMIT_S)
    time.sleep(LIMIT_S)


def join_late(
    connection: object, environ: dict[str, str], stage: str | None, rank_0: int | None, interrupted: bool = False
) -> None:
    """A rank which stops rank 0, if there is one, when it comes to the stage, and may get Ctrl-C soon after."""
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()

    def strike() -> None:
        nonlocal start
        if rank_0 is not None:
            while "rank 0 is not there yet":
                with (
                    suppress(ConnectionRefusedError),
                    socket.create_connection(("127.0.0.1", int(environ["MASTER_PORT"]))),
                ):
                    break
            os.kill(rank_0, signal.SIGSTOP)
        start = time.monotonic()
        if interrupted:
            start += WAITS_S
            threading.Timer(WAITS_S, os.kill, (os.getpid(), signal.SIGINT)).start()

    if stage is None:
        strike()
    else:
        module, name, _ = STAGES[stage]
        original = getattr(module, name)

        def with_rank_0_stopped(*given: object, **options: object) -> object:
            strike()
            return original(*given, **options)

        setattr(module, name, with_rank_0_stopped)
    try:
        tpk.init(timeout=LIMIT_S if interrupted else TIMEOUT_S)
        said = "joined"
    except PeerLost as error:
        said = f"{error.ranks}: {error}"
    except KeyboardInterrupt:
        said = "interrupted"
    connection.send((said, time.monotonic() - start))  # type: ignore[attr-defined]


def joined_late(stage: str, interrupted: bool) -> tuple[str, float]:
    """What rank 1 says beside a rank 0 that is stopped at the stage, and after how many seconds."""
    *_, launcher = STAGES[stage]
    port = {"MASTER_PORT": str(free_port())}
    environs = [launcher(rank, 2, "7") | port | {"LOCAL_RANK": str(rank)} for rank in (0, 1)]
    process = fork_server().Process(target=meet_and_wait, args=(None, environs[0]), daemon=True)
    process.start()
    try:
        run = partial(join_late, stage=stage, rank_0=process.pid, interrupted=interrupted)
        (answer,) = started([environs[1]], run)
        return answer  # type: ignore[return-value]
    finally:
        process.kill()


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_0_that_is_stopped_while_the_ranks_meet_is_named_in_time(stage: str) -> None:
    """Others waited for its store for ever."""
    said, seconds = joined_late(stage, interrupted=False)
    assert said.startswith("(0,)") and "rank 1" in said and "store" in said, said
    assert seconds < 1.1 * TIMEOUT_S + 2.0, seconds  # c10d writes stacks of its errors, and tests run beside this one


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_ends_the_wait_for_a_rank_0_that_is_stopped(stage: str) -> None:
    said, seconds = joined_late(stage, interrupted=True)
    assert said == "interrupted" and seconds < INTERRUPT_S, (said, seconds)


@pytest.mark.parametrize("launcher", [slurm, pytorchjob])
def test_ctrl_c_ends_the_wait_for_ranks_that_are_not_there(launcher: Callable[[int, int, str], dict[str, str]]) -> None:
    """Each rank waits alone: rank 0 for the others, and rank 1 for a rank 0 that is not there."""
    ranks = [launcher(rank, 2, "7") | {"MASTER_PORT": str(free_port()), "LOCAL_RANK": "0"} for rank in (0, 1)]
    for said, seconds in started(ranks, partial(join_late, stage=None, rank_0=None, interrupted=True)):  # type: ignore[misc]
        assert said == "interrupted" and seconds < INTERRUPT_S, (said, seconds)
