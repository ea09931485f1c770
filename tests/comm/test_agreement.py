"""Ranks that disagree about a call: GroupMismatch on every rank, soon and with both sides; never a hang or garbage."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.ops.support import new_group
from tpkernels.comm import agreement
from tpkernels.comm.groups import Group
from tpkernels.errors import CommunicationError, GroupMismatch, GroupPoisoned, PeerLost
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

FP32, BF16 = torch.float32, torch.bfloat16


def ones(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


CALLS: dict[str, Callable[[Any], Any]] = {
    "gather 4x8": lambda g: tpk.all_gather(ones(4, 8), g),
    "gather 8x4": lambda g: tpk.all_gather(ones(8, 4), g),  # as many bytes
    "gather 4x16 bf16": lambda g: tpk.all_gather(ones(4, 16, dtype=BF16), g),  # as many bytes
    "gather along 1": lambda g: tpk.all_gather(ones(4, 8), g, dim=1),
    "scatter": lambda g: tpk.reduce_scatter(ones(12, 8), g),
    "reduce": lambda g: tpk.all_reduce(ones(4, 8), g),
    "reduce more": lambda g: tpk.all_reduce(ones(64, 8), g),
    "gather_matmul": lambda g: tpk.all_gather_matmul(ones(4, 8), ones(5, 8), g, implementation="chunked"),
    "gather_matmul unfused": lambda g: tpk.all_gather_matmul(ones(4, 8), ones(5, 8), g, implementation="unfused"),
    "gather_matmul K=9": lambda g: tpk.all_gather_matmul(ones(4, 9), ones(5, 9), g, implementation="chunked"),
    "gather_matmul M=5": lambda g: tpk.all_gather_matmul(ones(5, 8), ones(5, 8), g, implementation="chunked"),
    "gather_matmul bf16": lambda g: tpk.all_gather_matmul(
        ones(4, 8, dtype=BF16), ones(5, 8, dtype=BF16), g, implementation="chunked"
    ),
    "matmul_scatter": lambda g: tpk.matmul_reduce_scatter(ones(12, 8), ones(5, 8), g, implementation="chunked"),
    "matmul_scatter N=6": lambda g: tpk.matmul_reduce_scatter(ones(12, 8), ones(6, 8), g, implementation="chunked"),
    "matmul_scatter sizes": lambda g: tpk.matmul_reduce_scatter(
        ones(12, 8), ones(5, 8), g, shard_sizes=[1, *[0] * (dist.get_world_size(g) - 2), 11], implementation="chunked"
    ),
    "matmul_reduce": lambda g: tpk.matmul_all_reduce(ones(12, 8), ones(5, 8), g, implementation="chunked"),
    "refused": lambda g: tpk.all_gather_matmul(ones(4, 8), ones(5, 7), g),
    "refused reduce": lambda g: tpk.all_reduce(ones(4, 8).int(), g),
    "nothing": lambda g: None,
}

# What rank 0 calls, and what all others do.
PAIRS = [
    ("gather 4x8", "gather 8x4"),
    ("gather 4x8", "gather 4x16 bf16"),
    ("gather 4x8", "gather along 1"),
    ("gather 4x8", "reduce"),
    ("scatter", "reduce"),
    ("reduce", "reduce more"),
    ("gather_matmul", "gather_matmul unfused"),
    ("gather_matmul", "gather_matmul K=9"),
    ("gather_matmul", "gather_matmul M=5"),
    ("gather_matmul", "gather_matmul bf16"),
    ("gather_matmul", "matmul_reduce"),
    ("gather_matmul", "gather 4x8"),
    ("matmul_scatter", "matmul_scatter N=6"),
    ("matmul_scatter", "matmul_scatter sizes"),
    ("matmul_scatter", "matmul_reduce"),
]


def disagree(known: Sequence[str], by_rank: Sequence[str]) -> tuple[BaseException | None, float, BaseException | None]:
    """This rank's error, the seconds until it came, and the error of the next call on the same group."""
    rank = dist.get_rank()
    with new_group(2) as group:
        for name in known:
            CALLS[name](group)
        dist.barrier()
        start = time.monotonic()
        error = outcome_of(CALLS[by_rank[rank]], group)
        seconds = time.monotonic() - start
        again = outcome_of(CALLS["reduce"], group)
        dist.barrier()
    with new_group() as fresh:
        assert torch.equal(tpk.all_reduce(ones(2, 2), fresh), ones(2, 2) * dist.get_world_size())
    return error, seconds, again


