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

Beside what it makes, a rest may return a tensor that was there before, and leave whole tensors in the module's buffers
(:mod:`tpkernels.planning.runs.rests`).  A path on which the model's code raises, as an ``assert`` does, is none: what
is asked is whole, so all ranks raise.

A module whose rest does more than that, or has more than :data:`MOST_PATHS` paths, is opaque as a whole.  So is one
that asks for a number, for ``nonzero``, or for whatever shapes depend on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tpkernels.planning.runs.events import Event, NotOpaque, Shape, Source

if TYPE_CHECKING:
    from tpkernels.planning.runs.trace import Recording

__all__ = ["MOST_PATHS", "KnownPaths", "Path", "Renews", "Rest", "passed_in", "paths_after"]

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
    refused: frozenset[Path] = frozenset()
    """Answers after which the module raises."""
    given: list[bool] = field(default_factory=list)
    """The answers of this call."""
    steps: list[Event] = field(default_factory=list)
    made: set[int] = field(default_factory=set)
    """The ids of tensors that it has made,"""
    passed: dict[int, Source] = field(default_factory=dict)
    """of its results, by their places, those that were there before the condition,"""
    buffers: Mapping[str, Any] = field(default_factory=dict)
    """what the module's buffers were then,"""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """and what it has put into them."""
    trained: list[bool] = field(default_factory=list)
    """Of its results: whether somebody wants their gradients."""

    def answer(self) -> bool:
        """To the next condition."""
        if self.answered == MOST_PATHS - 1:
            raise NotOpaque(self.module, f"has more than {MOST_PATHS} paths")
        wanted = self.path[self.answered] if self.answered < len(self.path) else True
        self.given.append(wanted != ((*self.given, wanted) in self.refused))
        return self.given[-1]

    @property
    def answered(self) -> int:
        return len(self.given)


@dataclass
class KnownPaths:
    """What runs have shown of modules that branch."""

    refused: dict[str, frozenset[Path]] = field(default_factory=dict)
    """By module: answers after which it raises, as an ``assert`` does. No run goes on from there, on any rank."""
    passing: dict[str, frozenset[int]] = field(default_factory=dict)
    """By module: the places of results that are, on every path, tensors that were there before the condition."""

    _own: dict[str, frozenset[Path]] = field(default_factory=dict)
    """Those of ``refused`` after which this very module has raised,"""
    _apart: set[str] = field(default_factory=set)
    """and modules that do not raise where others of their class do."""

    def refuse(self, name: str, answers: Path, like: Iterable[str]) -> None:
        """A module has raised; those ``like`` it are taken to do so as well, until they have been asked."""
        self._own[name] = self._own.get(name, frozenset()) | {answers}
        for one in {name, *like} - (self._apart - {name}):
            self.refused[one] = self.refused.get(one, frozenset()) | {answers}

    def refuses(self, name: str, path: Path) -> bool:
        """Whether the module raises somewhere along ``path``."""
        return any(path[:count] in self.refused.get(name, ()) for count in range(1, len(path) + 1))

    def forget(self, name: str, answers: Path) -> bool:
        """Whether it was taken from other modules that this one raises, which it does not."""
        if answers in self._own.get(name, ()):
            return False
        self._apart.add(name)
        self.refused[name] = self._own.get(name, frozenset())
        return True

    @property
    def asked(self) -> tuple[object, ...]:
        """For comparison."""
        return frozenset(self.refused.items()), frozenset(self.passing.items())


class Renews(Exception):
    """The module ``name`` gives another tensor than on other paths."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} gives a tensor that was there before on some paths alone")
        self.name = name


def passed_in(runs: Sequence[Recording]) -> dict[str, frozenset[int]]:
    """The places of results that are the same tensors from before the condition in all ``runs``."""
    calls: dict[tuple[str, int], list[dict[int, Any]]] = {}
    for run in runs:
        count: Counter[str] = Counter()
        for rest in run.rests:
            anywhere = {place: one[1:] if isinstance(one, tuple) else one for place, one in rest.passed.items()}
            calls.setdefault((rest.module, count[rest.module]), []).append(anywhere)
            count[rest.module] += 1
    found: dict[str, frozenset[int]] = {}
    for (module, _), passed in calls.items():
        same = frozenset(place for place, one in passed[0].items() if all(other.get(place) == one for other in passed))
        found[module] = found.get(module, same) & same
    return {module: places for module, places in found.items() if places}


def paths_after(path: Path, rests: Iterable[Rest]) -> list[Path]:
    """Paths that branch off where a run along ``path`` asked for more than it answers."""
    on_it = (rest.answered for rest in rests if tuple(rest.given[: len(path)]) == path[: rest.answered])
    longest = max(on_it, default=0)  # of those that raise on it, which go another way, others show what they do
    return [(*path, *(True,) * more, False) for more in range(longest - len(path))]
