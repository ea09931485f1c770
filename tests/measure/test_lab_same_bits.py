"""Two hosts of the network lab train to the bits of one process, and of two ranks that share memory."""

from __future__ import annotations

import pytest
import torch

import tpkernels as tpk
from tpkernels.measure.netlab import run_in_netlab
from tpkernels.selftest.same_bits import Case, Run

SAME_BITS = 8
CASES = [Case(kind, dtype, 4) for kind in ("gpt", "llama") for dtype in ("float32", "bfloat16")]


def train() -> tuple[set[str], list[dict[str, str]]]:
    """The implementations that ran, and the digests of each case."""
    mesh = tpk.init(device="cpu", same_bits=SAME_BITS, timeout=120)["tp"]
    torch.set_num_threads(1)
    found = []
    for case in CASES:
        run = Run(case, mesh.get_group(), SAME_BITS)
        run.steps(0, case.steps)
        found.append(run.digests)
    chosen = {
        tpk.explain(op, m=64, n=256, k=128, dtype=torch.bfloat16, group=mesh).chosen
        for op in ("all_gather_matmul", "matmul_all_reduce")
    }
    return chosen, found


@pytest.mark.full("trains four models in three places")
@pytest.mark.usefixtures("forked")
@pytest.mark.netns
def test_two_hosts_train_to_the_bits_of_one_process_and_of_shared_memory(lab_possible: None) -> None:
    ((_, alone),) = tpk.launch(train, 1, timeout=180)
    sharing = tpk.launch(train, 2, timeout=180)
    hosts = run_in_netlab(train, 2, rate="1gbit", timeout=180)
    assert all("shared_memory" in chosen for chosen, _ in sharing), sharing
    assert all("shared_memory" not in chosen for chosen, _ in hosts), hosts
    for _, digests in (*sharing, *hosts):
        for case, expected, found in zip(CASES, alone, digests, strict=True):
            differ = [name for name in expected if found[name] != expected[name]]
            assert len(expected) > 20 and not differ, (case, differ)
