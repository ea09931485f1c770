"""Guessed inputs of models of transformers that text, images and sound alone do not run.

It owns what the names of arguments mean: images as rows of patches with their sizes, frames of a video, boxes of words,
ids of several codebooks, numbers over time, states and actions, keys and values of another model, masks that a model
asks for without saying so.  Sizes come from the configuration.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tpkernels.planning.runs.example_inputs import Tokens

__all__ = ["MASKS", "rows_of_patches", "unusual"]

SIDES = (3, 4)
"""Of an image, in patches."""
MASKS = frozenset({"attention_mask", "input_features_mask", "feature_attention_mask"})
"""Of frames of sound, which code may take the sums of although none has to be given."""

Arguments = dict[str, Any]


def unusual(
    config: Any, names: Collection[str], sizes: Tokens, text: Arguments, images: Arguments, extra: Arguments
) -> Iterator[Arguments]:
    """Calls with what ``names`` ask for beside ``text`` or ``images``; ``extra`` goes with all."""
    vision = getattr(config, "vision_config", config)
    for others in (rows_of_patches(vision, names, sizes), _frames(vision, images, sizes)):
        if others:
            yield text | others | extra
            yield others | extra
    for others in (_series(config, names, sizes), _steps(config, names, sizes), _of_another(config, names, sizes)):
        if others:
            yield others | extra
    if text and "bbox" in names:
        yield text | {"bbox": sizes.floats(sizes.length, 4)} | extra
    total = getattr(config, "n_codes_total", None)
    if text and "codebook_idx" in names and isinstance(total, int):  # of the last one, to which all of them give
        yield {"codebook_idx": total - 1, "input_ids": text["input_ids"].new_zeros(sizes.batch, sizes.length, total)}
    codebooks = getattr(getattr(config, "decoder", config), "num_codebooks", None)
    if "decoder_input_ids" in extra and isinstance(codebooks, int):
        ids = extra["decoder_input_ids"]
        for shape in ((len(ids) * codebooks, ids.shape[1]), (*ids.shape, codebooks)):
            yield text | extra | {"decoder_input_ids": ids.new_zeros(shape)}


def rows_of_patches(vision: Any, names: Collection[str], sizes: Tokens) -> Arguments:
    """An image as rows of patches: with a mask and its sides (SigLIP 2), or with the place of each (Pix2Struct)."""
    height, width = SIDES
    features = getattr(vision, "patch_embed_hidden_size", None)
    if "flattened_patches" in names and isinstance(features, int):
        return {"flattened_patches": sizes.floats(height * width, 2 + features)}
    patch, channels = getattr(vision, "patch_size", None), getattr(vision, "num_channels", None) or 3
    if {"pixel_values", "spatial_shapes"} <= set(names) and isinstance(patch, int):
        mask = {"pixel_attention_mask": torch.ones(sizes.batch, height * width, dtype=torch.long)}
        sides = {"spatial_shapes": torch.tensor([SIDES] * sizes.batch)}
        return {"pixel_values": sizes.floats(height * width, channels * patch**2)} | mask | sides
    return {}


def _frames(vision: Any, images: Mapping[str, Any], sizes: Tokens) -> Arguments:
    """As many images as a video has frames."""
    frames = getattr(vision, "num_frames", None)
    if "pixel_values" not in images or not isinstance(frames, int):
        return {}
    return {"pixel_values": sizes.floats(frames, *images["pixel_values"].shape[1:])}


def _series(config: Any, names: Collection[str], sizes: Tokens) -> Arguments:
    """Numbers over time, with what is known of each time: those of the past, as many as lags reach back, and those that
    follow (Autoformer); or the past alone (PatchTST)."""
    past, future = (getattr(config, name, None) for name in ("context_length", "prediction_length"))
    if "past_values" not in names or not isinstance(past, int):
        return {}
    width = getattr(config, "num_input_channels", 0) or getattr(config, "input_size", 1)
    if "past_time_features" not in names:
        return {"past_values": sizes.floats(past, width)}
    past += max(getattr(config, "lags_sequence", None) or [0])
    given: Arguments = {}
    for which, length in (("past", past), ("future", future)):
        if f"{which}_values" in names and isinstance(length, int):
            values = sizes.floats(length, *((width,) if width > 1 else ()))
            features = sizes.floats(length, getattr(config, "num_time_features", 0))
            given |= {f"{which}_values": values, f"{which}_time_features": features}
    if "past_observed_mask" in names:
        given["past_observed_mask"] = torch.ones_like(given["past_values"])
    for kind, count in (("categorical", "num_static_categorical_features"), ("real", "num_static_real_features")):
        number = getattr(config, count, 0)
        if f"static_{kind}_features" in names and number:
            given[f"static_{kind}_features"] = sizes.ids(number) if kind == "categorical" else sizes.floats(number)
    return given


def _steps(config: Any, names: Collection[str], sizes: Tokens) -> Arguments:
    """What was seen, done and earned in each step (Decision Transformer)."""
    state, action = getattr(config, "state_dim", None), getattr(config, "act_dim", None)
    if not isinstance(state, int) or not isinstance(action, int):
        return {}
    widths = {"states": state, "actions": action, "rewards": 1, "returns_to_go": 1}
    if not {*widths, "timesteps"} <= set(names):
        return {}
    steps = {name: sizes.floats(sizes.length, width) for name, width in widths.items()}
    return steps | {"timesteps": sizes.ids(sizes.length)}


def _of_another(config: Any, names: Collection[str], sizes: Tokens) -> Arguments:
    """What another model has made of a text: its words, and keys and values for each kind of layers (the assistant of
    Gemma 4, which guesses the words that follow)."""
    width = getattr(config, "backbone_hidden_size", None)
    text = getattr(config, "text_config", config)
    kinds, layers = getattr(text, "layer_types", None), getattr(text, "per_layer_config", None)
    if not {"inputs_embeds", "shared_kv_states"} <= set(names) or not isinstance(width, int) or not kinds or not layers:
        return {}
    states = {}
    for place, kind in enumerate(kinds):
        shape = layers[place].num_key_value_heads, sizes.other_length, layers[place].head_dim
        states[kind] = sizes.floats(*shape), sizes.floats(*shape)
    return {"inputs_embeds": sizes.floats(sizes.length, 2 * width), "shared_kv_states": states}
