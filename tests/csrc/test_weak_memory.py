"""What the orderings in `common/signals.h` and `cpu/channel.cpp` are for: weaker ones have wrong executions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.csrc.weak_memory import Order, signalling, sleeping

pytestmark = pytest.mark.cpu

CSRC = Path(__file__).parents[2] / "csrc"
RELAXED, ACQ_REL, SEQ_CST = Order.RELAXED, Order.ACQ_REL, Order.SEQ_CST


@pytest.mark.parametrize(("ranks", "calls"), [(2, 3), (2, 4), (3, 1)])
def test_release_and_acquire_make_header_and_slot_of_the_call_visible(ranks: int, calls: int) -> None:
    outcome = signalling(ranks, calls)
    assert outcome.violation is None and not outcome.stuck and outcome.registers, outcome


def test_sequentially_consistent_epochs_are_releases_too() -> None:
    outcome = signalling(2, 3, store=SEQ_CST)
    assert outcome.violation is None and not outcome.stuck, outcome


def test_three_ranks_may_reuse_slots_two_calls_later(full: bool) -> None:
    outcome = signalling(3, 3 if full else 2)
    assert outcome.violation is None and not outcome.stuck, outcome


@pytest.mark.parametrize(
    ("store", "load", "slots"),
    [(RELAXED, ACQ_REL, 2), (ACQ_REL, RELAXED, 2), (RELAXED, RELAXED, 2), (ACQ_REL, ACQ_REL, 1)],
)
def test_a_relaxed_store_or_load_or_a_single_slot_reads_wrong_data(store: Order, load: Order, slots: int) -> None:
    outcome = signalling(2, 2, store, load, slots)
    assert outcome.violation is not None, outcome


def test_sleeper_and_signaller_never_miss_each_other_if_both_are_sequentially_consistent() -> None:
    assert not sleeping(SEQ_CST, SEQ_CST)


@pytest.mark.parametrize(("signaller", "waiter"), [(ACQ_REL, ACQ_REL), (SEQ_CST, ACQ_REL), (ACQ_REL, SEQ_CST)])
def test_with_release_and_acquire_on_either_side_both_can_miss(signaller: Order, waiter: Order) -> None:
    assert sleeping(signaller, waiter)


def test_looking_for_sleepers_before_publishing_misses_them_in_any_order() -> None:
    assert sleeping(SEQ_CST, SEQ_CST, look_first=True)


@pytest.mark.parametrize(
    ("file", "access"),
    [
        ("common/signals.h", r"counter\.store\(epoch, std::memory_order_seq_cst\)"),
        ("common/signals.h", r"counter\.load\(std::memory_order_acquire\)"),
        ("cpu/channel.cpp", r"own\.sleepers\.load\(std::memory_order_seq_cst\)"),
        ("cpu/channel.cpp", r"count_\.fetch_add\(1, std::memory_order_seq_cst\)"),
        ("cpu/channel.cpp", r"other\.epoch\.load\(std::memory_order_seq_cst\)"),
    ],
)
def test_the_source_uses_the_orderings_explored_here(file: str, access: str) -> None:
    assert re.search(access, (CSRC / file).read_text()), f"{file} no longer has {access}: explore its replacement"
