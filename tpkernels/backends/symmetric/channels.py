"""A rank's end of a group of GPUs: signal pads, slots, flags and side streams, and what goes wrong with them.

A :class:`Channel` is one sequence of calls of the protocol in ``csrc/cuda/README.md``.  A group has two
(:class:`SymmetricChannels`): ``main`` for ops, ``side`` for all-gathers that run beside an op, because a call must have
been joined before the next one of its channel begins.

Memory, per channel and rank: a signal pad, flags, and two slots of the largest call so far (:meth:`Channel.reserve`,
collective, waits for the device).  Slots that a captured graph has baked in are kept for good.

Assumes that the calls of a group come from one thread at a time, and that its streams are ordered after each other,
those on which graphs are replayed by who replays them.
Kernels that gave up are found by :meth:`Channel.check`, which reads host memory and waits for nothing: at the next
call, or after whatever made the host wait for the device.  What such a call has returned is void.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels import config
from tpkernels.backends.symmetric import cuda_group, cuda_native
from tpkernels.backends.symmetric.cuda_group import Call, Failure, OneShot
from tpkernels.backends.symmetric.cuda_native import (
    MAX_CHUNKS,
    PAD_BYTES,
    SLOTS,
    STATE_BYTES,
    Chunk,
    Kind,
    Raise,
    Steps,
)
from tpkernels.backends.symmetric.memory import Allocation, Device
from tpkernels.backends.symmetric.residency import waiting_blocks
from tpkernels.comm.groups import Group
from tpkernels.comm.transport import TransportFailure
from tpkernels.errors import CollectiveTimeout, GroupMismatch, PeerLost, UnsupportedProblem

__all__ = ["MAX_LANES", "Channel", "SymmetricChannels"]

# Side streams of a channel.  Up to four GPUs may be linked in pairs, and every pair wants its copy; more of them meet
# at a switch or a bus, where two streams are enough to have one copy running while the next one starts.  Each costs
# three calls of the driver, and streams beyond the hardware's queues (8 by default) wait for each other.
MAX_LANES = 3
_LANES_OF_MANY = 2
_GROW_STEP = 2 * 1024 * 1024
_MASK = 0xFFFFFFFF
_ODD = 0x9E3779B1  # makes different words of different places, because it is odd
_MAX_REMEMBERED = 4096
_BEGIN, _JOIN = int(Steps.BEGIN), int(Steps.JOIN)


class SymmetricChannels:
    """What a group has once its GPUs share memory: see :class:`.resource.SymmetricMemory`."""

    def __init__(self, group: Group, device: Device, *, one_link: bool = False) -> None:
        """Collective: every rank makes its end. one_link: all that comes from peers comes over one, as on PCIe."""
        self.device, self.rank, self.size = device, group.rank, group.size
        pads = device.allocate(2 * PAD_BYTES)
        self.how = Raise.KERNEL
        """How flags are raised on side streams; a rank's own business."""
        if config.load().stream_writes and device.library.has_write_value():
            self.how = Raise.WRITE_VALUE
        self._alarm = _HostWord(device.library)
        self.main = Channel(group, device, pads, 0, self._alarm, self.how, one_link)
        self.side = Channel(group, device, pads, PAD_BYTES, self._alarm, self.how, one_link)
        self.checks_first_use = True
        self.first_uses: dict[Hashable, str | None] = {}
        """What was wrong with the first call of a kind, or None; see :mod:`tpkernels.backends.symmetric.self_check`."""

    def share_gpu(self, num_sms: int) -> None:
        """Keep to so many SMs, before the first op and alike on every rank: ranks that share a GPU, for tests."""
        self.device.num_sms = num_sms
        for channel in (self.main, self.side):
            channel.group.max_blocks = waiting_blocks(num_sms)

    def check(self) -> None:
        """Raise what went wrong on either channel, if anything has."""
        self.main.check()
        self.side.check()

    def lost_replays(self) -> str | None:
        """What went wrong, if calls were captured: replays of graphs run none of our code, which would raise it."""
        for channel in (self.main, self.side):
            failure = channel.group.failure() if channel.is_captured else None
            if failure is not None:
                return str(channel.error(failure))
        return None

    def abort(self) -> None:
        """Make every wait of this rank's kernels end, now and for ever. Callable from any thread; calls no CUDA."""
        self._alarm.raise_it()

    def close(self) -> None:
        """Free what the garbage collector would not. The group makes no more calls."""
        self.device.synchronize()
        for channel in (self.main, self.side):
            channel.close()
        self._alarm.close()


