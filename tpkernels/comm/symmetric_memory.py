"""Memory that every GPU of a group can address: where it comes from, and whether a group can have it.

Owns what is private to torch (``torch.distributed._symmetric_memory``, 2.11 to 2.15) and hides it: everybody else asks
a :class:`Device` for an :class:`Allocation`, a table of plain addresses.  :func:`ensure` is collective and happens once
per group; it gives the group a :class:`~tpkernels.comm.symmetric_channels.SymmetricChannels`, or every rank the same
reason why there is none.

Assumes that all ranks run on one host: what a rank's :class:`Device` says of itself is exchanged through the group's
store.  Refuses what was not proved: two ranks on one GPU without torch's consent
(``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1``), GPUs without access to each other, an allocation whose addresses are
not what torch says they are.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tpkernels import config
from tpkernels.comm import agreement, cuda_native
from tpkernels.comm.groups import UNTRIED, Group
from tpkernels.comm.pools import outside_of_pools
from tpkernels.comm.transport import TransportFailure
from tpkernels.errors import UnsupportedProblem

__all__ = ["Allocation", "CudaDevice", "Device", "ensure", "is_consistent", "refuse_capture"]

_ONLY_CUDA = "symmetric memory serves CUDA tensors"


@dataclass(frozen=True, eq=False)
class Allocation:
    """As many zeroed bytes on every rank. It lives as long as somebody keeps it, on every rank."""

    local: Tensor
    """This rank's, uint8."""
    addresses: tuple[int, ...]
    """Of every rank's bytes, as this rank addresses them."""
    multicast: int = 0
    """Where a store reaches all ranks' bytes (NVLS), or 0; all ranks have it or none."""
    handle: Any = None
    """What else must live as long: it holds the mappings of the peers' memory."""


