"""Grouped GEMMs of `symmetric`, experts cut or dealt out, as W processes with an emulated GPU each (emulated.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

from tests.backends.emulated import Emulation, give_up_after
from tests.backends.grouped_cases import BF16, OPS, SIZES, cases, dealt_cases, fp8_cases
from tests.backends.test_symmetric import forgotten
from tpkernels.backends.symmetric import cuda_group
from tpkernels.backends.symmetric.dealt import _Slots
from tpkernels.backends.symmetric.resource import channels_of
from tpkernels.comm.groups import resolve
from tpkernels.errors import CommunicationError, UnsupportedProblem
from tpkernels.gemm.grouped import TokenRows
from tpkernels.testing import dealt, grouped
from tpkernels.testing.dealt import COMBINE, DEALT, DISPATCH, DealtCase
from tpkernels.testing.grouped import SCATTER, GroupedCase
from tpkernels.testing.numeric import assert_bitwise_equal
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

PATIENCE_S = 180.0


def judge(case: GroupedCase | DealtCase, group: Any, *, backward: bool = True) -> list[torch.Tensor]:
    if isinstance(case, DealtCase):
        return dealt.judge(case, group, backward=backward)
    return grouped.judge(case, group, backward=backward)


def judge_all(emulation: Emulation, chosen: Sequence[GroupedCase | DealtCase]) -> int:
    with emulation.group() as group:
        for case in chosen:
            judge(case, group)
    return len(chosen)


WHOLE = TokenRows.of_tokens


def first_uses(emulation: Emulation, spoiled: bool) -> list[str]:
    """What the first call of each op says; spoiled: all rows of a token are taken for the first row of all."""
    said, fault = [], mock.patch.object(TokenRows, "of_tokens", lambda rows: WHOLE(rows) * 0)
    with emulation.group() as group, fault if spoiled else nullcontext():
        for op in (SCATTER,) if spoiled else (*OPS, *DEALT):
            case: Any = (DealtCase if op in DEALT else GroupedCase)(op, SIZES[2], implementation="symmetric")
            for one in (case,) if spoiled else (case, case.but(fp8=("row", "row"), dtype=BF16)):
                try:
                    judge(one, group, backward=False)
                except UnsupportedProblem as error:
                    said.append(str(error))
    return said


def test_rows_of_two_ranks_lie_apart_in_a_slot_that_all_ranks_take_to_be_as_large() -> None:
    counts = [[3, 5, 0, 7], [0, 0, 0, 0], [2, 9, 1, 1], [4, 0, 6, 8]]
    slots = _Slots(counts, 10)
    for owner, of_owner in enumerate(counts):
        parts = [(slots.place(owner, other), 10 * of_owner[other]) for other in range(4) if other != owner]
        for (start, size), (following, _) in zip(parts, [*parts[1:], (slots.num_bytes, 0)], strict=True):
            assert start % 16 == 0 and start + size <= following
    assert slots.num_bytes == 256 and _Slots([[0, 0], [0, 0]], 10).num_bytes == 1


@pytest.mark.full("interpreted ranks, and larger problems than they are given elsewhere")
def test_first_calls_are_preceded_by_one_whose_answer_is_known(pools: Pools, emulation: Emulation) -> None:
    settings = replace(emulation, num_chunks=2, checks=True, one_shot_bytes=10**6, capability=90)
    assert pools(2).run(first_uses, settings, False, timeout=PATIENCE_S) == [[], []]
    for said in pools(2).run(first_uses, settings, True, timeout=PATIENCE_S):
        assert len(said) == 1 and SCATTER in said[0] and "elements are wrong" in said[0], said


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.slow("10 s: grouped ops, forward and backward, on interpreted ranks; tests/kernels interprets the kernel")
def test_values_and_gradients_are_within_the_bound(pools: Pools, emulation: Emulation, world: int, full: bool) -> None:
    chosen = cases(world) if full else cases(world)[world % 3 :: 3]
    settings = replace(emulation, num_chunks=2, late_us=500)
    pools(world).run(judge_all, settings, chosen, timeout=PATIENCE_S)
    # Few tokens: they are gathered, or summed, before anything else.
    apart = replace(settings, fuse_from_rows=10**6, one_shot_bytes=10**6 if world == 2 else 0)
    pools(world).run(judge_all, apart, chosen[::2], timeout=PATIENCE_S)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.slow("10 s: dealt-out experts, forward and backward, on interpreted ranks")
def test_dealt_out_experts_are_within_the_bound(pools: Pools, emulation: Emulation, world: int, full: bool) -> None:
    chosen = dealt_cases(world) if full else dealt_cases(world)[world % 3 :: 3]
    settings = replace(emulation, num_chunks=2, late_us=500)
    pools(world).run(judge_all, settings, chosen, timeout=PATIENCE_S)
    apart = replace(settings, fuse_from_rows=10**6)
    pools(world).run(judge_all, apart, chosen[::2], timeout=PATIENCE_S)


def exact(emulation: Emulation) -> list[torch.Tensor]:
    """Results and gradients of integers, whose sums are exact, which have the bits of unfused."""
    found = []
    with emulation.group() as group:
        for op in (*OPS, *DEALT):
            for dtype in (torch.float32, torch.bfloat16):
                kind: Any = DealtCase if op in DEALT else GroupedCase
                case = kind(op, (11, 0, 4), dtype=dtype, integers=True, bias=True, num_experts=5, top_k=3)
                results = [judge(case.but(implementation=name), group) for name in ("symmetric", "unfused")]
                for now, before in zip(*results, strict=True):
                    assert_bitwise_equal(now.detach(), before.detach(), f"{case}", either_zero=True)
                found += [one.detach() for one in results[0]]
    return found


@pytest.mark.full("three interpreted ranks, in one chunk and in three")
def test_integers_have_the_bits_of_unfused_in_any_number_of_chunks(pools: Pools, emulation: Emulation) -> None:
    of_one, of_three = (
        pools(3).run(exact, replace(emulation, num_chunks=chunks, late_us=500), timeout=PATIENCE_S) for chunks in (1, 3)
    )
    for one, three in zip(of_one, of_three, strict=True):
        for before, now in zip(one, three, strict=True):
            assert_bitwise_equal(now, before, "3 chunks against 1", either_zero=True)


def other_routings(emulation: Emulation) -> list[str]:
    """One call per routing, all of one kind: what of them the channel has kept after the first, and after the last."""
    kept = []
    with emulation.group() as group:
        for op in DEALT:
            for number in range(4):
                load = ("mixed", "one", "few", "mixed")[number]
                case = DealtCase(op, (9, 4), load=load, call=number, implementation="symmetric", integers=True)
                judge(case, group, backward=False)
                if number in (0, 3):
                    kept.append(sorted(map(str, channels_of(resolve(group)).main._remembered)))
    assert kept[0] == kept[1] and kept[2] == kept[3], "a routing was remembered"
    return kept[0]


@pytest.mark.full("interpreted ranks")
def test_calls_of_another_routing_are_of_the_same_kind(pools: Pools, emulation: Emulation) -> None:
    """Kernels are prepared once for all routings, and what is made of one is forgotten with its call."""
    assert all(pools(2).run(other_routings, replace(emulation, num_chunks=2), timeout=PATIENCE_S))


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.slow("interpreted ranks")
def test_values_of_fp8_operands_are_within_the_bound(
    pools: Pools, emulation: Emulation, world: int, full: bool
) -> None:
    chosen = fp8_cases(world) if full else fp8_cases(world)[world % 2 :: 2]
    settings = replace(emulation, num_chunks=2, late_us=500, capability=90)
    pools(world).run(judge_all, settings, chosen, timeout=PATIENCE_S)
    apart = replace(settings, fuse_from_rows=10**6, one_shot_bytes=10**6)
    pools(world).run(judge_all, apart, chosen[::2], timeout=PATIENCE_S)


# --- faults of dealt-out experts --------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "rows are taken from another rank's place": (DISPATCH, lambda: mock.patch.object(_Slots, "place", lambda *_: 0)),
    "sums are put into another rank's place": (COMBINE, lambda: mock.patch.object(_Slots, "place", lambda *_: 0)),
    "rows are fetched before they are there": (DISPATCH, lambda: forgotten("wait_peers")),
    "sums leave before they are made": (COMBINE, lambda: forgotten("wait_ranks")),
    "sums are added before they are there": (COMBINE, lambda: mock.patch.object(cuda_group.Group, "wait")),
}


def seeded(emulation: Emulation, fault: str) -> str:
    """The judge's error; ranks are late in turns, so that nobody finds by chance what it did not wait for."""
    op, patch = WRONG[fault]
    with emulation.group() as group:
        rank = dist.get_rank(group)
        case = DealtCase(op, (9, 6, 11), num_experts=6, top_k=3, implementation="symmetric")
        judge(case, group, backward=False)
        found = "nothing"
        with patch():
            for number in range(8):
                if (number + rank) % 2:
                    time.sleep(0.2)  # longer than a busy machine keeps the other ranks from their cores
                try:
                    judge(case.but(call=number), group, backward=False)
                except AssertionError as error:
                    found = str(error)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.slow("4 s in the interpreter: that the tests of dealt-out experts can fail")
