"""Inputs to trace a model with: the user's, or guesses from the model's kind and signature.

It owns the guesses.  A guess is right if the model runs with it on fake tensors, so a wrong one only costs time.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.planning.modules.experts import CalledOtherwise, KnownExperts, find_experts
from tpkernels.planning.runs.opaque_modules import NeedsValues, record
from tpkernels.planning.runs.shadow import MODES, Mode, Shadow
from tpkernels.planning.runs.tensors import tensors_in
from tpkernels.planning.runs.trace import Example, Recording
from tpkernels.planning.runs.trace_leaks import Watch
from tpkernels.planning.runs.unusual_inputs import MASKS, rows_of_patches, unusual

__all__ = ["Observation", "Tokens", "as_call", "as_calls", "candidates", "observe"]


@dataclass(frozen=True)
class Tokens:
    """The sizes of inputs that are guessed.

    By default sizes that a model is unlikely to have: equal numbers could hide which dimension is which.
    """

    batch: int = 3
    length: int = 7

    @property
    def other_length(self) -> int:
        return max(1, self.length - 2)

    def ids(self, length: int) -> Tensor:
        return torch.zeros(self.batch, length, dtype=torch.long, device="meta")

    def floats(self, *shape: int) -> Tensor:
        return torch.zeros((self.batch, *shape), device="meta")


FRAME_NAMES = (
    "input_size", "num_mel_bins", "feature_size", "input_feat_size", "feature_projection_input_dim", "input_dim"
)  # fmt: skip
"""How a configuration may call the features of a frame of sound."""
MOST_PARTS = 16
"""Models within a model that are recorded by themselves,"""
MOST_GUESSES = 12
"""and what each of them is tried with."""
INTEGER_NAMES = ("ids", "tokens", "token", "idx", "indices", "labels", "input_ids")


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
        given: list[tuple[Any, Any]],
        guesses: list[tuple[Any, Any]],
        sizes: Tokens,
    ) -> None:
        """Record the examples ``given``, or the first of the ``guesses`` that the model runs with."""
        try:
            self.shadow = Shadow(model, watch.caches, experts)
            watch.add(self.shadow.fake)
        except Exception as error:  # noqa: BLE001 - copying runs the code of whatever the model holds
            self.problem = f"the model cannot be copied ({type(error).__name__}: {_first_line(error)})"
            return
        opaque = None
        while opaque != self.shadow.asking:  # what one example made opaque changes the runs of those before it
            opaque = self.shadow.asking
            self.examples, self.calls = [], {}
            self.recording, self.note = None, ""
            self._record_all(self.shadow, model, given, guesses, sizes)
            if len(self.examples) < 2:
                break

    def _record_all(
        self,
        shadow: Shadow,
        model: nn.Module,
        given: list[tuple[Any, Any]],
        guesses: list[tuple[Any, Any]],
        sizes: Tokens,
    ) -> None:
        for args, kwargs in given[:1] or guesses:
            if self._record(shadow, Example("", *shadow.fake_inputs(args, kwargs))):
                break
        self.followed = bool(self.examples)
        needed, problem = self.needs_values, self.problem or "no example inputs were given, and none could be derived"
        for number, (args, kwargs) in enumerate(given[1:] if self.followed else (), start=1):
            if not self._record(shadow, Example("", *shadow.fake_inputs(args, kwargs))):
                self.recording, self.problem = None, f"example_inputs[{number}]: {self.problem}"
                return
        if not given:
            for kwargs in _further_calls(model, self.kwargs) if self.followed else ():
                self._record(shadow, Example("", *shadow.fake_inputs(self.args, kwargs)))
            for method, kwargs in _towers(model, sizes) if self.followed else ():
                self._record(shadow, Example(method, *shadow.fake_inputs((), kwargs)))
        if not given or (needed and not self.followed):
            self._record_parts(shadow, model, sizes)
        self.needs_values, self.problem = needed, "" if self.followed else problem
        shadow.set_mode(self.mode)

    def _record_parts(self, shadow: Shadow, model: nn.Module, sizes: Tokens) -> None:
        """Record models of transformers within the model of which no layer has run, each by itself."""
        done: list[str] = []
        failed: set[type[nn.Module]] = set()
        for name, module in model.named_modules():
            if len(done) == MOST_PARTS or not name or not _is_hugging_face(module) or type(module) in failed:
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

    def _record(self, shadow: Shadow, call: Example) -> bool:
        """Whether the model runs with these inputs, in at least one mode."""
        failures: dict[Mode, str] = {}
        found: list[tuple[Mode, Recording]] = []
        for mode in MODES:
            shadow.set_mode(mode)
            try:
                recording = record(shadow, call)
            except NeedsValues as error:
                failures[mode] = f"{type(error.__cause__).__name__}: {_first_line(error.__cause__)}"
                self.needs_values = True
                continue
            except CalledOtherwise:
                raise
            except Exception as error:  # noqa: BLE001 - a guess that does not fit can make a model raise anything
                failures[mode] = f"{type(error).__name__}: {_first_line(error)}"
                continue
            calls = [recording, *recording.others, *self._second(shadow, call, recording)]
            for one in calls:
                if not any(mode.training == other.training and one.same(known) for other, known in found):
                    found.append((mode, one))
        if not found:
            self.problem = self.problem or f"it cannot be traced ({failures[MODES[0]]})"
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


def candidates(model: nn.Module, sizes: Tokens | None = None) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Calls that could be right for ``model``, the likeliest first."""
    sizes = sizes or Tokens()
    if _is_hugging_face(model):
        yield from _hugging_face(model, sizes)
    signature = inspect.signature(model.forward)
    required = [
        p.name for p in signature.parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    firsts = list(dict.fromkeys(_first_inputs(model, sizes)))
    named = any(word in name.lower().split("_") for name in required[:1] for word in INTEGER_NAMES)
    for kind, shape in sorted(firsts, key=lambda first: (first[0] == "int") != named):
        make = torch.zeros(shape, dtype=torch.long if kind == "int" else torch.get_default_dtype(), device="meta")
        yield (make,) * max(1, len(required)), {}


def _is_hugging_face(model: nn.Module) -> bool:
    return hasattr(model, "config") and hasattr(model, "main_input_name")


def _hugging_face(model: nn.Module, sizes: Tokens) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    config: Any = model.config
    parameters = inspect.signature(model.forward).parameters
    names, others = set(parameters), any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    extra: dict[str, Any] = {}
    if "use_cache" in names or (others and hasattr(getattr(config, "text_config", None), "use_cache")):
        extra["use_cache"] = False
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        extra["decoder_input_ids"] = sizes.ids(sizes.other_length)
    text = {"input_ids": sizes.ids(sizes.length)} if "input_ids" in names else {}
    if text and "entity_ids" in names:  # each with up to two words
        places = sizes.ids(2 * sizes.other_length).unflatten(1, (-1, 2))
        text |= {"entity_ids": sizes.ids(sizes.other_length), "entity_position_ids": places}
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None)
    images: dict[str, Any] = {}
    if "pixel_values" in names and isinstance(size, int | list | tuple):
        height, width = (size, size) if isinstance(size, int) else size[:2]
        images["pixel_values"] = sizes.floats(getattr(vision, "num_channels", 3), height, width)
    main = str(model.main_input_name)
    if main == "input_features":
        yield from (((), sound | extra) for sound in _sounds(config, parameters, sizes))
    if main == "input_values":
        yield (), {main: sizes.floats(4000)} | extra
        yield (), {main: sizes.floats(1, 4000)} | extra
        features, length = (getattr(config, name, None) for name in ("num_mel_bins", "max_length"))
        if isinstance(features, int) and isinstance(length, int):
            yield (), {main: sizes.floats(length, features)} | extra
    if "grid_thw" in names and isinstance(getattr(config, "patch_size", None), int):
        patches, grid = _patches(config)
        first = next(name for name in inspect.signature(model.forward).parameters if name != "grid_thw")
        yield (), {first: patches, "grid_thw": grid}
    for inputs in (text | images, images, text):
        if inputs:
            yield (), inputs | extra
            yield (), inputs
    yield from (((), inputs) for inputs in unusual(config, names, sizes, text, images, extra))