def outcome_of(call: Callable[[Any], Any], group: Any) -> BaseException | None:
    try:
        call(group)
    except (RuntimeError, ValueError) as error:
        return error
    return None


def check_mismatch(results: Sequence[Any], by_rank: Sequence[str], seconds: float) -> None:
    for rank, (error, took, again) in enumerate(results):
        assert type(error) is GroupMismatch, f"rank {rank} ({by_rank[rank]}): {error!r}"
        assert f"rank {rank}, call " in str(error)
        assert took < seconds, (rank, took)
        assert type(again) is GroupPoisoned and "make a new group" in str(again), again
        assert "First failure: GroupMismatch" in str(again)


@pytest.mark.sample(10)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("pair", PAIRS, ids=" / ".join)
def test_new_signatures_that_differ_are_found_before_anything_is_sent(
    ranks: Pools, world: int, pair: tuple[str, str]
) -> None:
    by_rank = [pair[0]] + [pair[1]] * (world - 1)
    results = ranks(world).run(disagree, ["reduce more", "scatter"], by_rank)
    check_mismatch(results, by_rank, 3.0)
    for error, _, _ in results:
        assert "the ranks made different calls" in str(error)
        assert f"rank(s) [0]: {error_side(pair[0])}" in str(error) and error_side(pair[1]) in str(error)
        assert error.ranks == (0,)


def error_side(name: str) -> str:
    ops = {
        "gather ": "all_gather(",
        "scatter": "reduce_scatter(",
        "reduce": "all_reduce(",
        "gather_matmul": "all_gather_matmul(",
        "matmul_scatter": "matmul_reduce_scatter(",
        "matmul_reduce": "matmul_all_reduce(",
    }
    return next(op for prefix, op in ops.items() if name.startswith(prefix))


@pytest.mark.parametrize("pair", PAIRS, ids=" / ".join)
def test_known_signatures_that_differ_are_found_by_the_monitor(ranks: Pools, pair: tuple[str, str]) -> None:
    by_rank = [pair[0], pair[1]]
    results = ranks(2).run(disagree, pair, by_rank)
    check_mismatch(results, by_rank, 3.0)
    for error, _, _ in results:
        assert error_side(pair[0]) in str(error) and error_side(pair[1]) in str(error)


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("known", [True, False])
def test_one_of_three_ranks_is_named_when_it_differs(ranks: Pools, odd: int, known: bool) -> None:
    pair = ("gather_matmul", "matmul_scatter")
    by_rank = [pair[1] if rank == odd else pair[0] for rank in range(3)]
    results = ranks(3).run(disagree, pair if known else [], by_rank)
    check_mismatch(results, by_rank, 3.0)
    for error, _, _ in results:
        assert f"rank(s) [{odd}]: matmul_reduce_scatter(" in str(error)
        assert error.ranks == (odd,)


def test_every_rank_may_make_another_call(ranks: Pools) -> None:
    by_rank = ["gather_matmul", "matmul_scatter", "reduce"]
    check_mismatch(ranks(3).run(disagree, by_rank, by_rank), by_rank, 3.0)


@pytest.mark.parametrize("known", [("gather_matmul",), ("matmul_scatter",)], ids="known: {0[0]}".format)
def test_a_known_call_against_a_new_one_is_found(ranks: Pools, known: tuple[str]) -> None:
    by_rank = ["gather_matmul", "matmul_scatter", "gather_matmul"]
    check_mismatch(ranks(3).run(disagree, known, by_rank), by_rank, 3.0)


def disagree_without(late: int, seconds: float) -> tuple[BaseException | None, float]:
    """Two of three ranks disagree while the third is busy elsewhere."""
    with new_group() as group:
        CALLS["reduce"](group)
        if dist.get_rank() == late:
            time.sleep(seconds)
        start = time.monotonic()
        error = outcome_of(CALLS["gather_matmul" if dist.get_rank() == 0 else "matmul_scatter"], group)
        elapsed = time.monotonic() - start
        dist.barrier()
    return error, elapsed


def test_a_disagreement_is_reported_before_the_last_rank_arrives(ranks: Pools) -> None:
    for error, seconds in ranks(3).run(disagree_without, 2, 5.0):
        assert type(error) is GroupMismatch and seconds < 3.0, (error, seconds)


def test_the_same_calls_in_another_order_are_found(ranks: Pools) -> None:
    results = ranks(2).run(in_another_order)
    for error, seconds in results:
        assert type(error) is GroupMismatch and seconds < 3.0, (error, seconds)


