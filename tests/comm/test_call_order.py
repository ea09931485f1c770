"""Known calls in another order, on a transport that matches messages by their order alone, as NCCL does.

NCCL is not here: these ranks send through gloo without the tags by which it tells calls apart.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tpkernels.comm import agreement, call_order, monitor, trail, transport
from tpkernels.comm.bounded_store import BoundedStore
from tpkernels.comm.call_order import Comparison
from tpkernels.comm.device_backends import DeviceBackends
from tpkernels.comm.groups import resolve
from tpkernels.comm.trail import Trail, fingerprint
from tpkernels.errors import GroupMismatch, GroupPoisoned
from tpkernels.testing.spawn import Pools

LIMIT_S = 20.0
SOON = 5.0  # seconds; measured: below 1
PAUSE = 0.02


# trails


def trail_of(calls: Sequence[str]) -> Trail:
    made = Trail()
    for number, name in enumerate(calls, start=1):
        made.add(number, name, fingerprint(name))
    return made


@pytest.mark.cpu
@pytest.mark.parametrize("other", ["bac", "acb", "cba", "aab", "abb", "ab", "abcc"])
def test_trails_are_alike_for_the_same_calls_in_the_same_order_alone(other: str) -> None:
    assert trail_of("abc").last == trail_of("abc").last
    assert trail_of("abc").last.digest != trail_of(other).last.digest


@pytest.mark.cpu
def test_a_trail_forgets_the_oldest_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trail, "KEPT", 4)
    found = trail_of("abcdef")
    assert [step.signature for step in found.steps()] == list("cdef")
    assert [found.at(place) is not None for place in range(8)] == [False, False, False, True, True, True, True, False]


class Store(dict[str, bytes]):
    """As much of a c10d store as the comparison uses."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self[key] for key in keys]


def looks(*trails: Trail, rounds: int = 3) -> list[GroupMismatch | None]:
    """What each rank has found after so many looks of each, one after the other."""
    store, found = BoundedStore(Store(), 5.0), [None] * len(trails)
    groups: list[Any] = [
        SimpleNamespace(rank=rank, size=len(trails), key="k", name="tp") for rank in range(len(trails))
    ]
    comparisons = [Comparison() for _ in trails]
    for _ in range(rounds):
        for rank, comparison in enumerate(comparisons):
            found[rank] = found[rank] or comparison.look(groups[rank], trails[rank], store)  # type: ignore[call-overload]
    return found


@pytest.mark.cpu
def test_ranks_that_are_ahead_or_have_not_begun_are_not_blamed() -> None:
    assert looks(trail_of("abcab"), trail_of("ab"), trail_of(""), trail_of("abca"), rounds=5) == [None] * 4


@pytest.mark.cpu
@pytest.mark.parametrize(("ahead", "behind"), [("xabcd", "xba"), ("xab", "xba"), ("xabcd", "xb")])
def test_the_first_calls_that_differ_are_named_on_all_ranks(ahead: str, behind: str) -> None:
    for rank, error in enumerate(looks(trail_of(ahead), trail_of(behind), trail_of(ahead))):
        assert error is not None and error.ranks == (1,)
        assert f"rank {rank}, call 2 on group 'tp'" in str(error)
        assert "rank(s) [0, 2]: a\n" in str(error) and "rank(s) [1]: b\n" in str(error)


@pytest.mark.cpu
def test_a_difference_that_nobody_remembers_is_an_error_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (trail, call_order):
        monkeypatch.setattr(module, "KEPT", 4)
    for error in looks(trail_of("ab" + 8 * "x"), trail_of("ba" + 8 * "x")):
        assert "the ranks made different calls, more than 4 calls ago" in str(error)


@pytest.mark.cpu
def test_a_rank_that_does_not_tell_its_calls_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "AWAIT_OTHERS", 0.0)
    store = BoundedStore(Store(), 5.0)
    store.set("k/order/1", json.dumps({"place": 1, "digest": 5, "steps": [], "words": []}))
    group: Any = SimpleNamespace(rank=0, size=2, key="k", name="tp")
    error = Comparison().look(group, trail_of("abc"), store)
    assert error is not None and error.ranks == (1,) and "rank(s) [1] do not say which" in str(error)


# ranks


