"""A rank's end of a group of GPUs, on the library of :mod:`.cuda_native`: calls, failures, side streams.

Owns the Python form of ``struct tpk_group`` and ``tpk_pipeline``; knows nothing of torch: addresses and streams are
integers.  Everything only enqueues.  What may be enqueued when is the protocol of ``csrc/cuda/README.md``; who keeps to
it is :class:`tpkernels.backends.symmetric.channels.Channel`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpkernels import errors
from tpkernels.backends.symmetric.cuda_native import (
    FLAG_RAISED,
    CallRecord,
    Chunk,
    Dtype,
    FailureRecord,
    GroupRecord,
    Kind,
    Library,
    NormRecord,
    OneShotRecord,
    Raise,
    Steps,
)

__all__ = ["Call", "Failure", "Group", "Norm", "OneShot", "Pipeline"]


@dataclass(frozen=True)
class Failure:
    """The first wait of this rank that failed: `rank`, in call `epoch` of op `op`, waited for `peer`."""

    kind: Kind
    rank: int
    op: int
    peer: int
    chunk: int
    """-1: the peer has not begun the call."""
    epoch: int
    expected: int
    got: int
    fingerprint: int
    waited_s: float

    def error(self, op_name: str) -> errors.CommunicationError:
        """The exception that says so."""
        chunk = "" if self.chunk < 0 else f", chunk {self.chunk}"
        where = f"{op_name}, call {self.epoch} on this group{chunk}: rank {self.rank}"
        after = "The group is poisoned; make a new one."
        if self.kind is Kind.MISMATCH:
            text = f"{where} and rank {self.peer} made different calls (fingerprint {self.fingerprint:#010x} there)."
            return errors.GroupMismatch(f"{text} {after}", ranks=[self.peer])
        if self.kind is Kind.POISONED:
            return errors.GroupPoisoned(f"{where} gave up, because rank {self.peer} failed. {after}", ranks=[self.peer])
        if self.kind is Kind.ALARM:
            return errors.GroupPoisoned(f"{where} gave up, because another of its kernels did. {after}")
        text = f"{where} waited {self.waited_s:.1f} s for rank {self.peer}, whose signal is {self.got}."
        return errors.CollectiveTimeout(f"{text} {after}", ranks=[self.peer])


class OneShot(NamedTuple):
    """A call in one kernel. slots: slot `slot` of every rank's symmetric buffer; multicast: of all of them, or 0."""

    op: int
    slot: int
    fingerprint: int
    slots: Sequence[int]
    multicast: int = 0


class Norm(NamedTuple):
    """Addresses of what follows an all-reduce: rows like its result, one row, rows, and an fp32 for each row."""

    residual: int
    weight: int
    normed: int
    scales: int
    eps: float


