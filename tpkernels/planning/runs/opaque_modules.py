"""Record models that need the values of tensors: the module that needs them becomes one step of the run.

It owns :func:`record`.  A router that asks ``nonzero()`` for the tokens of an expert, calls ``.item()`` or branches on
a tensor cannot run on fake tensors.  The innermost module whose call needs a value is marked opaque, and the recording
starts again.  An opaque module runs unrecorded, under a guess of what the values are: the recording has what goes in
and what comes out, and nothing of the inside.

A guess by itself proves nothing.  The model is recorded with at least two different guesses, and all recordings must
agree in every event.  If they disagree, as they do where a shape depends on a value, the module around is marked opaque
instead, up to the model itself, which then has no data flow.  The same happens to a module that writes to its inputs,
or passes tensors on by other means than its results.

Where the model itself would have to be opaque, sizes depend on values: a detector's on how many points it finds, a
vocoder's on how long a text takes to say.  Then the module that asks is *open*.  It is followed, its values are
guessed, and what has a size of them has another in each guess, as it has in calls with other inputs.  The recordings
must agree but for sizes; without any rows, or with a single one, the model may do something else, or not run at all.
Each recording is proven by itself: a rank must ask about whole tensors, which have the same values on all.  As with the
sizes of inputs, code that does something else from some number on is not seen, nor what it does where one module finds
nothing and another does.  Who asks for a fraction does not mean a size, nor one who makes no size of what is told.

A module that asks for a condition, one truth value, is opaque only from there on, and no guess is needed: it is
recorded on every path (:mod:`tpkernels.planning.runs.conditions`).  It becomes opaque as a whole if that fails.
Conditions of inputs and random numbers alone are recorded with every answer, or with enough of them, and no module
becomes a step because of these (:mod:`tpkernels.planning.runs.shared_conditions`).
"""

from __future__ import annotations

import dis
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from tpkernels.planning.modules.experts import CalledOtherwise
from tpkernels.planning.runs.conditions import MOST_PATHS, Path, Renews, passed_in, paths_after
from tpkernels.planning.runs.events import NotOpaque, Opaque
from tpkernels.planning.runs.example_calls import Example
from tpkernels.planning.runs.fake_answers import FEW, GUESSES, Guess
from tpkernels.planning.runs.known_values import Changes
from tpkernels.planning.runs.session import Scope
from tpkernels.planning.runs.shadow import Shadow
from tpkernels.planning.runs.shared_conditions import (
    MOST_DECIDED,
    MOST_ENUMERATED,
    Contradicted,
    Turns,
    Undecided,
    check_stretches,
    settled_in,
    turns_of,
)
from tpkernels.planning.runs.tensors import storage_of
from tpkernels.planning.runs.trace import Recording

__all__ = ["NeedsValues", "record"]

MOST_OPAQUE = 2000
"""Modules that may be marked, one recording each at worst."""


class NeedsValues(Exception):
    """The model itself would have to be opaque, because of what this was raised from."""


@dataclass
class _Close(Exception):
    """The module ``name``, "" for the model itself, has to become opaque because of ``cause``."""

    name: str
    cause: Exception
    branches: bool = False
    """It only asks for a condition, so that what it does before can be followed."""
    asks: str | None = None
    """The module that asks for what only sizes may depend on."""


@dataclass
class _Refuses(Exception):
    """The module ``name`` raises after these answers."""

    name: str
    answers: Path


class _GuessFailed(Exception):
    """An opaque module does not run with what was guessed."""


def record(shadow: Shadow, call: Example, after: Recording | None = None) -> Recording:
    """A recording of ``shadow``; modules that need values are opaque afterwards.

    ``after``: the call before this one.

    Raises:
        NeedsValues: it needs the values of tensors, and no module but the one that is called could be opaque.
        Exception: what the model raises.
    """
    beyond_all: Exception | None = None
    for _ in range(MOST_OPAQUE):
        try:
            first = _with_all_answers(shadow, call, after)
            runs = {run.turns: run for run in (*first.others, first)}.values()
            if all(_is_refused(shadow, run) for run in runs) and not _pass_on(shadow, [first, *first.others]):
                return first
        except _Refuses as refuses:
            kind = type(shadow.modules[refuses.name])
            like = [name for name in shadow.branching if type(shadow.modules[name]) is kind]
            shadow.known.refuse(refuses.name, refuses.answers, like)
        except Renews as renews:
            shadow.known.passing[renews.name] = frozenset()
        except Undecided:
            shadow.decides = False
        except _Close as close:
            beyond = {"", call.method} | shadow.opaque | shadow.open
            if close.name in beyond and close.asks is not None and close.asks not in shadow.open:
                beyond_all = beyond_all or close.cause
                opened = {"", call.method} if close.asks in ("", call.method) else {close.asks}
                shadow.ask_as(shadow.opaque - opened, {*shadow.branching}, shadow.open | opened)
                continue
            if close.name in beyond:
                raise NeedsValues from beyond_all or close.cause
            for name in _alike(shadow, close.name):
                if close.branches:
                    shadow.make_branching(name)
                else:
                    shadow.make_opaque(name)
        except Changes as error:
            shadow.constants = [one for one in shadow.constants if storage_of(one[0]) not in error.storages]
    raise RuntimeError(f"more than {MOST_OPAQUE} modules need the values of tensors")