@contextmanager
def without_tags(*, compared: bool = True) -> Iterator[Any]:
    """A group whose messages match by order alone; ``compared``: as we know it to do."""
    with (
        mock.patch.object(transport, "call_tag", lambda call, signature_id=0: transport._TAG_BASE),
        mock.patch.object(DeviceBackends, "match_by_order", compared),
    ):
        group = dist.new_group(timeout=timedelta(seconds=LIMIT_S))
        yield group
        dist.destroy_process_group(group)


def gather(rows: int, group: Any) -> torch.Tensor:
    """32 numbers of each rank, that say whose they are and of which call."""
    mine = torch.full((rows, 32 // rows), 100.0 * rows + dist.get_rank())
    return tpk.all_gather(mine, group, implementation="unfused")


def is_right(rows: int, whole: torch.Tensor) -> bool:
    expected = [[100.0 * rows + rank] * (32 // rows) for rank in range(dist.get_world_size()) for _ in range(rows)]
    return whole.tolist() == expected


def in_another_order(odd: int, compared: bool) -> tuple[list[bool], BaseException | None, BaseException | None, float]:
    """Whether two calls gave what they must; then the first error of later calls, the next one, and the seconds."""
    with without_tags(compared=compared) as group:
        assert is_right(4, gather(4, group)) and is_right(8, gather(8, group)), "known, in one order"
        order = (8, 4) if dist.get_rank() == odd else (4, 8)
        right = {rows: is_right(rows, gather(rows, group)) for rows in order}
        start, errors = time.monotonic(), []
        for _ in range(int(SOON / PAUSE) if compared else 20):  # a number: until a time, ranks would make unlike ones
            if len(errors) == 2:
                break
            try:
                gather(2, group)
            except (GroupMismatch, GroupPoisoned) as error:
                errors.append(error)
            time.sleep(PAUSE)
        took = time.monotonic() - start
        errors += [None] * 2
        return [right[4], right[8]], errors[0], errors[1], took


@pytest.mark.gloo
@pytest.mark.parametrize(("world", "odd"), [(2, 1), (3, 0)])
def test_two_known_calls_of_equal_bytes_in_another_order_end_in_a_mismatch(ranks: Pools, world: int, odd: int) -> None:
    for rank, (_, error, again, took) in enumerate(ranks(world).run(in_another_order, odd, True)):
        assert type(error) is GroupMismatch, f"rank {rank}: {error!r} after {took:.1f} s"
        sides = {str(line).strip() for line in str(error).splitlines()[1:3]}
        others = [other for other in range(world) if other != odd]
        assert any(side.startswith(f"rank(s) [{odd}]: all_gather(") and "[8, " in side for side in sides), error
        assert any(side.startswith(f"rank(s) {others}: all_gather(") and "[4, " in side for side in sides), error
        assert error.ranks == ((odd,) if world > 2 else error.ranks)
        assert "what was computed from there on" in str(error)
        assert type(again) is GroupPoisoned


@pytest.mark.gloo
def test_without_the_comparison_they_compute_with_each_others_data(ranks: Pools) -> None:
    """What the test above would see if ranks did not compare: wrong data, and no error."""
    for right, error, _, _ in ranks(2).run(in_another_order, 1, False):
        assert right == [False, False] and error is None


def in_step(calls: int) -> tuple[int, int]:
    """The place and the digest in which the trails end, of ranks that take turns in being late."""
    pause = random.Random(dist.get_rank())
    with mock.patch.object(monitor, "PERIOD", 0.01), without_tags() as group:
        for number in range(calls):
            rows = (2, 4, 8)[number % 3]
            assert is_right(rows, gather(rows, group))
            if pause.random() < 0.05:
                time.sleep(0.05 * pause.random())
        state = resolve(group)
        assert state.trail is not None and state.verdict is None and state.poison is None
        return state.trail.last.place, state.trail.last.digest


@pytest.mark.gloo
def test_ranks_in_step_are_left_alone(ranks: Pools) -> None:
    first, *others = ranks(3).run(in_step, 200)
    assert first[0] == 200 and all(other == first for other in others)


@pytest.mark.gloo
def test_groups_that_match_messages_by_tags_keep_no_trail(ranks: Pools) -> None:
    assert ranks(2).run(has_no_trail) == [True, True]


def has_no_trail() -> bool:
    group = dist.group.WORLD
    assert group is not None
    assert DeviceBackends.parse("cpu:gloo,cuda:nccl").match_by_order and DeviceBackends.parse("nccl").match_by_order
    return resolve(group).trail is None
