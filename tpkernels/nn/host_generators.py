"""The global generators of Python and NumPy, which a model's code may draw from: their states, and ranks in step.

Every rank runs the same code, so ranks that begin with equal states draw equal numbers, as with torch's generator
(:mod:`tpkernels.nn.same_weights`): the masks of Wav2Vec2's SpecAugment, which are NumPy's, then hide the same frames.
Nobody seeds these generators unless the user does.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from tpkernels.comm.groups import Group
from tpkernels.ops.mesh_exchange import broadcast, exchange_bytes

__all__ = ["HOSTS", "HostStates", "host_states", "hosts_in_step", "seeded_hosts", "take_first_states"]

HOSTS = ("numpy", "python")


class HostStates(NamedTuple):
    """What ``random.getstate()`` and ``numpy.random.get_state()`` return, as lists and numbers."""

    python: list[Any]
    numpy: list[Any]

    def set(self) -> None:
        """Go on from here."""
        version, numbers, gauss = self.python
        random.setstate((version, tuple(numbers), gauss))
        kind, keys, *rest = self.numpy
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))

    def digest(self, names: Collection[str]) -> bytes:
        """16 bytes that tell the states of ``names`` from others."""
        told = json.dumps([getattr(self, name) for name in sorted(names)])
        return hashlib.blake2b(told.encode(), digest_size=16).digest()

    def unlike(self, other: HostStates) -> frozenset[str]:
        """Which of :data:`HOSTS` have other states there."""
        return frozenset(name for name in HOSTS if getattr(self, name) != getattr(other, name))


def host_states() -> HostStates:
    """The states now."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    numpy = [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)]
    return HostStates([version, list(numbers), gauss], numpy)


@contextmanager
def seeded_hosts(seed: int) -> Iterator[None]:
    """Inside, both draw as with ``seed``; afterwards they go on from where they were."""
    before = host_states()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        before.set()


def take_first_states(group: Group, what: str) -> None:
    """Go on with the states of the group's first rank."""
    kept = json.dumps(host_states()).encode()
    length = torch.tensor([len(kept)], dtype=torch.int64).view(torch.uint8)
    broadcast([group], f"{what}: the size of random states", length)
    data = torch.zeros(int(length.view(torch.int64)[0]), dtype=torch.uint8)
    if group.rank == 0:
        data = torch.frombuffer(bytearray(kept), dtype=torch.uint8)
    broadcast([group], f"{what}: random states", data)
    HostStates(*json.loads(bytes(data.tolist()))).set()


def hosts_in_step(drawn_from: Collection[str], group: Group, mode: str) -> None:
    """Let the ranks' generators of Python and NumPy go on in step, if a model draws from one of them.

    ``mode``: as for :func:`tpkernels.nn.init_weights`.

    Raises:
        ValueError: with "same", on every rank: the states differ of one that the model draws from.
    """
    if not drawn_from or group.size == 1:
        return
    what = "parallelize"
    digests = exchange_bytes([group], f"{what}: random generators", host_states().digest(drawn_from))
    if len(set(digests)) == 1:
        return
    if mode == "same":
        names = " and ".join(sorted(drawn_from))
        raise ValueError(
            f'{what}, init_weights="same": the model draws random numbers from {names}, whose generators differ '
            f"between the ranks (digests: {[digest.hex()[:8] for digest in digests]}), so that ranks would go on with "
            "different activations. Seed them alike on all ranks of a tensor-parallel group (numpy.random.seed, "
            'random.seed), or let init_weights="rank 0" set them'
        )
    take_first_states(group, what)
