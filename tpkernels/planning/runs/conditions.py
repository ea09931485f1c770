"""Code that branches on a condition of tensors (``if not x.isfinite().all(): x = x.clamp(...)``), followed both ways.

It owns :class:`Rest`: what a module runs from its first condition on, until its call ends.  All that comes before is
recorded op by op and can be cut.  The rest is one step that takes and gives whole tensors, as an opaque module is
(:mod:`tpkernels.planning.runs.opaque_modules`).  But no value is guessed in it.  A condition is answered True or False,
and each *path*, the answers one after the other, is run.

Why a plan is right whatever the answers are:

* Every rank takes the same path.  The proof has each rank ask about a whole tensor, never about a part, nor about what
  has a part of its gradient.  Whole tensors have the same bits on all ranks: they are sums and gathered parts, which
  come out alike everywhere, or computed alike from such.  (It is what opaque modules count on as well.)  Along a
  sequence that is cut a rank has rows of its own, so there no condition is asked of the residual.
* Each path is recorded, and each recording is proven by itself.  Whatever the rest reads must be whole in each, and it
  must run the same steps on a rank as on the whole model.  It calls no layers and no convolutions, so that nothing in
  it is cut; it writes to nothing but its own tensors, and changes no attribute.  So all that it hands on is what it
  returns, which is whole.
* What it returns is alike on every path: kinds, shapes, dtypes, and whether gradients are wanted.  Outside of rests all
  recordings have the same events.  So what is known after a rest, that its results are whole activations, does not
  depend on the path, and neither does what is proven of all that follows.  By induction over the calls this holds for
  all mixtures, one layer on one path and the next on another, though only those are run that take the same path
  everywhere, and one in which calls take turns: it would show a path that another call's code can see by means that
  are not watched, a list for example.

A module whose rest does more than that, or has more than :data:`MOST_PATHS` paths, is opaque as a whole.  So is one
that asks for a number, for ``nonzero``, or for whatever shapes depend on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tpkernels.planning.runs.events import Event, NotOpaque, Shape, Source

__all__ = ["MOST_PATHS", "Path", "Rest", "paths_after"]

MOST_PATHS = 8

Path = tuple[bool, ...]
"""Answers to the conditions of one call, in order; True to all that are asked after these."""


@dataclass
class Rest:
    """What ``module`` runs from a condition of ``asked`` on, in one call."""

    module: str
    path: Path
    asked: list[Shape]
    sources: tuple[Source, ...]
    answered: int = 0
    steps: list[Event] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    """Of its results: whether somebody wants their gradients."""

    def answer(self) -> bool:
        """To the next condition."""
        if self.answered == MOST_PATHS - 1:
            raise NotOpaque(self.module, f"has more than {MOST_PATHS} paths")
        self.answered += 1
        return self.path[self.answered - 1] if self.answered <= len(self.path) else True


def paths_after(path: Path, rests: Iterable[Rest]) -> list[Path]:
    """Paths that branch off where a run along ``path`` asked for more than it answers."""
    longest = max((rest.answered for rest in rests), default=0)
    return [(*path, *(True,) * more, False) for more in range(longest - len(path))]
