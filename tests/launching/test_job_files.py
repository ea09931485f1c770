"""The job files in examples/ run: under a stand-in for Slurm's srun, Open MPI's own mpirun, as pods of a PyTorchJob."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.comm.test_job_store import free_port, pytorchjob
from tests.launching.test_elastic import losses
from tpkernels.testing.spawn import fork_server

pytestmark = [pytest.mark.gloo, pytest.mark.full(".ci/run names its tests: a hundred seconds of a busy core")]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 20
LIMIT_S = 300
# Tasks are forks of the stand-in, so that they need not import torch again.  What it tells them is what srun does.
SRUN = f"""#!{sys.executable}
import os, runpy, sys
import tpkernels, torch

nodes, tasks = int(os.environ["SLURM_JOB_NUM_NODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
assert sys.argv[1:3] == ["--cpus-per-task", os.environ["SLURM_CPUS_PER_TASK"]] and sys.argv[3] == "python", sys.argv
sys.argv = sys.argv[4:]
step = dict(ID=0, NUM_TASKS=nodes * tasks, NUM_NODES=nodes, TASKS_PER_NODE=f"{{tasks}}(x{{nodes}})")
os.environ.update({{f"SLURM_STEP_{{name}}": str(value) for name, value in step.items()}})
os.environ["SLURM_STEP_NODELIST"] = "localhost,other"
started = []
for rank in range(nodes * tasks):
    child = os.fork()
    if child == 0:
        node, local = divmod(rank, tasks)
        os.environ.update(SLURM_PROCID=str(rank), SLURM_NODEID=str(node), SLURM_LOCALID=str(local))
        torch.set_num_threads(1)
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    started.append(child)
sys.exit(any([os.waitpid(child, 0)[1] for child in started]))
"""


def alone(replicas: int) -> list[tuple[int, float]]:
    """The losses of the first replica, as a process that trains on the batches of all of them has them."""
    names = runpy.run_path(str(EXAMPLES / "train.py"))
    args = argparse.Namespace(vocabulary=512, batch=4, length=64)
    torch.manual_seed(0)
    model = names["Model"](args.vocabulary, 128, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(STEPS):
        batches = [names["batch"](step, replica, args) for replica in range(replicas)]
        parts = [F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()) for ids in batches]
        torch.stack(parts).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((step + 1, parts[0].item()))
    return found


def check(text: str, replicas: int, snapshots: Path, saved: tuple[int, ...] = (STEPS,)) -> None:
    found, expected = losses(text), alone(replicas)
    assert [step for step, _ in found] == [step for step, _ in expected], text
    for (step, loss), (_, plain) in zip(found, expected, strict=True):
        assert loss == pytest.approx(plain, abs=2e-4), f"step {step}"
    assert {path.name for path in snapshots.iterdir()} == {f"step-{step}" for step in saved}


def run_script(name: str, folder: Path, environ: dict[str, str], **programs: str) -> str:
    """What the script says in a folder that has the examples, where ``python`` and ``programs`` are these."""
    folder.joinpath("examples").symlink_to(EXAMPLES)
    path = folder / "bin"
    path.mkdir()
    # Not one thread for each core that the file asks for: the ranks share those of this machine.
    python = f'#!/bin/sh\nOMP_NUM_THREADS=1 exec {sys.executable} "$@"\n'
    for program, text in {"python": python, **programs}.items():
        path.joinpath(program).write_text(text)
        path.joinpath(program).chmod(0o755)
    root = str(EXAMPLES.parent)
    given = os.environ | {"PATH": f"{path}:{os.environ['PATH']}", "PYTHONPATH": root} | environ
    command = ["timeout", "--kill-after=10", str(LIMIT_S), "bash", f"examples/{name}"]  # ends what the script started
    done = subprocess.run(command, cwd=folder, env=given, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_script_of_slurm_trains_as_one_process_does(tmp_path: Path) -> None:
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\w+)", (EXAMPLES / "train.slurm").read_text(), re.M))
    environ = {
        "SLURM_JOB_ID": "71",
        "SLURM_JOB_NUM_NODES": asked["nodes"],
        "SLURM_NTASKS_PER_NODE": asked["ntasks-per-node"],
        "SLURM_CPUS_PER_TASK": "1",
    }
    text = run_script("train.slurm", tmp_path, environ, srun=SRUN)
    check(text, int(asked["nodes"]), tmp_path / "snapshot-71")


def test_the_script_of_mpi_trains_as_one_process_does(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is missing: apt-get install openmpi-bin")
    environ = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    check(run_script("train.mpi.sh", tmp_path, environ), 1, tmp_path / "snapshots")


def pod(environ: dict[str, str], command: list[str], output: Path) -> None:
    with output.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.update(environ)
    assert command[0] == "python"
    sys.argv = command[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


def test_the_pods_of_a_pytorchjob_train_as_one_process_does(tmp_path: Path) -> None:
    import yaml

    replicas = yaml.safe_load((EXAMPLES / "train.pytorchjob.yaml").read_text())["spec"]["pytorchReplicaSpecs"]
    pods = [kind["template"]["spec"]["containers"][0] for kind in replicas.values() for _ in range(kind["replicas"])]
    folders = {"/examples": str(EXAMPLES), "/snapshots": str(tmp_path / "snapshots")}  # as the pods have them
    port, processes = str(free_port()), []
    outputs = [tmp_path / f"pod-{rank}.txt" for rank in range(len(pods))]
    for rank, (container, output) in enumerate(zip(pods, outputs, strict=True)):
        environ: dict[str, Any] = {one["name"]: one["value"] for one in container["env"]}
        environ |= pytorchjob(rank, len(pods), "job") | {"MASTER_PORT": port}
        command = [re.sub(r"^/\w+", lambda found: folders[found[0]], word) for word in container["command"]]
        processes.append(fork_server().Process(target=pod, args=(environ, command, output)))
        processes[-1].start()
    for process in processes:
        process.join(LIMIT_S)
        process.kill()
        process.join()
    texts = [output.read_text() for output in outputs]
    assert [process.exitcode for process in processes] == [0, 0], texts
    check("".join(texts), 1, tmp_path / "snapshots", saved=(10, STEPS))
