"""The shared memory of a group whose ranks run on one host: set-up, views of it as tensors, and its errors.

:func:`ensure` is collective and happens once per group.  It gives the group a :class:`SharedSegments`, or every rank
the same reason why there is none: other hosts, another user, no compiled core, no descriptors left.  The protocol of
a call is that of ``csrc/README.md``; :meth:`SharedSegments.call` wraps one.
"""

from __future__ import annotations

import errno
import os
import time
import weakref
from collections.abc import Sequence
from functools import lru_cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from tpkernels.comm import agreement, presence, rendezvous
from tpkernels.comm.groups import UNTRIED, Group
from tpkernels.comm.native import ABI, native, why_not
from tpkernels.comm.transport import TransportFailure
from tpkernels.errors import CollectiveTimeout, CommunicationError, GroupMismatch, PeerLost, UnsupportedProblem

__all__ = ["SharedSegments", "ensure", "header_text", "native_dtype"]

# Ranks that share cores must not spin; ranks with a core each lose less by spinning than by sleeping (a futex sleep
# and wake-up cost 10-60 us).
SPIN_US = 50.0
_GROW_STEP = 2 * 1024 * 1024
_TEXT_BYTES = 440


class SharedSegments:
    """This rank's channel to the other ranks of a group, and tensors that lie in its slots."""

    def __init__(self, group: Group, channel: Any) -> None:
        self.channel = channel
        self.rank, self.size = group.rank, group.size
        module: Any = native()
        self._module = module
        with torch.inference_mode(False):  # tensors made inside it could not be written outside
            self._bytes = [torch.frombuffer(channel.segment(rank), dtype=torch.uint8) for rank in range(group.size)]
        self._typed: dict[torch.dtype, list[Tensor]] = {}
        self._slot_bytes = int(self._module.SLOT_BYTES)

    def reserve(self, num_bytes: int) -> None:
        """Make room for ``num_bytes`` per call on every rank.  Collective: all ranks must ask for the same.

        Raises:
            UnsupportedProblem: a rank has no memory left; no rank has sent anything, and the group goes on.
        """
        if num_bytes <= self.channel.capacity:
            return
        try:
            failed = self.channel.grow(-(-num_bytes // _GROW_STEP) * _GROW_STEP)
        except self._module.ChannelError as error:
            raise self.translate(error) from None
        if failed:
            listing = "; ".join(f"rank {rank}: {os.strerror(code)} ({errno.errorcode[code]})" for rank, code in failed)
            raise UnsupportedProblem(
                f"shared_memory cannot stage {num_bytes} bytes: {listing}. Nothing was sent and the group still works: "
                "free memory, or pass implementation='chunked'"
            )

    def call(self, fingerprint: int, text: str) -> _Call:
        """One call of the protocol: ``with segments.call(...):`` begins and ends it and names who failed."""
        return _Call(self, fingerprint, text)

    def view(self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """A contiguous tensor ``offset`` bytes into the current slot of ``rank``; only our own may be written."""
        typed = self._typed.get(dtype)
        if typed is None:
            with torch.inference_mode(False):
                typed = self._typed[dtype] = [whole.view(dtype) for whole in self._bytes]
        start = (self.channel.call & 1) * self._slot_bytes + offset
        rows, columns = shape
        return typed[rank].as_strided((rows, columns), (columns, 1), start // dtype.itemsize)

    def stage(self, x: Tensor) -> None:
        """Copy ``x`` (contiguous) to the start of our current slot."""
        num_bytes = x.numel() * x.element_size()
        self._module.copy_rows(x.data_ptr(), num_bytes, self.channel.address(self.rank), num_bytes, 1, num_bytes)

    def all_reduce(self, fingerprint: int, text: str, x: Tensor, out: Tensor) -> None:
        """out = sum over ranks of ``x`` (contiguous): a whole call in one step."""
        channel, count = self.channel, x.numel()
        needed = self._module.all_reduce_bytes(count * x.element_size())
        if needed > channel.capacity:
            self.reserve(needed)
        try:
            channel.all_reduce(fingerprint, text, native_dtype(x.dtype), x.data_ptr(), out.data_ptr(), count)
        except self._module.ChannelError as error:
            raise self.translate(error) from None

    def repeated_sum(
        self, fingerprint: int, text: str, shape: tuple[int, int], dtype: torch.dtype, *, multiplies: bool
    ) -> RepeatedSum:
        """The call that sums a matrix of this shape in place, or multiplies before; there must be room for it."""
        compiled = self._module.RepeatedSum(self.channel, fingerprint, text, native_dtype(dtype), *shape)
        return RepeatedSum(self, compiled, multiplies)

    def translate(self, error: Exception) -> TransportFailure:
        """The transport's failure for the native one (kind, blamed ranks, call, epoch, message)."""
        kind, blamed, call, epoch, message = error.args
        failure = self._module.Failure
        verdicts: dict[Any, type[CommunicationError]] = {
            failure.mismatch: GroupMismatch,
            failure.timeout: CollectiveTimeout,
        }
        verdict = None if kind == failure.interrupted else verdicts.get(kind, PeerLost)
        return TransportFailure(f"{message} [shared-memory call {call}, epoch {epoch}]", None, verdict, blamed)

    def poison(self, error: CommunicationError) -> None:
        """Tell the peers, who may be waiting in this memory, that this rank failed."""
        failure = self._module.Failure
        kinds = {GroupMismatch: failure.mismatch, CollectiveTimeout: failure.timeout, PeerLost: failure.peer_lost}
        mask = sum(1 << rank for rank in set(error.ranks))
        self.channel.poison(kinds.get(type(error), failure.other), mask, str(error))


class RepeatedSum:
    """See :class:`tpkernels.ops.contract.RepeatedSum`; its calls go straight to the compiled core."""

    __slots__ = ("_segments", "finish", "multiply", "start")

    def __init__(self, segments: SharedSegments, compiled: Any, multiplies: bool) -> None:
        self._segments, self.start, self.finish = segments, compiled.start, compiled.finish
        self.multiply = compiled.start_product if multiplies else None

    def named(self, error: BaseException) -> BaseException:
        return self._segments.translate(error) if isinstance(error, self._segments._module.ChannelError) else error


@lru_cache(maxsize=16)
def native_dtype(dtype: torch.dtype) -> Any:
    """The compiled core's name of a dtype."""
    module: Any = native()
    return module.Dtype.__members__[str(dtype).removeprefix("torch.")]


class _Call:
    def __init__(self, segments: SharedSegments, fingerprint: int, text: str) -> None:
        self._segments, self._fingerprint, self._text = segments, fingerprint, text

    def __enter__(self) -> Any:
        segments = self._segments
        try:
            segments.channel.begin(self._fingerprint, self._text)
        except segments._module.ChannelError as error:
            raise segments.translate(error) from None
        return segments.channel

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self._segments.channel.end()
        elif isinstance(error, self._segments._module.ChannelError):
            raise self._segments.translate(error) from None


def header_text(signature: str, fingerprint: int) -> str:
    """What peers read of a call; a text that is too long still differs where the calls do."""
    return signature if len(signature) <= _TEXT_BYTES else f"{signature[: _TEXT_BYTES - 20]}... #{fingerprint:016x}"


def ensure(group: Group, call: int) -> None:
    """Set up the group's shared memory unless that was tried before.  Collective.

    Raises:
        PeerLost: a rank went away meanwhile.
    """
    if group.shared is not None or group.no_shared_memory is not UNTRIED:
        return
    hub, start = None, time.monotonic()
    reason = _why_not_here(group)
    if reason is None and group.rank == 0:
        try:
            hub = rendezvous.Hub(group.size)
        except OSError as error:
            reason = f"cannot listen for the other ranks: {error}"
    facts = {
        "refusal": reason,
        "network": os.stat("/proc/self/ns/net").st_ino,
        "uid": os.getuid(),
        "abi": ABI,
        "address": None if hub is None else [hub.address, hub.token],
    }
    try:
        records = agreement.exchange_records(group, call, agreement.Record("shared memory", facts), part="shared")
        group.no_shared_memory = _common_refusal([record.facts for record in records])
        if group.no_shared_memory is None:
            limits = rendezvous.Limits(time.monotonic() + group.timeout, lambda rank: _is_gone(group, rank))
            if hub is not None:
                group.no_shared_memory = _as_hub(group, hub, limits)
            else:
                address, token = records[0].facts["address"]
                group.no_shared_memory = _as_spoke(group, address, token, limits)
    except rendezvous.Lost as error:
        raise _culprit(group, call, error, time.monotonic() - start) from error
    finally:
        if hub is not None:
            hub.close()
    if group.no_shared_memory is not None:
        group.shared = None  # ours opened, another rank's did not


def _release(group: Group) -> None:
    group.shared = None
    group.repeated.clear()


def _culprit(group: Group, call: int, lost: rendezvous.Lost, waited: float) -> CommunicationError:
    """Whom to blame: a rank whose connection ended may have left because another died, and says so in the store."""
    try:
        own = agreement.read(group, f"call/{call}").get(group.rank)
        if own is not None:
            return agreement.blame(group, call, agreement.Record.from_json(own).signature, str(lost), waited)
    except RuntimeError as error:
        lost.add_note(f"the store could not be asked: {error}")
    return PeerLost(f"rank {group.rank}, call {call} on group {group.name!r}: {lost}", ranks=lost.ranks)


def _is_gone(group: Group, rank: int) -> bool:
    """Whether a rank will not come any more: its process is dead, or it has failed and said so."""
    try:
        return group.peers[rank].is_dead() or rank in presence.failures(group)
    except RuntimeError:  # the store's host died; who that was shows in the processes
        return False


def _why_not_here(group: Group) -> str | None:
    """This rank's own reasons."""
    module = native()
    if module is None:
        return why_not()
    if group.backends.serving("cpu") != "gloo":
        return f"shared memory serves CPU tensors in gloo groups, the backends of this one are {group.backends}"
    if not group.co_located:
        return "the ranks run on different hosts (or in different process-id namespaces)"
    if group.size > module.MAX_RANKS:
        return f"at most {module.MAX_RANKS} ranks share memory, the group has {group.size}"
    return None


def _common_refusal(facts: Sequence[Any]) -> str | None:
    for rank, fact in enumerate(facts):
        if fact["refusal"] is not None:
            return f"rank {rank}: {fact['refusal']}"
    for name, what in (("network", "network namespaces"), ("uid", "users"), ("abi", "revisions of the compiled core")):
        values = [fact[name] for fact in facts]
        if len(set(values)) > 1:
            return f"the ranks have different {what}: {values}"
    return None


def _as_hub(group: Group, hub: rendezvous.Hub, limits: rendezvous.Limits) -> str | None:
    """Rank 0: collect, hand out, open, tell the verdict; returns the common refusal."""
    module: Any = native()
    mine: list[int] = []
    refusals: dict[int, str | None] = {}
    try:
        try:
            mine.append(module.make_control(group.size))
            mine.append(module.make_data())
        except (OSError, RuntimeError) as error:
            refusals[0] = str(error)
        theirs = hub.collect(limits)
        with rendezvous.closing(*(fd for fd in theirs.values() if isinstance(fd, int))):
            refusals |= {rank: found for rank, found in theirs.items() if isinstance(found, str)}
            if not refusals:
                data = [mine[1], *(int(fd) for _, fd in sorted(theirs.items()))]
                hub.tell({"segments": group.size}, [mine[0], *data])
                refusals = {0: _open(group, mine[0], data), **hub.reports(limits)}
        verdict = next((f"rank {rank}: {why}" for rank, why in sorted(refusals.items()) if why is not None), None)
        hub.tell({"refusal": verdict})
        return verdict
    except rendezvous.Lost as error:
        hub.tell({"lost": list(error.ranks), "message": str(error)})
        raise
    finally:
        rendezvous.close_all(mine)


def _as_spoke(group: Group, address: str, token: str, limits: rendezvous.Limits) -> str | None:
    """Every other rank's part of the same."""
    module: Any = native()
    spoke = rendezvous.Spoke(group.rank, address, token, limits)
    try:
        try:
            mine = module.make_data()
        except (OSError, RuntimeError) as error:
            spoke.hello(None, str(error))
        else:
            with rendezvous.closing(mine):
                spoke.hello(mine, None)
        message, descriptors = spoke.receive(group.size + 1)
        with rendezvous.closing(*descriptors):
            if "segments" in message:
                complete = len(descriptors) == group.size + 1
                missing = f"{len(descriptors)} of {group.size + 1} descriptors arrived (too many open files?)"
                spoke.report(_open(group, descriptors[0], descriptors[1:]) if complete else missing)
                message, _ = spoke.receive(0)
        if "lost" in message:
            raise rendezvous.Lost(message["message"], message["lost"])
        refusal: str | None = message["refusal"]
        return refusal
    finally:
        spoke.close()


def _open(group: Group, control: int, data: Sequence[int]) -> str | None:
    """Map everything and take this rank's lock; None or why that failed."""
    module: Any = native()
    spin_us = SPIN_US if group.size <= (os.cpu_count() or 1) else 0.0
    try:
        channel = module.Channel(group.rank, group.size, control, list(data), group.timeout, spin_us)
    except (OSError, RuntimeError, ValueError) as error:
        return str(error)
    group.shared = SharedSegments(group, channel)
    # Pages live while anybody maps them: they go with the process group, even if the monitor still looks at its state.
    weakref.finalize(group.pg, _release, group).atexit = False
    return None
