"""The CUDA kernels' C library: loads `tpkernels/_cuda.so` once, and is its interface in Python.

Owns the ctypes mirror of `csrc/cuda/launch.h` (what each function does is written there) and the wording of its errors;
knows nothing of torch: pointers, streams and sizes are integers. Assumes that the build left its record beside the
library. Refuses a library of another revision. The library loads on machines without a GPU, where every launch then
raises :class:`CudaError`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from tpkernels import errors
from tpkernels.comm import native

__all__ = [
    "ABI",
    "Chunk",
    "CudaError",
    "Dtype",
    "Failure",
    "Group",
    "Kind",
    "Library",
    "MAX_CHUNKS",
    "MAX_RANKS",
    "PAD_BYTES",
    "Pipeline",
    "Raise",
    "SLOTS",
    "STATE_BYTES",
    "STATE_EPOCH_OFFSET",
    "STATE_FAILED_OFFSET",
    "build_record",
    "library",
    "load",
    "why_not",
]

# Equal to the constants of csrc/cuda/launch.h; a test compares them.
ABI = 2
MAX_RANKS, MAX_CHUNKS, SLOTS = 64, 64, 2
PAD_BYTES, STATE_BYTES = 33408, 32
STATE_EPOCH_OFFSET, STATE_FAILED_OFFSET = 0, 8
FILE = native.PACKAGE / "_cuda.so"
RECORD = native.PACKAGE / "_cuda_build.json"

_INVALID = -1
# Errors of the CUDA runtime that say that there is nothing to run on: no driver, an older one, no device, none visible.
_NO_GPU = {35: "the NVIDIA driver is missing or older than CUDA 13", 100: "there is no CUDA device"}


class Dtype(IntEnum):
    F32, BF16, F16 = 0, 1, 2


class Raise(IntEnum):
    """How a local flag is raised on a side stream: enum tpk_raise."""

    KERNEL, COPY, WRITE_VALUE = 0, 1, 2


class Kind(IntEnum):
    """What went wrong in a wait: enum tpk_failure_kind."""

    TIMEOUT, POISONED, MISMATCH, ALARM = 1, 2, 3, 4


class CudaError(errors.TpKernelsError):
    """A function of the CUDA library, or the CUDA runtime below it, refused."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.code)


# --- the library ------------------------------------------------------------------------------------------------------


class _FailureRecord(ctypes.Structure):
    _fields_ = (
        ("state", ctypes.c_uint32), ("kind", ctypes.c_int32), ("rank", ctypes.c_int32), ("op", ctypes.c_int32),
        ("peer", ctypes.c_int32), ("chunk", ctypes.c_int32), ("epoch", ctypes.c_uint32), ("expected", ctypes.c_uint32),
        ("got", ctypes.c_uint32), ("fingerprint", ctypes.c_uint32), ("waited_ns", ctypes.c_uint64),
    )  # fmt: skip


class _Group(ctypes.Structure):
    _fields_ = (
        ("rank", ctypes.c_int32), ("world_size", ctypes.c_int32), ("pads", ctypes.POINTER(ctypes.c_void_p)),
        ("state", ctypes.c_void_p), ("failure", ctypes.c_void_p), ("alarm", ctypes.c_void_p),
        ("timeout_ns", ctypes.c_uint64),
    )  # fmt: skip


class Chunk(ctypes.Structure):
    """A copy of `rows` rows, what it waits for, and whom it tells: struct tpk_chunk. Pass all fields by name."""

    _fields_ = (
        ("target", ctypes.c_void_p), ("source", ctypes.c_void_p), ("rows", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64), ("target_stride_bytes", ctypes.c_int64),
        ("source_stride_bytes", ctypes.c_int64), ("wait_flag", ctypes.c_void_p), ("wait_peer", ctypes.c_int32),
        ("raise_flag", ctypes.c_void_p), ("signal_peer", ctypes.c_int32), ("chunk", ctypes.c_int32),
    )  # fmt: skip


