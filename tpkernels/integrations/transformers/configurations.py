"""Models of Hugging Face's transformers: made from a configuration alone, on the meta device.

Assumes that ``transformers`` is installed; nothing is downloaded for a local folder or file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["meta_model", "real_model"]


def meta_model(source: str) -> nn.Module:
    """The model that a configuration describes, without weights.

    Args:
        source: a ``config.json``, a folder with one, or a name that transformers resolves.

    Raises:
        ValueError: there is no such configuration, or transformers cannot make a model of it.
        ModuleNotFoundError: transformers is not installed.
    """
    with torch.device("meta"):
        return _build(source, None)


def real_model(source: str, *, layers: int | None = None) -> nn.Module:
    """The model that a configuration describes, as transformers initialises it; ``layers``: of each stack of blocks.

    Raises:
        ValueError, ModuleNotFoundError: as :func:`meta_model`; or the configuration does not count its layers.
    """
    return _build(source, layers)


COUNTS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")


def _build(source: str, layers: int | None) -> nn.Module:
    import transformers

    config = _config(transformers, source)
    if layers is not None and not _shorten(config, layers):
        raise ValueError(f"{source!r} has none of {COUNTS}: it cannot be built with {layers} layers")
    names = [name for name in config.architectures or [] if hasattr(transformers, name)]
    kind = getattr(transformers, names[0]) if names else transformers.AutoModel
    try:
        model: nn.Module = kind.from_config(config) if not names else kind._from_config(config)
    except ValueError as error:
        raise ValueError(f"transformers cannot make a model of {source!r}: {error}") from error
    return model


def _shorten(config: Any, layers: int) -> bool:
    """Fewer layers, in the configurations within this one, too; lists of one item per layer become as short."""
    shortened = False
    names = {getattr(config, "attribute_map", {}).get(name, name) for name in COUNTS}
    for name in sorted(names):
        before = getattr(config, name, None)
        if not isinstance(before, int) or isinstance(before, bool):
            continue
        shortened = True
        if before > layers:
            setattr(config, name, layers)
            for key, value in list(vars(config).items()):
                if isinstance(value, list) and len(value) == before:
                    setattr(config, key, value[:layers])
    inner = [value for value in vars(config).values() if hasattr(value, "to_dict") and hasattr(value, "model_type")]
    return any([_shorten(one, layers) for one in inner]) or shortened


def _config(transformers: Any, source: str) -> Any:
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        try:
            return transformers.AutoConfig.from_pretrained(source)
        except (OSError, ValueError) as error:
            why = str(error).splitlines()[0]
            raise ValueError(f"{source!r} is not a configuration file, a folder with one, or a model: {why}") from error
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
        return transformers.AutoConfig.for_model(**described)
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not a configuration that transformers understands: {error}") from error
