"""Whether a group gets symmetric memory is one answer for all ranks; torch's part and the GPU's are played.

What is real: the exchange through the store, the reasons, growth, and who is told of a rank that has no memory left.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory
from torch.utils._python_dispatch import TorchDispatchMode

import tpkernels as tpk
from tests.backends.test_symmetric_order import Recorder
from tests.ops.support import new_group
from tpkernels.backends.symmetric import cuda_native
from tpkernels.backends.symmetric import memory as symmetric_memory
from tpkernels.backends.symmetric import resource as symmetric_resource
from tpkernels.backends.symmetric.memory import CudaDevice
from tpkernels.backends.symmetric.residency import waiting_blocks
from tpkernels.backends.symmetric.resource import SymmetricMemory, channels_of
from tpkernels.comm import resources
from tpkernels.comm.groups import Group, resolve
from tpkernels.comm.resources import UNTRIED
from tpkernels.ops import agreed_call
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo


def own_gpu(fault: str) -> Any:
    """As this rank's process numbers the GPUs that it is shown."""
    return SimpleNamespace(type="cuda", index=0 if fault.startswith("one visible GPU") else dist.get_rank())


@contextmanager
def played(rank: int, fault: str) -> Iterator[list[int]]:
    """A GPU per rank; rank 1 has the fault. Yields the bytes that this rank has asked for."""
    faulty, asked = rank == 1, []

    def new_tensor(num_bytes: int, device: Any) -> Tensor:
        asked.append(num_bytes)
        if faulty and (fault == "out of memory" or (fault == "grows too large" and len(asked) == 2)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate it\nand more")
        return torch.ones(num_bytes, dtype=torch.uint8)

    def rendezvous(local: Tensor, name: str) -> Any:
        if faulty and fault == "no handle":
            raise RuntimeError("cuMemImportFromShareableHandle: invalid")
        own = local.data_ptr() + (64 if faulty and fault == "an offset" else 0)
        table = [own if r == rank else own + 2**20 * (r + 1) for r in range(2)]
        return SimpleNamespace(buffer_ptrs=table, multicast_ptr=0 if faulty and fault == "no multicast" else 2**40)

    def said(of: str, reason: str) -> str | None:
        return reason if faulty and fault == of else None

    device = f"gpu {0 if fault == 'one GPU' else rank}"
    properties = SimpleNamespace(name="H", major=9, minor=0, multi_processor_count=132, uuid=device)
    changes: dict[tuple[Any, str], Any] = {
        (symmetric_resource, "_why_not_here"): lambda group: said("no library", "no library"),
        (symmetric_resource, "_cannot_load"): lambda device: said("no code", "no code for it"),
        (symmetric_resource, "_inaccessible"): lambda *a: said("no access", "no way to rank 0"),
        (symmetric_memory, "_new_tensor"): new_tensor,
        (_symmetric_memory, "rendezvous"): rendezvous,
        (torch.cuda, "get_device_properties"): lambda device: properties,
        (torch.cuda, "synchronize"): lambda device: None,
        (torch.cuda, "is_current_stream_capturing"): lambda: False,
        (cuda_native, "load"): Recorder,
        (torch.cuda, "Stream"): lambda device: SimpleNamespace(synchronize=lambda: None),
        (CudaDevice, "zeros"): lambda self, shape, dtype: torch.zeros(tuple(shape), dtype=dtype),
    }
    allowed = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": str(int(fault.endswith("allowed")))}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, allowed))
        for (owner, name), value in changes.items():
            stack.enter_context(mock.patch.object(owner, name, value))
        yield asked


def meet(made: Any) -> Group:
    tpk.all_reduce(torch.zeros(1), made, implementation="unfused")
    return resolve(made)


def set_up(fault: str) -> tuple[str | None, bool]:
    with new_group() as made, played(dist.get_rank(), fault):
        group = meet(made)
        memory: SymmetricMemory = group.resources[SymmetricMemory.name]
        assert memory.refusal("cuda") == "symmetric memory serves CUDA tensors"  # so far, all were on the CPU
        resources.ensure(group, group.calls, own_gpu(fault))
        first = memory.channels
        resources.ensure(group, group.calls, own_gpu(fault))
        assert memory.channels is first  # once is enough
        if first is not None:
            assert "serves tensors on cuda" in str(memory.refusal("cpu"))
            assert first.main._pads.local.count_nonzero() == 0
            assert first.main.group.max_blocks == first.side.group.max_blocks == waiting_blocks(132)
            first.share_gpu(33)
            assert first.main.group.max_blocks == first.side.group.max_blocks == waiting_blocks(33)
            assert first.device.num_sms == 33
            assert first.main.multicasts is first.side.multicasts is (fault != "no multicast")  # all have it, or none
        # The group goes on, whatever the answer was.
        assert torch.equal(tpk.all_reduce(torch.ones(2), made, implementation="unfused"), torch.full((2,), 2.0))
        return memory.refusal("cuda"), first is not None


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("none", None),
        ("no multicast", None),
        ("no library", "rank 1: no library"),
        ("no code", "rank 1: no code for it"),
        ("no access", "rank 1: no way to rank 0"),
        ("one GPU", "ranks [0, 1] are on one GPU"),
        (
            "one visible GPU each",
            "[0, 1] have a GPU each and all call it cuda:0, because each process is shown its own",
        ),
        ("one visible GPU each, allowed", None),
        ("out of memory", "rank 1: CUDA out of memory. Tried to allocate it"),
        ("no handle", "rank 1: cuMemImportFromShareableHandle: invalid"),
        ("an offset", "rank 1: torch "),
    ],
)
def test_all_ranks_get_the_memory_or_one_reason(ranks: Pools, fault: str, reason: str | None) -> None:
    answers = ranks(2).run(set_up, fault)
    assert len({text for text, _ in answers}) == 1, answers
    for text, has_memory in answers:
        assert has_memory is (reason is None), answers
        assert text is None if reason is None else reason in str(text), answers


