"""Processes that talk with their parent: words in order, and every way in which words do not come."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from tpkernels import config
from tpkernels.launching.conversation import Conversation, NotSaid
from tpkernels.launching.local_ranks import pack_call
from tpkernels.launching.rank_process import Link, RankSetup
from tpkernels.testing.spawn import fork_server

pytestmark = pytest.mark.gloo


def talk(*bodies: Callable[[Link], object]) -> Conversation:
    setups = [RankSetup(rank, config.inherited(), talks=True) for rank in range(len(bodies))]
    return Conversation(setups, [pack_call(body, ()) for body in bodies], fork_server())


def soon() -> float:
    return time.monotonic() + 60


def echo(link: Link) -> str:
    link.say("echo", link.hear(60.0))
    return "done"


def hear_nothing(link: Link) -> None:
    link.hear(0.01)


def leave(link: Link) -> None:
    link.say("leaves")
    os._exit(3)


def test_what_is_told_is_heard_and_what_is_told_too_late_is_nobodys() -> None:
    with talk(echo, echo) as both:
        for rank in (0, 1):
            both.tell(rank, {"rank": rank})
        assert [said.value for said in both.expect(("echo",), soon())] == [{"rank": 0}, {"rank": 1}]
        assert [said.value for said in both.expect(("returned",), soon(), [1])] == ["done"]
        both.tell(1, "too late")
        both.ranks[1].call(pack_call(echo, ()), soon())
        both.tell(1, "again")
        while sum(said.what == "returned" and said.rank == 1 for said in both.heard) < 2:
            assert both.ranks[1].process.exitcode is None
            both.listen(1.0)
        assert [said.value for said in both.heard if said.what == "echo" and said.rank == 1][-1] == "again"


def test_one_that_raises_leaves_or_is_silent_is_not_waited_for() -> None:
    with talk(hear_nothing, leave, echo) as three:
        with pytest.raises(NotSaid) as raised:
            three.expect(("word",), soon(), [0])
        assert raised.value.failure is not None and "nothing was heard within 0.01 s" in raised.value.failure.details
        with pytest.raises(NotSaid) as gone:  # rank 2 waits, but for one that it needs
            three.expect(("word",), soon(), [2], needed=[1])
        assert (gone.value.missing, gone.value.gone, gone.value.failure) == ((2,), (1,), None)
        assert three.expect(("leaves",), soon(), [1])[0].rank == 1, "words outlive who said them"
        with pytest.raises(NotSaid) as silent:
            three.expect(("word",), time.monotonic() + 0.1, [2])
        assert (silent.value.missing, silent.value.gone) == ((2,), ())
