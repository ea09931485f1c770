"""`symmetric` and CUDA graphs: memory that they would take away, and replays beside other calls; on emulated GPUs.

What is played: the pool that torch opens while a graph is warmed up, whether a stream records, and a replay, which is a
call with the slots and the memory that were current when it was captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

pytest.importorskip("triton")

import tpkernels as tpk
from tests.backends import emulated
from tests.backends.contract import JUDGES, run
from tests.backends.emulated import EmulatedDevice, Emulation
from tests.backends.test_symmetric import case_of
from tests.backends.test_symmetric_order import Recorder
from tpkernels.backends.symmetric.channels import Channel, SymmetricChannels
from tpkernels.backends.symmetric.cuda_native import FailureRecord, Kind
from tpkernels.backends.symmetric.resource import SymmetricMemory, channels_of
from tpkernels.comm import monitor
from tpkernels.comm.groups import resolve
from tpkernels.comm.job_identity import JobIdentity
from tpkernels.dispatch import OPS
from tpkernels.testing.cases import GATHER, REDUCE, SCATTER, operands
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

PATIENCE_S = 120.0


def left_in_the_pool(emulation: Emulation, faulty: bool) -> list[str]:
    """What outlives a warm-up in which the group is set up and every op is called for the first time."""
    fault = mock.patch.object(emulated, "outside_of_pools", lambda make: make())
    with emulation.group() as made:
        group = resolve(made)
        before = channels_of(group)
        device = before.device
        assert isinstance(device, EmulatedDevice)
        with device.warming_up() as left:
            with fault if faulty else mock.patch.dict({}):
                channels = SymmetricChannels(group, device)
                channels.checks_first_use = True
                group.resources[SymmetricMemory.name] = SymmetricMemory(channels)
                for op in OPS:
                    JUDGES["values"](case_of(op), made)
        for op in OPS:
            JUDGES["values"](case_of(op, call=1), made)
        group.resources[SymmetricMemory.name] = SymmetricMemory(before)
        channels.check()
        channels.close()
    return left


@pytest.mark.full("seconds of interpreted kernels")
@pytest.mark.sample(1)
@pytest.mark.parametrize("faulty", [False, True], ids=["as it is", "tables from the pool"])
def test_a_warm_up_leaves_nothing_in_the_pool_of_its_graph(pools: Pools, emulation: Emulation, faulty: bool) -> None:
    for left in pools(2).run(left_in_the_pool, replace(emulation, timeout=20.0), faulty, timeout=PATIENCE_S):
        assert bool(left) is faulty, left
        if faulty:  # the state, flags, and tables of both kinds of GEMM
            assert "torch.uint8[32]" in left and sum("int64" in text for text in left) >= 3, left


# --- replays ----------------------------------------------------------------------------------------------------------


class Replay:
    """What a graph that is captured now has baked in: its one call is made with this when it is replayed."""

    BAKED = ("slot", "_slots", "_slot_bytes", "_generation")

    def __init__(self, channel: Channel) -> None:
        self._channel, self._baked = channel, self._state(channel)

    def _state(self, channel: Channel) -> dict[str, Any]:
        return {name: getattr(channel, name) for name in self.BAKED if hasattr(channel, name)}

    @contextmanager
    def played(self) -> Iterator[None]:
        now = self._state(self._channel)
        self._channel.__dict__.update(self._baked)
        try:
            yield
        finally:
            self._channel.__dict__.update(now)


def replays(emulation: Emulation, op: str, ranks: str, between: int, grows: bool, faulty: bool) -> str:
    """Capture a call, make others, then replay it on some ranks, while the rest make the same call eagerly."""
    in_any_place = mock.patch.object(Channel, "_in_place", lambda self, fingerprint, slot: fingerprint & 0xFFFFFFFF)
    known = case_of(op)
    with emulation.group() as made, in_any_place if faulty else nullcontext():
        group, rank = resolve(made), dist.get_rank(made)
        channel = channels_of(group).main
        for call in range(2):  # with each slot
            JUDGES["values"](known.but(call=call), made)
        replay = Replay(channel)
        if grows:
            channel.reserve(2 * channel._slot_bytes)
        for call in range(between):
            JUDGES["values"](known.but(call=10 + call), made)
        try:
            for call in range(3):  # a failure shows at the next call, and what the failed one returned is void
                case = known.but(call=20 + call)
                with replay.played() if str(rank) in ranks else nullcontext():
                    if ranks == "01":
                        JUDGES["values"](case, made)
                    else:
                        run(case, operands(case, 2), made)
        except tpk.errors.CommunicationError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("op", "ranks", "between", "grows", "faulty"),
    [
        (GATHER, "01", 1, False, False),
        (REDUCE, "01", 1, True, False),
        (GATHER, "1", 1, False, False),
        (SCATTER, "1", 2, True, False),
        ("all_reduce", "1", 1, False, False),
        (GATHER, "1", 1, False, True),
    ],
)
def test_a_replay_goes_with_replays_and_is_told_from_a_call_that_looks_for_its_data_elsewhere(
    pools: Pools, emulation: Emulation, op: str, ranks: str, between: int, grows: bool, faulty: bool
) -> None:
    """One call between capture and replay puts a rank that calls eagerly into the other slot; growth, elsewhere."""
    settings = replace(emulation, timeout=20.0, one_shot_bytes=10**6 if op == "all_reduce" else 0)
    told = pools(2).run(replays, settings, op, ranks, between, grows, faulty, timeout=PATIENCE_S)
    if ranks == "01" or faulty:  # with the fault it goes unnoticed, and computes with data of an earlier call
        assert told == ["no error"] * 2
        return
    assert all(text.split(":")[0] in ("GroupMismatch", "GroupPoisoned", "PeerLost") for text in told), told
    named = [text for text in told if text.startswith("GroupMismatch")]
    assert named and all(f"{op}(" in text and "in slot " in text and "CUDA graph" in text for text in named), told


# --- a program that only replays --------------------------------------------------------------------------------------


@pytest.mark.cpu
def test_the_monitor_tells_once_of_a_failure_that_only_replays_would_see(caplog: pytest.LogCaptureFixture) -> None:
    group: Any = SimpleNamespace(rank=0, size=4, timeout=1.0, peers=(), name="tp", control=mock.Mock())
    group.verdict, group.job, group.calls = None, JobIdentity("", b"a secret"), 1
    channels = SymmetricChannels(group, Recorder())
    group.resources = {SymmetricMemory.name: SymmetricMemory(channels)}
    group.key, group.poison, group.works, group.trail, group.in_flight = "met", None, None, None, None
    watch = monitor._Watch(group)
    watch._knows_of_a_loss = lambda: False  # type: ignore[method-assign]
    watch.tick()
    address = channels.main.group._failure_address
    assert address is not None
    record = FailureRecord.from_address(address)
    record.state, record.kind, record.peer, record.chunk = 1, Kind.TIMEOUT, 2, 3
    watch.tick()
    assert caplog.messages == []  # no graph has any of its calls: the next one raises
    with mock.patch.object(Recorder, "capturing", return_value=True):
        channels.main.remember("a route", object, on_device=False)
    for _ in range(2):
        watch.tick()
    (message,) = caplog.messages
    assert "group 'tp'" in message and "for rank 2" in message and "chunk 3" in message and "is void" in message
