"""Runs of a model to plan it by: with the inputs of the user, or with what is guessed of its kind and signature.

It owns the :class:`Observation`: which calls are recorded, in which modes, and that the recordings fit each other.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn

from tpkernels.planning.modules.experts import CalledOtherwise, KnownExperts, find_experts
from tpkernels.planning.runs.example_calls import Example
from tpkernels.planning.runs.guessed_inputs import (
    Call,
    Tokens,
    candidates,
    further_calls,
    is_hugging_face,
    other_ways,
    towers,
)
from tpkernels.planning.runs.host_draws import BETWEEN, COME, ENDS, DecidedByDraws, check_undecided
from tpkernels.planning.runs.opaque_modules import NeedsValues, record
from tpkernels.planning.runs.shadow import MODES, Mode, Shadow
from tpkernels.planning.runs.tensors import tensors_in
from tpkernels.planning.runs.trace import Recording
from tpkernels.planning.runs.trace_leaks import Watch

__all__ = ["Observation", "as_call", "as_calls", "observe"]

MOST_PARTS = 16
"""Models within a model that are recorded by themselves,"""
MOST_GUESSES = 12
"""and what each of them is tried with."""


class Observation:
    """A recorded run of a model, or the reason why there is none."""

    def __init__(
        self,
        model: nn.Module,
        example_inputs: object,
        watch: Watch | None = None,
        experts: Mapping[str, KnownExperts] = Shadow.experts,
    ) -> None:
        sizes = example_inputs if isinstance(example_inputs, Tokens) else Tokens()
        example_inputs = None if isinstance(example_inputs, Tokens) else example_inputs
        self.guessed = example_inputs is None
        self.shadow: Shadow | None = None
        self.recording: Recording | None = None
        self.args: Any = ()
        self.kwargs: Any = {}
        self.mode = MODES[0]
        """Of the recorded run; one of training shows dropout."""
        self.examples: list[list[tuple[Mode, Recording]]] = []
        """Of each example its first run, and one for each mode in which the model runs otherwise."""
        self.calls: dict[int, Example] = {}
        """How each recording, by its id, was made."""
        self.note = ""
        """Which mode could not be recorded, and why."""
        self.problem = ""
        """Why the model as a whole could not be recorded."""
        self.followed = False
        """Whether the model as a whole was recorded; else only models within it are."""
        self.refused_experts: dict[str, str] = {}
        """Modules that look like experts, and why they stay whole."""
        self._asking: set[Any] = set()
        """What modules were known to ask for at the end of each run that was recorded; all runs must know the same."""
        self.needs_values = False
        """It could not be recorded because it asks for the values of tensors, whatever the inputs are."""
        given = [] if example_inputs is None else as_calls(example_inputs)
        watch = watch or Watch()
        self._record_anew(model, watch, experts, given, list(candidates(model, sizes)) if not given else [], sizes)
        unknown = self._unknown()
        if unknown and not given and self.followed and "pixel_values" in self.kwargs:
            # Where images go among the words depends on values, and most of the model is not seen then: text alone.
            state = dict(vars(self))
            texts = [(args, kwargs) for args, kwargs in candidates(model, sizes) if "pixel_values" not in kwargs]
            self._record_anew(model, watch, experts, [], texts, sizes)
            now = self._unknown()
            if now is None or now >= unknown:
                vars(self).update(state)

    def _unknown(self) -> int | None:
        """Of how many tensors the recording does not know the rows; None without a recording."""
        return None if self.recording is None else len(self.recording.rows_unknown)

    def _record_anew(
        self,
        model: nn.Module,
        watch: Watch,
        experts: Mapping[str, KnownExperts],
        given: list[Call],
        guesses: list[Call],
        sizes: Tokens,
    ) -> None:
        """Record the examples ``given``, or the first of the ``guesses`` that the model runs with."""
        try:
            self.shadow = Shadow(model, watch.caches, experts)
            watch.add(self.shadow.fake)
        except Exception as error:  # noqa: BLE001 - copying runs the code of whatever the model holds
            self.problem = f"the model cannot be copied ({type(error).__name__}: {_first_line(error)})"
            return
        while True:
            self.examples, self.calls, self._asking = [], {}, set()
            self.recording, self.note = None, ""
            self._record_all(self.shadow, model, given, guesses, sizes)
            if self._asking <= {_asked(self.shadow)}:  # else a run has changed those before it
                break

    def _record_all(
        self,
        shadow: Shadow,
        model: nn.Module,
        given: list[Call],
        guesses: list[Call],
        sizes: Tokens,
    ) -> None:
        tried = iter(given[:1] or guesses)
        first = next((guess for guess in tried if self._record(shadow, Example("", *shadow.fake_inputs(*guess)))), None)
        self.followed = first is not None
        needed, problem = self.needs_values, self.problem or "no example inputs were given, and none could be derived"
        for number, (args, kwargs) in enumerate(given[1:] if self.followed else (), start=1):
            if not self._record(shadow, Example("", *shadow.fake_inputs(args, kwargs))):
                self.recording, self.problem = None, f"example_inputs[{number}]: {self.problem}"
                return
        if first is not None and not given:
            self._record_more(shadow, model, sizes, first, [guess for guess in tried if guess[1]])
        if not given or (needed and not self.followed):
            self._record_parts(shadow, model, sizes)
        self.needs_values, self.problem = needed, "" if self.followed else problem
        shadow.set_mode(self.mode)

    def _record_more(
        self, shadow: Shadow, model: nn.Module, sizes: Tokens, first: Call, guesses: Sequence[Call]
    ) -> None:
        """Calls that run what the ``first`` guess does not; ``guesses`` are those that came behind it."""
        keeps = any(recording.kept_states for _, recording in self.recordings)
        for kwargs in further_calls(model, first[1], keeps=keeps):
            self._record(shadow, Example("", *shadow.fake_inputs(first[0], kwargs)))
        for method, calls in towers(model, sizes):
            if method == "get_image_features" or self._not_called(shadow):
                any(self._record(shadow, Example(method, *shadow.fake_inputs((), kwargs))) for kwargs in calls)
        others: list[Call] = [((), kwargs) for kwargs in other_ways(model, sizes, first[1])] if not first[0] else []
        others += [guess for guess in guesses if guess[1].keys() - first[1].keys()][:MOST_GUESSES]
        for guess in others:
            if not self._not_called(shadow):
                return
            self._record(shadow, Example("", *shadow.fake_inputs(*guess)), fresh=True)

    def _not_called(self, shadow: Shadow) -> set[str]:
        """Layers that no recorded run calls."""
        return shadow.layers.keys() - (self.recording.layer_rows.keys() if self.recording is not None else ())

    def _record_parts(self, shadow: Shadow, model: nn.Module, sizes: Tokens) -> None:
        """Record models of transformers within the model of which no layer has run, each by itself."""
        done: list[str] = []
        failed: set[type[nn.Module]] = set()
        for name, module in model.named_modules():
            if len(done) == MOST_PARTS or not name or not is_hugging_face(module) or type(module) in failed:
                continue
            seen = {} if self.recording is None else self.recording.layer_rows
            layers = [layer for layer in shadow.layers if layer.startswith(f"{name}.")]
            if not layers or any(layer in seen for layer in layers):
                continue
            guesses = islice(candidates(module, sizes), MOST_GUESSES)
            if any(self._record(shadow, Example(name, *shadow.fake_inputs(*guess))) for guess in guesses):
                done.append(name)
            else:
                failed.add(type(module))

    @property
    def recordings(self) -> list[tuple[Mode, Recording]]:
        """Of all examples."""
        return [recording for example in self.examples for recording in example]

    @property
    def firsts(self) -> list[tuple[Mode, Recording]]:
        """The first of each example."""
        return [example[0] for example in self.examples]

    def _record(self, shadow: Shadow, call: Example, *, fresh: bool = False) -> bool:
        """Whether the model runs with these inputs, in at least one mode; with ``fresh``, and calls a layer that no
        other example does."""
        failures: dict[Mode, str] = {}
        found: list[tuple[Mode, Recording]] = []
        for mode in MODES:
            shadow.set_mode(mode)
            asking = shadow.asking
            try:
                recording = record(shadow, call)
            except CalledOtherwise:
                raise
            except Exception as error:  # noqa: BLE001 - a guess that does not fit can make a model raise anything
                if isinstance(error, NeedsValues):
                    self.needs_values = True
                cause = error.__cause__ if isinstance(error, NeedsValues) else error
                failures[mode] = f"{type(cause).__name__}: {_first_line(cause)}"
                if found:
                    shadow.ask_as(*asking)
                continue
            self._asking.add(_asked(shadow))
            calls = [recording, *recording.others, *self._second(shadow, call, recording)]
            try:
                calls += self._with_other_dice(shadow, call, recording)
            except DecidedByDraws as error:
                self.problem, self.needs_values = self.problem or f"it cannot be traced ({error})", True
                return False
            for one in calls:
                if not any(mode.training == other.training and one.same(known) for other, known in found):
                    found.append((mode, one))
        if not found:
            self.problem = self.problem or f"it cannot be traced ({failures[MODES[0]]})"
            return False
        if fresh and not any(self._not_called(shadow) & one.layer_rows.keys() for _, one in found):
            return False
        self.examples.append(found)
        self.calls |= {id(recording): call for _, recording in found}
        first = len(self.examples) == 1
        if first:
            self.mode, self.recording = found[0]
            self.args, self.kwargs, self.problem = call.args, call.kwargs, ""
        assert self.recording is not None
        for _, other in found if not first else found[1:]:
            self.recording.direct |= other.direct
        if not first:
            self.recording.also(found[0][1])
        if failures and first:
            failed, why = next(iter(failures.items()))
            proven = [str(mode) for mode in MODES if mode not in failures and mode.gradients == failed.gradients]
            self.note = f"proven for {' and '.join(proven)} alone: in {failed} it cannot be traced ({why})"
        if shadow.open and not self.note:
            asks = sorted(name or "the model" for name in shadow.open if not name or name != call.method)
            told = f"{' and '.join(asks)} {'asks' if len(asks) == 1 else 'ask'}"
            self.note = f"{told} for values on which sizes depend: proven for some, as for the sizes of inputs"
        return True

    def _second(self, shadow: Shadow, call: Example, first: Recording) -> list[Recording]:
        """The same call once more, where it finds what the first one has left in modules (a table of positions)."""
        if not first.changes:
            return []
        try:
            return [one for second in [record(shadow, call, first)] for one in (second, *second.others)]
        except CalledOtherwise:
            raise
        except Exception as error:  # noqa: BLE001 - as of the first call
            why = _first_line(error.__cause__ or error)
            self.note = f"proven for a first call alone: a second one cannot be traced ({why})"
            return []

    def _with_other_dice(self, shadow: Shadow, call: Example, first: Recording) -> list[Recording]:
        """The same call with other numbers from Python and NumPy, if the model draws any.

        Raises:
            DecidedByDraws: it runs something else with these.
        """
        if not any(one.drew for one in (first, *first.others)):
            return []
        ends, between = ([self._with_dice(shadow, call, dice) for dice in places] for places in (ENDS, BETWEEN))
        check_undecided(first, ends, between)
        return [one for end in ends for one in (end, *end.others)]

    @staticmethod
    def _with_dice(shadow: Shadow, call: Example, dice: str) -> Recording:
        shadow.dice = dice
        try:
            return record(shadow, call)
        except CalledOtherwise:
            raise
        except Exception as error:
            raise DecidedByDraws from error
        finally:
            shadow.dice = COME

    def told(self, model: nn.Module) -> str:
        """The inputs of the recorded run, by name and shape; who guessed them."""
        if self.recording is None:
            return ""
        told = [self._told(model, self.calls[id(recording)]) for _, recording in self.firsts]
        return "; and ".join(told) + (" (a guess: give example_inputs or --tokens)" if self.guessed else "")

    @staticmethod
    def _told(model: nn.Module, call: Example) -> str:
        try:
            named = inspect.signature(call.of(model)).bind_partial(*call.args, **call.kwargs).arguments
        except TypeError:  # a forward that is called otherwise than it is declared
            named = {f"argument {number}": value for number, value in enumerate(call.args)} | dict(call.kwargs)
        shapes = [f"{name} {_shapes(tensors)}" for name, value in named.items() if (tensors := tensors_in(value))]
        return (f"{call.method} of " if call.method else "") + ", ".join(shapes)


def _asked(shadow: Shadow) -> tuple[object, ...]:
    """What runs know of modules that ask for values."""
    return shadow.asking, shadow.decides, shadow.known.asked


def observe(
    model: nn.Module,
    example_inputs: object,
    watch: Watch | None = None,
) -> Observation:
    """Run ``model`` on fake tensors; ``watch`` is of :func:`tpkernels.planning.runs.trace_leaks.nothing_left`.

    ``example_inputs``: the user's, None to guess them, or the :class:`Tokens` that a guess shall have.

    Raises:
        ValueError: example inputs were given, and the model does not run with them for another reason than that it
            asks for the values of tensors.
    """
    experts, refused = find_experts(model)
    while True:
        try:
            found = Observation(model, example_inputs, watch, experts)
            break
        except CalledOtherwise as error:
            kind = type(model.get_submodule(error.name))
            refused |= {name: str(error) for name in experts if type(model.get_submodule(name)) is kind}
            experts = {name: known for name, known in experts.items() if name not in refused}
    found.refused_experts = refused
    if not found.guessed and found.recording is None and not found.needs_values:
        raise ValueError(
            f"{type(model).__name__} does not run with the example_inputs given: {found.problem}. If it does run with "
            "them on real tensors, leave them out: its layers are gathered then, one by one"
        )
    return found


def as_calls(example: object) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """One call, or several from a list of tuples and mappings."""
    if isinstance(example, list) and example and all(isinstance(one, tuple | Mapping) for one in example):
        return [as_call(one) for one in example]
    return [as_call(example)]


def as_call(example: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tensor, a sequence of positional arguments, or a mapping of keyword arguments."""
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, Sequence) and not isinstance(example, str):
        return tuple(example), {}
    raise ValueError(
        f"example_inputs must be a tensor, a tuple of arguments or a dict of keyword arguments, got {example!r}"
    )


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors)


def _first_line(error: BaseException | None) -> str:
    return str(error).splitlines()[0][:160] if str(error) else "no message"
