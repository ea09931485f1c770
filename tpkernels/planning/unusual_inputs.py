"""Guessed inputs of models of transformers that text, images and sound alone do not run.

It owns what the names of arguments mean: images as rows of patches with their sizes, frames of a video, boxes of words,
ids of several codebooks, masks that a model asks for without saying so.  Numbers come from the configuration.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tpkernels.planning.example_inputs import Tokens

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
    if text and "bbox" in names:
        yield text | {"bbox": sizes.floats(sizes.length, 4)} | extra
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