class Device(Protocol):
    """What a rank's GPU is to the ``symmetric`` implementation; tests put an emulated one in its place."""

    library: cuda_native.Library
    kind: str
    """``torch.device.type`` of the tensors that it computes with."""
    name: str
    """The kind of GPU, as caches of measurements name it."""
    capability: int
    num_sms: int

    def allocate(self, num_bytes: int) -> Allocation:
        """Collective, blocks the host until all ranks have zeroed theirs; only outside of graph capture.

        Raises:
            UnsupportedProblem: a rank has no memory left; all ranks raise, and the group goes on.
            TransportFailure: a rank did not come, or the memory cannot be shared.
        """

    def current(self) -> AbstractContextManager[Any]:
        """Makes this the current device, which the C library works on."""

    def stream(self) -> int:
        """The current stream, as the C library takes it."""

    def order(self) -> None:
        """Calls follow each other: the current stream waits for that of the call before, if it is another one.

        Not in graph capture, which would have to contain the call before; who captures has synchronised.
        """

    def launch(self, kernel: Callable[[], None]) -> None:
        """Run a function that enqueues a kernel on the current stream."""

    def synchronize(self) -> None:
        """Wait until everything enqueued on this device is done."""

    def time_us(self, kernel: Callable[[], None]) -> float:
        """Microseconds on the device of what a function enqueues; blocks the host."""

    def capturing(self) -> bool:
        """Whether the current stream records a graph."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Scratch of one call, wherever the caller's memory comes from: a graph that is captured owns it."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """To be kept: never of the pool of a graph, and there for every stream; outside of graph capture."""

    def upload(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """A tensor of these numbers, to be kept as that of :meth:`zeros`; outside of graph capture."""

    def patience(self, timeout_s: float) -> int:
        """A time-out in what Triton kernels count: nanoseconds, or polls where they are interpreted."""


class CudaDevice:
    """This process's GPU, and torch's symmetric memory on it."""

    kind = "cuda"

    def __init__(self, group: Group, device: torch.device, library: cuda_native.Library) -> None:
        self.library = library
        self._group, self._device, self._allocations = group, device, 0
        self._last_stream: torch.cuda.Stream | None = None
        self._keeps = torch.cuda.Stream(device)
        properties = torch.cuda.get_device_properties(device)
        self.name = _kind_of(properties)
        self.capability = 10 * properties.major + properties.minor
        self.num_sms = properties.multi_processor_count

    def allocate(self, num_bytes: int) -> Allocation:
        group, number = self._group, self._allocations
        self._allocations += 1
        local, refusal = None, None
        try:
            local = _new_tensor(num_bytes, self._device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            refusal = str(error).splitlines()[0]
        # Behind this the driver waits for all ranks: nobody goes there before all have come, with memory in hand.
        self._agree(f"{number}/allocated", refusal, UnsupportedProblem)
        assert local is not None
        try:
            with _process_ends_after(group.timeout):
                made, problem = _rendezvous(local, group), None
        except RuntimeError as error:
            made, problem = None, str(error).splitlines()[0]
        local.zero_()
        torch.cuda.synchronize(self._device)
        # Kernels of sm_80 have no such stores, whatever the handle says.
        multicast = made.multicast if made is not None and self.capability >= 90 else 0
        everywhere = self._agree(f"{number}/mapped", problem, TransportFailure, multicast=multicast != 0)
        assert made is not None
        return replace(made, multicast=multicast if everywhere else 0)

    def _agree(self, step: str, refusal: str | None, error: type[Exception], multicast: bool = False) -> bool:
        """All ranks have come here; raises on all of them if one had a reason. Whether all have multicast."""
        record = agreement.Record("symmetric memory", {"refusal": refusal, "multicast": multicast})
        records = agreement.exchange_records(self._group, 0, record, part=f"symmetric/{step}")
        refusals = {rank: found.facts["refusal"] for rank, found in enumerate(records) if found.facts["refusal"]}
        if refusals:
            listing = "; ".join(f"rank {rank}: {reason}" for rank, reason in refusals.items())
            raise error(f"symmetric memory cannot be had: {listing}")
        return all(found.facts["multicast"] for found in records)

    def current(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device)

    def stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def order(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        if self._last_stream is not None and stream != self._last_stream and not self.capturing():
            stream.wait_stream(self._last_stream)
        self._last_stream = stream

    def launch(self, kernel: Callable[[], None]) -> None:
        kernel()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def time_us(self, kernel: Callable[[], None]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        kernel()
        end.record()
        end.synchronize()
        return float(1e3 * begin.elapsed_time(end))

    def capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._kept(lambda: torch.zeros(tuple(shape), dtype=dtype, device=self._device))

    def upload(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        return self._kept(lambda: torch.tensor(values, dtype=dtype).to(self._device))

    def _kept(self, make: Callable[[], Tensor]) -> Tensor:
        def work() -> Tensor:
            with torch.cuda.device(self._device), torch.cuda.stream(self._keeps):
                made = make()
                self._keeps.synchronize()  # no stream that reads it needs to wait; nothing else runs here
            return made

        return outside_of_pools(work)

    def patience(self, timeout_s: float) -> int:
        return int(timeout_s * 1e9)


def _new_tensor(num_bytes: int, device: torch.device) -> Tensor:
    """Not ``symm_mem.empty``: from 2.13 on that may cut tensors out of a pool, at offsets that differ between ranks."""
    from torch._C._distributed_c10d import _SymmetricMemory

    made: Tensor = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
    return made


@contextmanager
def _process_ends_after(seconds: float) -> Iterator[None]:
    """Where a wait cannot be ended: the process ends, with a traceback, unless what is in here has come to an end.

    A rank that dies in torch's rendezvous leaves its peers in the driver (cuMulticastBindMem waits for all of the team)
    or at a socket, and torch keeps the interpreter's lock meanwhile, so that no thread of Python, nor the monitor, can
    do anything.  faulthandler's watchdog needs no lock; it is one per process, so another one's deadline is lost.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)  # sys.stderr may be no file
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _rendezvous(local: Tensor, group: Group) -> Allocation:
    from torch.distributed import _symmetric_memory

    # By name: 2.11 and later take it, and a group object only some of them.
    handle: Any = _symmetric_memory.rendezvous(local, group.pg.group_name)
    addresses = tuple(int(address) for address in handle.buffer_ptrs)
    if not is_consistent(addresses, local.data_ptr(), group.rank, group.size):
        raise RuntimeError(f"torch {torch.__version__} maps a buffer at {local.data_ptr():#x} as {addresses}")
    return Allocation(local, addresses, int(getattr(handle, "multicast_ptr", 0) or 0), handle)


def is_consistent(addresses: Sequence[int], local: int, rank: int, size: int) -> bool:
    """Whether a table of addresses can be that of ``size`` ranks of which this one, ``rank``, has its bytes there."""
    return len(addresses) == size and all(addresses) and addresses[rank] == local and len(set(addresses)) == size


# --- whether a group can have it --------------------------------------------------------------------------------------


def refuse_capture(group: Group, what: str, device: torch.device) -> None:
    """Before the ranks meet, or set up symmetric memory: both make things on the device, and wait for it.

    Raises:
        UnsupportedProblem: the current stream records a graph; nothing was sent.
    """
    new = group.key is None or group.no_symmetric_memory in (UNTRIED, _ONLY_CUDA)
    if new and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedProblem(
            f"{what}: the first call on a group cannot be captured in a CUDA graph, because it sets up what the group "
            "has on the GPU: make this call once before the capture, on every rank"
        )


def ensure(group: Group, call: int, device: torch.device) -> None:
    """Set up the group's symmetric memory unless that was tried before.  Collective, once per group.

    Raises:
        TransportFailure, PeerLost, CollectiveTimeout: a rank went away meanwhile.
    """
    if group.no_symmetric_memory not in (UNTRIED, _ONLY_CUDA):
        return
    if device.type != "cuda":
        group.no_symmetric_memory = _ONLY_CUDA
        return
    reason = _why_not_here(group) or _cannot_load(device)
    facts = {"refusal": reason, **(_facts_of(device) if reason is None else {})}
    records = agreement.exchange_records(group, call, agreement.Record("symmetric memory", facts), part="symmetric")
    all_facts = [record.facts for record in records]
    reason = common_refusal(all_facts, overlapping=config.load().overlapping_devices)
    if reason is None:
        accessible = _inaccessible(group.rank, device, [fact["uuid"] for fact in all_facts])
        record = agreement.Record("symmetric memory", {"refusal": accessible})
        records = agreement.exchange_records(group, call, record, part="symmetric access")
        reason = common_refusal([{**fact, **r.facts} for fact, r in zip(all_facts, records, strict=True)], True)
    if reason is None:
        reason = _set_up(group, device)
    group.no_symmetric_memory = reason


