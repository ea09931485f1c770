"""Which job a process belongs to, and how what its ranks say of themselves is told from what anybody else says.

A job has a name, and it has a secret where somebody gave it one: :func:`tpkernels.launch` draws one and hands it down
in the environment of its ranks, and :mod:`tpkernels.config` reads it from there or from a file that only its owner can
read.  Ranks compare the name when they meet.  With a secret, every record that a rank leaves in the group's store, and
its card at the meeting, carries a code over its place and its text (HMAC-SHA256): what anybody else has written there
is ignored, and reported in the log.

The code covers the name of the group and the key, so that a record is worth nothing in another place.  It does not
protect against a record's return: who can write into the store may put an older text of the same rank back into its
place, or remove it.  Nor does it cover what the store counts, nor tensors on the wire.

Owns: the secret, which is in no message, log, command line or store, and in no ``repr``.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from tpkernels import config

__all__ = ["Foreign", "JobIdentity", "Seal"]

_MARK = "hmac1:"
_DIGITS = 64
_NAME_DIGITS = 16


class Foreign(ValueError):
    """A record that no rank of this job has written."""


@dataclass(frozen=True)
class JobIdentity:
    """The job of this process."""

    name: str
    """What all ranks of the job have in common and others do not, as far as anybody has said; may be published."""
    secret: bytes | None = field(default=None, repr=False)

    @staticmethod
    def of_this_process() -> JobIdentity:
        """By the environment.

        Raises:
            ValueError: the secret is malformed, or others can read its file.
        """
        name, secret = config.job_name() or "", config.job_secret()
        if secret is not None:  # a name that nobody takes by chance, and that tells nothing
            name = _code(secret, "the name of the job", name)[:_NAME_DIGITS]
        return JobIdentity(name, secret)

    def seal(self, where: str) -> Seal:
        """Codes for records in one place, such as the store of one group."""
        return Seal(where, self.secret)

    def __str__(self) -> str:
        return self.name or "a job without a name"


@dataclass(frozen=True)
class Seal:
    """Marks texts as those of a job's ranks, by the place ``where`` they are; without a secret it leaves them alone."""

    where: str
    _secret: bytes | None = field(default=None, repr=False)

    def close(self, key: str, text: str) -> str:
        """The text with its code, as it is stored under ``key``."""
        return text if self._secret is None else f"{_MARK}{_code(self._secret, self.where, key, text)}:{text}"

    def open(self, key: str, stored: bytes) -> str:
        """The text that a rank of this job has stored under ``key``.

        Raises:
            Foreign: somebody else has.
        """
        try:
            text = stored.decode()
        except UnicodeDecodeError:
            raise Foreign("it is no text") from None
        if self._secret is None:
            return text
        code, text = text[len(_MARK) : len(_MARK) + _DIGITS], text[len(_MARK) + _DIGITS + 1 :]
        expected = self.close(key, text).encode()
        if not hmac.compare_digest(expected, stored):
            raise Foreign("it was made without the secret of this job" if code else "it has no code")
        return text


def _code(secret: bytes, *parts: str) -> str:
    """Over the parts and where each ends."""
    message = b"".join(len(part.encode()).to_bytes(8, "big") + part.encode() for part in parts)
    return hmac.new(secret, message, hashlib.sha256).hexdigest()