def _pass_on(shadow: Shadow, runs: list[Recording]) -> bool:
    """Whether branching modules are found to pass tensors on, which are to be followed."""
    found = {name: places for name, places in passed_in(runs).items() if name not in shadow.known.passing}
    shadow.known.passing |= found
    return bool(found)


def _is_refused(shadow: Shadow, run: Recording) -> bool:
    """Whether each call of a module raises where another module of its class has raised, on what ``run`` gave it; if
    one does not, what was taken from others is forgotten."""
    asking = {rest.module for rest in run.rests}
    calls = [(scope, path) for scope in run.scopes if scope.name in asking
             for path in shadow.known.refused.get(scope.name, ())]  # fmt: skip
    for scope, path in calls:
        if not _raises_alone(shadow, scope, path, run):
            if not shadow.known.forget(scope.name, path):
                raise _Close(scope.name, ValueError(f"{scope.name} raises in some calls, and not in others"))
            return False
    return True


def _is_the_models(error: Exception) -> bool:
    """Whether code outside of torch has raised it by ``raise`` or ``assert``: what fails on fake tensors alone may run
    on others."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or error.__cause__ is not None or error.__context__ is not None:
        return False
    home = trace.tb_frame.f_globals.get("__name__", "").split(".")[0]
    raises = trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raises and home not in ("torch", "tpkernels")


def _raises_alone(shadow: Shadow, scope: Scope, path: Path, run: Recording) -> bool:
    """Whether one call of a module raises after these answers."""
    alone = Recording(shadow, paths=(path,))
    refused = shadow.known.refused.pop(scope.name)
    try:
        alone.run_scope(scope, run)
    except Exception as error:  # noqa: BLE001 - what the model raises
        return alone.rest is not None and tuple(alone.rest.given) == path and _is_the_models(error)
    finally:
        shadow.known.refused[scope.name] = refused
    return False


def _alike(shadow: Shadow, name: str) -> list[str]:
    """Modules of the same class, at the same place of another block: they will need values too."""
    kind, place = type(shadow.modules[name]), _place(name)
    return [n for n, m in shadow.modules.items() if type(m) is kind and _place(n) == place and n not in shadow.opaque]


def _place(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _with_all_answers(shadow: Shadow, call: Example, after: Recording | None) -> Recording:
    """The recording that calls most layers; the others of the same call are those on all other paths of branching
    modules, and with other answers to conditions that all ranks answer alike.

    Raises:
        Undecided: some answers do not show what the model does.
    """
    runs: dict[Turns, Recording] = {(): _first_answered(shadow, call, after)}
    asked = 0
    while (most := max(len(run.decisions) for run in runs.values())) > asked:
        asked, runs = most, {}
        for turns in turns_of(asked):
            with suppress(Contradicted):
                runs[turns] = _agreed(shadow, call, after, turns)
    if asked > MOST_ENUMERATED:
        check_stretches(runs)
        if more := _answered_alone(shadow, call, after, settled_in(runs.values())):
            runs |= more
            check_stretches(runs)
    settled = settled_in(runs.values())
    every = [(run, [*run.others, *_on_other_paths(shadow, call, run)]) for run in runs.values()]
    for run, others in every:
        for one in (run, *others):
            one.settled = settled
    first = max(runs.values(), key=lambda run: len(run.layer_rows))
    first.others = [one for run, others in every for one in (run, *others) if one is not first]
    return first


def _answered_alone(
    shadow: Shadow, call: Example, after: Recording | None, numbers: Iterable[int]
) -> dict[Turns, Recording]:
    """Runs with another answer to one condition alone, as far as the model runs with it: the few turns of many
    conditions answer several at once, and one that raises says nothing of the others."""
    found: dict[Turns, Recording] = {}
    for number in numbers:
        turns = (*[False] * number, True, *[False] * MOST_DECIDED)
        try:
            found[turns] = _agreed(shadow, call, after, turns)
        except Contradicted:
            continue  # no run of the model: the condition is settled
    return found


def _first_answered(shadow: Shadow, call: Example, after: Recording | None) -> Recording:
    """The recording with False for every answer; a call that raises whatever is answered is a wrong one."""
    try:
        return _agreed(shadow, call, after, () if shadow.decides else None)
    except Undecided as error:
        if error.__cause__ is None:
            raise
        try:
            _agreed(shadow, call, after, (True,))
        except Undecided:
            raise error.__cause__ from None
        raise


def _agreed(shadow: Shadow, call: Example, after: Recording | None, turns: Turns | None) -> Recording:
    """One recording, if all guesses lead to the same one."""
    first: Recording | None = None
    runs: list[Recording] = []
    failure: Exception | None = None
    for truth in (True, False):
        guesses = [guess for guess in GUESSES if guess.truth is truth]
        rows = set[int]()
        for guess in guesses:
            if guess.rows in rows:
                continue
            try:
                run = _run(shadow, guess, call, after, turns=turns)
            except _GuessFailed as error:
                failure = failure or error
                continue
            if not run.asked:
                return run
            rows.add(guess.rows)
            first = first or run
            runs.append(run)
        if len(rows) > 1 and not any(run.asked_truth for run in runs):
            break
    values = {(guess.truth, guess.rows) for run in runs for guess in [run.guess]}
    if first is None or not any({(truth, 2), (truth, 3)} <= values for truth in (True, False)):
        assert failure is not None
        if shadow.open:
            raise _Close("", failure)
        raise failure.__cause__ or failure
    shadow.guess = first.guess
    first.others = _compare(first, runs)
    if first.asked_openly:
        if not first.others:
            raise _Close("", ValueError("what the model runs depends on the values of tensors, and no size does"))
        few = _with_few(shadow, call, after, turns, first.guess)
        first.others += [run for run in few if not _alike_but_for_sizes(first, run)]
        shadow.guess = first.guess
    _join(first, runs)
    return first


def _with_few(
    shadow: Shadow, call: Example, after: Recording | None, turns: Turns | None, guess: Guess
) -> list[Recording]:
    """Recordings with sizes of which code may make an exception, as far as the model runs with them."""
    found = []
    for size in FEW:
        with suppress(_GuessFailed):
            found.append(_run(shadow, replace(guess, size=size), call, after, turns=turns))
    return found


def _on_other_paths(shadow: Shadow, call: Example, first: Recording) -> list[Recording]:
    """Recordings of what else modules do that branch on a condition, which must agree with the first one elsewhere."""
    found: list[Recording] = []
    todo = paths_after((), first.rests)
    while todo:
        path = todo.pop(0)
        if all(shadow.known.refuses(rest.module, path) for rest in first.rests):
            continue  # calls would go another way, which is one of the others
        if len(found) + 1 == MOST_PATHS:
            asks = max(first.rests, key=lambda rest: rest.answered).module
            raise _Close(asks, ValueError(f"{asks} has more than {MOST_PATHS} paths"))
        run = _run(shadow, first.guess, call, first.after, (path,), first.turns)
        todo += paths_after(path, run.rests)
        if all(_answers(run) != _answers(other) for other in (first, *found)):  # others may be refused
            found.append(run)
    mixture = ((), *(path for run in found for path in run.paths))
    mixed = found and len(first.rests) > 1
    mixtures = [_run(shadow, first.guess, call, first.after, mixture, first.turns)] if mixed else []
    for other in (*found, *mixtures):
        _compare_paths(first, other)
    return found


def _answers(run: Recording) -> list[list[bool]]:
    return [rest.given for rest in run.rests]


def _compare_paths(first: Recording, other: Recording) -> None:
    for mine, its in zip(first.rests, other.rests, strict=False):
        if mine.trained != its.trained:
            raise _Close(mine.module, ValueError(f"whether {mine.module} passes gradients depends on a condition"))
    events, others = ([event.anywhere() for event in recording.events] for recording in (first, other))
    differs = next((at for at, pair in enumerate(zip(events, others, strict=False)) if pair[0] != pair[1]), None)
    if differs is None and len(events) == len(others) and first.result_places == other.result_places:
        return
    last = max((at for at in first.rest_at if differs is None or at <= differs), default=None)
    if last is None:
        raise RuntimeError("two runs of the model differ before any condition was asked for")
    name = first.rest_at[last].module
    raise _Close(name, ValueError(f"what follows {name} depends on a condition of tensors"))


def _run(
    shadow: Shadow,
    guess: Guess,
    call: Example,
    after: Recording | None,
    paths: tuple[Path, ...] = ((),),
    turns: Turns | None = None,
) -> Recording:
    """The recording under ``guess``, on ``paths`` and with the answers ``turns``.

    Raises:
        _Close, _GuessFailed, Undecided, and whatever the model raises without a guess.
    """
    shadow.guess = guess
    recording = Recording(shadow, after=after, paths=paths, turns=turns)
    try:
        recording.run(call)
        if recording.met_real_cache:  # later runs compute what this one found there
            recording = Recording(shadow, after=after, paths=paths, turns=turns)
            recording.run(call)
    except NotOpaque as error:
        beyond = error.name if error.name in shadow.branching else recording.callers[error.name]
        raise _Close(beyond, error) from error
    except (CalledOtherwise, Changes, Renews, Undecided):
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        if recording.rest is not None:
            raise _Close(recording.rest.module, error) from error
        if recording.failed_in is None and recording.branches_in is not None:
            raise _Close(recording.branches_in, error, branches=True) from error
        if recording.failed_in is None:
            raise _Close(recording.innermost, error, asks=recording.innermost) from error
        raise _GuessFailed from error
    except Exception as error:
        if (rest := recording.rest) is not None:
            other = (*rest.given[:-1], not rest.given[-1]) if rest.given else ()
            if rest.given and other not in rest.refused and _is_the_models(error):
                raise _Refuses(rest.module, tuple(rest.given)) from error
            raise _Close(rest.module, error) from error
        if recording.failed_in is not None or recording.asked_openly:
            raise _GuessFailed from error
        if recording.asked:
            raise _Close(recording.callers[recording.last_opaque], error) from error
        if any(decided.contradicts for decided in recording.decisions):
            raise Contradicted from error
        if recording.decisions:  # a call that is refused, or one that no input would lead to
            raise Undecided from error
        raise
    return recording


def _compare(first: Recording, runs: list[Recording]) -> list[Recording]:
    """Check that all guesses lead to the same events; the runs whose sizes are others than the first's."""
    sizes: list[Recording] = []
    for other in runs:
        events = zip(first.events, other.events, strict=False)
        same = next((at for at, pair in enumerate(events) if pair[0].anywhere() != pair[1].anywhere()), None)
        if same is None and len(first.events) == len(other.events):
            continue
        if first.asked_openly and _alike_but_for_sizes(first, other):
            sizes.append(other)
            continue
        if first.asked_openly:
            raise _Close("", ValueError("what the model runs depends on the values of tensors, not sizes alone"))
        before = first.events[: len(first.events) if same is None else same + 1]
        packets = [event.packet for event in before if isinstance(event.packet, Opaque)]
        opaque = [packet.name for packet in packets if packet.name in first.callers]
        if not opaque:
            raise RuntimeError("two runs of the model differ before any value was asked for")
        error = ValueError(f"the results of {opaque[-1]} depend on the values of tensors")
        raise _Close(first.callers[opaque[-1]], error, asks=opaque[-1])
    return sizes


def _alike_but_for_sizes(first: Recording, other: Recording) -> bool:
    events, others = ([event.of_any_size() for event in recording.events] for recording in (first, other))
    return events == others and first.result_places == other.result_places


def _join(first: Recording, runs: list[Recording]) -> None:
    """What any of the guesses saw inside of opaque modules; what one block does, its like may do."""
    shadow = first.shadow
    direct, called = set[str](), set[str]()
    for run in runs:
        direct |= run.direct
        called |= run.called_quietly
        for name, around in run.called_within.items():
            first.called_within[name] = first.called_within.get(name, around) & around
    places = {_place(name) for name in called}
    read = {_place(name) for name in direct if _inside(name, shadow.opaque)}
    for name in (*shadow.layers, *shadow.experts):
        if _inside(name, shadow.opaque):
            if _place(name) in places:
                first.layer_rows.setdefault(name, 0)
                first.rows_unknown.add(name)
            if _place(name) in read:
                direct.add(name)
    first.direct |= direct


def _inside(name: str, modules: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:count]) in modules for count in range(1, len(parts)))
