"""Memory that every GPU of a group can address, and where it comes from.

Owns what is private to torch (``torch.distributed._symmetric_memory``, 2.11 to 2.15) and hides it: everybody else asks
a :class:`Device` for an :class:`Allocation`, a table of plain addresses.  Whether a group can have such memory is
found out by :mod:`tpkernels.backends.symmetric.resource`.

Assumes that all ranks run on one host.  Refuses an allocation whose addresses are not what torch says they are.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tpkernels.backends.pools import outside_of_pools
from tpkernels.backends.symmetric import cuda_native
from tpkernels.comm import agreement
from tpkernels.comm.groups import Group
from tpkernels.comm.transport import TransportFailure
from tpkernels.errors import UnsupportedProblem

__all__ = ["Allocation", "CudaDevice", "Device", "is_consistent", "kind_of"]


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
        self.name = kind_of(properties)
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


def kind_of(properties: Any) -> str:
    """The kind of GPU, from what torch says of it."""
    return f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.multi_processor_count} SMs"
