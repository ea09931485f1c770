"""Guessed inputs of models of transformers that text, images and sound alone do not run.

It owns what the names of arguments mean: images as they are, in tiles or as rows of patches with their sizes, frames of
a video, boxes of words, ids of something else than the words, ids of several codebooks, numbers over time, states and
actions, keys and values of another model, masks that a model asks for without saying so.  Sizes come from the
configuration.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tpkernels.planning.runs.guessed_inputs import Tokens

__all__ = ["MASKS", "patches", "picture", "placed_patches", "rows_of_patches", "unusual"]

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
    for others in (
        rows_of_patches(vision, names, sizes), _frames(vision, images, sizes), _tiles(vision, names, sizes),
        placed_patches(vision, names, sizes), _one_row_of_patches(vision, names),
    ):  # fmt: skip
        if others:
            yield text | others | extra
            yield others | extra
    if text and (ids := _other_ids(names, sizes)):
        yield text | ids | extra
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
    width = getattr(config, "hidden_size", None)
    if "inputs_embeds" in names and isinstance(width, int):  # alone, where words are no input (a talker's predictor)
        yield {"inputs_embeds": sizes.floats(sizes.length, width)} | extra


def picture(vision: Any, sizes: Tokens) -> Arguments:
    """Images of the size that a configuration names, or that one within it does (the first tower of Unlimited-OCR)."""
    size = getattr(vision, "image_size", None)
    if isinstance(size, int | list | tuple):
        height, width = (size, size) if isinstance(size, int) else size[:2]
        return {"pixel_values": sizes.floats(getattr(vision, "num_channels", 3), height, width)}
    within = [value for key, value in getattr(vision, "__dict__", {}).items() if key.endswith("_config")]
    return next((found for inner in within if (found := picture(inner, sizes))), {})


def patches(vision: Any) -> tuple[Tensor, Tensor]:
    """Two images as rows of patches, as Qwen2-VL takes them, and their sizes in patches: frames, height and width."""
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", None) or 3
    frames = getattr(vision, "temporal_patch_size", None) or 1
    merged = getattr(vision, "spatial_merge_size", None) or 1
    grid = torch.tensor([[1, 2 * merged, 4 * merged], [1, 2 * merged, 2 * merged]])
    return torch.zeros(12 * merged**2, channels * frames * vision.patch_size**2, device="meta"), grid


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


def placed_patches(vision: Any, names: Collection[str], sizes: Tokens) -> Arguments:
    """Patches with the place of each, which are pooled in squares (Gemma 4)."""
    patch, side = getattr(vision, "patch_size", None), getattr(vision, "pooling_kernel_size", None)
    key = next((name for name in ("pixel_position_ids", "image_position_ids") if name in names), "")
    if "pixel_values" not in names or not key or not isinstance(patch, int) or not isinstance(side, int):
        return {}
    places = torch.cartesian_prod(torch.arange(2 * side), torch.arange(side))
    pixels = sizes.floats(len(places), 3 * patch**2)
    return {"pixel_values": pixels, key: places.expand(sizes.batch, -1, -1).clone()}


def _frames(vision: Any, images: Mapping[str, Any], sizes: Tokens) -> Arguments:
    """As many images as a video has frames."""
    frames = getattr(vision, "num_frames", None)
    if "pixel_values" not in images or not isinstance(frames, int):
        return {}
    return {"pixel_values": sizes.floats(frames, *images["pixel_values"].shape[1:])}


def _tiles(vision: Any, names: Collection[str], sizes: Tokens) -> Arguments:
    """An image for each text, cut into tiles, and which words look at which tiles (Llama 3.2 Vision)."""
    tiles, whole = getattr(vision, "max_num_tiles", None), picture(vision, sizes)
    if not {"pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"} <= set(names) or not tiles or not whole:
        return {}
    shape = whole["pixel_values"].shape[1:]
    found = {"pixel_values": sizes.floats(1, tiles, *shape), "aspect_ratio_ids": sizes.ids(1)}
    found["aspect_ratio_mask"] = torch.ones(sizes.batch, 1, tiles, dtype=torch.long)
    if "cross_attention_mask" in names:
        found["cross_attention_mask"] = torch.ones(sizes.batch, sizes.length, 1, tiles, dtype=torch.long)
    return found


def _one_row_of_patches(vision: Any, names: Collection[str]) -> Arguments:
    """The patches of two images one after the other, as an image of one patch's height, and their sides (MiniCPM-V)."""
    patch, channels = getattr(vision, "patch_size", None), getattr(vision, "num_channels", None) or 3
    if not {"pixel_values", "target_sizes"} <= set(names) or not isinstance(patch, int):
        return {}
    sides = torch.tensor([[4, 8], [4, 4]])
    return {"pixel_values": torch.zeros(1, channels, patch, 48 * patch, device="meta"), "target_sizes": sides}


def _other_ids(names: Collection[str], sizes: Tokens) -> Arguments:
    """Of something that is told beside the words (the protein of Evolla), with the masks that belong to them."""
    found: Arguments = {}
    for name in names:
        kind = name.removesuffix("_input_ids")
        if kind != name and kind != "decoder":
            found[name] = sizes.ids(sizes.other_length)
            if f"{kind}_attention_mask" in names:
                found[f"{kind}_attention_mask"] = torch.ones(sizes.batch, sizes.other_length, dtype=torch.long)
    return found


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
