"""Exceptions raised by tpkernels.

Bad arguments raise :class:`ValueError` before anything is sent.  Everything below is about a *group*: what one rank
alone cannot know or repair.  Each message names the rank, the operation, the call number on the group, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "TpKernelsError",
    "UnsupportedPlatform",
    "UnsupportedProblem",
    "StateMismatch",
    "CommunicationError",
    "GroupMismatch",
    "PeerLost",
    "CollectiveTimeout",
    "GroupPoisoned",
    "VerificationError",
    "FallbackPlanWarning",
    "UnprovenCallWarning",
]


class TpKernelsError(RuntimeError):
    """Base class of the errors of tpkernels; what Python or torch has a class for, such as ``ValueError``, is that."""


class UnsupportedPlatform(TpKernelsError):
    """This operating system is not Linux; planning works, running ranks does not."""


class UnsupportedProblem(TpKernelsError, ValueError):
    """A forced ``implementation=`` cannot run this problem; the message lists every implementation's reason."""


class VerificationError(TpKernelsError):
    """A parallel model does not compute what the unsharded one does; the message names the first module."""


class UnprovenCallWarning(UserWarning):
    """A parallel model was called in a way that its plan was not proven for, and no rule could follow what it does."""


class FallbackPlanWarning(UserWarning):
    """A model was cut layer by layer, because its data flow could not be seen: every layer gathers what it computes."""


class StateMismatch(TpKernelsError, ValueError):
    """A state dict that is not this model's, or not the same on all ranks; every rank raises, and nothing changed."""


class CommunicationError(TpKernelsError):
    """A collective failed.  The group is poisoned: each later call on it raises at once, a new group works."""

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        """Group ranks that the message blames."""

    def without_traceback(self) -> CommunicationError:
        """The same error as a new object, which refers to no frame."""
        return type(self)(str(self), ranks=self.ranks)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), str(self), self.ranks))


class GroupMismatch(CommunicationError):
    """Ranks of one group called different operations, shapes or dtypes, or one of them refused its arguments."""


class PeerLost(CommunicationError):
    """A peer process died or cannot be reached any more."""


class CollectiveTimeout(CommunicationError):
    """Every peer is alive, but at least one did not arrive within the group's timeout."""


class GroupPoisoned(CommunicationError):
    """The group failed earlier; the message carries the first failure."""


def _rebuild(cls: type[CommunicationError], message: str, ranks: tuple[int, ...]) -> CommunicationError:
    return cls(message, ranks=ranks)
