"""torchrun's elastic restarts: a host dies, and the job goes on from its last snapshot with the ranks that are left."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.distributed import run

from tests.comm.test_job_store import free_port
from tpkernels.testing.spawn import fork_server

pytestmark = pytest.mark.gloo

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train.py"
TINY = ("--width", "32", "--layers", "1", "--vocabulary", "64", "--length", "8", "--steps", "6")
LIMIT_S = 300.0
# The rank of host 1 kills its host in the fifth step: torchrun's agent, and then itself.  Host 0 waits for it to join;
# the agent there starts a rank alone where the other one is late, and both anew when it comes.
DYING = """
import os, pathlib, runpy, signal, sys, time
import tpkernels as tpk

joined = pathlib.Path(__file__).with_name("joined")
if os.environ["HOST"] == "1":
    joined.touch()
deadline = time.monotonic() + 120
while not joined.exists():
    assert time.monotonic() < deadline, "host 1 has not joined"
    time.sleep(0.05)

clip, calls = tpk.clip_grad_norm_, []

def clip_or_die(*args):
    calls.append(args)
    if len(calls) == 5 and os.environ["HOST"] == "1":
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return clip(*args)

tpk.clip_grad_norm_ = clip_or_die
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def torchrun(host: int, arguments: list[str], output: Path) -> None:
    """One host's torchrun; its ranks are forks of it, so that they need not import torch again."""
    with output.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.update(OMP_NUM_THREADS="1", HOST=str(host))
    run.main(["--run-path", "--start-method", "fork", *arguments])


def said(hosts: Sequence[Sequence[str]], folder: Path, name: str) -> list[str]:
    """What the ranks of each host say, once all have ended."""
    processes, outputs = [], [folder / f"{name}-{host}.txt" for host in range(len(hosts))]
    for host, arguments in enumerate(hosts):
        process = fork_server().Process(target=torchrun, args=(host, arguments, outputs[host]))
        process.start()
        processes.append(process)
    for process in processes:
        process.join(LIMIT_S)
        process.kill()
        process.join()
    texts = [output.read_text(encoding="utf-8") for output in outputs]
    assert processes[0].exitcode == 0, texts[0]
    return texts


def losses(text: str) -> list[tuple[int, float]]:
    found = re.findall(r"^step (\d+): loss (\S+), gradient norm \d", text, re.M)
    return sorted((int(step), float(loss)) for step, loss in found)


@pytest.mark.slow("8 s: torchrun, twice")
def test_a_job_that_loses_a_host_goes_on_from_its_snapshot_with_fewer_ranks(tmp_path: Path) -> None:
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    program = [str(script), str(EXAMPLE), *TINY, "--save-every", "2", "--folder"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    elastic = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "2", *rendezvous, "--rdzv-conf"]
    # The first host serves the rendezvous, so it is the other one that dies.
    confs = [
        f"last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5,is_host={host == 0}" for host in (0, 1)
    ]
    texts = said([[*elastic, conf, *program, str(tmp_path / "run")] for conf in confs], tmp_path, "elastic")
    assert re.search(r"PeerLost: rank \d.*: rank \d died", texts[0]), texts[0]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-2", "step-4", "step-6"]

    (alone,) = said([["--standalone", *program, str(tmp_path / "alone")]], tmp_path, "alone")
    found, expected = losses(texts[0] + texts[1]), losses(alone)
    assert [step for step, _ in found] == [step for step, _ in expected] == [1, 2, 3, 4, 5, 6], "none is done twice"
    for (step, loss), (_, plain) in zip(found, expected, strict=True):
        assert loss == pytest.approx(plain, abs=2e-4), f"step {step}"
