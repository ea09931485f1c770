"""What "auto" knows of the cost of `symmetric`: measured on emulated GPUs, or modelled; and rates of links of GPUs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.backends.emulated import Emulation
from tests.backends.test_symmetric_choices import PROBLEM
from tpkernels.backends.symmetric import costs as symmetric_costs
from tpkernels.backends.symmetric import implementations as symmetric
from tpkernels.backends.symmetric.calibration import call_costs
from tpkernels.backends.symmetric.resource import SymmetricMemory, channels_of
from tpkernels.comm import calibration
from tpkernels.comm.groups import resolve
from tpkernels.comm.resources import Standing
from tpkernels.dispatch import Costs
from tpkernels.ops import agreed_costs
from tpkernels.testing.cases import GATHER, REDUCE
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.cpu


def measured(emulation: Emulation) -> dict[str, float]:
    with emulation.group() as made:
        return call_costs(channels_of(resolve(made)))


@pytest.mark.gloo
def test_a_small_call_is_measured_and_a_slow_one_is_seen(pools: Pools, emulation: Emulation) -> None:
    """Tasks of side streams are late by 5 ms on average each fourth time; one kernel has no side stream."""
    for usual, slow in zip(
        pools(2).run(measured, emulation), pools(2).run(measured, replace(emulation, late_us=10_000)), strict=True
    ):
        assert set(usual) == {"symmetric_call_us", "symmetric_kernel_us"} and min(usual.values()) > 1.0
        assert slow["symmetric_call_us"] > usual["symmetric_call_us"] + 1000.0, (usual, slow)


def estimate(costs: Costs, op: str, m: int) -> float:
    (offer,) = [offer for offer in symmetric.dispatch.implementations(op) if offer.name == "symmetric"]
    return offer.estimate(replace(PROBLEM, op=op, m=m), costs)


@pytest.mark.parametrize(("op", "m", "field", "calls"), [
    (GATHER, 8192, "symmetric_call_us", 1), (REDUCE, 8192, "symmetric_call_us", 2),
    (REDUCE, 8, "symmetric_kernel_us", 1), (REDUCE, 512, "symmetric_kernel_us", 1),
])  # fmt: skip
def test_what_was_measured_goes_before_the_model(op: str, m: int, field: str, calls: int) -> None:
    model = symmetric_costs.CALL_US if field == "symmetric_call_us" else symmetric_costs.KERNEL_US
    found = estimate(Costs(own=((field, 7.0),), measured=True), op, m)
    assert found == pytest.approx(estimate(Costs(measured=True), op, m) + calls * (7.0 - model))


def test_the_slowest_rank_counts_and_explain_says_what_is_modelled() -> None:
    told = [{"symmetric_call_us": us, "symmetric_kernel_us": us / 4} for us in (40.0, 90.0)]
    agreed = agreed_costs.slowest(told, widens=False)
    assert agreed.own == (("symmetric_call_us", 90.0), ("symmetric_kernel_us", 22.5))
    for costs, said in ((agreed, "symmetric call 90 us"), (Costs(), "symmetric call modelled")):
        assert said in str(symmetric.dispatch.select(PROBLEM, "symmetric", costs)[1])
    without = replace(PROBLEM, resources=(Standing(SymmetricMemory.name, "one host only"),))
    assert "symmetric call" not in str(symmetric.dispatch.select(without, "unfused", Costs())[1])


# --- the link ---------------------------------------------------------------------------------------------------------

LATENCY_S, GBYTES, HOST_S = 10e-6, 300.0, 400e-6


def rates(monkeypatch: pytest.MonkeyPatch, kind: str) -> dict[str, float]:
    """Of a link of 300 GB/s, whose host takes 400 us to ask for anything."""
    device = torch.device(kind)

    def ring(group: Any, tag: int, at: torch.device, num_bytes: int, repeats: int) -> calibration._Took:
        assert at == device
        transfer_s = LATENCY_S + 1e-9 * num_bytes / GBYTES
        return calibration._Took(HOST_S + transfer_s, HOST_S, transfer_s if kind == "cuda" else HOST_S + transfer_s)

    monkeypatch.setattr(calibration, "_ring", ring)
    group: Any = SimpleNamespace(backends=SimpleNamespace(wire_device=lambda asked: asked))
    return calibration.link_rates(group, 0, device)


def test_a_link_between_gpus_has_the_rate_of_much_data_by_their_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rates(monkeypatch, "cuda")
    assert found["link_gbytes"] == pytest.approx(GBYTES, rel=1e-3)
    assert found["link_latency_us"] == pytest.approx(1e6 * (HOST_S + LATENCY_S), rel=0.01)
    assert calibration._LARGE_BYTES_ON_DEVICE >= 64 << 20


def test_a_mib_by_the_clock_of_the_host_has_another_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was measured before, and still is on a CPU, where a MiB takes a hundred times as long."""
    assert rates(monkeypatch, "cpu")["link_gbytes"] < GBYTES / 50