class Group:
    """One rank's end of a group of GPUs. Not thread-safe; calls enqueue on `stream` (a cudaStream_t) and return.

    Args:
        pads: device address of every rank's signal pad, as this rank addresses it (PAD_BYTES, zeroed).
        state: device address of STATE_BYTES of this rank's own memory, zeroed.
        max_blocks: that a kernel of this rank may wait with, the same on every rank: `residency.waiting_blocks`.
        alarm: device address of a uint64 that other kernels of this rank set when they give up, or 0.

    Made on the rank's current device, not in capture. Pads and state must be zero before any rank makes its first call,
    and outlive the group.
    """

    def __init__(
        self, cuda: Library, *, rank: int, pads: Sequence[int], state: int, timeout_s: float, max_blocks: int,
        alarm: int = 0,
    ) -> None:  # fmt: skip
        self._library = cuda
        self._pads = (ctypes.c_void_p * len(pads))(*pads)
        cuda.call("tpk_load_kernels")
        host, device = ctypes.c_void_p(), ctypes.c_void_p()
        cuda.call("tpk_failure_create", ctypes.byref(host), ctypes.byref(device))
        assert host.value is not None
        self._failure_address: int | None = host.value
        self._group = GroupRecord(
            rank, len(pads), self._pads, state, device, alarm or None, int(timeout_s * 1e9), max_blocks
        )
        self.rank, self.world_size, self.state = rank, len(pads), state

    @property
    def address(self) -> int:
        """Of the struct tpk_group."""
        return ctypes.addressof(self._group)

    @property
    def max_blocks(self) -> int:
        blocks: int = self._group.max_blocks
        return blocks

    @max_blocks.setter
    def max_blocks(self, blocks: int) -> None:
        self._group.max_blocks = blocks

    @property
    def failure_on_device(self) -> int:
        """Of the failure record, as kernels address it."""
        address: int = self._group.failure
        return address

    @property
    def others(self) -> int:
        """All ranks but this one, a bit each."""
        return ((1 << self.world_size) - 1) & ~(1 << self.rank)

    def failure(self) -> Failure | None:
        """What went wrong, if anything has. Reads host memory: no synchronisation, true once the kernel has ended."""
        if self._failure_address is None:
            return None
        record = FailureRecord.from_address(self._failure_address)
        if record.state != 1:
            return None
        names = ("rank", "op", "peer", "chunk", "epoch", "expected", "got", "fingerprint")
        fields: dict[str, int] = {name: getattr(record, name) for name in names}
        if fields["epoch"] == FLAG_RAISED:  # a kernel that knows of its call only what its flags hold
            fields["epoch"] = record.call
        return Failure(kind=Kind(record.kind), waited_s=record.waited_ns / 1e9, **fields)

    def close(self) -> None:
        """Free the failure record. No kernel of the group may be running or come."""
        if self._failure_address is not None:
            address, self._failure_address = self._failure_address, None
            self._library.call("tpk_failure_destroy", address)

    def begin(self, *, op: int, slot: int, fingerprint: int, stream: int, flags: int = 0, num_flags: int = 0) -> None:
        """Lowers local flags, too."""
        self._library.call("tpk_begin", self.address, op, slot, fingerprint, flags or None, num_flags, stream)

    def end(self, *, op: int, stream: int) -> None:
        self._library.call("tpk_end", self.address, op, stream)

    def barrier(self, *, op: int, fingerprint: int, stream: int) -> None:
        self._library.call("tpk_barrier", self.address, op, fingerprint, stream)

    def signal(self, *, chunk: int, peers: int, stream: int) -> None:
        self._library.call("tpk_signal", self.address, chunk, peers, stream)

    def wait(self, *, op: int, chunk: int, peers: int, stream: int) -> None:
        self._library.call("tpk_wait", self.address, op, chunk, peers, stream)

    def raise_flag(self, flag: int, *, stream: int) -> None:
        self._library.call("tpk_raise_flag", self.address, flag, stream)

    def wait_flag(self, flag: int, *, op: int, chunk: int, stream: int) -> None:
        self._library.call("tpk_wait_flag", self.address, op, chunk, flag, stream)

    def reduce(
        self, *, op: int, part_dtype: Dtype, parts: Sequence[int], strides: Sequence[int], out: int, out_dtype: Dtype,
        out_stride: int, rows: int, columns: int, bias: int = 0, num_chunks: int = 0, stream: int,
    ) -> None:  # fmt: skip
        """Sum of the ranks' partials; strides in elements."""
        self._check_per_rank("parts", parts)
        self._check_per_rank("strides", strides)
        part_table = (ctypes.c_void_p * len(parts))(*parts)
        stride_table = (ctypes.c_int64 * len(strides))(*strides)
        self._library.call(
            "tpk_reduce", self.address, op, part_dtype, out_dtype, part_table, stride_table, bias or None, out,
            out_stride, rows, columns, num_chunks, stream,
        )  # fmt: skip

    def all_reduce(
        self, call: OneShot, *, dtype: Dtype, x: int, out: int, rows: int, columns: int, bias: int = 0, stream: int,
        two_steps: bool = False,
    ) -> None:  # fmt: skip
        """A whole call: the sum of all ranks' x; in one step or in two, with the same bits."""
        self._library.call(
            "tpk_all_reduce_two_shot" if two_steps else "tpk_all_reduce", self.address, self._one_shot(call), dtype, x,
            bias or None, out, rows, columns, stream,
        )  # fmt: skip

    def all_reduce_norm(
        self, call: OneShot, norm: Norm, *, dtype: Dtype, x: int, out: int, rows: int, columns: int, bias: int = 0,
        stream: int,
    ) -> None:  # fmt: skip
        """A whole call in one step: out is the sum of all ranks' x and the residual, and its rows are normalised."""
        record = NormRecord(norm.residual, norm.weight, norm.normed, norm.scales, norm.eps)
        self._library.call(
            "tpk_all_reduce_norm", self.address, self._one_shot(call), dtype, x, bias or None, ctypes.byref(record),
            out, rows, columns, stream,
        )  # fmt: skip

    def all_gather(
        self, call: OneShot, *, element_bytes: int, x: int, out: int, counts: Sequence[int], stream: int
    ) -> None:
        """A whole call: all ranks' x, counts[r] elements of rank r, one after the other."""
        self._check_per_rank("counts", counts)
        table = (ctypes.c_int64 * len(counts))(*counts)
        self._library.call(
            "tpk_all_gather", self.address, self._one_shot(call), element_bytes, x or None, out or None, table, stream
        )

    def _one_shot(self, call: OneShot) -> object:
        self._check_per_rank("slots", call.slots)
        slots = (ctypes.c_void_p * len(call.slots))(*call.slots)
        record = OneShotRecord(call.op, call.slot, call.fingerprint, slots, call.multicast or None)
        return ctypes.byref(record)

    def _check_per_rank(self, name: str, values: Sequence[int]) -> None:
        if len(values) != self.world_size:
            raise ValueError(f"{name} has {len(values)} entries, one per rank ({self.world_size}) are needed")


