"""torchrun on two hosts of the network lab, two ranks on each: ``tpk.init()`` makes one job of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import run

import tpkernels as tpk
from tests.nn.reference import LIMIT_S
from tpkernels.measure import links, netlab
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.netns

NODES, PER_NODE, STEPS = 2, 2, 5
SCRIPT = "import sys\nfrom tests.measure.test_two_nodes import rank_of_torchrun\nrank_of_torchrun(sys.argv[1])\n"


def losses() -> list[float]:
    """Of a model that all ranks share, from the job's variables alone."""
    mesh = tpk.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 44), nn.GELU(), nn.Linear(44, 16))
    tpk.parallelize(model, mesh, example_inputs=torch.zeros(4, 16))
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        tpk.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def rank_of_torchrun(folder: str) -> None:
    said = {name: os.environ[name] for name in ("LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR")}
    found = {"said": said, "host": os.readlink("/proc/self/ns/net"), "losses": losses()}
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def node(folder: str) -> None:
    """What a user types on each host."""
    number = os.environ["RANK"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        del os.environ[name]  # of the lab, which is no launcher here
    meeting = ["--master-addr", links.host_address(0), "--master-port", "29501"]
    nodes = ["--nnodes", str(NODES), "--node-rank", number, "--nproc-per-node", str(PER_NODE), *meeting]
    script = Path(folder, f"script{number}.py")
    script.write_text(SCRIPT, encoding="utf-8")
    # Ranks that are forks need not import torch again.
    run.main(["--run-path", "--start-method", "fork", *nodes, str(script), folder])


@pytest.mark.usefixtures("forked")
@pytest.mark.slow("5 s: torchrun in network namespaces")
def test_torchrun_on_two_hosts_has_the_losses_of_one_host(lab_possible: None, ranks: Pools, tmp_path: Path) -> None:
    netlab.run_in_netlab(node, NODES, str(tmp_path), timeout=LIMIT_S)
    found: list[Any] = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(NODES * PER_NODE)]
    said = [{"LOCAL_RANK": str(rank % 2), "GROUP_RANK": str(rank // 2)} for rank in range(4)]
    common = {"WORLD_SIZE": "4", "MASTER_ADDR": links.host_address(0)}
    assert [one["said"] for one in found] == [{**one, **common} for one in said]
    hosts = [one["host"] for one in found]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3], "each host has two ranks"
    one_host = ranks(2).run(losses, timeout=LIMIT_S)[0]
    assert one_host[-1] < one_host[0]
    for one in found:
        assert one["losses"] == pytest.approx(one_host, rel=1e-6)
