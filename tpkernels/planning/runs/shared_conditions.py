"""Conditions that all ranks answer alike before they know anything of layers: of inputs and of random numbers.

LayerDrop skips a block where ``torch.rand([]) < p``, and FSMT leaves a mask away where no token is padding.  What is
asked there is made of the model's inputs, of numbers in its code and of random numbers alone, and not of parameters,
buffers or what layers give.  Every rank has the same of these: inputs are given to all ranks, and outside of the layers
of a group, and of what is drawn for parts, all draw from one stream.  So all answer alike, and the code behind the
condition may call layers, other than behind a condition of activations
(:mod:`tpkernels.planning.runs.conditions`).

It owns :class:`Alike`, which says what a tensor is made of, the *turns* that a run takes, and which of these prove all.
A run answers its conditions with its turns, one after the other and again from the first.  Where the numbers that the
example inputs give tell the answer (whether a sound fills its last window), False stands for that, and True for its
contrary.

* With up to :data:`MOST_ENUMERATED` conditions every combination of answers is a run, and each is proven by itself.
* With more (a condition for each block) all are answered False, all True, and in turns, beginning with either.  So each
  condition is seen with both answers, and with both answers of the one before.  Between two conditions the same ops
  must run on the same shapes in all runs that answer the first of them alike: what runs there depends on this answer
  alone.  And nothing that is cut passes a condition: a part that was made before one is not read behind it, nor is what
  has a part of its gradient (``not_from_before`` of the replay).  So what comes from before is whole, whatever the
  answers were, and each stretch between two conditions is proven by the run that shows it.  By induction over the
  conditions that holds for any answers.  As for other conditions, lists and other objects that code fills on one path
  and reads on the next are not watched.

A run that raises proves nothing, and its conditions are left to the modules that ask.  But where it has contradicted
the numbers that it was given, it is no run of the model: what the numbers say is taken as sizes are, and such a run is
left out.  A condition to which only the told answer leads to a run is *settled*, as that of an ``assert`` is: the path
does not branch there, and the stretches before and behind it are one, so that what is cut may pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpkernels.planning.runs.events import Source
from tpkernels.planning.runs.tensors import storage_of, written_by

if TYPE_CHECKING:
    from tpkernels.planning.runs.trace import Recording

__all__ = [
    "MOST_ENUMERATED",
    "Alike",
    "Contradicted",
    "Decided",
    "Turns",
    "Undecided",
    "check_stretches",
    "settled_in",
    "turn_of",
    "turns_of",
]

aten = torch.ops.aten
MOST_ENUMERATED = 3
MOST_DECIDED = 1000
"""In one run; a loop that waits for an answer may otherwise never end."""

Turns = tuple[bool, ...]
"""Answers to conditions, in turns; False to all if there is none."""


class Undecided(Exception):
    """Runs under other answers do not show what a model does: its conditions are those of modules."""


class Contradicted(Undecided):
    """A run raised that had answered a condition other than its numbers say."""


@dataclass(frozen=True)
class Decided:
    """A condition of the tensors ``asked``, and what a run made of it."""

    asked: tuple[Source, ...]
    turn: bool
    truth: bool | None
    """What the numbers of the example say; None if they do not."""

    @property
    def contradicts(self) -> bool:
        return self.turn and self.truth is not None


class Alike:
    """Tensors that are made of inputs, of numbers in the code and of random numbers alone, by their storages."""

    def __init__(self, storages: set[int] | None = None) -> None:
        self._storages = set(storages or ())

    def copy(self) -> Alike:
        return Alike(self._storages)

    def add(self, tensors: Sequence[Tensor]) -> None:
        self._storages |= set(map(storage_of, tensors))

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_of(tensor) in self._storages

    def passed(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """An op has run on ``tensors``."""
        if func is aten.lift_fresh.default or all(tensor in self for tensor in tensors):
            self.add(outputs)
        elif func._schema.is_mutable:
            self._storages -= set(map(storage_of, written_by(func, args, kwargs)))


def turn_of(turns: Turns, number: int) -> bool:
    """The turn that a run takes at condition ``number``.

    Raises:
        Undecided: it has asked too often.
    """
    if number >= MOST_DECIDED:
        raise Undecided(f"more than {MOST_DECIDED} conditions: a loop without end?")
    return turns[number % len(turns)] if turns else False


def turns_of(conditions: int) -> list[Turns]:
    """Of the runs that show what a model does that asks so many conditions."""
    if conditions <= MOST_ENUMERATED:
        return list(product((False, True), repeat=conditions))
    return [(False,), (True,), (False, True), (True, False)]


def settled_in(runs: Iterable[Recording]) -> frozenset[int]:
    """The numbers of conditions that all ``runs`` answer as the numbers of the example tell."""
    asked = [(number, one) for run in runs for number, one in enumerate(run.decisions)]
    other = {number for number, one in asked if one.truth is None or one.contradicts}
    return frozenset(number for number, _ in asked) - other


def check_stretches(runs: Mapping[Turns, Recording]) -> None:
    """Check that what runs between two conditions depends on the answer to the first of them alone.

    Raises:
        Undecided: it does not; or runs are missing, and their answers are not all told by numbers.
    """
    known: dict[tuple[int, bool | None], Any] = {}
    for turns, run in runs.items():
        if len(runs) < len(turns_of(len(run.decisions))) and any(one.truth is None for one in run.decisions):
            raise Undecided("not every answer leads to a run")
        begins = [0, *run.decided_at]
        for number, (start, stop) in enumerate(zip(begins, [*run.decided_at, len(run.events)], strict=True)):
            turn = turns[(number - 1) % len(turns)] if number else None
            steps = [
                (event.packet, event.layer, event.whole, event.kwargs, event.outputs, event.constant)
                for event in run.events[start:stop]
            ]
            if known.setdefault((number, turn), steps) != steps:
                raise Undecided(f"what runs behind condition {number} depends on the answers to those before it")