def _set_up(group: Group, device: torch.device) -> str | None:
    """None, or why torch could not share memory between these ranks, the same on all of them."""
    from tpkernels.comm.symmetric_channels import SymmetricChannels

    try:
        group.symmetric = SymmetricChannels(group, CudaDevice(group, device, cuda_native.load()))
    except (UnsupportedProblem, TransportFailure) as error:
        return str(error)
    # Streams and records go with the process group, even if the monitor still looks at its state.
    weakref.finalize(group.pg, _release, group).atexit = False
    return None


def _release(group: Group) -> None:
    if group.symmetric is not None:
        group.symmetric.close()
    group.symmetric = None


def _why_not_here(group: Group) -> str | None:
    """This rank's own reasons."""
    if cuda_native.library() is None:
        return f"{cuda_native.why_not()}; `tpkernels doctor` says more"
    if not torch.cuda.is_available():
        return "torch finds no GPU in this process"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        return f"torch {torch.__version__} has no symmetric memory"
    if not group.co_located:
        return "the ranks run on different hosts (or in different process-id namespaces)"
    if group.size > cuda_native.MAX_RANKS:
        return f"at most {cuda_native.MAX_RANKS} ranks have symmetric memory, the group has {group.size}"
    return None


def _cannot_load(device: torch.device) -> str | None:
    """Why the library's kernels do not run on this GPU; it has code for some architectures only."""
    try:
        with torch.cuda.device(device):
            cuda_native.load().call("tpk_load_kernels")
    except cuda_native.CudaError as error:
        return f"the CUDA kernels do not load on {torch.cuda.get_device_name(device)}: {error}"
    return None


def _kind_of(properties: Any) -> str:
    return f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.multi_processor_count} SMs"


def _facts_of(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "uuid": str(properties.uuid),
        "index": device.index,
        "gpu": _kind_of(properties),
        "capability": 10 * properties.major + properties.minor,
        "torch": torch.__version__,
        "abi": cuda_native.ABI,
    }


def common_refusal(facts: Sequence[Mapping[str, Any]], overlapping: bool) -> str | None:
    """Why these ranks cannot share memory, from what all of them said: the same on every rank."""
    for rank, fact in enumerate(facts):
        if fact["refusal"] is not None:
            return f"rank {rank}: {fact['refusal']}"
    differing = (("gpu", "GPUs"), ("torch", "versions of torch"), ("abi", "revisions of the CUDA kernels"))
    for name, what in differing:
        values = [fact[name] for fact in facts]
        if len(set(values)) > 1:
            return f"the ranks have different {what}: {values}"
    if facts[0]["capability"] < 80:
        return f"the kernels need capability 8.0 or more, this is {facts[0]['gpu']}"
    return None if overlapping else _overlap(facts)


def _overlap(facts: Sequence[Mapping[str, Any]]) -> str | None:
    """Who is on one GPU, or seems to torch to be: its rendezvous compares numbers of devices, not devices."""
    if same := _alike([fact["uuid"] for fact in facts]):
        return (
            f"ranks {same} are on one GPU; give each its own (torch.cuda.set_device), or allow it for experiments: "
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1"
        )
    if same := _alike([fact["index"] for fact in facts]):
        return (
            f"ranks {same} have a GPU each and all call it cuda:{facts[same[0]]['index']}, because each process is "
            "shown its own only (CUDA_VISIBLE_DEVICES per rank); torch's symmetric memory takes equal numbers for one "
            "GPU. Let every rank see all GPUs of the host (unset CUDA_VISIBLE_DEVICES; Slurm: --gpus-per-node, no "
            "--gpus-per-task or --gpu-bind; Ray: RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1) and take that of its "
            "local rank, as tpkernels.init does; or set TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 on every rank: no "
            "multicast (NVLS) then"
        )
    return None


def _alike(values: Sequence[Any]) -> list[int]:
    """The first ranks that have one value in common; none, if all values differ."""
    return next(
        ([r for r, other in enumerate(values) if other == value] for value in values if values.count(value) > 1), []
    )


def _inaccessible(rank: int, device: torch.device, uuids: Sequence[str]) -> str | None:
    """A peer's GPU that this one cannot address. Those that this process cannot see are judged by the rendezvous."""
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    own, library = device.index, cuda_native.load()
    for peer, uuid in enumerate(uuids):
        index = visible.get(uuid)
        if index is None or index == own:
            continue
        if not library.can_access_peer(own, index):
            return f"its GPU has no access to the memory of rank {peer}'s (no NVLink or PCIe path between them)"
    return None