_I32, _I64, _U32, _U64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
_SIGNATURES: Mapping[str, tuple[object, ...]] = {
    "tpk_device_count": (_PTR,),
    "tpk_can_access_peer": (_I32, _I32, _PTR),
    "tpk_has_write_value": (_PTR,),
    "tpk_load_kernels": (),
    "tpk_failure_create": (_PTR, _PTR),
    "tpk_failure_destroy": (_PTR,),
    "tpk_begin": (_PTR, _I32, _I32, _U32, _PTR),
    "tpk_end": (_PTR, _I32, _PTR),
    "tpk_barrier": (_PTR, _I32, _U32, _PTR),
    "tpk_signal": (_PTR, _I32, _U64, _PTR),
    "tpk_wait": (_PTR, _I32, _I32, _U64, _PTR),
    "tpk_raise_flag": (_PTR, _PTR, _PTR),
    "tpk_wait_flag": (_PTR, _I32, _I32, _PTR, _PTR),
    "tpk_pipeline_create": (_I32, _PTR),
    "tpk_pipeline_destroy": (_PTR,),
    "tpk_pipeline_stream": (_PTR, _I32, _PTR),
    "tpk_pipeline_fork": (_PTR, _PTR),
    "tpk_pipeline_join": (_PTR, _PTR),
    "tpk_pipeline_run": (_PTR, _I32, _PTR, _I32, _PTR, _I64, _I32, _U32),
    "tpk_reduce": (_PTR, _I32, _I32, _I32, _PTR, _PTR, _PTR, _PTR, _I64, _I64, _I64, _I32, _I32, _PTR),
    "tpk_all_reduce": (_PTR, _I32, _I32, _PTR, _PTR, _PTR, _I64, _I64, _PTR, _I32, _U32, _PTR),
}


class Library:
    """The loaded library: `call(name, ...)` raises what the function refuses."""

    def __init__(self, file: Path) -> None:
        self._library = ctypes.CDLL(str(file))
        found = self._library.tpk_cuda_abi()
        if found != ABI:
            raise OSError(f"{file.name} is of another revision ({found}) than this Python code ({ABI}): rebuild it")
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._library.tpk_error_string.restype = ctypes.c_char_p
        self._library.tpk_all_reduce_slot_bytes.argtypes = (_I64,)
        self._library.tpk_all_reduce_slot_bytes.restype = _I64

    def call(self, name: str, *args: object) -> None:
        """Call a function of launch.h that returns a status.

        Raises:
            ValueError: the function refused an argument.
            CudaError: CUDA failed.
        """
        code: int = getattr(self._library, name)(*args)
        if code == 0:
            return
        said = self._library.tpk_error_string(code).decode()
        if code == _INVALID:
            raise ValueError(f"{name}: {said}")
        hint = f": {_NO_GPU[code]}; `tpkernels doctor` says more" if code in _NO_GPU else ""
        raise CudaError(f"{name}: CUDA error {code} ({said}){hint}", code)

    def device_count(self) -> int:
        return self._integer("tpk_device_count")

    def can_access_peer(self, device: int, peer_device: int) -> bool:
        return self._integer("tpk_can_access_peer", device, peer_device) != 0

    def has_write_value(self) -> bool:
        """Whether flags can be raised with :attr:`Raise.WRITE_VALUE` on this driver."""
        return self._integer("tpk_has_write_value") != 0

    def all_reduce_slot_bytes(self, num_bytes: int) -> int:
        """Bytes per source in a slot of the one-shot all-reduce."""
        result: int = self._library.tpk_all_reduce_slot_bytes(num_bytes)
        return result

    def _integer(self, name: str, *args: int) -> int:
        value = ctypes.c_int()
        self.call(name, *args, ctypes.byref(value))
        return value.value


def library() -> Library | None:
    """The library of this installation, or None where there is none that loads."""
    return _load()[0]


def why_not() -> str:
    """Why :func:`library` is None, in one line; empty if it is not."""
    return _load()[1]


def load() -> Library:
    """The library of this installation.

    Raises:
        CudaError: there is none that loads.
    """
    found, reason = _load()
    if found is None:
        raise CudaError(f"{reason}; build it: TPKERNELS_CUDA=1 {native.how_to_rebuild()}", _INVALID)
    return found


def build_record() -> native.BuildRecord | None:
    """The record of the build, or None if there is none: a source tree that was never built."""
    return native.build_record(RECORD)


@functools.cache
def _load() -> tuple[Library | None, str]:
    if not FILE.is_file():
        record = build_record()
        if record is None:
            return None, "the CUDA kernels were never built"
        return None, f"the CUDA kernels were not built: {record.reason or 'their library is gone'}"
    try:
        return Library(FILE), ""
    except (OSError, AttributeError) as error:  # AttributeError: a function is missing
        return None, f"the CUDA kernels do not load: {error}"


