"""Guesses of what a model is called with: from its kind, its configuration and the names of its arguments.

It owns which calls are tried, and in which order.  A guess is right if the model runs with it on fake tensors, so a
wrong one only costs time.  What the first call that runs leaves out, further calls may run: towers of images and sound,
layers of a decoder that read an encoder, a path that a switch opens.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.planning.runs.unusual_inputs import MASKS, patches, picture, placed_patches, rows_of_patches, unusual

__all__ = ["Tokens", "candidates", "further_calls", "is_hugging_face", "other_ways", "towers"]

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments in order, and by name."""


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

    def marks(self) -> Tensor:
        """A mask of the first word of each sequence, which code may ask for its numbers."""
        return (torch.arange(self.length) == 0).long().expand(self.batch, -1).clone()

    def floats(self, *shape: int) -> Tensor:
        return torch.zeros((self.batch, *shape), device="meta")


FRAME_NAMES = (
    "input_size", "num_mel_bins", "feature_size", "input_feat_size", "feature_projection_input_dim", "input_dim"
)  # fmt: skip
"""How a configuration may call the features of a frame of sound."""
ENCODED_NAMES = ("cross_attention_hidden_size", "encoder_hidden_size", "hidden_size")
"""How it may call the features of what another model has encoded."""
INTEGER_NAMES = ("ids", "tokens", "token", "idx", "indices", "labels", "input_ids")
_TOLD = ("output_", "return_", "use_cache")
"""How switches begin that change what a model hands out, not what it runs."""


def candidates(model: nn.Module, sizes: Tokens | None = None) -> Iterator[Call]:
    """Calls that could be right for ``model``, the likeliest first."""
    sizes = sizes or Tokens()
    if is_hugging_face(model):
        yield from _hugging_face(model, sizes)
    required = _required(model)
    firsts = list(dict.fromkeys(_first_inputs(model, sizes)))
    named = any(word in name.lower().split("_") for name in required[:1] for word in INTEGER_NAMES)
    for kind, shape in sorted(firsts, key=lambda first: (first[0] == "int") != named):
        make = torch.zeros(shape, dtype=torch.long if kind == "int" else torch.get_default_dtype(), device="meta")
        yield (make,) * max(1, len(required)), {}


def further_calls(model: nn.Module, kwargs: Mapping[str, Any], *, keeps: bool = False) -> Iterator[dict[str, Any]]:
    """Calls that run what the guess ``kwargs`` does not: words without entities (LUKE); and, for the next call, a state
    in plain tensors, which all ranks have whole (RWKV), or that modules keep (``keeps``: they keep tensors).

    A cache that is an object of its own may hold parts, and is not asked for where it is all that is kept.
    """
    if any(name.startswith("entity_") for name in kwargs):
        yield {name: value for name, value in kwargs.items() if not name.startswith("entity_")}
    names = list(inspect.signature(model.forward).parameters)
    plain = keeps or [n for n in names if "cache" in n or "past" in n] == ["use_cache"]
    if kwargs.get("use_cache") is False and plain:
        yield dict(kwargs) | {"use_cache": True}


