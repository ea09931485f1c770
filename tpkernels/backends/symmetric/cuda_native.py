"""The CUDA kernels' C library: loads `tpkernels/_cuda.so`, or the one that was named, once; its interface in Python.

Owns the ctypes mirror of `csrc/cuda/launch.h` (what each function does is written there) and the wording of its errors;
knows nothing of torch: pointers, streams and sizes are integers. Assumes that the build left its record beside the
library. Refuses a library of another revision. The library loads on machines without a GPU, where every launch then
raises :class:`CudaError`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from enum import IntEnum, IntFlag
from pathlib import Path

from tpkernels import config, errors
from tpkernels.gemm import native

__all__ = [
    "ABI",
    "CallRecord",
    "Chunk",
    "CudaError",
    "Dtype",
    "FLAG_RAISED",
    "FailureRecord",
    "GroupRecord",
    "Kind",
    "Library",
    "MAX_CHUNKS",
    "MAX_RANKS",
    "OneShotRecord",
    "PAD_BYTES",
    "Raise",
    "SLOTS",
    "STATE_BYTES",
    "STATE_FAILED_OFFSET",
    "STATE_RAISED_OFFSET",
    "Steps",
    "build_record",
    "file",
    "how_to_repair",
    "library",
    "load",
    "why_not",
]

# Equal to the constants of csrc/cuda/launch.h; a test compares them.
ABI = 7
MAX_RANKS, MAX_CHUNKS, SLOTS = 64, 64, 2
PAD_BYTES, STATE_BYTES = 33408, 32
STATE_RAISED_OFFSET, STATE_FAILED_OFFSET = 0, 8
FLAG_RAISED = 0x40000000
FILE = native.PACKAGE / "_cuda.so"
RECORD = native.PACKAGE / "_cuda_build.json"

_INVALID = -1
# Errors of the CUDA runtime that say that there is nothing to run on: no driver, an older one, no device, none visible.
_NO_GPU = {35: "the NVIDIA driver is missing or older than the CUDA of the kernels", 100: "there is no CUDA device"}


class Dtype(IntEnum):
    F32, BF16, F16 = 0, 1, 2


class Raise(IntEnum):
    """How a local flag is raised on a side stream: enum tpk_raise."""

    KERNEL, COPY, WRITE_VALUE = 0, 1, 2


class Steps(IntFlag):
    """Parts of a call that the copy engines serve: enum tpk_steps."""

    BEGIN, MOVE, JOIN, END = 1, 2, 4, 8


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


class FailureRecord(ctypes.Structure):
    """struct tpk_failure: the first failure of a rank, in host memory; complete once `state` is 1."""

    _fields_ = (
        ("state", ctypes.c_uint32), ("kind", ctypes.c_int32), ("rank", ctypes.c_int32), ("op", ctypes.c_int32),
        ("peer", ctypes.c_int32), ("chunk", ctypes.c_int32), ("epoch", ctypes.c_uint32), ("expected", ctypes.c_uint32),
        ("got", ctypes.c_uint32), ("fingerprint", ctypes.c_uint32), ("waited_ns", ctypes.c_uint64),
        ("call", ctypes.c_uint32), ("unused", ctypes.c_uint32),
    )  # fmt: skip


class GroupRecord(ctypes.Structure):
    """struct tpk_group: a rank's end of a group, as every launch takes it."""

    _fields_ = (
        ("rank", ctypes.c_int32), ("world_size", ctypes.c_int32), ("pads", ctypes.POINTER(ctypes.c_void_p)),
        ("state", ctypes.c_void_p), ("failure", ctypes.c_void_p), ("alarm", ctypes.c_void_p),
        ("timeout_ns", ctypes.c_uint64), ("max_blocks", ctypes.c_int32),
    )  # fmt: skip


class Chunk(ctypes.Structure):
    """A copy of `rows` rows, what it waits for, and whom it tells: struct tpk_chunk. Pass fields by name."""

    _fields_ = (
        ("target", ctypes.c_int64), ("source", ctypes.c_int64), ("target_base", ctypes.c_int32),
        ("source_base", ctypes.c_int32), ("rows", ctypes.c_int64), ("row_bytes", ctypes.c_int64),
        ("target_stride_bytes", ctypes.c_int64), ("source_stride_bytes", ctypes.c_int64),
        ("wait_peers", ctypes.c_uint64), ("wait_ranks", ctypes.c_uint64), ("raise_ranks", ctypes.c_uint64),
        ("signal_peers", ctypes.c_uint64), ("flags", ctypes.c_void_p), ("flag_stride", ctypes.c_int32),
        ("chunk", ctypes.c_int32), ("lane", ctypes.c_int32), ("unused", ctypes.c_int32),
    )  # fmt: skip


class CallRecord(ctypes.Structure):
    """struct tpk_call: a call whose data the copy engines move."""

    _fields_ = (
        ("group", ctypes.c_void_p), ("pipeline", ctypes.c_void_p), ("chunks", ctypes.POINTER(Chunk)),
        ("num_chunks", ctypes.c_int64), ("flags", ctypes.c_void_p), ("num_flags", ctypes.c_int32),
        ("op", ctypes.c_int32), ("slot", ctypes.c_int32), ("fingerprint", ctypes.c_uint32),
        ("how", ctypes.c_int32), ("raised_value", ctypes.c_uint32),
    )  # fmt: skip


