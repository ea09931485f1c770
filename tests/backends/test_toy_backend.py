"""A new backend is one folder: the toy owns a resource, keeps the contract, and no file of the package knows it.

It is registered in the ranks for the length of a test, as an import of its folder would do.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels as tpk
from tests.backends import toy
from tests.backends.contract import BASE, exact_cases, judge_all, ops_of
from tests.backends.toy import mailbox
from tests.backends.toy.ops import OPS as TOY_OPS
from tests.ops.support import new_group
from tpkernels import dispatch
from tpkernels.comm import resources
from tpkernels.comm.groups import resolve
from tpkernels.dispatch import OPS
from tpkernels.errors import CommunicationError, GroupMismatch, PeerLost, UnsupportedProblem
from tpkernels.testing.cases import COLLECTIVES, GATHER, REDUCE, Case
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

TOY: dict[str, Any] = {"implementation": "toy"}


@contextmanager
def registered() -> Iterator[None]:
    with mock.patch.dict(dispatch._registry), mock.patch.dict(resources._kinds):
        toy.register()
        yield


def box_of(group: Any) -> toy.Mailbox:
    box: toy.Mailbox = resolve(group).resources[toy.Mailbox.name]
    return box


# --- the contract -----------------------------------------------------------------------------------------------------


def judged(cases: Sequence[Case], judge: str, fault: str | None = None) -> str | None:
    """What the judge says on this rank, if anything."""
    with registered(), struck(fault):
        try:
            assert judge_all(cases, judge) == len(cases)
        except AssertionError as error:
            return str(error)
    return None


@contextmanager
def struck(fault: str | None) -> Iterator[None]:
    """Rank 0 opens the third letter of another rank wrongly, and leaves all others alone."""
    opened, letters = mailbox.opened, iter(range(1_000_000))

    def wrongly(content: bytes, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        matrix = opened(content, shape, dtype)
        if next(letters) == 5:  # two ranks: every other one is our own
            if fault == "lost":
                matrix.zero_()
            else:
                matrix[:2] = matrix[:2].flip(0)
        return matrix

    if fault is None or dist.get_rank() != 0:
        yield
        return
    with mock.patch.object(mailbox, "opened", wrongly):
        yield


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("judge", ["unfused", "poison", "ownership"])
def test_the_toy_keeps_the_contract(ranks: Pools, op: str, judge: str) -> None:
    cases = exact_cases(op, "toy", 2)
    assert ranks(2).run(judged, cases if judge == "unfused" else few(op), judge) == [None, None]


def few(op: str) -> list[Case]:
    case = BASE.but(op=op, shape=(12, 24), **TOY)
    return [case.but(bias=False, ns=()) if op in COLLECTIVES else case]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("fault", ["lost", "swapped"])
def test_a_letter_that_is_opened_wrongly_is_caught(ranks: Pools, op: str, fault: str) -> None:
    case = few(op)[0]
    first, second = ranks(2).run(judged, [case.but(call=call) for call in range(3)], "values", fault)
    assert first is not None and "call=2" in first and "call=0" not in first
    assert second is None, "the other rank opened its letters well"


def test_it_has_all_ops_and_no_file_of_the_package_knows_it() -> None:
    assert set(TOY_OPS) == set(OPS)
    with registered():
        assert ops_of("toy") == list(OPS)
    assert ops_of("toy") == []
    package = Path(tpk.__file__).parent
    known = [path for path in package.rglob("*.py") if re.search(r"\btoy\b|mailbox", path.read_text(), re.IGNORECASE)]
    assert known == []


# --- what it owns -----------------------------------------------------------------------------------------------------


def owned() -> tuple[str, toy.Mailbox]:
    """How it is explained where costs are measured, and what is left of it when the group is gone."""
    with registered():
        with new_group(calibrate=True) as group:
            said = str(tpk.explain(REDUCE, m=8, n=8, k=8, dtype=torch.float32, group=group))
            box, before = box_of(group), box_of(group).ticks
            time.sleep(0.8)
            assert box.ticks > before, "the monitor did not look after it"
        box._store = None
    return said, box


def test_the_group_sets_it_up_measures_it_looks_after_it_and_closes_it(ranks: Pools) -> None:
    for said, box in ranks(2).run(owned):
        assert "costs (measured on this group)" in said
        (us,) = re.findall(r"round of mail (\d+) us", said)
        (estimate,) = re.findall(r"toy +estimate ([\d,]+) us", said)
        assert int(estimate.replace(",", "")) >= int(us) > 0, said
        assert box.closed


def refused() -> tuple[str, bool]:
    """Rank 1 has no mailbox: what forcing it says, and whether the group goes on."""
    missing = ["the box is full"] if dist.get_rank() == 1 else []
    with registered(), mock.patch.object(mailbox, "BROKEN", missing), new_group() as group:
        with pytest.raises(UnsupportedProblem) as caught:
            tpk.all_reduce(torch.ones(3), group, **TOY)
        return str(caught.value), bool((tpk.all_reduce(torch.ones(3), group) == 2).all())


def test_what_one_rank_lacks_is_refused_by_all(ranks: Pools) -> None:
    for said, goes_on in ranks(2).run(refused):
        assert "toy: rank 1: the box is full" in said and goes_on


def failed(how: str) -> tuple[str, str, float]:
    """Both ranks know two calls; then rank 1 fails in one of them, or the ranks make different ones."""
    rank, x = dist.get_rank(), torch.ones(4, 4)
    calls: list[Callable[[Any], Tensor]] = [
        lambda group: tpk.all_reduce(x, group, **TOY),
        lambda group: tpk.all_gather(x, group, **TOY),
    ]
    with registered(), new_group() as group:
        for call in calls:
            call(group)
        dies = mock.patch.object(mailbox.Mailbox, "post", side_effect=PeerLost("a seeded failure", ranks=(1,)))
        start = time.monotonic()
        with dies if how == "fails" and rank == 1 else mock.patch.dict({}), pytest.raises(CommunicationError) as caught:
            calls[rank if how == "differs" else 0](group)
        return type(caught.value).__name__, str(caught.value), time.monotonic() - start


def test_a_wait_in_it_ends_when_a_peer_has_failed(ranks: Pools) -> None:
    for name, said, seconds in ranks(2).run(failed, "fails"):
        assert name == "PeerLost" and "a seeded failure" in said
        assert seconds < 10.0  # of 30


def test_the_monitor_ends_a_wait_in_it_when_the_ranks_made_different_calls(ranks: Pools) -> None:
    for name, said, seconds in ranks(2).run(failed, "differs"):
        assert name == GroupMismatch.__name__ and "all_reduce(" in said and "all_gather(" in said
        assert seconds < 10.0


def registered_on_rank_1() -> str:
    with registered() if dist.get_rank() == 1 else mock.patch.dict({}), new_group() as group:
        with pytest.raises(GroupMismatch) as caught:
            tpk.all_reduce(torch.ones(3), group)
        return str(caught.value)


def test_ranks_that_registered_different_resources_are_told(ranks: Pools) -> None:
    for said in ranks(2).run(registered_on_rank_1):
        assert "different resources" in said and "'mailbox'" in said


def set_to(*stamps: int) -> str | bool:
    """What a call says on this rank if the toy's own setting is the rank's one of these; else whether it is right."""
    own = mock.patch.object(toy.Mailbox, "settings", return_value={"TOY_STAMP": stamps[dist.get_rank()]})
    with registered(), own, new_group() as group:
        try:
            return bool((tpk.all_reduce(torch.ones(3), group, **TOY) == 2).all())
        except GroupMismatch as error:
            return str(error)


def test_a_setting_of_its_own_that_differs_between_ranks_is_named(ranks: Pools) -> None:
    for said in ranks(2).run(set_to, 3, 4):
        assert isinstance(said, str) and "TOY_STAMP differs between ranks: [3, 4]" in said
    assert ranks(2).run(set_to, 4, 4) == [True, True]


@pytest.mark.cpu
def test_a_name_is_taken_once() -> None:
    with registered(), pytest.raises(ValueError, match="'mailbox' already"):
        resources.register(toy.Mailbox)


def test_an_automatic_choice_takes_it_where_it_is_cheapest(ranks: Pools) -> None:
    assert ranks(2).run(chosen) == [("toy", True)] * 2


def chosen() -> tuple[str, bool]:
    """With estimates of nothing."""
    with registered(), new_group() as group:
        for op in (GATHER, "all_reduce"):
            offer = dispatch._registry[op, "toy"]
            dispatch._registry[op, "toy"] = dispatch.Implementation(
                "toy", op, offer.refuses, lambda problem, costs: 0.0, offer.run
            )
        posted = tpk.all_reduce(torch.ones(3), group)
        explained = tpk.explain("all_reduce", m=1, n=3, k=3, dtype=torch.float32, group=group)
        return explained.chosen, bool((posted == 2).all()) and box_of(group).posted == 1


# --- nobody between an op and a backend names one ---------------------------------------------------------------------

BETWEEN = (
    "comm/agreement.py", "comm/calibration.py", "comm/groups.py", "comm/monitor.py", "comm/resources.py", "dispatch.py",
    "ops/agreed_call.py", "ops/contract.py", "ops/explain.py",
)  # fmt: skip
NAMES = re.compile("symmetric|shared_|copy_engine|multicast")


def namers(package: Path) -> list[str]:
    return [name for name in BETWEEN if NAMES.search((package / name).read_text())]


@pytest.mark.cpu
def test_calls_agreement_monitor_and_dispatch_name_no_backend(tmp_path: Path) -> None:
    package = Path(tpk.__file__).parent
    assert namers(package) == []
    for name in BETWEEN:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((package / name).read_text())
    with (tmp_path / "dispatch.py").open("a") as file:
        file.write("    no_shared_memory: str | None = None\n")
    assert namers(tmp_path) == ["dispatch.py"]