def other_ways(model: nn.Module, sizes: Tokens, kwargs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Calls that may run layers which the guess ``kwargs`` does not: a decoder with what another model has encoded
    (TrOCR), each switch of the signature turned on (the fine path of Granite Docling), and each mask that may be left
    out, with the first word of each sequence marked (global attention of Longformer)."""
    parameters = inspect.signature(model.forward).parameters
    if "encoder_hidden_states" in parameters and "encoder_hidden_states" not in kwargs:
        width = _number(getattr(model, "config", None), ENCODED_NAMES)
        if width:
            yield dict(kwargs) | {"encoder_hidden_states": sizes.floats(sizes.other_length, width)}
    for name, one in parameters.items():
        if one.default is False and not name.startswith(_TOLD):
            yield dict(kwargs) | {name: True}
    for name, one in parameters.items():
        if one.default is None and name.endswith("_mask") and name not in kwargs:
            yield dict(kwargs) | {name: sizes.marks()}


def towers(model: nn.Module, sizes: Tokens) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Methods of transformers' models that run what text alone does not, each with calls of which the first that runs
    is right."""
    config: Any = getattr(model, "config", None)
    vision = getattr(config, "vision_config", None)
    if names := _arguments(model, "get_image_features"):
        yield "get_image_features", list(_images(vision, names, sizes))
    if names := _arguments(model, "get_audio_features"):
        sound = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config
        yield "get_audio_features", list(_sounds(sound, names, sizes))
    widths = [getattr(config, name, None) for name in ("hidden_size", "latent_dim")]
    if _arguments(model, "sample_latent") and all(isinstance(width, int) for width in widths):  # flow heads of speech
        condition, noise = (sizes.floats(width) for width in widths if width)
        yield "sample_latent", [{"condition": condition, "noise": noise, "num_flow_steps": 1}]


def is_hugging_face(model: nn.Module) -> bool:
    return hasattr(model, "config") and hasattr(model, "main_input_name")


def _arguments(model: nn.Module, method: str) -> Mapping[str, inspect.Parameter]:
    found = getattr(model, method, None)
    return inspect.signature(found).parameters if callable(found) else {}


def _required(model: nn.Module) -> list[str]:
    return [
        p.name for p in inspect.signature(model.forward).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip


def _number(config: Any, names: tuple[str, ...]) -> int:
    """The first of the fields ``names`` that is a number; 0 without one."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)


def _hugging_face(model: nn.Module, sizes: Tokens) -> Iterator[Call]:
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
    images = picture(getattr(config, "vision_config", config), sizes) if "pixel_values" in names else {}
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
        rows, grid = patches(config)
        first = next(name for name in inspect.signature(model.forward).parameters if name != "grid_thw")
        yield (), {first: rows, "grid_thw": grid}
    for inputs in (text | images, images, text):
        if inputs:
            yield (), inputs | extra
            yield (), inputs
    yield from (((), inputs) for inputs in unusual(config, names, sizes, text, images, extra))
    if main not in names:
        yield from (((), frames) for frames in _frames_by_position(model, parameters, sizes))


def _frames_by_position(
    model: nn.Module, parameters: Mapping[str, inspect.Parameter], sizes: Tokens
) -> Iterator[dict[str, Any]]:
    """Frames of sound as the first argument, whatever its name is, and None for whatever else must be given and may be
    None (the encoder of sound of Phi-4)."""
    first, *rest = [*_required(model), ""]
    features = _number(model.config, FRAME_NAMES)
    if first and features:
        nothing = {name: None for name in rest if name and _may_be_none(parameters[name].annotation)}
        yield {first: sizes.floats(2 * sizes.length, features)} | nothing


def _may_be_none(annotation: Any) -> bool:
    return type(None) in typing.get_args(annotation) or (isinstance(annotation, str) and "None" in annotation)


def _sounds(config: Any, parameters: Mapping[str, inspect.Parameter], sizes: Tokens) -> Iterator[dict[str, Any]]:
    """Frames of sound, by features or by time first, with the masks that must be given; in whole windows."""
    features = _number(config, FRAME_NAMES)
    lengths = [2 * getattr(config, "max_source_positions", sizes.length), 2 * getattr(config, "n_window", 64)]
    masks = [name for name, one in parameters.items() if "mask" in name and one.default is one.empty]
    for more in (frozenset[str](), MASKS & parameters.keys()):
        for length in dict.fromkeys(lengths if features else ()):
            given = {name: torch.ones(sizes.batch, length, dtype=torch.long) for name in (*masks, *more)}
            yield {"input_features": sizes.floats(features, length)} | given
            yield {"input_features": sizes.floats(length, features)} | given


def _images(vision: Any, names: Mapping[str, Any], sizes: Tokens) -> Iterator[dict[str, Any]]:
    """Images as a tower takes them: as rows of patches, or as squares of them (PaddleOCR-VL), or as they are."""
    if rows := rows_of_patches(vision, names, sizes) or placed_patches(vision, names, sizes):
        yield rows
    elif {"pixel_values", "image_grid_thw"} <= names.keys() and isinstance(getattr(vision, "patch_size", None), int):
        rows_, grid = patches(vision)
        yield {"pixel_values": rows_, "image_grid_thw": grid}
        side = vision.patch_size
        if rows_.shape[1] % side**2 == 0:
            yield {"pixel_values": rows_.unflatten(1, (-1, side, side)), "image_grid_thw": grid}
    elif "pixel_values" in names and (image := picture(vision, sizes)):
        yield image


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
