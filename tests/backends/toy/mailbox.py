"""Messages between the ranks through the group's store: what the toy owns.

A message is named by its number, which all ranks count alike, and by the fingerprint of its call, so that ranks that
made different calls find no message instead of a wrong one.  No message is ever deleted: this is a toy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels.comm import agreement
from tpkernels.comm.groups import Group
from tpkernels.comm.resources import UNTRIED, Resource
from tpkernels.comm.transport import TransportFailure
from tpkernels.errors import CommunicationError

BROKEN: list[str] = []
"""Why this rank has no mailbox, for tests; nothing where it has one."""


class Mailbox(Resource):
    """This rank's box; ``why_not`` is equal on all ranks."""

    name = "mailbox"

    def __init__(self) -> None:
        self.why_not: str | None = UNTRIED
        self.posted = self.ticks = 0
        self.closed = self._aborted = False
        self._store: Any = None
        self._rank, self._size, self._timeout, self._prefix = 0, 0, 0.0, ""

    # --- the protocol of resources

    def ensure(self, group: Group, call: int, device: torch.device) -> None:
        if self.why_not is not UNTRIED:
            return
        facts = {"refusal": BROKEN[0] if BROKEN else None}
        records = agreement.exchange_records(group, call, agreement.Record("mailbox", facts), part="mailbox")
        refusals = [f"rank {r}: {one.facts['refusal']}" for r, one in enumerate(records) if one.facts["refusal"]]
        self.why_not = refusals[0] if refusals else None
        self._store, self._rank, self._size = group.store, group.rank, group.size
        self._timeout, self._prefix = group.timeout, f"{group.key}/mailbox"

    def refusal(self, device: str) -> str | None:
        return self.why_not if device == "cpu" else f"messages are of CPU tensors, these are on {device}"

    def link_costs(self, group: Group, device: torch.device, link: Mapping[str, float]) -> dict[str, float]:
        if self.refusal(device.type) is not None:
            return {}
        start, nothing = time.perf_counter(), torch.zeros(1, 1)
        for _ in range(5):
            self.collect(self.post(nothing, 0), 0, [nothing.shape] * self._size, nothing.dtype)
        return {"mailbox_round_us": 1e6 * (time.perf_counter() - start) / 5}

    @classmethod
    def costs_text(cls, own: Mapping[str, float]) -> str:
        return f"round of mail {own['mailbox_round_us']:.0f} us" if "mailbox_round_us" in own else ""

    def poison(self, error: CommunicationError) -> None:
        if self._store is not None:
            self._store.set(f"{self._prefix}/failed", f"rank {self._rank}: {error}")

    def abort(self) -> None:
        self._aborted = True

    def tick(self, group: Group, has_lost_a_peer: Callable[[], bool]) -> None:
        self.ticks += 1

    def close(self, group: Group) -> None:
        self.closed = True

    # --- what the implementations use

    def post(self, own: Tensor, fingerprint: int) -> int:
        """Send a matrix to all ranks; the number of the message, for :meth:`collect`."""
        number, self.posted = self.posted, self.posted + 1
        content = own.contiguous().view(torch.uint8).numpy().tobytes()
        self._store.set(self._key(number, fingerprint, self._rank), b"!" + content)  # a store may not take nothing
        return number

    def collect(
        self, number: int, fingerprint: int, shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[Tensor]:
        """Every rank's matrix of this number, in rank order.

        Raises:
            TransportFailure: one did not come.
        """
        return [opened(self._wait(number, fingerprint, r), shape, dtype) for r, shape in enumerate(shapes)]

    def _wait(self, number: int, fingerprint: int, rank: int) -> bytes:
        key, deadline = self._key(number, fingerprint, rank), time.monotonic() + self._timeout
        while True:
            # Asked in this order: a rank may send this message and fail in its next call between the two questions.
            has_failed = self._store.check([f"{self._prefix}/failed"])
            if self._store.check([key]):
                break
            if self._aborted:
                raise TransportFailure(f"the wait for message {number} was ended", rank)
            if has_failed:
                said = self._store.get(f"{self._prefix}/failed").decode()
                raise TransportFailure(f"message {number} will not come: {said}", rank)
            if time.monotonic() > deadline:
                raise TransportFailure(f"message {number} did not come within {self._timeout:g} s", rank)
            time.sleep(0.0005)
        message: bytes = self._store.get(key)
        return message[1:]

    def _key(self, number: int, fingerprint: int, rank: int) -> str:
        return f"{self._prefix}/{number}/{fingerprint:x}/{rank}"


def opened(content: bytes, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    if not content:
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(*shape)
