"""Which job the variables of launchers describe, and what is refused; no process is started here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpkernels import config
from tpkernels.launchers import LOOPBACK, PORTS, Job, _hydra_of, first_host, job_of, meeting_of

pytestmark = pytest.mark.cpu

SALLOC = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "gpu[07-08]"}
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
SRUN = SALLOC | STEP
BATCH_SCRIPT = SALLOC | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_MCA_ess_base_jobid": "1109786625",
    "PMIX_RANK": "1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "5",
    "MV2_COMM_WORLD_SIZE": "6",
    "MV2_COMM_WORLD_LOCAL_RANK": "2",
    "MV2_COMM_WORLD_LOCAL_SIZE": "3",
}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
# What Kubeflow's training operator (1.9, pkg/controller.v1/pytorch/envvar.go) gives each pod of a PyTorchJob.
PYTORCHJOB = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "run-master-0",
    "MASTER_PORT": "23456",
    "PET_MASTER_ADDR": "run-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_NODE_RANK": "1",
    "PET_NNODES": "2",
}
# What its successor gives each pod of a TrainJob, whose program is started by torchrun.
TRAINJOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "run-trainer-node-0-0",
}
# What ray.train's TorchTrainer (2.60, ray/train/torch/config.py) gives its workers; two of four are on this node.
RAY = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        (TORCHRUN, Job(5, 1, 8, 4)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Job(1, 1, 2, 2)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Job(0, 0, 1, 1)),
        (PYTORCHJOB, Job(1, 0, 2, 1)),
        (PYTORCHJOB | {"PET_NPROC_PER_NODE": "auto"}, Job(1, 0, 2, 1)),
        (PYTORCHJOB | {"WORLD_SIZE": "8", "PET_NPROC_PER_NODE": "4"} | TORCHRUN, Job(5, 1, 8, 4)),
        (TRAINJOB | TORCHRUN, Job(5, 1, 8, 4)),
        (RAY, Job(3, 1, 4, 2)),
        (SRUN | OPEN_MPI | TORCHRUN, Job(5, 1, 8, 4)),
        (SRUN, Job(3, 1, 4, 2, "Slurm", "77.0")),
        (SRUN | {"WORLD_SIZE": "4"}, Job(3, 1, 4, 2, "Slurm", "77.0")),
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMIX_RANK": "3"}, Job(3, 1, 4, 2, "Slurm", "77.0")),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"}, Job(3, 0, 4, 1, "Slurm", "77.0")),
        (OPEN_MPI, Job(1, 1, 4, 4, "Open MPI", "1109786625")),
        (OPEN_MPI | {"PMIX_NAMESPACE": "prterun-a-12@1"}, Job(1, 1, 4, 4, "Open MPI", "prterun-a-12@1")),
        (MVAPICH, Job(5, 2, 6, 3, "MVAPICH2")),
        (HYDRA, Job(1, 1, 2, 2, "Hydra")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "1"}, Job(1, 0, 2, 1, "PMI")),
    ],
)
def test_each_launchers_variables_say_where_a_rank_stands(environ: dict[str, str], job: Job) -> None:
    assert job_of(environ) == config.job_environment(environ) == job


def test_mpirun_inside_an_allocation_says_more_than_the_step_of_its_daemon() -> None:
    daemon = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert job_of(daemon | OPEN_MPI) == job_of(OPEN_MPI)
    assert job_of(daemon | HYDRA) == job_of(HYDRA)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "1"},
        SALLOC,
        {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "auto"},
        BATCH_SCRIPT,
        BATCH_SCRIPT | {"PMIX_RANK": "0"},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty bash, and salloc's shell of its own
        BATCH_SCRIPT | {"SLURM_STEP_ID": str(0xFFFFFFFA)},
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        HYDRA | {"PMI_SIZE": "1", "PMI_RANK": "0"},
    ],
)
def test_a_process_that_is_alone_is_no_job(environ: dict[str, str]) -> None:
    assert job_of(environ) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "RANK=0 is set, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set, but RANK is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 must be at least 0 and below WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be a whole number, got 'x'"),
        (SRUN | {"WORLD_SIZE": "8"}, "WORLD_SIZE=8, but Slurm says 4"),
        (OPEN_MPI | {"RANK": "0"}, "RANK=0, but Open MPI says 1"),
        (SRUN | {"SLURM_PROCID": "4"}, "SLURM_PROCID=4 must be"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "many"}, "SLURM_STEP_TASKS_PER_NODE must be numbers"),
        (SRUN | {"SLURM_NODEID": "2"}, "SLURM_NODEID=2, but"),
        (PYTORCHJOB | {"WORLD_SIZE": "8", "PET_NPROC_PER_NODE": "4"}, "PET_NNODES=2 and WORLD_SIZE=8.*with torchrun"),
        (PYTORCHJOB | {"PET_NNODES": "1:2"}, "PET_NNODES=1:2 and WORLD_SIZE=2"),
        (TRAINJOB, "PET_NNODES=2 says that this pod is one of several"),
        (
            {"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "run-worker-0:29400"},
            "PET_NNODES=1:4.*start the program with torchrun",
        ),
        ({"PMIX_RANK": "1"}, "nothing says how many ranks there are"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "which rank of this host this is"),
    ],
)
def test_variables_that_contradict_each_other_are_refused_by_name(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job_of(environ)


def meet(environ: dict[str, str]) -> tuple[str, int]:
    job = job_of(environ)
    assert job is not None
    place = meeting_of(job, environ)
    return place.host, place.port


def test_ranks_of_one_host_meet_at_a_port_that_the_job_names() -> None:
    first, other = OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, OPEN_MPI
    assert meet(first) == meet(other)
    assert meet(other)[0] == LOOPBACK and meet(other)[1] in PORTS
    assert meet(OPEN_MPI | {"OMPI_MCA_ess_base_jobid": "2"}) != meet(OPEN_MPI)
    assert config.meeting(Job(0, 0, 2, 2)) is None, "c10d meets torchrun's ranks by itself"


def test_ranks_of_several_hosts_meet_at_the_first_of_the_step() -> None:
    host, port = meet(SRUN)
    assert host == "gpu07" and port in PORTS
    assert meet(SRUN | {"SLURM_STEP_NODELIST": "gpu08"})[0] == "gpu08"
    assert meet(SRUN | {"SLURM_STEP_ID": "1"})[1] != port, "steps of one job that run at the same time"
    one_host = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1"}
    assert meet(one_host)[0] == LOOPBACK


def test_what_the_user_says_of_the_meeting_comes_first() -> None:
    said = {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    assert meet(SRUN | said) == meet(OPEN_MPI | said) == meet(MVAPICH | said) == ("head", 1234)
    assert meet(SRUN | {"MASTER_PORT": "99"}) == ("gpu07", 99)


def test_hosts_that_nobody_names_are_refused_with_the_command() -> None:
    with pytest.raises(ValueError, match=r"MVAPICH2 started 6 ranks, 3 of them.*MASTER_ADDR is not set.*export MASTER"):
        meet(MVAPICH)
    with pytest.raises(ValueError, match="mpirun -x MASTER_ADDR -x MASTER_PORT"):
        meet(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    nameless = {key: value for key, value in SRUN.items() if "NODELIST" not in key}
    with pytest.raises(ValueError, match="scontrol show hostnames"):
        meet(nameless)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node[01-04,07]", "node01"),
        ("node[7,9-12],login1", "node7"),
        ("a,b[1-2]", "a"),
        ("rack[2-3]n[04-05]-ib", "rack2n04-ib"),
        ("node-3.cluster.org,x", "node-3.cluster.org"),
    ],
)
def test_the_first_host_of_slurms_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", "node[1-2", ",a", "]"])
def test_what_is_no_list_of_hosts_is_refused(nodes: str) -> None:
    with pytest.raises(ValueError, match="not a list of hosts"):
        first_host(nodes)


def test_ranks_of_hydra_are_named_after_its_daemon_whatever_shells_are_between(tmp_path: Path) -> None:
    for pid, name, parent in ((1, "init", 0), (40, "hydra_pmi_proxy", 1), (41, "ba) sh", 40), (42, "python", 41)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0")
    (tmp_path / "self").symlink_to(tmp_path / "42")
    assert _hydra_of(tmp_path) == "hydra_pmi_proxy 40"
    (tmp_path / "40" / "stat").write_text("40 (bash) S 1 1 1 0")
    assert _hydra_of(tmp_path) is None
