"""The all-reduce of `symmetric` that sums shares and sends the sums in one kernel: on emulated GPUs."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

import tpkernels as tpk
from tests.backends.contract import exact_cases, run
from tests.backends.emulated import Emulation, give_up_after
from tests.backends.test_symmetric import DTYPES, FORCED, case_of, judge_all
from tests.backends.test_symmetric_self_check import one_more
from tpkernels.backends.symmetric import implementations as symmetric
from tpkernels.backends.symmetric.resource import channels_of
from tpkernels.comm.groups import resolve
from tpkernels.testing.cases import REDUCE, operands
from tpkernels.testing.numeric import assert_bitwise_equal
from tpkernels.testing.payload import payload
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

PATIENCE_S = 180.0
MUCH = 10**7


def two_shot(emulation: Emulation, **changes: Any) -> Emulation:
    return replace(emulation, two_shot_bytes=MUCH, **changes)


@pytest.mark.sample(2)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_integers_are_exact_and_have_the_bits_of_unfused(pools: Pools, emulation: Emulation, world: int) -> None:
    """Rows and shares that do not divide, missing rows, bias, every dtype; stores that reach everybody, or not."""
    for op in ("all_reduce", REDUCE):
        cases = [case for case in exact_cases(op, "symmetric", world) if case.dtype in DTYPES]
        sample = cases if op == "all_reduce" else cases[world % 3 :: 3]
        pools(world).run(judge_all, two_shot(emulation, multicast=world == 3), sample, "unfused", timeout=PATIENCE_S)


WAYS: dict[str, dict[str, int]] = {
    "one step": {"one_shot_bytes": MUCH},
    "one kernel of two steps": {"two_shot_bytes": MUCH},
    "two steps": {},
}


def sums(emulation: Emulation) -> list[torch.Tensor]:
    """Of sizes that leave the last ranks little or nothing."""
    found = []
    with emulation.group() as group:
        rank = dist.get_rank(group)
        for call, shape in enumerate(((1, 1), (3, 7), (5, 8), (1, 40), (37, 31), (64, 24))):
            for dtype in DTYPES:
                x = payload(shape, dtype, rank=rank, call=call)
                found.append(tpk.all_reduce(x, group, **FORCED))
                w, bias = payload((9, shape[1]), dtype, rank=rank, name="w"), payload((9,), dtype, name="bias")
                if call % 2:
                    time.sleep(0.01 * rank)
                found.append(tpk.matmul_all_reduce(x, w, group, bias=bias, **FORCED))
        assert channels_of(resolve(group))
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3])
def test_every_way_to_sum_has_the_same_bits_on_every_rank(pools: Pools, emulation: Emulation, world: int) -> None:
    plain = replace(emulation, fuse_from_rows=10**6)  # all from the products of the library
    found = {way: pools(world).run(sums, replace(plain, **bytes_)) for way, bytes_ in WAYS.items()}
    (expected, *_) = found["two steps"]
    for way, ranks in found.items():
        for rank, tensors in enumerate(ranks):
            for now, before in zip(tensors, expected, strict=True):
                assert_bitwise_equal(now, before, f"{way}, rank {rank}")


# --- failures ---------------------------------------------------------------------------------------------------------


def abandoned(emulation: Emulation, what: str) -> tuple[str, str, float]:
    """Rank 1 does not come to the second call, or comes to another one."""
    case = case_of("all_reduce", shape=(30, 8))
    with emulation.group() as made:
        run(case, operands(case, 3), made)
        other = case_of("all_reduce", shape=(31, 8))
        run(other, operands(other, 3), made)
        give_up_after(made, 2.0 if what == "missing" else 20.0)
        start = time.monotonic()
        if dist.get_rank(made) == 1:
            if what == "missing":
                time.sleep(8.0)
                return "nothing", "", 0.0
            case = other
        try:
            for _ in range(3):
                run(case, operands(case, 3), made)
        except tpk.errors.CommunicationError as error:
            return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", 0.0


def test_a_rank_that_does_not_come_is_a_time_out_that_names_it(pools: Pools, emulation: Emulation) -> None:
    told = pools(3).run(abandoned, two_shot(emulation), "missing", timeout=PATIENCE_S)
    named = [text for name, text, _ in told if name == "CollectiveTimeout"]
    assert named and all("for rank 1" in text and "epoch" in text for text in named), told
    for rank in (0, 2):
        name, _, took = told[rank]
        assert name in ("CollectiveTimeout", "GroupPoisoned") and took < 60, told


def test_a_rank_in_another_call_is_told_by_its_fingerprint(pools: Pools, emulation: Emulation) -> None:
    told = pools(3).run(abandoned, two_shot(emulation), "disagrees", timeout=PATIENCE_S)
    assert any(name == "GroupMismatch" for name, _, _ in told), told
    assert all(name in ("GroupMismatch", "GroupPoisoned") for name, _, _ in told), told


# --- when -------------------------------------------------------------------------------------------------------------


def first_use(emulation: Emulation, spoiled: bool) -> list[str]:
    """The ways that were tried before the first calls, or what a wrong sum makes of them."""
    with emulation.group() as made:
        case = case_of("all_reduce", shape=(300, 8))
        with one_more("two_shot", -1) if spoiled and dist.get_rank(made) == 1 else mock.patch.dict({}):
            try:
                run(case, operands(case, 2), made)
            except tpk.errors.UnsupportedProblem as error:
                return [str(error)]
        channels = channels_of(resolve(made))
        assert set(channels.first_uses.values()) == {None}
        return [way for _, _, _, way in channels.first_uses]


def test_it_is_tried_before_it_is_trusted(pools: Pools, emulation: Emulation) -> None:
    settings = two_shot(emulation, checks=True, one_shot_bytes=100)
    assert pools(2).run(first_use, settings, False) == [["in one kernel of two steps"]] * 2
    for (said,) in pools(2).run(first_use, settings, True):
        assert re.search(r"rank 1: \d+ of \d+ elements are wrong", said), said


@pytest.mark.cpu
@pytest.mark.parametrize("size", [2, 3, 8])
def test_each_way_has_its_sizes(size: int) -> None:
    one_shot = (4 if size == 2 else 1) * symmetric.ONE_SHOT_BYTES
    ways = {0: "one_shot", one_shot: "one_shot", one_shot + 1: "two_shot", symmetric.TWO_SHOT_BYTES: "two_shot"}
    for num_bytes, way in ways.items():
        assert symmetric.in_one_kernel(size, num_bytes) is getattr(symmetric, way)
    assert symmetric.in_one_kernel(size, symmetric.TWO_SHOT_BYTES + 1) is None