# --- a rank's end of a group ------------------------------------------------------------------------------------------


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


class Group:
    """One rank's end of a group of GPUs. Not thread-safe; calls enqueue on `stream` (a cudaStream_t) and return.

    Args:
        pads: device address of every rank's signal pad, as this rank addresses it (PAD_BYTES, zeroed).
        state: device address of STATE_BYTES of this rank's own memory, zeroed.
        alarm: device address of a uint64 that other kernels of this rank set when they give up, or 0.

    Made on the rank's current device, not in capture. Pads and state must be zero before any rank makes its first call,
    and outlive the group.
    """

    def __init__(
        self, cuda: Library, *, rank: int, pads: Sequence[int], state: int, timeout_s: float, alarm: int = 0
    ) -> None:
        self._library = cuda
        self._pads = (ctypes.c_void_p * len(pads))(*pads)
        cuda.call("tpk_load_kernels")
        host, device = ctypes.c_void_p(), ctypes.c_void_p()
        cuda.call("tpk_failure_create", ctypes.byref(host), ctypes.byref(device))
        assert host.value is not None
        self._failure_address: int | None = host.value
        self._group = _Group(rank, len(pads), self._pads, state, device, alarm or None, int(timeout_s * 1e9))
        self.rank, self.world_size, self.state = rank, len(pads), state

    @property
    def address(self) -> int:
        """Of the struct tpk_group."""
        return ctypes.addressof(self._group)

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
        record = _FailureRecord.from_address(self._failure_address)
        if record.state != 1:
            return None
        names = ("rank", "op", "peer", "chunk", "epoch", "expected", "got", "fingerprint")
        fields: dict[str, int] = {name: getattr(record, name) for name in names}
        return Failure(kind=Kind(record.kind), waited_s=record.waited_ns / 1e9, **fields)

    def close(self) -> None:
        """Free the failure record. No kernel of the group may be running or come."""
        if self._failure_address is not None:
            address, self._failure_address = self._failure_address, None
            self._library.call("tpk_failure_destroy", address)

    def begin(self, *, op: int, slot: int, fingerprint: int, stream: int) -> None:
        self._library.call("tpk_begin", self.address, op, slot, fingerprint, stream)

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
        out_stride: int, rows: int, columns: int, bias: int = 0, num_chunks: int = 0, max_blocks: int = 0, stream: int,
    ) -> None:  # fmt: skip
        """Sum of the ranks' partials; strides in elements."""
        self._check_per_rank("parts", parts)
        self._check_per_rank("strides", strides)
        part_table = (ctypes.c_void_p * len(parts))(*parts)
        stride_table = (ctypes.c_int64 * len(strides))(*strides)
        self._library.call(
            "tpk_reduce", self.address, op, part_dtype, out_dtype, part_table, stride_table, bias or None, out,
            out_stride, rows, columns, num_chunks, max_blocks, stream,
        )  # fmt: skip

    def all_reduce(
        self, *, op: int, dtype: Dtype, x: int, out: int, rows: int, columns: int, slots: Sequence[int], slot: int,
        fingerprint: int, bias: int = 0, stream: int,
    ) -> None:  # fmt: skip
        """A whole call: the one-shot all-reduce. `slots`: slot `slot` of every rank's symmetric buffer."""
        self._check_per_rank("slots", slots)
        table = (ctypes.c_void_p * len(slots))(*slots)
        self._library.call(
            "tpk_all_reduce", self.address, op, dtype, x, bias or None, out, rows, columns, table, slot, fingerprint,
            stream,
        )  # fmt: skip

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

    def run(
        self, lane: int, group: Group, chunks: ctypes.Array[Chunk], *, op: int, how: Raise = Raise.KERNEL,
        epoch_on_host: int = 0,
    ) -> None:  # fmt: skip
        """Enqueue the copies, in order, on side stream `lane`. `(Chunk * n)(...)` makes the array; it may be reused."""
        self._library.call(
            "tpk_pipeline_run", self._pipeline, lane, group.address, op, chunks, len(chunks), how, epoch_on_host
        )

    def close(self) -> None:
        if self._pipeline.value is not None:
            self._library.call("tpk_pipeline_destroy", self._pipeline)
            self._pipeline = ctypes.c_void_p()
