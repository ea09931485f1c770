"""When `symmetric` is chosen, and why it is refused: what needs no ranks of test_symmetric.py."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tpkernels.backends.symmetric import cuda_native, resource
from tpkernels.backends.symmetric import implementations as symmetric
from tpkernels.backends.symmetric.memory import is_consistent
from tpkernels.backends.symmetric.resource import MULTICAST, SymmetricMemory, common_refusal
from tpkernels.comm.resources import Standing
from tpkernels.dispatch import OPS, Costs, Problem
from tpkernels.testing.cases import GATHER, REDUCE, SCATTER

pytestmark = pytest.mark.cpu

PROBLEM = Problem(
    GATHER, 4096, 4096, 4096, torch.bfloat16, 8, device="cuda", backend="nccl", co_located=True,
    resources=(Standing(SymmetricMemory.name),),
)  # fmt: skip
FACT = {"refusal": None, "gpu": "H, sm_90", "capability": 90, "torch": "2.13", "abi": 3}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"world_size": 1}, "one rank"),
        ({"dtype": torch.float64}, "not in torch.float64"),
        ({"dtype": torch.float8_e4m3fn, "out_dtype": torch.float16}, None),
        ({"resources": (Standing(SymmetricMemory.name, "rank 3: no Triton here"),)}, "no Triton here"),
    ],
)
def test_it_says_why_it_can_not_run(changes: dict[str, Any], reason: str | None) -> None:
    for offer in (offer for op in OPS for offer in symmetric.dispatch.implementations(op) if offer.name == "symmetric"):
        found = offer.refuses(replace(PROBLEM, op=offer.op, **changes))
        assert found is None if reason is None else reason in str(found), found


@pytest.mark.parametrize(
    ("second", "overlapping", "reason"),
    [
        ({"uuid": "b"}, False, None),
        ({"uuid": "a"}, False, "ranks [0, 1] are on one GPU"),
        ({"uuid": "a"}, True, None),
        ({"uuid": "b", "index": 0}, False, "ranks [0, 1] have a GPU each and all call it cuda:0"),
        ({"uuid": "b", "index": 0}, True, None),
        ({"uuid": "a", "index": 0}, False, "ranks [0, 1] are on one GPU"),
        ({"uuid": "b", "gpu": "A, sm_80"}, False, "different GPUs"),
        ({"uuid": "b", "torch": "2.11"}, False, "different versions of torch"),
        ({"uuid": "b", "refusal": "no library"}, False, "rank 1: no library"),
    ],
)
def test_all_ranks_have_one_reason_why_their_gpus_share_no_memory(
    second: dict[str, Any], overlapping: bool, reason: str | None
) -> None:
    found = common_refusal([{**FACT, "uuid": "a", "index": 0}, {**FACT, "index": 1, **second}], overlapping)
    assert found is None if reason is None else reason in str(found), found


def test_old_gpus_are_refused() -> None:
    assert "capability 8.0" in str(common_refusal([{**FACT, "uuid": "a", "capability": 75}], False))


def test_addresses_that_can_not_be_those_of_the_ranks_are_seen() -> None:
    assert is_consistent((16, 32), 32, rank=1, size=2)
    for addresses, local in (((16, 32), 48), ((16,), 16), ((32, 32), 32), ((0, 32), 32)):
        assert not is_consistent(addresses, local, rank=1 if len(addresses) > 1 else 0, size=2)


def test_large_calls_are_fused_where_the_link_is_worth_it() -> None:
    """On costs of an NVLink node: fused wins where transfers can hide, one shot where data is small."""
    costs = Costs(
        gemm_gflops=600e3, gemm_overhead_us=8, weight_gbytes=2000, link_gbytes=300, link_latency_us=20, link_cpu=0,
        measured=True,
    )  # fmt: skip
    chosen = {
        (op, m): symmetric.dispatch.select(replace(PROBLEM, op=op, m=m, k=8192), "auto", costs)[0].name
        for op in (GATHER, SCATTER, REDUCE)
        for m in (8, 8192)
    }
    assert chosen[GATHER, 8192] == chosen[SCATTER, 8192] == chosen[REDUCE, 8] == "symmetric", chosen


@pytest.mark.parametrize("multicast", [False, True])
def test_explain_says_how_a_sum_travels(multicast: bool) -> None:
    features = frozenset([MULTICAST] if multicast else [])
    problem = replace(PROBLEM, resources=(Standing(SymmetricMemory.name, features=features),))
    for op, m, said in (
        (REDUCE, 16, "in one step"),
        (REDUCE, 512, "in one kernel: reduce-scatter, then all-gather of the sums"),
        (REDUCE, 8192, "reduce-scatter, then all-gather of the sums"),
        ("all_reduce", 16, "in one step"),
        (GATHER, 8192, ""),
        (SCATTER, 8192, ""),
    ):
        _, explanation = symmetric.dispatch.select(replace(problem, op=op, m=m), "symmetric", Costs())
        (found,) = [candidate.how for candidate in explanation.candidates if candidate.name == "symmetric"]
        by_multicast = ", pushed by multicast stores (NVLS), summed by the ranks in fixed order"
        assert found == (f"{said}{by_multicast}" if multicast and said else said)
        assert found in str(explanation)


@pytest.mark.parametrize(("atomics", "one_link"), [({1, 2}, False), ({1}, True), (set(), True)], ids=str)
def test_peers_behind_pcie_share_a_link(atomics: set[int], one_link: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU 0's peers: those of this process's GPUs; a rank on the same GPU, or on one that is not seen, says nothing."""
    uuids = ["GPU-a", "GPU-b", "GPU-c"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=uuids[i]))
    library = SimpleNamespace(has_peer_atomics=lambda own, peer: own == 0 and peer in atomics)
    monkeypatch.setattr(cuda_native, "load", lambda: library)
    here = torch.device("cuda", 0)
    assert resource._share_a_link(here, uuids) is one_link
    assert resource._share_a_link(here, ["GPU-a", "GPU-a", "GPU-elsewhere"]) is False
