"""What a rank has called on a group, in order, as one number per call that depends on all calls before it.

A call pays for that number and nothing else: 4 us of the 124 that a small call between two processes takes (median of
200 interleaved pairs, quartiles -5 and 16; 0.5 us in a loop; 2 cores of a busy Intel Xeon, 2026-11-23).
A group without a trail pays 0.03 us for asking.  :mod:`tpkernels.comm.call_order` compares the ranks' trails.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from typing import NamedTuple

__all__ = ["KEPT", "Step", "Trail", "fingerprint", "short_text"]

# So many calls a rank may be ahead of another one and still compare with it.
KEPT = 4096
# A digest is a polynomial in the factor, modulo this prime, whose coefficients are the calls' fingerprints.
_PRIME = (1 << 61) - 1
_FACTOR = 0x9E3779B97F4A7C15 % _PRIME
# What a call is called where its text has a fixed place, as in the header of a segment that ranks share.
_TEXT_BYTES = 440


def fingerprint(text: str) -> int:
    """64 bits that stand for a call in words, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def short_text(signature: str, number: int) -> str:
    """What peers read of a call; ``number`` is its fingerprint: a text that is cut still differs where calls do."""
    return signature if len(signature) <= _TEXT_BYTES else f"{signature[: _TEXT_BYTES - 20]}... #{number:016x}"


class Step(NamedTuple):
    """A rank's call in the ``place`` of its trail (1 is the first), and the digest of all up to it.

    ``call`` is its number on the group, as error messages say it.
    """

    place: int
    digest: int
    call: int
    signature: Hashable


class Trail:
    """One thread at a time adds, any thread reads."""

    def __init__(self) -> None:
        self.last = Step(0, 0, 0, "")
        self._ring = [self.last] * KEPT

    def add(self, call: int, signature: Hashable, number: int) -> None:
        """``number`` is the :func:`fingerprint` of the signature's words."""
        place, digest, _, _ = self.last
        step = Step(place + 1, (digest * _FACTOR + number) % _PRIME, call, signature)
        self._ring[place % KEPT] = step
        self.last = step  # at the end: whoever reads it finds the steps before it

    def at(self, place: int) -> Step | None:
        """The step in this place, unless it is to come or forgotten."""
        step = self._ring[(place - 1) % KEPT]
        return step if step.place == place > 0 else None

    def steps(self) -> list[Step]:
        """Those that are not forgotten, oldest first."""
        last = self.last.place
        found = (self.at(place) for place in range(max(1, last - KEPT + 1), last + 1))
        return [step for step in found if step is not None]
