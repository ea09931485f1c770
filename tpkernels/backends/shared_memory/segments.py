"""The shared memory of a group whose ranks run on one host: set-up, views of it as tensors, and its errors.

A group's :class:`SharedMemory` is set up collectively, once.  It then has :class:`SharedSegments`, or on every rank the
same reason why there are none: other hosts, another user, no compiled core, no descriptors left.  The protocol of
a call is that of ``csrc/README.md``; :meth:`SharedSegments.call` wraps one.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from tpkernels.backends.shared_memory import rendezvous
from tpkernels.comm import agreement, presence
from tpkernels.comm.groups import Group
from tpkernels.comm.resources import UNTRIED, Resource
from tpkernels.comm.transport import TransportFailure
from tpkernels.errors import CollectiveTimeout, CommunicationError, GroupMismatch, PeerLost, UnsupportedProblem
from tpkernels.gemm import few_rows
from tpkernels.gemm.native import ABI, native, native_dtype, why_not

__all__ = ["SharedMemory", "SharedSegments"]

# Ranks that share cores must not spin; ranks with a core each lose less by spinning than by sleeping (a futex sleep
# and wake-up cost 10-60 us).
SPIN_US = 50.0
_GROW_STEP = 2 * 1024 * 1024
_MEASURED_BYTES = 1024 * 1024


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


class SharedMemory(Resource):
    """The group's segments, or why there are none."""

    name = "shared_memory"

    def __init__(self) -> None:
        self.segments: SharedSegments | None = None
        self.no_memory: str | None = UNTRIED
        """Why there is none, the same on all ranks."""

    def ensure(self, group: Group, call: int, device: torch.device) -> None:
        if self.segments is not None or self.no_memory is not UNTRIED:
            return
        _set_up(self, group, call)

    def refusal(self, device: str) -> str | None:
        return self.no_memory

    def link_costs(self, group: Group, device: torch.device, link: Mapping[str, float]) -> dict[str, float]:
        return {} if self.segments is None else _rates(self.segments, link["link_gbytes"])

    def gemm_costs(self, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
        return {} if self.segments is None or device.type != "cpu" else few_rows.rates(dtype)

    def poison(self, error: CommunicationError) -> None:
        if self.segments is not None:
            self.segments.poison(error)

    def abort(self) -> None:
        if self.segments is not None:
            self.segments.channel.interrupt()

    def close(self, group: Group) -> None:
        """Pages live while anybody maps them."""
        self.segments = None


def _set_up(memory: SharedMemory, group: Group, call: int) -> None:
    """Give the group its segments, or every rank the same reason why there are none.  Collective.

    Raises:
        PeerLost: a rank went away meanwhile.
    """
    hub, start = None, time.monotonic()
    reason = _why_not_here(group)
    if reason is None and group.rank == 0:
        try:
            hub = rendezvous.Hub(group.size)
        except OSError as error:
            reason = f"cannot listen for the other ranks: {error}"
    facts = {
        "refusal": reason,
        "network": None if reason is not None else os.stat("/proc/self/ns/net").st_ino,  # there may be no /proc
        "uid": os.getuid(),
        "abi": ABI,
        "address": None if hub is None else [hub.address, hub.token],
    }
    try:
        records = agreement.exchange_records(group, call, agreement.Record("shared memory", facts), part="shared")
        memory.no_memory = _common_refusal([record.facts for record in records])
        if memory.no_memory is None:
            limits = rendezvous.Limits(time.monotonic() + group.timeout, lambda ranks: _gone(group, ranks))
            if hub is not None:
                memory.no_memory = _as_hub(memory, group, hub, limits)
            else:
                address, token = records[0].facts["address"]
                memory.no_memory = _as_spoke(memory, group, address, token, limits)
    except rendezvous.Lost as error:
        raise _culprit(group, call, error, time.monotonic() - start) from error
    finally:
        if hub is not None:
            hub.close()
    if memory.no_memory is not None:
        memory.segments = None  # ours opened, another rank's did not


def _rates(segments: SharedSegments, link_gbytes: float) -> dict[str, float]:
    """Rate of copies in and out of segments, and the time of an exchange without payload.  Collective.

    The copies are those of a gather: into our segment, and from there and from the peers', who have just written it,
    into fresh memory.  Copies that stay in the caches of one core ran three to four times as fast.  ``link_gbytes`` is
    what the same ranks reach over sockets: those copy every byte twice, so copies that seem slower than twice that were
    disturbed.

    Raises:
        TransportFailure: a peer did not answer.
    """
    one, shard = torch.zeros(1), torch.zeros(_MEASURED_BYTES, dtype=torch.uint8)
    exchange_s, gather_s = [], []
    for _ in range(9):
        start = time.perf_counter()
        segments.all_reduce(0, "calibration", one, torch.empty_like(one))
        exchange_s.append(time.perf_counter() - start)
    segments.reserve(_MEASURED_BYTES)
    sizes = [_MEASURED_BYTES] * segments.size
    for _ in range(9):
        start = time.perf_counter()
        with segments.call(0, "calibration") as channel:
            segments.stage(shard)
            channel.signal()
            whole = torch.empty(sum(sizes), dtype=torch.uint8)
            channel.gather_slots(1, sizes, shard.data_ptr(), whole.data_ptr())
        gather_s.append(time.perf_counter() - start)
    moved = (1 + segments.size) * _MEASURED_BYTES
    copy_gbytes = max(1e-9 * moved / min(gather_s), 2 * link_gbytes)
    return {"copy_gbytes": copy_gbytes, "signal_us": 1e6 * min(exchange_s)}


def _culprit(group: Group, call: int, lost: rendezvous.Lost, waited: float) -> CommunicationError:
    """Whom to blame: a rank whose connection ended may have left because another died, or because the store did."""
    own = agreement.Looks(group)(lambda store: agreement.recorded(group, f"call/{call}", store)).get(group.rank)
    what = "shared memory" if own is None else own.signature
    peer = lost.ranks[0] if lost.ranks else None
    return agreement.blame(group, call, what, str(lost), waited, broken=waited < 0.9 * group.timeout, peer=peer)


def _gone(group: Group, ranks: Sequence[int]) -> list[int]:
    """Those that will not come any more: their processes are dead, or they have failed and said so."""
    dead = [rank for rank in ranks if group.peers[rank].is_dead()]
    failed = {} if dead else agreement.Looks(group)(lambda store: presence.failures(group, store))
    return dead or [rank for rank in ranks if rank in failed]


def _why_not_here(group: Group) -> str | None:
    """This rank's own reasons."""
    module = native()
    if module is None:
        return why_not()
    if group.backends.serving("cpu") != "gloo":
        return f"shared memory serves CPU tensors in gloo groups, the backends of this one are {group.backends}"
    if not group.co_located:
        return "the ranks run on different hosts (or in different process-id namespaces)"
    import resource  # Windows has none, and must be able to import this

    limit, needed = resource.getrlimit(resource.RLIMIT_FSIZE)[0], 2 * module.SLOT_BYTES
    if limit != resource.RLIM_INFINITY and limit < needed:
        return (
            f"this process may make files of {limit} bytes only, and a segment has addresses, not memory, for {needed} "
            "bytes: ulimit -f unlimited"
        )
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


def _as_hub(memory: SharedMemory, group: Group, hub: rendezvous.Hub, limits: rendezvous.Limits) -> str | None:
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
                refusals = {0: _open(memory, group, mine[0], data), **hub.reports(limits)}
        verdict = next((f"rank {rank}: {why}" for rank, why in sorted(refusals.items()) if why is not None), None)
        hub.tell({"refusal": verdict})
        return verdict
    except rendezvous.Lost as error:
        hub.tell({"lost": list(error.ranks), "message": str(error)})
        raise
    finally:
        rendezvous.close_all(mine)


def _as_spoke(memory: SharedMemory, group: Group, address: str, token: str, limits: rendezvous.Limits) -> str | None:
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
                spoke.report(_open(memory, group, descriptors[0], descriptors[1:]) if complete else missing)
                message, _ = spoke.receive(0)
        if "lost" in message:
            raise rendezvous.Lost(message["message"], message["lost"])
        refusal: str | None = message["refusal"]
        return refusal
    finally:
        spoke.close()


def _open(memory: SharedMemory, group: Group, control: int, data: Sequence[int]) -> str | None:
    """Map everything and take this rank's lock; None or why that failed."""
    module: Any = native()
    spin_us = SPIN_US if group.size <= (os.cpu_count() or 1) else 0.0
    try:
        channel = module.Channel(group.rank, group.size, control, list(data), group.timeout, spin_us)
    except (OSError, RuntimeError, ValueError) as error:
        return str(error)
    memory.segments = SharedSegments(group, channel)
    return None
