"""What ``tpk.init(deterministic=True)`` promises: choices that change bits rest on nothing that a launch measures."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.ops.support import new_group
from tpkernels import config
from tpkernels.backends.shared_memory import segments
from tpkernels.comm import calibration
from tpkernels.comm.groups import resolve
from tpkernels.gemm import few_rows
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo


@contextmanager
def another_machine(seed: int, measured: list[str]) -> Iterator[None]:
    """Measurements as those of a launch beside other jobs: anything may come out."""
    dice = random.Random(seed)

    def gemm(device: torch.device, dtype: torch.dtype, widens: bool = False) -> dict[str, float]:
        measured.append("gemm")
        names = ("gemm_gflops", "gemm_overhead_us", "weight_gbytes", "relay_gbytes")
        return {name: 10 ** dice.uniform(-2, 3) for name in names}

    def link(group: Any, call: int, device: torch.device) -> dict[str, float]:
        measured.append("link")
        return {"link_gbytes": 10 ** dice.uniform(-4, 2), "link_latency_us": 10 ** dice.uniform(0, 5), "link_cpu": 1.0}

    def memory(*args: object) -> dict[str, float]:
        measured.append("memory")
        return {"copy_gbytes": 10 ** dice.uniform(-4, 2), "signal_us": 10 ** dice.uniform(0, 5)}

    def rows(*args: object) -> Any:
        measured.append("few rows")
        return mock.Mock(compiled_us=dice.random(), torch_us=dice.random())

    with (
        mock.patch.dict(os.environ, TPKERNELS_CALIBRATE="1"),  # the ranks of these tests do not measure otherwise
        mock.patch.object(calibration, "gemm_rates", gemm),
        mock.patch.object(calibration, "link_rates", link),
        mock.patch.object(few_rows, "measured", rows),
        mock.patch.object(segments.SharedMemory, "link_costs", memory),
    ):
        yield


def _launch(seed: int) -> tuple[list[tuple[str, int]], list[torch.Tensor], list[str]]:
    """What is chosen in a launch, the results, and what was measured."""
    measured: list[str] = []
    torch.manual_seed(1)
    x, weight = torch.randn(64, 512), torch.randn(96, 512)
    with new_group() as group, another_machine(seed, measured):
        results = [
            tpk.matmul_all_reduce(x, weight, group),
            tpk.all_gather_matmul(x, weight, group),
            tpk.matmul_reduce_scatter(x, weight, group),
            tpk.matmul_all_reduce(x[:2].contiguous(), torch.ones(2048, 512), group),
        ]
        chosen = [(plan.implementation.name, plan.num_chunks) for plan in resolve(group).agreed.values()]
    return chosen, results, measured


def launches(deterministic: bool) -> tuple[bool, bool, set[str]]:
    """Whether five launches have chosen alike and have the same bits, and what they measured."""
    config.be_deterministic(deterministic)
    try:
        found = [_launch(seed) for seed in range(5)]
    finally:
        config.be_deterministic(False)
    same_choices = all(chosen == found[0][0] for chosen, _, _ in found)
    same_bits = all(
        torch.equal(mine, first) for _, results, _ in found for mine, first in zip(results, found[0][1], strict=True)
    )
    return same_choices, same_bits, {what for _, _, measured in found for what in measured}


def test_launches_of_a_deterministic_job_measure_nothing_and_have_the_same_bits(ranks: Pools) -> None:
    for same_choices, same_bits, measured in ranks(2).run(launches, True):
        assert same_choices and same_bits and not measured


def test_launches_that_measure_may_choose_otherwise(ranks: Pools) -> None:
    """The test above can fail: this is what it excludes."""
    for same_choices, _, measured in ranks(2).run(launches, False):
        assert not same_choices and {"gemm", "link"} <= measured


def one_asks() -> str:
    tpk.init(deterministic=dist.get_rank() == 0)
    try:
        with new_group() as group:
            tpk.all_reduce(torch.ones(2), group)
    except tpk.errors.GroupMismatch as error:
        return str(error)
    finally:
        config.be_deterministic(False)
    return "nothing"


def test_ranks_that_ask_for_different_things_raise(ranks: Pools) -> None:
    for said in ranks(2).run(one_asks):
        assert "tpk.init(deterministic=...) differs between ranks: [True, False]" in said


def test_it_is_init_that_asks() -> None:
    try:
        with mock.patch("tpkernels.comm.startup._make_mesh"):
            tpk.init(device="cpu", deterministic=True)
            assert config.is_deterministic() and not config.load({}).calibrate
            assert not config.load({"TPKERNELS_TUNE": "1"}).tune
            tpk.init(device="cpu")
            assert config.is_deterministic(), "who says nothing leaves it as it was"
            tpk.init(device="cpu", deterministic=False)
        assert not config.is_deterministic() and config.load({}).calibrate
        with pytest.raises(ValueError, match="device must be"):
            tpk.init(device="tpu", deterministic=True)
        assert not config.is_deterministic(), "who joins no job decides nothing"
    finally:
        config.be_deterministic(False)