def grow() -> tuple[str, int, int]:
    """A rank has no memory for larger slots: what all are told, the slots then, and the second try."""
    with new_group() as made, played(dist.get_rank(), "grows too large") as asked:
        group = meet(made)
        resources.ensure(group, group.calls, own_gpu("none"))
        channel, told = channels_of(group).main, "nothing"
        try:
            channel.prepare(5 * 2**20, 1, "a call")
        except tpk.errors.UnsupportedProblem as error:
            told = str(error)
        assert channel._slots is None
        channel.prepare(5 * 2**20, 1, "a call")
        channel.prepare(3 * 2**20, 1, "a smaller call")
        slots = channel._slots
        assert slots is not None
        first = channel.addresses()
        channel.prepare(1, 1, "the other slot")
        return told, len(asked), abs(channel.addresses()[0] - first[0]) + slots.local.numel()


def test_a_rank_that_has_no_memory_to_grow_makes_all_refuse_and_the_group_goes_on(ranks: Pools) -> None:
    for told, allocations, places in ranks(2).run(grow):
        assert "rank 1: CUDA out of memory" in told
        assert allocations == 3  # pads, the failed growth, and the one that went well
        assert places == 3 * 6 * 2**20  # two slots of 6 MiB, and the step between them


def test_a_call_on_another_stream_waits_for_the_one_before_it_unless_a_graph_is_captured() -> None:
    class Stream:
        def __init__(self) -> None:
            self.waited_for: list[Stream] = []

        def wait_stream(self, other: Stream) -> None:
            self.waited_for.append(other)

    first, second, third = Stream(), Stream(), Stream()
    with played(0, "none"):
        device = CudaDevice(SimpleNamespace(), own_gpu("one visible GPU"), Recorder())  # type: ignore[arg-type]
        for stream, capturing in ((first, False), (first, False), (second, False), (third, True), (first, False)):
            with (
                mock.patch.object(torch.cuda, "current_stream", lambda device, stream=stream: stream),
                mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing),
            ):
                device.order()
    assert (first.waited_for, second.waited_for, third.waited_for) == ([third], [first], [])


