"""Bits: integers are exact at any chunk count, and no result depends on timing, arrival order or earlier calls."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from tests.ops.support import IMPLEMENTATIONS, check_all, new_group, own_part, run_and_check
from tpkernels.comm.transport import Transfer
from tpkernels.testing.cases import DTYPES, FUSED, GATHER, REDUCE, SCATTER, Case, call, operands
from tpkernels.testing.numeric import assert_bitwise_equal
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

WORLDS = [3, 2]
COMMUNICATING = (GATHER, SCATTER, REDUCE)


@pytest.mark.sample(2)
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("world", WORLDS)
def test_integers_are_exact_at_any_chunk_count(ranks: Pools, world: int, num_chunks: int) -> None:
    cases = []
    for dtype in DTYPES:
        base = Case(GATHER, (24, 32), ns=(10, 5), dtype=dtype, integers=True, bias=True, own_ns=True)
        cases += [base, base.but(activation="relu"), base.but(op="copy_matmul")]
        cases += [base.but(shape=(3, 24, 16), dim=1, ns=(7,)), base.but(shape=(12, 24), dim=-1, ns=(7,))]
        for op in (SCATTER, REDUCE):
            cases.append(Case(op, (23, 32), ns=(10,), dtype=dtype, integers=True, bias=True))
        cases.append(Case(SCATTER, (5, 23, 32), ns=(10,), dim=1, dtype=dtype, integers=True))
        cases.append(Case(SCATTER, (9, 32), ns=(13,), dim=-1, dtype=dtype, integers=True, bias=True))
    for repetition, name in enumerate(IMPLEMENTATIONS):
        ranks(world).run(check_all, [case.but(implementation=name, call=repetition) for case in cases], num_chunks)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [3, 4])
def test_a_large_all_reduce_in_two_phases_is_exact(ranks: Pools, world: int) -> None:
    """With more than two ranks an all-reduce of this size is a reduce-scatter and a gather."""
    cases = [
        Case(REDUCE, (rows, 64), ns=(300,), dtype=dtype, integers=True, bias=True, implementation=name)
        for rows in (500, 1001)
        for dtype in (torch.bfloat16, torch.float32)
        for name in IMPLEMENTATIONS
    ]
    for num_chunks in (1, 5):
        ranks(world).run(check_all, cases, num_chunks)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", WORLDS)
def test_chunked_gives_the_bits_of_unfused_in_bf16(ranks: Pools, world: int) -> None:
    """bf16 rows do not depend on how many rows a GEMM has; fp32 ones may (see point_to_point/chunked.py)."""
    ranks(world).run(compare_implementations, torch.bfloat16)


def compare_implementations(dtype: torch.dtype) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    cases = [Case(op, (240, 64), ns=(48,), dtype=dtype, bias=True) for op in COMMUNICATING]
    results = {}
    for num_chunks in (1, 3):
        with new_group(num_chunks) as group:
            for case in cases:
                for name in IMPLEMENTATIONS:
                    outs, _ = call(case.but(implementation=name), own_part(operands(case, world), rank), group)
                    first = results.setdefault(case.op, outs[0])
                    assert_bitwise_equal(outs[0], first, f"{case.op}, {name}, {num_chunks} chunks")


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", WORLDS)
def test_all_ranks_of_an_all_reduce_get_the_same_bits(ranks: Pools, world: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for name in IMPLEMENTATIONS:
            for rows in (7, 700):
                case = Case(REDUCE, (rows, 96), ns=(120,), dtype=dtype, bias=True, implementation=name)
                first, *others = ranks(world).run(return_output, case, 3)
                for other in others:
                    assert_bitwise_equal(other, first, str(case))


def return_output(case: Case, num_chunks: int) -> torch.Tensor:
    with new_group(num_chunks) as group:
        return run_and_check(case, group)[0]


@contextmanager
def jitter(seed: int) -> Iterator[None]:
    """Waits end late by random times, so that chunks are met in many orders."""
    original, source = Transfer.wait, random.Random(seed)

    def wait(self: Transfer) -> None:
        time.sleep(source.choice((0.0, 0.0, 0.001, 0.004)))
        original(self)

    Transfer.wait = wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        Transfer.wait = original  # type: ignore[method-assign]


def repeat_with_jitter(rounds: int, num_chunks: int) -> int:
    """Every op, again and again, each rank late at random: the bits of the first round."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cases = [
        Case(op, (96, 64), ns=(40,), dtype=dtype, bias=True, implementation=name)
        for op in COMMUNICATING
        for dtype in (torch.float32, torch.bfloat16)
        for name in IMPLEMENTATIONS
    ]
    cases.append(Case(GATHER, (5, 12, 64), dim=1, ns=(8, 4), return_gathered=True))
    cases.append(Case(SCATTER, (5, 12, 64), dim=1, ns=(8,)))
    cases.append(Case(SCATTER, (30, 64), dim=-1, ns=(11,)))
    first: dict[Case, list[torch.Tensor]] = {}
    with new_group(num_chunks) as group:
        parts = {case: own_part(operands(case, world), rank) for case in cases}
        for turn in range(rounds):
            with jitter(1000 * turn + rank):
                for number, case in enumerate(cases):
                    if (turn + number) % world == rank:
                        time.sleep(0.005)
                    outs, gathered = call(case, parts[case], group)
                    outs = outs if gathered is None else [*outs, gathered]
                    for now, before in zip(outs, first.setdefault(case, outs), strict=True):
                        assert_bitwise_equal(now, before, f"rank {rank}, round {turn}, {case}")
    return rounds


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", WORLDS)
def test_results_do_not_depend_on_who_is_late(ranks: Pools, world: int, full: bool) -> None:
    ranks(world).run(repeat_with_jitter, 40 if full else 5, 4, timeout=300)


