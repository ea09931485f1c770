"""Cases of the ops, run on real ranks and judged there: every rank can rebuild the operands of all others.

Owns: where ranks compute (`PLACE`, which tests/gpu moves to a GPU), new groups, and running cases on them. Cases and
their references are those of `tpkernels.testing`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.errors import GroupMismatch
from tpkernels.gemm.native import native
from tpkernels.testing.cases import Case, Operands, Own, call, operands
from tpkernels.testing.numeric import assert_bitwise_equal
from tpkernels.testing.references import check_values

Said = tuple[str, str]  # an error's type and text
# Without the compiled core tests/backends says, as skips, what is not tested.
IMPLEMENTATIONS = ("unfused", "chunked", *(("shared_memory",) if native() is not None else ()))


@dataclass
class Place:
    """Where this process's ranks compute, over which backend (None: the default group's) with which options, and what
    is done with a new group before it is used."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str | None = None
    options: Callable[[], Any] = lambda: None
    prepare: Callable[[Any], None] = lambda group: None


PLACE = Place()


def own_part(all_of: Operands, rank: int) -> Own:
    """This rank's operands, where it computes."""
    return all_of.of(rank, PLACE.device)


def run_and_check(case: Case, group: Any) -> list[Tensor]:
    """Run the case on this rank and judge every output; the error of a wrong one names the case."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    parts = operands(case, world)
    own = own_part(parts, rank)
    kept = [part.clone() for part in (own[0], *own[1])]
    outs, gathered = call(case, own, group)
    check_values(case, parts, outs, gathered, rank)
    for before, now in zip(kept, (own[0], *own[1]), strict=True):
        assert_bitwise_equal(now, before, f"{case}: an input after the call")
    return outs


@contextmanager
def new_group(num_chunks: int | None = None, *, calibrate: bool = False, timeout: float = 30.0) -> Iterator[Any]:
    """A group of all ranks on which nothing was agreed yet, with the environment that decides its chunk count."""
    from datetime import timedelta

    wanted = {
        "TPKERNELS_NUM_CHUNKS": None if num_chunks is None else str(num_chunks),
        "TPKERNELS_CALIBRATE": "1" if calibrate else "0",
    }
    before = {name: os.environ.get(name) for name in wanted}
    _write_environment(wanted)
    limit = timedelta(seconds=timeout)
    group = dist.new_group(timeout=limit, backend=PLACE.backend, pg_options=PLACE.options())
    try:
        PLACE.prepare(group)
        yield group
    finally:
        _write_environment(before)
        dist.destroy_process_group(group)


def _write_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def check_all(cases: Sequence[Case], num_chunks: int | None = None, calibrate: bool = False) -> int:
    """Run cases one after the other on one new group; how many were checked."""
    with new_group(num_chunks, calibrate=calibrate) as group:
        for case in cases:
            run_and_check(case, group)
    return len(cases)


def refused(wrong: Sequence[tuple[Callable[..., Any], dict[str, Any]]], works: Callable[[Any], bool]) -> list[Said]:
    """What each rank raises when rank 0 alone passes the wrong changes to a function of a group, in a new group each.

    Where all ranks are wrong alike, the group goes on: ``works`` with it afterwards.
    """
    rank, found = dist.get_rank(), []
    for function, changes in wrong:
        with new_group() as group:
            try:
                function(group, **(changes if rank == 0 else {}))
            except (ValueError, GroupMismatch) as error:
                found.append((type(error).__name__, str(error)))
    with new_group() as group:
        for function, changes in wrong:
            with pytest.raises(ValueError, match=r"must|takes?|sum to"):
                function(group, **changes)
        assert works(group)
    return found


def assert_peer_is_told(by_rank: Sequence[list[Said]], count: int) -> None:
    """Of :func:`refused` on two ranks: the peer's error has the words of the one that was wrong."""
    for (kind, said), (kind_of_peer, said_to_peer) in zip(*by_rank, strict=True):
        assert kind == "ValueError" and kind_of_peer == "GroupMismatch", (said, said_to_peer)
        assert said in said_to_peer
    assert len(by_rank[0]) == count
