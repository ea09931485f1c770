"""Random numbers that a model's code draws from Python or NumPy, as Wav2Vec2 does for the masks of its SpecAugment.

No op shows them: what code makes of them comes into a run as a constant.  It owns the states that runs begin with.  All
runs of a call have the same, and a run of one module has those that the recording had there; so a replay draws the
recording's numbers, and takes the same constants.  Afterwards the user's states are as they were.

Such a number may also decide what runs (``if random.random() < p``), of which a run shows one side alone.  So a call
that draws is recorded several times: with numbers as they come, and with the common uniform ones, whole numbers and
choices all at the lower end of their range, and at the upper.  Each of these recordings is proven by itself.  They may
run other ops if one number is all that a run draws (whether Phi-4's chunks of sound end or begin with a shorter one):
both sides are seen then.  Numbers between the ends must lead to the same.  Otherwise the model is not followed
(:class:`DecidedByDraws`).  As with guesses of values, this is a trial of what the code does, and no proof of what other
numbers would lead to.

Ranks have to draw alike, so the plan says which generators the model draws from, and ``tpk.parallelize`` puts these in
step (:mod:`tpkernels.nn.host_generators`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from tpkernels.nn.host_generators import HostStates, host_states

if TYPE_CHECKING:
    from tpkernels.planning.runs.session import Session
    from tpkernels.planning.runs.trace import Recording

__all__ = ["BETWEEN", "COME", "ENDS", "DecidedByDraws", "check_undecided", "drawing"]

COME = "unknown"
"""How runs draw;"""
ENDS = {"low": 0.0, "high": 1 - 2**-53}
"""and how else: all numbers at this part of their range,"""
BETWEEN = {"below the middle": 0.3, "middle": 0.5, "above the middle": 0.7}
"""or here."""
_PLACES = ENDS | BETWEEN


class DecidedByDraws(Exception):
    """The code of a model decides by several random numbers of Python or NumPy what it runs."""

    def __init__(self) -> None:
        super().__init__("its code decides by random numbers of Python or NumPy which ops it runs")


@contextmanager
def drawing(session: Session) -> Iterator[None]:
    """Within it, the session's dice are rolled; then it knows which generators were drawn from."""
    users = host_states()
    begins = session.host_begins or _begins(session.dice)
    begins.set()
    session.host_began = begins
    try:
        with _at_an_end(session):
            yield
    finally:
        session.drew = host_states().unlike(begins)
        session.drew_once = session.drew_once and session.host_after == host_states()
        session.shadow.drawn_from |= session.drew
        users.set()


_states: dict[str, HostStates] = {}


def _begins(dice: str) -> HostStates:
    if dice not in _states:
        random.seed(f"tpkernels {dice}")
        np.random.seed([COME, *_PLACES].index(dice))
        _states[dice] = host_states()
    return _states[dice]


@contextmanager
def _at_an_end(session: Session) -> Iterator[None]:
    """Functions of both modules that draw numbers by which code may decide; each still uses up what it would draw."""
    session.drew_once, session.host_after = False, None
    if session.dice == COME:
        yield
        return
    at = _PLACES[session.dice]

    def note(drawn: Any) -> None:
        session.drew_once = session.host_after is None and np.size(drawn) == 1
        session.host_after = host_states()

    def as_shaped(draw: Callable[..., Any], value: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            like, one = draw(*args, **kwargs), value(*args, **kwargs)
            note(like)
            return np.full_like(like, one) if isinstance(like, np.ndarray) else type(like)(one)

        return drawn

    def between(low: Any = 0.0, high: Any = 1.0, *_: Any, **__: Any) -> Any:
        return low + (high - low) * at

    def whole(low: Any, high: Any = None, *_: Any, **__: Any) -> Any:
        low, high = (0, low) if high is None else (low, high)
        return low + int((high - low) * at)

    def up_to(low: int, high: int) -> int:
        return low + int((high + 1 - low) * at)

    def chosen(items: Any) -> Any:
        random.random()  # which notes that it was called
        return items[int(len(items) * at)]

    def unit(*_: Any, **__: Any) -> float:
        return at

    changed: list[tuple[Any, str, Callable[..., Any]]] = [
        *((np.random, name, unit) for name in ("rand", "random", "random_sample")),
        (np.random, "uniform", between), (np.random, "randint", whole),
        (random, "random", unit), (random, "uniform", between), (random, "randint", up_to),
    ]  # fmt: skip
    patches = [patch.object(module, name, as_shaped(getattr(module, name), value)) for module, name, value in changed]
    patches.append(patch.object(random, "choice", chosen))
    try:
        for one in patches:
            one.start()
        yield
    finally:
        for one in reversed(patches):
            one.stop()


def check_undecided(first: Recording, ends: Sequence[Recording], between: Sequence[Recording]) -> None:
    """Check that all recordings of one call ran the same ops on the same tensors, whatever numbers these took; or that
    those with known dice drew one number alone, and all ran what the ends do.

    Raises:
        DecidedByDraws: they did not.
    """
    sides = [_steps(one) for one in ends]
    others = [_steps(one) for one in (first, *between)]
    alike = all(one == sides[0] for one in (*sides, *others))
    once = all(one.drew_once for one in (*ends, *between)) and all(one in sides for one in others)
    if not alike and not once:
        raise DecidedByDraws


def _steps(recording: Recording) -> list[Any]:
    """Of a recording, and of those of the same call that answer conditions otherwise."""
    every = (recording, *recording.others)
    return [[_step(event.anywhere()) for event in one.events] for one in every]


def _step(event: Any) -> tuple[Any, ...]:
    return event.packet, event.layer, event.outputs, event.sources