class Pipeline:
    """Side streams of the current device on which the copy engines move chunks."""

    def __init__(self, cuda: Library, streams: int) -> None:
        self._library = cuda
        self._pipeline = ctypes.c_void_p()
        cuda.call("tpk_pipeline_create", streams, ctypes.byref(self._pipeline))
        self._streams = [self._stream(lane) for lane in range(streams)]

    def stream(self, lane: int) -> int:
        """Side stream `lane`, for what else is to run there."""
        return self._streams[lane]

    def _stream(self, lane: int) -> int:
        found = ctypes.c_void_p()
        self._library.call("tpk_pipeline_stream", self._pipeline, lane, ctypes.byref(found))
        return found.value or 0

    def fork(self, stream: int) -> None:
        """What :meth:`run` enqueues from now on waits for what `stream` holds now."""
        self._library.call("tpk_pipeline_fork", self._pipeline, stream)

    def join(self, stream: int) -> None:
        """`stream` waits for all that was enqueued here."""
        self._library.call("tpk_pipeline_join", self._pipeline, stream)

    @property
    def address(self) -> int:
        """Of the tpk_pipeline."""
        assert self._pipeline.value is not None, "the pipeline was closed"
        return self._pipeline.value

    def close(self) -> None:
        if self._pipeline.value is not None:
            self._library.call("tpk_pipeline_destroy", self._pipeline)
            self._pipeline = ctypes.c_void_p()


class Call:
    """A call whose data the copy engines move, prepared: one crossing into C enqueues as much of it as is asked for.

    Args:
        chunks: copies in the order in which they are enqueued.
        flags: address of local flags, of which the first `num_flags` are lowered when the call begins.
        raised: what :attr:`Raise.WRITE_VALUE` writes; another value where others than this begin the calls.

    Not thread-safe. The group and the pipeline outlive it.
    """

    def __init__(
        self, cuda: Library, group: Group, pipeline: Pipeline, chunks: Sequence[Chunk], *, op: int, slot: int = 0,
        fingerprint: int = 0, flags: int = 0, num_flags: int = 0, how: Raise = Raise.KERNEL, raised: int = FLAG_RAISED,
    ) -> None:  # fmt: skip
        self._library = cuda
        self.chunks = (Chunk * len(chunks))(*chunks)
        self.on_stream = any(chunk.lane < 0 for chunk in chunks)
        """Whether some copies are made on the stream of the call."""
        self.record = CallRecord(
            group.address, pipeline.address, self.chunks, len(chunks), flags or None, num_flags, op, slot, fingerprint,
            how, raised,
        )  # fmt: skip
        self._address = ctypes.addressof(self.record)

    def run(self, steps: Steps, *bases: int, stream: int) -> None:
        """Enqueue these steps. bases: addresses of the tensors that chunks name by number, from 1 on."""
        table = (ctypes.c_void_p * len(bases))(*bases) if bases else None
        self._library.call("tpk_call_run", self._address, int(steps), table, len(bases), stream)
