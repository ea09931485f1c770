"""What a small model is called with: by the names of the arguments that its ``forward`` takes, and its configuration.

A call is right when the unsharded model runs with it; the likeliest and richest comes first.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tests.models.architectures.shrink import PLACEHOLDERS
from tests.models.architectures.special_inputs import INPUTS

__all__ = ["calls", "cast"]

BATCH, LENGTH, OTHER_LENGTH = 2, 7, 5
WORDS = range(8, 72)
"""Ids that mean nothing special."""

Call = tuple[str, dict[str, Any]]
"""What it is made of, and the arguments."""


def calls(name: str, model: nn.Module) -> Iterator[Call]:
    """Calls of the model, the likeliest to be right first; those that name the architecture's own come alone."""
    maker = _Maker(model)
    if name in INPUTS:
        yield "special", maker.extra | {key: maker.given(value) for key, value in INPUTS[name].items()}
        return
    for kind, arguments in maker.calls():
        yield kind, maker.extra | arguments


def cast(arguments: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The same call in another floating dtype; values are those of fp32."""
    found: dict[str, Any] = tree_map(
        lambda value: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value,
        dict(arguments),
    )
    return found


class _Maker:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.config = model, _merged(model.config)
        parameters = inspect.signature(model.forward).parameters
        self.names = set(parameters)
        self.required = [p.name for p in parameters.values() if p.default is p.empty and p.kind not in (2, 4)]
        self.random = torch.Generator().manual_seed(11)
        self.extra = {"use_cache": False} if "use_cache" in self.names else {}
        self.main = str(getattr(model, "main_input_name", ""))

    def given(self, value: Any) -> Any:
        kind, *rest = value
        if kind == "words":
            length, placeholder, count = rest
            ids = self.ids(length)
            ids[:, 1 : 1 + count] = placeholder
            return ids
        makers = {
            "int": self.ints,
            "is": torch.tensor,
            "ones": torch.ones,
            "mask": lambda shape: torch.ones(shape, dtype=torch.long),
            "exactly": lambda value: value,
            "tuples": lambda some: {key: tuple(map(self.given, items)) for key, items in some.items()},
            "yes": lambda shape: torch.ones(shape, dtype=torch.bool),
            "no": lambda shape: torch.zeros(shape, dtype=torch.bool),
            "float": self.floats,
            "uniform": lambda shape: torch.rand(shape, generator=self.random),
        }
        return makers[kind](*rest)

    def ints(self, shape: Any, high: int) -> Tensor:
        return torch.randint(0, high, tuple(shape), generator=self.random)

    def ids(self, length: int) -> Tensor:
        return torch.randint(WORDS.start, WORDS.stop, (BATCH, length), generator=self.random)

    def floats(self, shape: Any) -> Tensor:
        return torch.randn(tuple(shape), generator=self.random)

    def calls(self) -> Iterator[Call]:
        text: dict[str, Any] = {"input_ids": self.ids(LENGTH)} if "input_ids" in self.names else {}
        if "decoder_input_ids" in self.names:
            text["decoder_input_ids"] = self.ids(OTHER_LENGTH)
        text |= self.others()
        if {"image_grid_thw", "grid_thw"} & self.names:
            yield from self.with_grids(text)
        if "input_ids" in self.names and "pixel_values" in self.names:
            yield from self.with_images(text)
        if self.main != "input_ids" or not text:
            yield from self.by_main(text)
        if text:
            yield "text", text
        for images in self.images():
            yield "image", images
        yield "required", {name: self.by_name(name) for name in self.required}

    def others(self) -> dict[str, Any]:
        """Arguments that have to be there."""
        skip = {"input_ids", "decoder_input_ids", "pixel_values", self.main}
        return {name: self.by_name(name) for name in self.required if name not in skip}

    def images(self) -> Iterator[dict[str, Any]]:
        if "pixel_values" not in self.names:
            return
        size, channels = self.config.get("image_size", 32), self.config.get("num_channels", 3)
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        rest = {key: value for key, value in self.others().items() if not key.endswith("ids")}
        yield {"pixel_values": self.floats((BATCH, channels, height, width))} | rest
        for side in (64, 224):
            yield {"pixel_values": self.floats((BATCH, channels, side, side))} | rest
        yield {"pixel_values": self.floats((BATCH, 4, channels, height, width))} | rest

    def with_images(self, text: dict[str, Any]) -> Iterator[Call]:
        """As many placeholders as the model makes features of an image."""
        for images in self.images():
            count = self.features_of(images)
            if count:
                ids = self.ids(LENGTH + count)
                ids[:, 1 : 1 + count] = getattr(self.model.config, "image_token_id", PLACEHOLDERS["image"])
                yield "text and image", text | {"input_ids": ids} | images
            yield "text and image", text | images
            break

    def with_grids(self, text: dict[str, Any]) -> Iterator[Call]:
        """Images as rows of patches, with their sizes in patches: 4 x 4 each."""
        side, merge = self.config.get("patch_size", 8), self.config.get("spatial_merge_size", 2)
        frames, channels = (
            self.config.get("temporal_patch_size") or self.config.get("patch_temporal", 1),
            self.config.get("num_channels") or 3,
        )
        channels = self.config.get("in_channels") or channels
        patches = self.floats((BATCH * 16, channels * frames * side * side))
        grid = torch.tensor([[1, 4, 4]] * BATCH)
        if "image_grid_thw" not in self.names:
            first = self.required[0] if self.required else "hidden_states"
            yield "image", {first: patches, "grid_thw": grid}
            return
        count = 16 // merge**2
        ids = self.ids(LENGTH + count)
        ids[:, 1 : 1 + count] = getattr(self.model.config, "image_token_id", PLACEHOLDERS["image"])
        kinds = {"mm_token_type_ids": (ids == ids[0, 1]).long()} if "mm_token_type_ids" in self.names else {}
        yield "text and image", text | {"input_ids": ids, "pixel_values": patches, "image_grid_thw": grid} | kinds

    def features_of(self, images: dict[str, Any]) -> int:
        """Of one image; 0 where the model does not say."""
        try:
            with torch.no_grad():
                found = self.model.get_image_features(**images)  # type: ignore[operator]
        except Exception:  # noqa: BLE001 - a guess: whatever does not fit raises anything
            return 0
        found = getattr(found, "pooler_output", found)
        features = torch.cat(list(found)) if isinstance(found, list | tuple) else found
        return 0 if not isinstance(features, Tensor) else features.flatten(0, -2).shape[0] // BATCH

    def by_main(self, text: dict[str, Any]) -> Iterator[Call]:
        rest = self.others() | {key: value for key, value in text.items() if key != "input_ids"}
        if self.main == "input_features":
            names = ("num_mel_bins", "feature_size", "feature_projection_input_dim", "input_feat_per_channel")
            mels = next((self.config[name] for name in names if self.config.get(name)), 16)
            long = 2 * int(self.config.get("max_source_positions") or 20)
            for shape in ((BATCH, mels, long), (BATCH, long, mels), (BATCH, 1, long, mels)):
                yield "audio", rest | {"input_features": self.floats(shape)}
        if self.main == "input_values":
            yield "audio", rest | {"input_values": self.floats((BATCH, 1200))}
            yield "audio", rest | {"input_values": self.floats((BATCH, 1, 1200))}
            mels = self.config.get("num_mel_bins", 16)
            yield "audio", rest | {"input_values": self.floats((BATCH, self.config.get("max_length", 64), mels))}
        if self.main == "pixel_values_videos":
            size, frames = self.config.get("image_size", 32), self.config.get("num_frames", 4)
            size = size if isinstance(size, int) else size[0]
            yield "video", self.others() | {self.main: self.floats((BATCH, frames, 3, size, size))}
        if self.main == "pixel_values":
            for images in self.images():
                yield "image", rest | images
                yield "image", images

    def by_name(self, name: str) -> Any:
        """A guess by the name alone."""
        hidden = self.config.get("hidden_size", 32)
        if name == "pixel_values":
            return next(self.images())["pixel_values"]
        if name in ("input_ids", "decoder_input_ids", "labels") or name.endswith(("_ids", "_tokens", "codes")):
            return self.ids(LENGTH)
        if name == "bbox":
            return self.ints((BATCH, LENGTH, 4), 8).sort(-1).values
        if name.endswith("attention_mask") or name.endswith("_mask"):
            return torch.ones(BATCH, LENGTH, dtype=torch.long)
        return self.floats((BATCH, LENGTH, hidden if isinstance(hidden, int) else 32))


def _merged(config: Any) -> dict[str, Any]:
    """Fields of the configuration; what it lacks, from its parts for images and sound."""
    found = dict(vars(config))
    for part in ("vision_config", "audio_config", "encoder_config", "backbone_config", "text_config"):
        inner = getattr(config, part, None)
        if hasattr(inner, "to_dict"):
            found = {**{k: v for k, v in vars(inner).items() if v is not None}, **found}
    return found
