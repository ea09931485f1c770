"""Whether a group's GPUs can share memory, and what the group then has: its :class:`SymmetricMemory`.

The set-up is collective and happens once per group.  The group then has a
:class:`~tpkernels.backends.symmetric.channels.SymmetricChannels`, or every rank the same reason why there is none.

Assumes nothing of the ranks: what each one's GPU is, they tell each other through the group's store.  Refuses what was
not proved: other hosts, two ranks on one GPU without torch's consent (``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1``),
GPUs without access to each other.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tpkernels import config
from tpkernels.backends.symmetric import calibration as symmetric_calibration
from tpkernels.backends.symmetric import cuda_native
from tpkernels.backends.symmetric.channels import SymmetricChannels
from tpkernels.backends.symmetric.memory import CudaDevice, kind_of
from tpkernels.comm import agreement
from tpkernels.comm.groups import Group
from tpkernels.comm.resources import UNTRIED, Resource
from tpkernels.comm.transport import TransportFailure
from tpkernels.errors import CommunicationError, UnsupportedProblem

__all__ = ["MULTICAST", "SymmetricMemory", "channels_of", "common_refusal"]

MULTICAST = "multicast"
"""The feature that one store can reach the memory of all ranks (NVLS)."""
_ONLY_CUDA = "symmetric memory serves CUDA tensors"

_log = logging.getLogger(__name__)


class SymmetricMemory(Resource):
    """The group's channels, or why there are none."""

    name = "symmetric_memory"

    def __init__(self, channels: SymmetricChannels | None = None) -> None:
        self.channels = channels
        self.no_memory: str | None = UNTRIED if channels is None else None
        """Why there is none, the same on all ranks."""
        self._had_lost = self._told_of_replays = False

    def check_setup(self, group: Group, what: str, device: torch.device) -> None:
        """The first call is not captured: the ranks' meeting and the set-up make things on the device, and wait."""
        new = group.key is None or self.no_memory in (UNTRIED, _ONLY_CUDA)
        if new and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UnsupportedProblem(
                f"{what}: the first call on a group cannot be captured in a CUDA graph, because it sets up what the "
                "group has on the GPU: make this call once before the capture, on every rank"
            )

    def ensure(self, group: Group, call: int, device: torch.device) -> None:
        if self.no_memory not in (UNTRIED, _ONLY_CUDA):
            return
        if device.type != "cuda":
            self.no_memory = _ONLY_CUDA
            return
        reason, uuids = _agreed_refusal(group, call, device)
        if reason is None:
            try:
                here = CudaDevice(group, device, cuda_native.load())
                self.channels = SymmetricChannels(group, here, one_link=_share_a_link(device, uuids))
            except (UnsupportedProblem, TransportFailure) as error:  # the same on all ranks
                reason = str(error)
        self.no_memory = reason

    def refusal(self, device: str) -> str | None:
        if self.channels is not None and self.channels.device.kind != device:
            return (
                f"symmetric memory of this group serves tensors on {self.channels.device.kind}, these are on {device}"
            )
        return self.no_memory

    def features(self, device: str) -> frozenset[str]:
        return frozenset([MULTICAST] if self.channels is not None and self.channels.main.multicasts else [])

    def link_costs(self, group: Group, device: torch.device, link: Mapping[str, float]) -> dict[str, float]:
        if self.channels is None or device.type != self.channels.device.kind:
            return {}
        return symmetric_calibration.call_costs(self.channels)

    @classmethod
    def costs_text(cls, own: Mapping[str, float]) -> str:
        call_us = own.get("symmetric_call_us", 0.0)
        return f"symmetric call {call_us:.0f} us" if call_us else "symmetric call modelled"

    def poison(self, error: CommunicationError) -> None:
        if self.channels is not None:
            self.channels.abort()  # waits of ours that end tell the peers

    def tick(self, group: Group, has_lost_a_peer: Callable[[], bool]) -> None:
        if self.channels is not None:
            self._tell_of_replays(group, self.channels)
            self._end_waits(self.channels, has_lost_a_peer())

    def _tell_of_replays(self, group: Group, channels: SymmetricChannels) -> None:
        """A program that only replays CUDA graphs makes no call that would raise: it is told here, once."""
        said = None if self._told_of_replays else channels.lost_replays()
        if said is not None:
            self._told_of_replays = True
            _log.error(
                "tpkernels, group %r: %s. What CUDA graphs with calls on this group have returned since then is void; "
                "the next call on it that is not a replay raises",
                group.name, said,
            )  # fmt: skip

    def _end_waits(self, channels: SymmetricChannels, lost: bool) -> None:
        """Kernels wait for calls that have long returned: end them some time after a peer has failed or died.

        Not at once: a peer that came to its end in good order may leave while ours still wait for another one.
        """
        if lost and self._had_lost:
            channels.abort()
        self._had_lost = lost

    def close(self, group: Group) -> None:
        """Free streams and records."""
        if self.channels is not None:
            self.channels.close()
        self.channels = None


def channels_of(group: Group) -> SymmetricChannels:
    """Those of a group that was found to have them."""
    channels: SymmetricChannels | None = group.resources[SymmetricMemory.name].channels
    assert channels is not None, "selected without symmetric memory"
    return channels


def _agreed_refusal(group: Group, call: int, device: torch.device) -> tuple[str | None, list[str]]:
    """Why these ranks cannot share memory, as far as that shows before they try; and the GPUs of all.  Collective."""
    reason = _why_not_here(group) or _cannot_load(device)
    facts = {"refusal": reason, **(_facts_of(device) if reason is None else {})}
    records = agreement.exchange_records(group, call, agreement.Record("symmetric memory", facts), part="symmetric")
    all_facts = [record.facts for record in records]
    reason, uuids = common_refusal(all_facts, overlapping=config.load().overlapping_devices), list[str]()
    if reason is None:
        uuids = [fact["uuid"] for fact in all_facts]
        accessible = _inaccessible(group.rank, device, uuids)
        record = agreement.Record("symmetric memory", {"refusal": accessible})
        records = agreement.exchange_records(group, call, record, part="symmetric access")
        reason = common_refusal([{**fact, **r.facts} for fact, r in zip(all_facts, records, strict=True)], True)
    return reason, uuids


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


def _facts_of(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "uuid": str(properties.uuid),
        "index": device.index,
        "gpu": kind_of(properties),
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
    for peer, index in _visible_peers(device, uuids).items():
        if not cuda_native.load().can_access_peer(device.index, index):
            return f"its GPU has no access to the memory of rank {peer}'s (no NVLink or PCIe path between them)"
    return None


def _share_a_link(device: torch.device, uuids: Sequence[str]) -> bool:
    """Whether copies of several peers share a link, that of this GPU to the bus: PCIe carries no atomics."""
    peers = _visible_peers(device, uuids).values()
    return any(not cuda_native.load().has_peer_atomics(device.index, index) for index in peers)


def _visible_peers(device: torch.device, uuids: Sequence[str]) -> dict[int, int]:
    """By rank, the number of its GPU in this process, of other GPUs than this one."""
    numbers = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    found = {rank: numbers[uuid] for rank, uuid in enumerate(uuids) if uuid in numbers}
    return {rank: number for rank, number in found.items() if number != device.index}
