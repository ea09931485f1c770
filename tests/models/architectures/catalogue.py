"""Which architectures the installed transformers has, and which class stands for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.models.architectures.special import CLASSES, CONFIGS, PARTS, VARIANTS

__all__ = ["PREFERENCE", "Architecture", "architectures", "config_class"]

PREFERENCE = (
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "CAUSAL_LM",
    "CTC",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "OBJECT_DETECTION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "AUDIO_CLASSIFICATION",
    "TIME_SERIES_PREDICTION",
    "TEXT_TO_SPECTROGRAM",
    "TEXT_TO_WAVEFORM",
    "UNIVERSAL_SEGMENTATION",
    "KEYPOINT_DETECTION",
    "KEYPOINT_MATCHING",
    "IMAGE_TO_IMAGE",
    "MASK_GENERATION",
    "RNNT",
    "TDT",
)
"""The head that is taken, the first of these that the architecture has; without one, the model alone."""


@dataclass(frozen=True)
class Architecture:
    """A ``model_type``, or a variant of it, and the class in ``transformers`` that is built; empty without one."""

    name: str
    kind: str
    head: str
    model_type: str
    options: Mapping[str, Any]
    """Fields of the configuration."""
    part: str = ""
    """The field of the configuration that the class is made from; empty for all of it."""


@cache
def architectures() -> dict[str, Architecture]:
    """All of them by ``model_type``, in the order of transformers' own list."""
    from transformers.models.auto import configuration_auto, modeling_auto

    mappings: dict[str, Any] = {
        head: getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES", {}) for head in PREFERENCE
    }
    mappings["MODEL"] = modeling_auto.MODEL_MAPPING_NAMES
    mappings["BACKBONE"] = modeling_auto.MODEL_FOR_BACKBONE_MAPPING_NAMES
    found = {}
    for name in configuration_auto.CONFIG_MAPPING_NAMES:
        kinds = ((head, mapping[name]) for head, mapping in mappings.items() if name in mapping)
        head, kind = next(kinds, ("", ""))
        kind = CLASSES.get(name) or (kind if isinstance(kind, str) else kind[0])
        found[name] = Architecture(name, kind, head, name, CONFIGS.get(name, {}))
        for other, (base, options) in VARIANTS.items():
            if base == name:
                found[other] = Architecture(other, kind, head, name, {**CONFIGS.get(name, {}), **options})
        for other, (base, part, kind) in PARTS.items():
            if base == name:
                found[other] = Architecture(other, kind, "", name, CONFIGS.get(name, {}), part)
    return found


def config_class(name: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[name]
