"""What `symmetric` enqueues and when, without ranks: a library that writes down what it is asked for.

Hardware queues run work in the order of enqueuing, so what signals must come before what waits for it
(csrc/cuda/README.md); and a call whose kind is known must leave host and memory alone, or it cannot be captured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tpkernels.backends.symmetric import channels as symmetric_channels
from tpkernels.backends.symmetric import implementations as symmetric
from tpkernels.backends.symmetric import kernel_launches
from tpkernels.backends.symmetric.channels import SymmetricChannels
from tpkernels.backends.symmetric.cuda_native import CallRecord, Raise, Steps
from tpkernels.backends.symmetric.memory import Allocation
from tpkernels.backends.symmetric.resource import SymmetricMemory
from tpkernels.comm.resources import Standing
from tpkernels.dispatch import Costs, Problem
from tpkernels.ops.contract import (
    AllGather,
    AllGatherMatmul,
    AllReduce,
    Context,
    MatmulAllReduce,
    MatmulReduceScatter,
    ReduceScatter,
)
from tpkernels.partition import Layout

pytestmark = pytest.mark.cpu

SIZE, ROWS, K, N = 4, 80, 16, 24
STAGE, PULL, PUSH, OWN = "stage", "pull", "push", "own"


class Recorder:
    """A library and a device at once, of rank 0; nothing is done, everything is noted."""

    kind, name, capability, num_sms = "cpu", "a recorder", 80, 8
    multicast = 0

    def __init__(self) -> None:
        self.library: Any = self
        self.noted: list[str] = []
        self.crossings = 0
        """Calls of the C library that enqueue what the copy engines do."""
        self.raises: list[Raise] = []
        """How flags are raised, by crossing."""
        self.made: list[str] = []
        self.multicasts: list[int | None] = []
        self.peers_memory: set[int] = set()
        """Where copies have read or written memory of peers; see :meth:`allocate`."""
        self.peers_from = 1 << 40
        self._memory = torch.zeros(1 << 24, dtype=torch.uint8)
        self._kept: list[Any] = []

    def call(self, name: str, *arguments: Any) -> None:
        name = name.removeprefix("tpk_").removeprefix("pipeline_")
        if name == "failure_create":
            self._kept.append(ctypes.create_string_buffer(64))
            for pointer in arguments:
                pointer._obj.value = ctypes.addressof(self._kept[-1])
        if name in ("all_reduce", "all_gather"):
            self.multicasts.append(arguments[1]._obj.multicast)
        if name == "call_run":
            record = CallRecord.from_address(arguments[0])
            steps = [step for step in Steps if step in Steps(arguments[1])]
            chunks = record.chunks[: record.num_chunks] if Steps.MOVE in steps else []
            ends = [end for chunk in chunks for end in (chunk.source, chunk.target)]
            self.peers_memory |= {end >> 36 << 36 for end in ends if end >> 40 in (1, 2)}
            for step in steps:
                self.noted += self._what(chunks) if step is Steps.MOVE else [step.name.lower()]
            self.crossings += 1
            self.raises.append(Raise(record.how))
            return
        if name == "create":
            arguments[1]._obj.value = 1
        self.noted.append(name)

    def has_write_value(self) -> bool:
        return True

    def _what(self, chunks: Sequence[Any]) -> list[str]:
        """In the order of enqueuing; a signal comes behind its chunk."""
        gathers, found = any(chunk.target_base == 2 for chunk in chunks), []
        for chunk in chunks:
            found.append(OWN if chunk.lane < 0 else PULL if chunk.target_base else STAGE if gathers else PUSH)
            found += ["signal"] * (chunk.signal_peers != 0)
        return found

    def one_shot_slot_bytes(self, num_bytes: int) -> int:
        return -(-num_bytes // 16) * 16

    def two_shot_slot_bytes(self, num_bytes: int, world_size: int) -> int:
        return 2 * num_bytes + 32 * world_size

    def allocate(self, num_bytes: int) -> Allocation:
        """Always at one address here, as freed and mapped anew; that of peer r begins at ``peers_from + (r << 36)``."""
        self.made.append("allocation")
        assert num_bytes <= self._memory.numel()
        peers = (self.peers_from + (rank << 36) for rank in range(1, SIZE))
        return Allocation(self._memory, (self._memory.data_ptr(), *peers), self.multicast)

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def order(self) -> None:
        """There is one stream."""

    def stream(self) -> int:
        return 0

    def launch(self, kernel: Callable[[], None]) -> None:
        self.noted.append("GEMM")

    def time_us(self, kernel: Callable[[], None]) -> float:
        return 1.0

    def synchronize(self) -> None:
        self.made.append("wait of the host")

    def capturing(self) -> bool:
        return False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def upload(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        self.made.append("upload")
        return torch.tensor(values, dtype=dtype)

    def patience(self, timeout_s: float) -> int:
        return 1


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    monkeypatch.setattr(kernel_launches, "rehearse", lambda *arguments: None)
    monkeypatch.setattr(symmetric, "ONE_SHOT_BYTES", 64)
    monkeypatch.setattr(symmetric, "TWO_SHOT_BYTES", 600)
    yield Recorder()


def enqueued(recorder: Recorder, op: str, call: Any, calls: int = 1) -> list[str]:
    """What the last of several calls has enqueued; all made things of the calls before are forgotten."""
    make_call = caller(recorder, op, call)
    for _ in range(calls):
        recorder.noted, recorder.made = [], []
        make_call()
    return recorder.noted


def caller(recorder: Recorder, op: str, call: Any) -> Callable[[], SymmetricChannels]:
    """What makes the call, on a new group; it returns what the group has."""
    group: Any = SimpleNamespace(rank=0, size=SIZE, timeout=1.0, peers=())
    channels = SymmetricChannels(group, recorder)
    group.resources = {SymmetricMemory.name: SymmetricMemory(channels)}
    here = (Standing(SymmetricMemory.name),)
    problem = Problem(op, SIZE * ROWS, SIZE * N, SIZE * K, torch.float32, SIZE, resources=here)
    context = Context(group, 0, 2, "a call", 77, problem, Costs(), forced_chunks=True)
    (offer,) = [o for o in symmetric.dispatch.implementations(op) if o.name == "symmetric"]

    def make_call() -> SymmetricChannels:
        found = offer.run(context, call)
        if op == "all_gather":
            found()
        return channels

    return make_call


def tensors() -> tuple[Tensor, Tensor, Tensor, Layout]:
    layout = Layout(1, (ROWS,) * SIZE, 1)
    return torch.zeros(ROWS, K), torch.zeros(SIZE * ROWS, K), torch.zeros(K, N), layout


def calls() -> dict[str, Any]:
    shard, whole, matrix, layout = tensors()
    return {
        "all_gather": AllGather(shard, layout),
        "reduce_scatter": ReduceScatter(whole, layout),
        "all_reduce": AllReduce(whole),
        "all_gather_matmul": AllGatherMatmul(shard, layout, [matrix, matrix], [None, None]),
        "matmul_reduce_scatter": MatmulReduceScatter([whole], [matrix], layout),
        "matmul_all_reduce": MatmulAllReduce([whole], [matrix]),
    }


PULLS, PUSHES = [PULL] * (SIZE - 1), [PUSH, "signal"] * 2 * (SIZE - 1)
GATHER = ["begin", STAGE, "signal", *PULLS, OWN]
SCATTER = ["begin", *PUSHES]
EXPECTED = {
    "all_gather": [*GATHER, "join", "end"],
    "reduce_scatter": [*SCATTER, "reduce", "join"],
    "all_reduce": [*SCATTER, "reduce", "join", *GATHER, "join", "end"],
    "all_gather_matmul": ["begin", STAGE, "signal", *PULLS, *PULLS, OWN, "GEMM", "GEMM", "join", "end"],
    "matmul_reduce_scatter": ["begin", "GEMM", *PUSHES, "meanwhile", "reduce", "join"],
    "matmul_all_reduce": ["begin", "GEMM", *PUSHES, "reduce", "join", *GATHER, "join", "end"],
}
# Into C for the copies alone; a reduction, and a join behind it, are one each besides.
CROSSINGS = {
    "all_gather": 2, "reduce_scatter": 1, "all_reduce": 2, "all_gather_matmul": 2, "matmul_reduce_scatter": 2,
    "matmul_all_reduce": 3,
}  # fmt: skip


@pytest.mark.parametrize("op", EXPECTED)
def test_what_signals_is_enqueued_before_what_waits_for_it(recorder: Recorder, op: str) -> None:
    call = calls()[op]
    if op == "matmul_reduce_scatter":
        call = MatmulReduceScatter(
            call.xs, call.matrices, call.layout, meanwhile=lambda: recorder.noted.append("meanwhile")
        )
    assert enqueued(recorder, op, call) == EXPECTED[op]
    assert recorder.crossings == CROSSINGS[op]


def test_few_rows_take_one_library_gemm_and_small_sums_one_kernel(recorder: Recorder) -> None:
    few = torch.zeros(4, K)
    layout = Layout(1, (1,) * SIZE, 1)
    matrix = tensors()[2]
    gather = AllGatherMatmul(few[:1], layout, [matrix], [None])
    assert enqueued(recorder, "all_gather_matmul", gather) == [*GATHER, "join", "end"]
    assert enqueued(recorder, "matmul_reduce_scatter", MatmulReduceScatter([few], [matrix], layout)) == [
        *SCATTER, "reduce", "join",
    ]  # fmt: skip
    assert enqueued(recorder, "all_reduce", AllReduce(few[:, :4])) == ["all_reduce"]
    assert enqueued(recorder, "all_reduce", AllReduce(few.repeat(2, 1))) == ["all_reduce_two_shot"]
    assert enqueued(recorder, "matmul_all_reduce", MatmulAllReduce([few], [matrix])) == ["all_reduce_two_shot"]


def test_sums_are_gathered_in_one_kernel_where_a_store_reaches_all_ranks(recorder: Recorder) -> None:
    recorder.multicast = 1 << 40
    scatter = {"all_reduce": SCATTER, "matmul_all_reduce": ["begin", "GEMM", *PUSHES]}
    for op, first in scatter.items():
        assert enqueued(recorder, op, calls()[op], calls=3) == [*first, "reduce", "join", "all_gather"]
        assert recorder.made == []
        assert recorder.multicasts[0] == recorder.multicasts[2] == 1 << 40  # of the first slot
        recorder.multicasts.clear()
    enqueued(recorder, "all_reduce", AllReduce(torch.zeros(4, 4)))
    assert recorder.multicasts == [(1 << 40) + 2 * 2**20]  # of the other one


def test_the_sums_of_much_data_are_put_in_place_by_copy_engines_even_there(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.multicast = 1 << 40
    much = AllReduce(torch.zeros(SIZE * ROWS, K))
    monkeypatch.setattr(symmetric, "MULTICAST_BYTES", 4 * SIZE * ROWS * K)
    assert enqueued(recorder, "all_reduce", much, calls=2)[-1] == "all_gather"
    monkeypatch.setattr(symmetric, "MULTICAST_BYTES", 4 * SIZE * ROWS * K - 1)
    assert enqueued(recorder, "all_reduce", much, calls=2)[-len(GATHER) - 2 :] == [*GATHER, "join", "end"]


@pytest.mark.parametrize("op", EXPECTED)
def test_a_known_call_makes_nothing_and_waits_for_nothing(recorder: Recorder, op: str) -> None:
    """The first two calls are of the kind, one with each slot."""
    enqueued(recorder, op, calls()[op], calls=1)
    assert recorder.made
    for number in (2, 3):
        enqueued(recorder, op, calls()[op], calls=number)
        assert recorder.made == [], f"call {number}"


def test_streams_write_flags_and_in_capture_kernels_raise_them(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_call = caller(recorder, "all_gather_matmul", calls()["all_gather_matmul"])
    for _ in range(2):  # one with each slot
        make_call()
    assert set(recorder.raises) == {Raise.WRITE_VALUE}
    monkeypatch.setattr(recorder, "capturing", lambda: True)
    recorder.raises.clear()
    make_call()
    assert set(recorder.raises) == {Raise.KERNEL}
    monkeypatch.setattr(recorder, "capturing", lambda: False)
    monkeypatch.setenv("TPKERNELS_STREAM_WRITES", "0")
    recorder.raises.clear()
    caller(recorder, "all_gather_matmul", calls()["all_gather_matmul"])()
    assert set(recorder.raises) == {Raise.KERNEL}


def test_a_call_that_fails_half_way_is_joined_all_the_same(recorder: Recorder) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    call = calls()["matmul_reduce_scatter"]
    with pytest.raises(ZeroDivisionError):
        enqueued(
            recorder,
            "matmul_reduce_scatter",
            MatmulReduceScatter(call.xs, call.matrices, call.layout, meanwhile=broken),
        )
    assert recorder.noted[-1] == "join"


@pytest.mark.parametrize("op", EXPECTED)
def test_copies_follow_the_peers_memory_when_slots_grow_and_this_ranks_stay_where_they_are(
    recorder: Recorder, op: str
) -> None:
    make_call = caller(recorder, op, calls()[op])
    for start in (1 << 40, 2 << 40):
        recorder.peers_from = start
        for _ in range(2):  # one with each slot
            recorder.peers_memory.clear()
            channels = make_call()
            assert recorder.peers_memory == {start + (rank << 36) for rank in range(1, SIZE)}
        for channel in (channels.main, channels.side):
            recorder.peers_from = 2 << 40
            channel.reserve(2 * channel._slot_bytes)


def test_what_is_remembered_has_a_bound_and_the_device_is_waited_for_before_any_of_it_goes(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symmetric_channels, "_MAX_REMEMBERED", 4)
    channel = caller(recorder, "all_gather", calls()["all_gather"])().main
    recorder.made.clear()
    for key in range(5):
        assert recorder.made == []
        channel.remember(key, object)
    assert recorder.made == ["wait of the host"] and set(channel._remembered) == {2, 3, 4}
    monkeypatch.setattr(recorder, "capturing", lambda: True)  # nothing may be waited for
    for key in range(10, 13):
        channel.remember(key, object, on_device=False)
    assert recorder.made == ["wait of the host"] and {2, 10, 11, 12} < set(channel._remembered)