def test_a_seeded_fault_is_caught(pools: Pools, emulation: Emulation, fault: str) -> None:
    said = pools(3).run(seeded, replace(emulation, num_chunks=2), fault, timeout=PATIENCE_S)
    assert any("exceed the bound" in one for one in said), said


def missing(emulation: Emulation, op: str) -> str:
    """What this rank raises where rank 1 keeps its signals to itself."""
    silent = mock.patch.object(cuda_group.Group, "signal") if op == DISPATCH else forgotten("signal_peers")
    with emulation.group() as made:
        rank = dist.get_rank(made)
        case = DealtCase(op, (9, 6, 11), num_experts=6, top_k=3, implementation="symmetric")
        judge(case, made, backward=False)
        give_up_after(made, 2.0)
        parts = dealt.operands(case)
        with silent if rank == 1 else nullcontext():
            try:
                for _ in range(3):
                    dealt.call(case, parts, parts.own(case, rank), made)
            except CommunicationError as error:
                return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.sample(1)
@pytest.mark.parametrize("op", DEALT)
@pytest.mark.slow("3 s in the interpreter")
def test_rows_that_never_come_end_in_an_error_that_names_their_rank(
    pools: Pools, emulation: Emulation, op: str
) -> None:
    told = pools(3).run(missing, replace(emulation, num_chunks=1), op, timeout=PATIENCE_S)  # the last is the first
    assert any(one.startswith("CollectiveTimeout") and "for rank 1" in one for one in told), told
    assert all(one.split(":")[0] in ("CollectiveTimeout", "PeerLost", "GroupPoisoned") for one in told), told