class OneShotRecord(ctypes.Structure):
    """struct tpk_one_shot: what the calls in one kernel have in common."""

    _fields_ = (
        ("op", ctypes.c_int32), ("slot", ctypes.c_int32), ("fingerprint", ctypes.c_uint32),
        ("slots", ctypes.POINTER(ctypes.c_void_p)), ("multicast", ctypes.c_void_p),
    )  # fmt: skip


class NormRecord(ctypes.Structure):
    """struct tpk_norm: the residual and the norm behind an all-reduce."""

    _fields_ = (
        ("residual", ctypes.c_void_p), ("weight", ctypes.c_void_p), ("normed", ctypes.c_void_p),
        ("scales", ctypes.c_void_p), ("eps", ctypes.c_float),
    )  # fmt: skip


_I32, _I64, _U32, _U64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
_SIGNATURES: Mapping[str, tuple[object, ...]] = {
    "tpk_device_count": (_PTR,),
    "tpk_can_access_peer": (_I32, _I32, _PTR),
    "tpk_has_peer_atomics": (_I32, _I32, _PTR),
    "tpk_has_write_value": (_PTR,),
    "tpk_load_kernels": (),
    "tpk_failure_create": (_PTR, _PTR),
    "tpk_failure_destroy": (_PTR,),
    "tpk_begin": (_PTR, _I32, _I32, _U32, _PTR, _I32, _PTR),
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
    "tpk_call_run": (_PTR, _I32, _PTR, _I32, _PTR),
    "tpk_reduce": (_PTR, _I32, _I32, _I32, _PTR, _PTR, _PTR, _PTR, _I64, _I64, _I64, _I32, _PTR),
    "tpk_all_reduce": (_PTR, _PTR, _I32, _PTR, _PTR, _PTR, _I64, _I64, _PTR),
    "tpk_all_reduce_norm": (_PTR, _PTR, _I32, _PTR, _PTR, _PTR, _PTR, _I64, _I64, _PTR),
    "tpk_all_reduce_two_shot": (_PTR, _PTR, _I32, _PTR, _PTR, _PTR, _I64, _I64, _PTR),
    "tpk_all_gather": (_PTR, _PTR, _I32, _PTR, _PTR, _PTR, _PTR),
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
        self._library.tpk_one_shot_slot_bytes.argtypes = (_I64,)
        self._library.tpk_one_shot_slot_bytes.restype = _I64
        self._library.tpk_two_shot_slot_bytes.argtypes = (_I64, _I32)
        self._library.tpk_two_shot_slot_bytes.restype = _I64

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

    def has_peer_atomics(self, device: int, peer_device: int) -> bool:
        """Whether the link between the two carries atomics, as NVLink does and PCIe does not."""
        return self._integer("tpk_has_peer_atomics", device, peer_device) != 0

    def has_write_value(self) -> bool:
        """Whether flags can be raised with :attr:`Raise.WRITE_VALUE` on the current device: tried, and waited for."""
        return self._integer("tpk_has_write_value") != 0

    def one_shot_slot_bytes(self, num_bytes: int) -> int:
        """Bytes per source in a slot of a call in one kernel, whose largest contribution has so many."""
        result: int = self._library.tpk_one_shot_slot_bytes(num_bytes)
        return result

    def two_shot_slot_bytes(self, num_bytes: int, world_size: int) -> int:
        """Bytes of a whole slot of the all-reduce of so many bytes in two steps."""
        result: int = self._library.tpk_two_shot_slot_bytes(num_bytes, world_size)
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
        raise CudaError(f"{reason}; {how_to_repair()}", _INVALID)
    return found


def how_to_repair() -> str:
    """What to do where there is no library that loads."""
    if file() != FILE:
        return "name the library that a build of tpkernels has left, or unset TPKERNELS_CUDA_LIBRARY"
    return f"build it: TPKERNELS_CUDA=1 {native.how_to_rebuild()}"


def file() -> Path:
    """Where the library is, or would be: what TPKERNELS_CUDA_LIBRARY names, or this installation's.

    Raises:
        ValueError: a variable of the environment has a value that is not of its kind.
    """
    return config.load().cuda_library or FILE


def build_record() -> native.BuildRecord | None:
    """The record of the build, or None if there is none: a source tree that was never built, a library by itself."""
    named = file()
    record = native.build_record(RECORD if named == FILE else named.with_name(RECORD.name))
    return record if named == FILE or (record is not None and record.module == named.name) else None


@functools.cache
def _load() -> tuple[Library | None, str]:
    chosen = file()
    if not chosen.is_file():
        if chosen != FILE:
            return None, f"TPKERNELS_CUDA_LIBRARY is {chosen}, which is no file"
        record = build_record()
        if record is None:
            return None, "the CUDA kernels were never built"
        return None, f"the CUDA kernels were not built: {record.reason or 'their library is gone'}"
    try:
        return Library(chosen), ""
    except (OSError, AttributeError) as error:  # AttributeError: a function is missing
        return None, f"the CUDA kernels do not load: {error}"