def in_another_order() -> tuple[BaseException | None, float]:
    order = ["gather_matmul", "matmul_scatter"]
    with new_group() as group:
        for name in order:
            CALLS[name](group)
        start = time.monotonic()
        error = None
        for name in order if dist.get_rank() == 0 else reversed(order):
            error = error or outcome_of(CALLS[name], group)
        seconds = time.monotonic() - start
        dist.barrier()
    return error, seconds


def skipped_call() -> tuple[BaseException | None, float]:
    """Rank 1 skips one call, and meets its peer in the next one."""
    with new_group() as group:
        for name in ("gather_matmul", "matmul_scatter"):
            CALLS[name](group)
        start = time.monotonic()
        error = outcome_of(CALLS["gather_matmul"], group) if dist.get_rank() == 0 else None
        error = error or outcome_of(CALLS["matmul_scatter"], group)
        seconds = time.monotonic() - start
        dist.barrier()
    return error, seconds


def test_a_skipped_call_is_found(ranks: Pools) -> None:
    for error, seconds in ranks(2).run(skipped_call):
        assert type(error) is GroupMismatch and seconds < 3.0, (error, seconds)


# ---------------------------------------------------------------- refused arguments


@pytest.mark.parametrize("refusing", [0, 1, 2])
@pytest.mark.parametrize("known", [True, False], ids=["known", "new"])
def test_one_ranks_bad_arguments_are_told_to_the_others(ranks: Pools, refusing: int, known: bool) -> None:
    by_rank = ["refused" if rank == refusing else "gather_matmul" for rank in range(3)]
    results = ranks(3).run(disagree, ["gather_matmul"] if known else ["reduce"], by_rank)
    for rank, (error, seconds, _) in enumerate(results):
        assert seconds < 3.0
        if rank == refusing:
            assert type(error) is ValueError and "weight must be [N, 8]" in str(error)
        else:
            assert type(error) is GroupMismatch
            assert f"rank {refusing} refused its arguments: weight must be [N, 8]" in str(error)
            assert error.ranks == (refusing,)


def refuse_in_turns() -> None:
    """Every rank's bad call is refused alike; the call after it works, and so does the one after that."""
    with new_group() as group:
        for turn in range(3):
            for name in ("refused", "refused reduce", "refused"):
                assert isinstance(outcome_of(CALLS[name], group), ValueError), turn
            expected = ones(4, 8) * dist.get_world_size()
            assert torch.equal(CALLS["reduce"](group), expected)


@pytest.mark.parametrize("world", [2, 3])
def test_a_group_works_on_after_all_ranks_refused_the_same_call(ranks: Pools, world: int) -> None:
    ranks(world).run(refuse_in_turns)


# ---------------------------------------------------------------- settings, records


def differing_settings(name: str, values: Sequence[str]) -> BaseException | None:
    with new_group() as group:
        os.environ[name] = values[dist.get_rank()]
        error = outcome_of(CALLS["gather_matmul"], group)
        dist.barrier()
    return error


@pytest.mark.parametrize(("name", "values"), [("TPKERNELS_NUM_CHUNKS", "23"), ("TPKERNELS_CALIBRATE", "01")])
def test_settings_that_differ_between_ranks_are_named(ranks: Pools, name: str, values: str) -> None:
    for error in ranks(2).run(differing_settings, name, list(values)):
        assert type(error) is GroupMismatch and f"{name} differs between ranks" in str(error), error


def slow_reader() -> None:
    """Rank 1 reads the records of a new call long after its peer has gone on: the facts must still be there."""
    original = agreement._poll

    def poll(group: Group, *args: Any) -> list[int]:
        missing = original(group, *args)
        if dist.get_rank() == 1:
            time.sleep(1.5)
        return missing

    agreement._poll = poll
    try:
        with new_group() as group:
            CALLS["gather_matmul"](group)
    finally:
        agreement._poll = original


def test_a_rank_that_reads_the_records_late_finds_their_facts(ranks: Pools) -> None:
    ranks(2).run(slow_reader)


def test_a_record_survives_its_way_through_the_store() -> None:
    record = agreement.Record(
        "op(dtype=float32)", {"local": 3, "chunks": None}, refused="x (3) \N{GREEK SMALL LETTER ALPHA}"
    )
    assert agreement.Record.from_json(record.to_json()) == record


def test_errors_pickle_with_the_ranks_they_blame() -> None:
    import pickle

    for kind in (GroupMismatch, PeerLost, GroupPoisoned):
        copy = pickle.loads(pickle.dumps(kind("rank 0: what happened", ranks=(1, 2))))
        assert type(copy) is kind and copy.ranks == (1, 2) and str(copy) == "rank 0: what happened"
        assert isinstance(copy, CommunicationError)
