"""`chunked` as one collective per chunk, which NCCL gives to copy engines: its values, over gloo and ordinary memory.

How the memory is made and registered is played to a backend that takes notes. Neither has run on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.backends.contract import BASE, judge_all
from tpkernels.backends.point_to_point import collectives, copy_engines
from tpkernels.comm import startup
from tpkernels.errors import UnsupportedProblem
from tpkernels.testing.cases import GATHER, SCATTER, Case
from tpkernels.testing.spawn import Pools, RanksFailed


def even_cases(op: str, world: int) -> list[Case]:
    """Shards of equal rows, more and fewer than chunks; uneven and empty ones take the other way."""
    base = BASE.but(op=op, implementation="chunked")
    cases = [base.but(shape=(7 * world, 24), dtype=dtype) for dtype in (torch.bfloat16, torch.float64)]
    cases += [base.but(shape=shape) for shape in ((world, 24), (2 * world, 5, 16), (0, 24))]
    cases += [base.but(shape=(7, 24), sizes=(7, *[0] * (world - 1))), base.but(shape=(3, 2 * world, 16), dim=1)]
    if op == GATHER:
        cases.append(cases[0].but(ns=(7, 3), bias=(True, False), activation="relu", return_gathered=True))
    return [case.but(call=number) for number, case in enumerate(cases)]


def ordinary_memory(self: copy_engines.Buffers, num_bytes: int) -> None:
    self._pair = self._bytes(num_bytes), self._bytes(num_bytes)


@contextmanager
def collectives_on_gloo(counts: dict[str, int], **changes: Any) -> Iterator[None]:
    def counted(chunk: int, *rest: Any) -> Any:
        counts["posted"] = counts.get("posted", 0) + 1
        return post(chunk, *rest)

    post = collectives._post
    with (
        mock.patch.object(copy_engines, "wanted", lambda group, device: True),
        mock.patch.object(copy_engines.Buffers, "_grow", ordinary_memory),
        mock.patch.multiple(collectives, _post=counted, **changes),
    ):
        yield


def on_rank(cases: list[Case], judge: str, num_chunks: int) -> int:
    counts: dict[str, int] = {}
    with collectives_on_gloo(counts):
        judge_all(cases, judge, num_chunks)
    return counts.get("posted", 0)


@pytest.mark.sample(1)
@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.slow("8 s: on CPUs nobody takes this way")
def test_chunks_as_collectives_are_exact_and_leave_nothing_behind(ranks: Pools, world: int, full: bool) -> None:
    for op in (GATHER, SCATTER):
        cases = even_cases(op, world)[:: 1 if full else 2]
        posted = ranks(world).run(on_rank, cases, "values", 3)
        assert min(posted) == max(posted) > (8 if full else 3), "every rank posts the same collectives"
        for judge in ("poison", "ownership"):
            ranks(world).run(on_rank, cases[:1], judge, 3)


def parts_in_arrival_order(self: Any, whole: torch.Tensor, rank: int, start: int, stop: int) -> torch.Tensor:
    """The seeded fault: the ranks' parts of a chunk follow each other in the order of the whole's rows."""
    first = rank * self._rows + start
    return whole[first : first + stop - start]


def with_fault() -> None:
    case = BASE.but(op=SCATTER, implementation="chunked", shape=(12, 24))
    with collectives_on_gloo({}), mock.patch.object(collectives.CollectivePartials, "_part", parts_in_arrival_order):
        judge_all([case], "values", 3)


@pytest.mark.gloo
def test_a_chunk_laid_out_wrongly_is_caught(ranks: Pools) -> None:
    with pytest.raises(RanksFailed, match="BoundExceeded: rank"):
        ranks(2).run(with_fault)


class NcclNotes:
    """The part of ProcessGroupNCCL that registers memory."""

    mem_allocator = "NCCL's"

    def __init__(self) -> None:
        self.said: list[Any] = []

    def register_mem_pool(self, pool: Any, symm: bool) -> None:
        self.said.append(("register", pool, symm))

    def deregister_mem_pool(self, pool: Any) -> None:
        self.said.append(("deregister", pool))


@pytest.mark.cpu
def test_memory_is_registered_as_windows_after_it_was_allocated_and_grows_by_a_new_pool() -> None:
    notes, pools, caller = NcclNotes(), iter(("first", "second", "third")), threading.get_ident()
    owned = {copy_engines.CopyEngines.name: copy_engines.CopyEngines()}
    group: Any = SimpleNamespace(pg=SimpleNamespace(_get_backend=lambda device: notes), resources=owned)

    def allocating(self: Any, count: int) -> torch.Tensor:
        notes.said.append("allocate")
        assert threading.get_ident() != caller, "where a graph's pool may be open"
        return torch.empty(count, dtype=torch.uint8)

    with (
        mock.patch.multiple(torch.cuda, MemPool=lambda allocator: next(pools), use_mem_pool=lambda pool: nullcontext(),
                            device=lambda device: nullcontext(), synchronize=lambda device: notes.said.append("wait"),
                            is_current_stream_capturing=lambda: False),
        mock.patch.object(copy_engines.Buffers, "_bytes", allocating),
    ):  # fmt: skip
        memory = copy_engines.buffers(group, torch.device("cuda", 0))
        outgoing, incoming = memory.take((3, 4), torch.bfloat16)
        assert outgoing.shape == incoming.shape == (3, 4) and outgoing.data_ptr() != incoming.data_ptr()
        once = ["wait", "allocate", "allocate", ("register", "first", True)]
        assert notes.said == once
        assert (
            copy_engines.buffers(group, memory._device).take((4,), torch.float32)[0].data_ptr() == outgoing.data_ptr()
        )
        memory.take((3 * 2**20,), torch.uint8)
        again = ["wait", ("deregister", "first"), "allocate", "allocate", ("register", "second", True)]
        assert notes.said == once + again
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            with pytest.raises(UnsupportedProblem, match="make this call once before the capture"):
                memory.take((9 * 2**20,), torch.uint8)
            baked = memory.take((2 * 2**20,), torch.uint8)[0].data_ptr()
        # A graph has the second pair's addresses: that stays, and stays registered.
        larger = memory.take((9 * 2**20,), torch.uint8)
        assert notes.said == [*once, *again, "wait", "allocate", "allocate", ("register", "third", True)]
        ((pool, pair),) = memory._baked
        assert pool == "second" and pair[0].data_ptr() == baked and larger[0].data_ptr() != baked


@pytest.mark.cpu
def test_options_ask_for_priority_a_cap_and_copy_engines_or_say_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    def options(is_high_priority_stream: bool) -> Any:
        made.append(SimpleNamespace(config=SimpleNamespace(), high=is_high_priority_stream))
        return made[-1]

    monkeypatch.setenv("TPKERNELS_NCCL_MAX_CTAS", "6")
    monkeypatch.setenv("TPKERNELS_NCCL_ZERO_CTA", "1")
    new = SimpleNamespace(Options=options, NCCL_CTA_POLICY_ZERO=2)
    with mock.patch.object(torch.distributed, "ProcessGroupNCCL", new, create=True):
        found = startup._nccl_options(7.0)
    assert (found.high, found.config.max_ctas, found.config.cta_policy) == (True, 6, 2)
    assert found._timeout.total_seconds() == 7.0
    old = SimpleNamespace(Options=options)
    with mock.patch.object(torch.distributed, "ProcessGroupNCCL", old, create=True):
        with pytest.raises(ValueError, match=r"TPKERNELS_NCCL_ZERO_CTA needs NCCL 2\.28"):
            startup._nccl_options(None)