def _further_calls(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Calls that run what the guess ``kwargs`` does not: words without entities (LUKE); and, for the next call, a state
    in plain tensors, which all ranks have whole (RWKV).

    A cache that is an object of its own may hold parts, and is not asked for.
    """
    if any(name.startswith("entity_") for name in kwargs):
        yield {name: value for name, value in kwargs.items() if not name.startswith("entity_")}
    names = list(inspect.signature(model.forward).parameters)
    if kwargs.get("use_cache") is False and [n for n in names if "cache" in n or "past" in n] == ["use_cache"]:
        yield dict(kwargs) | {"use_cache": True}


def _sounds(config: Any, parameters: Mapping[str, inspect.Parameter], sizes: Tokens) -> Iterator[dict[str, Any]]:
    """Frames of sound, by features or by time first, with the masks that must be given; in whole windows."""
    features = next((value for name in FRAME_NAMES if isinstance(value := getattr(config, name, None), int)), 0)
    lengths = [2 * getattr(config, "max_source_positions", sizes.length), 2 * getattr(config, "n_window", 64)]
    masks = [name for name, one in parameters.items() if "mask" in name and one.default is one.empty]
    for more in (frozenset[str](), MASKS & parameters.keys()):
        for length in dict.fromkeys(lengths if features else ()):
            given = {name: torch.ones(sizes.batch, length, dtype=torch.long) for name in (*masks, *more)}
            yield {"input_features": sizes.floats(features, length)} | given
            yield {"input_features": sizes.floats(length, features)} | given


def _towers(model: nn.Module, sizes: Tokens) -> Iterator[tuple[str, dict[str, Any]]]:
    """Methods of transformers' models of images and text that run what text alone does not."""
    config: Any = getattr(model, "config", None)
    method = getattr(model, "get_image_features", None)
    vision = getattr(config, "vision_config", None)
    size = getattr(vision, "image_size", None)
    names = set(inspect.signature(method).parameters) if callable(method) else set()
    if rows := rows_of_patches(vision, names, sizes):
        yield "get_image_features", rows
    elif {"pixel_values", "image_grid_thw"} <= names and isinstance(getattr(vision, "patch_size", None), int):
        patches, grid = _patches(vision)
        yield "get_image_features", {"pixel_values": patches, "image_grid_thw": grid}
    elif "pixel_values" in names and isinstance(size, int):
        yield "get_image_features", {"pixel_values": sizes.floats(getattr(vision, "num_channels", 3), size, size)}


def _patches(vision: Any) -> tuple[Tensor, Tensor]:
    """Two images as rows of patches, as Qwen2-VL takes them, and their sizes in patches: frames, height and width."""
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", None) or 3
    frames = getattr(vision, "temporal_patch_size", None) or 1
    merged = getattr(vision, "spatial_merge_size", None) or 1
    grid = torch.tensor([[1, 2 * merged, 4 * merged], [1, 2 * merged, 2 * merged]])
    return torch.zeros(12 * merged**2, channels * frames * vision.patch_size**2, device="meta"), grid


def _first_inputs(model: nn.Module, sizes: Tokens) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Inputs that the modules of the model take, in their order: one of these modules is the first to run."""
    batch, length = sizes.batch, sizes.length
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield "int", (batch, length)
        elif isinstance(module, nn.Linear):
            yield "float", (batch, length, module.in_features)
            yield "float", (batch, module.in_features)
        elif isinstance(module, nn.Conv2d):
            for size in (64, 32, 28, 224):
                yield "float", (batch, module.in_channels, size, size)
        elif isinstance(module, nn.Conv1d):
            yield "float", (batch, module.in_channels, 64)
        elif isinstance(module, nn.RNNBase):
            yield "float", (batch, length, module.input_size)
        elif isinstance(module, nn.MultiheadAttention):
            yield "float", (batch, length, module.embed_dim)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            yield "float", (batch, length, *module.normalized_shape)


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