class Pool(TorchDispatchMode):
    """The pool of a graph as torch opens it while "reduce-overhead" warms up: for the thread that it is entered in."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("in_thread", [True, False], ids=["as it is", "made by the caller's thread"])
def test_what_is_kept_on_the_gpu_never_comes_from_the_pool_of_a_graph(in_thread: bool) -> None:
    device: Any = object.__new__(CudaDevice)
    device._device, device._keeps = torch.device("cpu"), SimpleNamespace(synchronize=lambda: None)
    played = mock.patch.multiple(torch.cuda, device=lambda device: nullcontext(), stream=lambda stream: nullcontext())
    fault = mock.patch.object(symmetric_memory, "outside_of_pools", lambda make: make())
    with played, nullcontext() if in_thread else fault, Pool() as pool:
        kept = device.zeros((2, 3), torch.int32), device.upload([1, 2], torch.int64)
        assert (pool.made == []) is in_thread
        device.empty((1,), torch.uint8)  # scratch of a call: where else
        assert "aten.empty.memory_format" in pool.made
    assert (kept[0].shape, kept[1].tolist()) == ((2, 3), [1, 2]) and not kept[0].any()


def test_the_first_call_on_a_group_is_refused_in_capture_by_its_name() -> None:
    gpu = torch.device("cuda", 0)
    for key, tried, refused in ((None, UNTRIED, True), ("met", UNTRIED, True), ("met", None, False)):
        memory = SymmetricMemory()
        memory.no_memory = tried
        group: Any = SimpleNamespace(key=key, resources={kind.name: kind() for kind in resources.kinds()})
        group.resources[SymmetricMemory.name] = memory
        for capturing in (True, False):
            with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing):
                refusal = raises_unsupported(group, gpu)
                assert ("all_reduce(columns=7): the first call on a group" in refusal) is (refused and capturing)
                assert raises_unsupported(group, torch.device("cpu")) == ""


def raises_unsupported(group: Any, device: torch.device) -> str:
    """What a new kind of call is refused with before the ranks talk to each other."""
    with mock.patch.object(agreed_call.agreement, "meet", side_effect=ZeroDivisionError):
        try:
            signature: Any = "all_reduce(columns=7)"
            agreed_call._agree(group, 0, signature, 0, device, signature)
        except ZeroDivisionError:
            return ""
        except tpk.errors.UnsupportedProblem as error:
            return str(error)


def alone(agrees: bool) -> tuple[str, list[int], int]:
    """Rank 0 allocates and rank 1 never comes: what rank 0 is told, whom it blames, and how often it went further.

    Only entries that are bounded by the group's time-out are counted.
    """
    entered, watchdog = 0, mock.Mock()

    def rendezvous(local: Tensor, name: str) -> Any:
        nonlocal entered
        entered += watchdog.dump_traceback_later.call_args == mock.call(1.5, exit=True, file=2)
        watchdog.cancel_dump_traceback_later.assert_not_called()
        raise RuntimeError("nobody is there")

    faulty = mock.patch.object(CudaDevice, "_agree", return_value=True)
    with new_group(timeout=1.5) as made, played(dist.get_rank(), "none"):
        group = meet(made)
        if dist.get_rank() == 1:
            return "rank 1 does something else", [], 0
        device = CudaDevice(group, own_gpu("none"), Recorder())  # type: ignore[arg-type]
        watched = mock.patch.object(symmetric_memory, "faulthandler", watchdog)
        with (
            mock.patch.object(_symmetric_memory, "rendezvous", rendezvous),
            watched,
            nullcontext() if agrees else faulty,
        ):
            try:
                device.allocate(64)
            except tpk.errors.CommunicationError as error:
                return type(error).__name__, list(error.ranks), entered
            except AssertionError:
                return "went on by itself", [], entered
    return "nothing", [], entered


@pytest.mark.parametrize("agrees", [True, False], ids=["as it is", "without agreement"])
def test_nobody_goes_where_the_driver_waits_before_all_ranks_have_come(ranks: Pools, agrees: bool) -> None:
    told = ranks(2).run(alone, agrees)[0]
    assert told == (("CollectiveTimeout", [1], 0) if agrees else ("went on by itself", [], 1))


STUCK = """
import ctypes
from tpkernels.backends.symmetric import memory as symmetric_memory
with symmetric_memory._process_ends_after({seconds}):
    ctypes.PyDLL(None).sleep(2)  # as torch: with the interpreter's lock
print("came back")
"""


@pytest.mark.sample(1)
@pytest.mark.cpu
@pytest.mark.parametrize(("seconds", "ends"), [(0.5, True), (60, False)], ids=["late", "in time"])
def test_a_wait_within_the_driver_ends_the_process_and_says_where(seconds: float, ends: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK.format(seconds=seconds)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, "came back" in done.stdout) == ((1, False) if ends else (0, True)), done.stderr
    assert ("Timeout (0:00:00" in done.stderr) is ends, done.stderr