def late_rank(late: int, seconds: float) -> float:
    start = time.monotonic()
    with new_group(2) as group:
        for op in COMMUNICATING:
            case = Case(op, (12, 16), integers=True)
            run_and_check(case, group)
            if dist.get_rank() == late:
                time.sleep(seconds)
            run_and_check(case.but(call=1), group)
    return time.monotonic() - start


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3])
def test_a_late_rank_is_waited_for_longer_than_the_monitor_is_patient(ranks: Pools, world: int) -> None:
    elapsed = ranks(world).run(late_rank, world - 1, 1.2)
    assert min(elapsed) > 3 * 1.2


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", WORLDS)
def test_repeated_calls_carry_their_own_payload(ranks: Pools, world: int) -> None:
    """A chunk that is one call old would be seen: every call has numbers of its own."""
    cases = [
        Case(op, (12, 16), implementation=name, integers=True, bias=True, call=turn)
        for turn in range(30)
        for op in FUSED
        for name in IMPLEMENTATIONS
    ]
    ranks(world).run(check_all, cases, 3)


def rows_alone_and_together(dtype: torch.dtype) -> None:
    """The same rows in a larger batch, at another place: their results must have the same bits."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with new_group(1) as group:
        for op in (GATHER, REDUCE):
            case = Case(op, (64 * world, 64), ns=(32,), dtype=dtype, bias=True)
            x, ws, bs = own_part(operands(case, world), rank)
            whole = call(case, (x, ws, bs), group)[0][0]
            moved = call(case, (x.flip(0), ws, bs), group)[0][0]
            if op == REDUCE:
                assert_bitwise_equal(moved.flip(0), whole, f"{op}: rows of the same batch in another order")
            else:
                for block, other in zip(whole.split(64), moved.split(64), strict=True):
                    assert_bitwise_equal(other.flip(0), block, f"{op}: rows in another order")


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3])
def test_the_place_of_a_row_in_the_batch_does_not_matter_in_bf16(ranks: Pools, world: int) -> None:
    ranks(world).run(rows_alone_and_together, torch.bfloat16)