class Channel:
    """One sequence of calls. See ``csrc/cuda/README.md`` for what may be enqueued between :meth:`begin` and its end."""

    def __init__(
        self, group: Group, device: Device, pads: Allocation, offset: int, alarm: _HostWord, how: Raise, one_link: bool
    ) -> None:
        self.device, self.rank, self.size = device, group.rank, group.size
        self._owner, self._pads, self.timeout_s = group, pads, group.timeout
        self.pads = [address + offset for address in pads.addresses]
        self._state = device.zeros((STATE_BYTES,), torch.uint8)
        self.flags = device.zeros((group.size * MAX_CHUNKS,), torch.int32)
        """Local flags, by rank and chunk: copies tell the GEMM that a chunk has come, the GEMM that one may go."""
        self.counters = device.zeros((group.size * MAX_CHUNKS,), torch.int32)
        device.synchronize()
        self.group = cuda_group.Group(
            device.library, rank=group.rank, pads=self.pads, state=self._state.data_ptr(), timeout_s=group.timeout,
            max_blocks=waiting_blocks(device.num_sms), alarm=alarm.address,
        )  # fmt: skip
        self._how = self._raises = how
        self.num_lanes = max(1, min(MAX_LANES, group.size - 1 if group.size <= 4 else _LANES_OF_MANY))
        self.pull_lanes = 1 if one_link else self.num_lanes
        """Of them, those that fetch. Copies that share a link all come late. Those that leave share it as well, but
        each begins with a wait for the GEMM, which goes on beside another copy; benchmarks/README.md has the times."""
        self.pipeline = cuda_group.Pipeline(device.library, self.num_lanes)
        self.slot = 0
        self._slots: Allocation | None = None
        self._slot_bytes = 0
        self._generation = 0
        self._fingerprint = 0
        self._open = False
        self._texts: dict[int, str] = {}
        self._ops: list[str] = []
        self._remembered: dict[Hashable, Any] = {}
        self._baked: dict[int, Any] = {}

    # --- memory

    def reserve(self, num_bytes: int) -> None:
        """Make room for ``num_bytes`` per slot on every rank.  Collective: all ranks must ask for the same.

        Raises:
            UnsupportedProblem: a rank has no memory left, or a graph is captured, in which memory cannot grow; nothing
                was sent, and the group goes on.
        """
        if num_bytes <= self._slot_bytes:
            return
        if self.device.capturing():
            raise UnsupportedProblem(
                f"symmetric memory cannot grow from {self._slot_bytes} to {num_bytes} bytes while a CUDA graph is "
                "captured: make this call once before the capture, with the same shapes, on every rank"
            )
        grown = -(-num_bytes // _GROW_STEP) * _GROW_STEP
        # Everybody has come to the allocation, so has waited here: nobody reads or writes the old slots any more.
        self.device.synchronize()
        self.check()
        self._slots, self._slot_bytes = self.device.allocate(SLOTS * grown), grown
        self._generation += 1

    def addresses(self, offset: int = 0) -> list[int]:
        """Of every rank's current slot, ``offset`` bytes into it."""
        assert self._slots is not None, "no slot was reserved"
        start = self.slot * self._slot_bytes + offset
        return [address + start for address in self._slots.addresses]

    def own_slot(self) -> Tensor:
        """The bytes of this rank's current slot."""
        assert self._slots is not None, "no slot was reserved"
        return self._slots.local[self.slot * self._slot_bytes :][: self._slot_bytes]

    @property
    def is_captured(self) -> bool:
        """Whether a graph has calls of this channel."""
        return bool(self._baked)

    @property
    def multicasts(self) -> bool:
        """Whether a store can reach all ranks (NVLS); the same on every rank."""
        return self._pads.multicast != 0

    def one_shot(self, op: str) -> OneShot:
        """A call in one kernel on the current slot, after :meth:`prepare`."""
        assert self._slots is not None, "no slot was reserved"
        multicast = self._slots.multicast
        return OneShot(
            self.op(op), self.slot, self._fingerprint, self.addresses(),
            multicast and multicast + self.slot * self._slot_bytes,
        )  # fmt: skip

    def flag(self, index: int) -> int:
        """Address of a local flag."""
        return self.flags.data_ptr() + 4 * index

    def remember(self, key: Hashable, make: Callable[[], Any], on_device: bool = True) -> Any:
        """What calls like this one need (on the device), made at the first of them.

        Raises:
            UnsupportedProblem: within graph capture, where nothing can be made on the device.
        """
        capturing = self.device.capturing()
        found = self._remembered.get(key)
        if found is None:
            if on_device and capturing:
                raise UnsupportedProblem(
                    "symmetric: the first call of its kind cannot be captured in a CUDA graph: make it once before the "
                    "capture, with the same shapes, on every rank"
                )
            if len(self._remembered) >= _MAX_REMEMBERED and not capturing:
                self._forget_oldest()
            found = self._remembered[key] = make()
        if capturing:
            self._baked[id(found)] = found
        return found

    def _forget_oldest(self) -> None:
        """Half of them at once: kernels may still read those on the device, and are waited for."""
        self.device.synchronize()
        for key in list(self._remembered)[: len(self._remembered) // 2]:
            del self._remembered[key]

    # --- a call

    def op(self, name: str) -> int:
        """The number by which failures of this rank name an op."""
        if name not in self._ops:
            self._ops.append(name)
        return self._ops.index(name)

    def prepare(self, num_bytes: int, fingerprint: int, text: str) -> None:
        """Before anything of a call is enqueued: an earlier one that was not asked for, memory, and the other slot."""
        self.settle()
        self.reserve(max(16, num_bytes))
        self.slot = 1 - self.slot
        self._fingerprint = self._in_place(fingerprint, self.slot)
        if self._fingerprint not in self._texts:
            for slot in range(SLOTS):  # a peer's may be the other one
                self._texts[self._in_place(fingerprint, slot)] = f"{text} in slot {slot} of memory {self._generation}"
            while len(self._texts) > 512:
                self._texts.pop(next(iter(self._texts)))
        # CUDA has graph nodes for a stream's writes, but does not document that capture makes them: kernels there.
        capturing = self.device.capturing()
        self._raises = Raise.KERNEL if capturing else self._how
        if capturing:
            self._baked[id(self._slots)] = self._slots

    def _in_place(self, fingerprint: int, slot: int) -> int:
        """What the ranks compare: the call, and which slot of which allocation it is made in.

        The slot and its address are the host's choice at an eager call, and at a replay that of the time of capture.
        Ranks of which one replays and another one calls would find each other's old data, were it not for this.
        """
        place = SLOTS * self._generation + slot + 1
        return (fingerprint ^ place * _ODD) & _MASK

    def planned(self, op: str, chunks: Sequence[Chunk], num_flags: int) -> Call:
        """A call in the current slot, to be remembered; its first ``num_flags`` flags are lowered when it begins."""
        return Call(
            self.device.library, self.group, self.pipeline, chunks, op=self.op(op), slot=self.slot,
            flags=self.flags.data_ptr(), num_flags=num_flags, how=self._how,
        )  # fmt: skip

    def run(self, call: Call, steps: Steps, *bases: int) -> None:
        """Enqueue these steps of the call that was prepared, from BEGIN on; see :class:`.cuda_group.Call`.

        Side streams follow the current one from BEGIN on, and are joined to it by JOIN or :meth:`settle`.
        """
        # Copies on side streams alone are nobody's business on the current one, which may be busy with a GEMM.
        stream = self.device.stream() if steps != Steps.MOVE or call.on_stream else 0
        call.record.fingerprint, call.record.how = self._fingerprint, self._raises
        self._open |= bool(int(steps) & _BEGIN)  # as integers: flags of Python's enum cost a microsecond each
        call.run(steps, *bases, stream=stream)
        self._open &= not int(steps) & _JOIN

    def settle(self) -> None:
        """The current stream waits for the side streams, so that what they use may be freed or used again."""
        if self._open:
            self._open = False
            self.pipeline.join(self.device.stream())

    # --- failures

    def check(self) -> None:
        """Raise what made this rank's kernels give up, if anything has.

        Raises:
            TransportFailure: with the verdict and whom to blame, where the record says so.
        """
        failure = self.group.failure()
        if failure is not None:
            raise self.error(failure)

    def error(self, failure: Failure) -> TransportFailure:
        op = self._ops[failure.op] if 0 <= failure.op < len(self._ops) else f"number {failure.op}"
        peer, where = failure.peer, f"[symmetric call, op {op}, epoch {failure.epoch}, chunk {failure.chunk}]"
        if failure.kind is Kind.MISMATCH:
            theirs = self._texts.get(failure.fingerprint, f"a call of fingerprint {failure.fingerprint:#010x}")
            text = (
                f"rank {peer} made another call than rank {self.rank}: it made {theirs} {where}. Where it is the same "
                "call in another slot, one of the ranks replays a CUDA graph and the other does not: all ranks must "
                "capture and replay the same sequence of calls"
            )
            return TransportFailure(text, peer, GroupMismatch, (peer,))
        if failure.kind is Kind.TIMEOUT:
            awaited = "to begin the call" if failure.chunk < 0 else f"for its chunk {failure.chunk}"
            text = f"rank {self.rank} waited {failure.waited_s:.1f} s for rank {peer} {awaited} {where}"
            peers = self._owner.peers
            dead = len(peers) > peer and peers[peer].is_dead()
            return TransportFailure(text, peer, PeerLost if dead else CollectiveTimeout, (peer,))
        if failure.kind is Kind.POISONED:
            return TransportFailure(f"rank {self.rank} gave up, because rank {peer} failed {where}", peer)
        return TransportFailure(f"rank {self.rank} gave up: a peer is gone, or its other channel failed {where}")

    def close(self) -> None:
        self.pipeline.close()
        self.group.close()


class _HostWord:
    """A 64-bit word of host memory that kernels look at while they wait: the library's own kind of mapped memory."""

    def __init__(self, library: cuda_native.Library) -> None:
        self._library = library
        host, device = ctypes.c_void_p(), ctypes.c_void_p()
        library.call("tpk_failure_create", ctypes.byref(host), ctypes.byref(device))
        assert host.value is not None and device.value is not None
        self._host: int | None = host.value
        self.address = device.value

    def raise_it(self) -> None:
        if self._host is not None:
            ctypes.c_uint64.from_address(self._host).value = 1

    def close(self) -> None:
        if self._host is not None:
            host, self._host = self._host, None
            self._library.call("tpk_failure_destroy", host)
