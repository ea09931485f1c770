"""Ray Train's own TorchTrainer with two workers: the example, and a worker that is killed.

Ray, with what its Train imports, is 417 MB: `.ci/run` installs it beside the environment, and runs this file there.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import os
import runpy
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import tpkernels as tpk
from tests.nn.reference import LIMIT_S
from tpkernels.errors import PeerLost
from tpkernels.testing.spawn import Pools

if any(importlib.util.find_spec(name) is None for name in ("ray", "pandas", "pyarrow")):
    pytest.skip("--full: only where ray[train], 417 MB, was installed by hand", allow_module_level=True)

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchTrainer

pytestmark = pytest.mark.gloo

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ray_train.py"
STEPS = 3
LIMIT = int(2 * LIMIT_S)


@pytest.fixture(scope="module")
def node() -> Iterator[None]:
    """A node of Ray's on this machine, with a secret of its own."""
    told = {
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(LIMIT),
    }
    # A short path: Ray puts sockets below it.
    with mock.patch.dict(os.environ, told), tempfile.TemporaryDirectory(prefix="ray-") as folder:
        options = {"include_dashboard": False, "log_to_driver": False, "_temp_dir": folder}
        ray.init(num_cpus=2, object_store_memory=80 * 2**20, **options)
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """fit() has no limit of its own."""

    def late(*_: object) -> None:
        raise TimeoutError(f"the job did not end within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def of_one_process(folder: str) -> list[float]:
    """The loop of the example on one rank."""
    losses: list[float] = runpy.run_path(str(EXAMPLE))["loop"]({"folder": folder, "steps": STEPS})
    return losses


def test_the_example_trains_on_two_workers_as_one_process_does(node: None, ranks: Pools, tmp_path: Path) -> None:
    alone, folder = tmp_path / "alone", tmp_path / "two"
    alone.mkdir()
    (expected,) = ranks(1).run(of_one_process, str(alone), timeout=LIMIT_S)
    output = io.StringIO()
    arguments = [str(EXAMPLE), "--workers", "2", "--steps", str(STEPS), "--folder", str(folder)]
    with within(LIMIT), contextlib.redirect_stdout(output), mock.patch.object(sys, "argv", arguments):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    found = ast.literal_eval(output.getvalue().strip().splitlines()[-1].removeprefix("losses "))
    assert len(found) == STEPS and found == pytest.approx(expected, abs=1e-6)
    assert sorted(path.name for path in folder.glob("step-*")) == [f"step-{step + 1}" for step in range(STEPS)]


def dies(config: dict[str, Any]) -> None:
    """The second worker, in its second step."""
    import torch

    mesh = tpk.init()
    x = torch.ones(2, 4)
    for step in range(STEPS):
        if step == 1 and mesh.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        tpk.matmul_all_reduce(x, torch.ones(3, 4), mesh["tp"])


def test_a_worker_that_is_killed_ends_the_job_and_the_other_one_names_it(node: None, tmp_path: Path) -> None:
    run = RunConfig(storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=0))
    trainer = TorchTrainer(dies, train_loop_config={}, scaling_config=ScalingConfig(num_workers=2), run_config=run)
    for _ in range(3):  # Ray asks its workers now and then, and the survivor needs some milliseconds to notice
        with within(LIMIT), pytest.raises(WorkerGroupError) as caught:
            trainer.fit()
        failures = caught.value.worker_failures
        assert 1 in failures, failures
        if 0 in failures:
            break
    survivor = failures[0]
    assert isinstance(survivor, PeerLost) and "rank 1 died" in str(survivor), repr(survivor)
    assert str(survivor) in str(caught.value), "the error of the job shows what the survivor says"
