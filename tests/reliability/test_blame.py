"""Who is blamed when ranks that have met a peer and ranks that have not look for each other's failures."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.reliability.crew import Crew, Link, Raised, caught
from tests.reliability.deaths import SETTLE_S, _wrong
from tpkernels.comm import agreement, transport
from tpkernels.comm.groups import resolve
from tpkernels.errors import PeerLost

pytestmark = pytest.mark.gloo

VICTIM = 2


def _reduce(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return tpk.all_reduce(torch.ones(2, 2, dtype=dtype), dist.group.WORLD)


# ---------------------------------------------------------------- one survivor has left when the other looks


def _meet_one_survivor_only(link: Link, late: int) -> None:
    """The victim never tells rank 1 who it is: rank 0 has met everybody and rank 1 has not when the victim dies."""
    if link.rank == VICTIM:
        _send_nothing_to(1)
        agreement.exchange_records = lambda *_, **__: link.hear(SETTLE_S)
    if link.rank == 0:
        _before(agreement, "exchange_records", lambda: link.say("met"))
    if link.rank == late:
        _before(*((transport, "wait_all") if late == 1 else (agreement, "_poll")), lambda: link.hear(SETTLE_S))
    link.say("error", *caught(_reduce))


def _send_nothing_to(peer: int) -> None:
    original = transport.exchange

    def exchange(group: Any, tag: int, chunk: int, sends: Any, recvs: Any) -> Any:
        return original(group, tag, chunk, [one for one in sends if one[0] != peer], recvs)

    transport.exchange = exchange


def _before(owner: Any, name: str, work: Any) -> None:
    """Do `work` first when the function is called for the first time."""
    original = getattr(owner, name)

    def function(*args: Any, **options: Any) -> Any:
        setattr(owner, name, original)
        work()
        return original(*args, **options)

    setattr(owner, name, function)


@pytest.mark.parametrize("late", [1, 0], ids=["the one left had met", "the one left had not met"])
def test_a_survivor_that_has_left_is_not_blamed_with_the_victim(late: int) -> None:
    early = 1 - late
    with Crew(3, _meet_one_survivor_only, late, timeout=20.0) as crew:
        crew.expect("met", SETTLE_S, [0])
        crew.kill(VICTIM)
        errors = crew.expect("error", SETTLE_S, [early])
        crew.processes[early].join(SETTLE_S)
        crew.tell(late, "look now")
        errors += crew.expect("error", SETTLE_S, [late])
    assert [_wrong(said, VICTIM) for said in errors] == [None, None], errors


# ---------------------------------------------------------------- groups that are made again with the same store


def _three_lives(link: Link) -> list[Raised | None]:
    """The errors of three groups of one name whose ranks leave their notes in one store."""
    job: Any = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    store, notes = job.underlying_store, dist.PrefixStore("notes", job.underlying_store)
    errors: list[Raised | None] = []

    def live(work: Any) -> None:
        resolve(dist.group.WORLD).store = notes
        errors.append(caught(work)[0])
        dist.destroy_process_group()
        again = dist.PrefixStore(f"life {len(errors)}", store)  # gloo's own keys must be new
        limit = timedelta(seconds=6)  # gloo connects within it, on a busy machine too
        dist.init_process_group("gloo", store=again, rank=link.rank, world_size=link.size, timeout=limit)
        # A rank that leaves while another still connects would make that one fail in gloo.
        again.set(f"connected {link.rank}", "yes")
        again.wait([f"connected {rank}" for rank in range(link.size)], limit)

    live(lambda: _reduce(torch.float64 if link.rank == 0 else torch.float32))
    live(_reduce if link.rank != VICTIM else lambda: None)
    live(lambda: _reduce_and_fail(link.rank))
    return errors


def _reduce_and_fail(rank: int) -> None:
    assert torch.equal(_reduce(), torch.full((2, 2), 3.0))
    if rank == VICTIM:
        raise agreement.fail(resolve(dist.group.WORLD), PeerLost("unplugged", ranks=(VICTIM,)))
    _reduce(torch.float64)


def test_a_group_made_again_with_the_same_store_reads_its_own_notes_only() -> None:
    with Crew(3, _three_lives, timeout=20.0, linger=True) as crew:
        by_rank = [said.value for said in crew.expect("returned", SETTLE_S)]
    for rank, (first, second, third) in enumerate(by_rank):
        assert first.kind == "GroupMismatch" and first.ranks == (0,), first
        if rank == VICTIM:
            assert second is None
        else:  # the victim's note of the first life says that rank 0 was wrong
            assert second.kind == "PeerLost" and second.ranks == (VICTIM,), second
            assert "no word from rank 2" in second.text and "different calls" not in second.text
        # The victim has come to one group less than its peers; they know since they met.
        assert third.kind == "PeerLost" and third.ranks == (VICTIM,) and "unplugged" in third.text, third
