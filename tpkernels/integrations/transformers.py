"""Models of Hugging Face's transformers: made from a configuration alone, on the meta device.

Assumes that ``transformers`` is installed; nothing is downloaded for a local folder or file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["meta_model"]


def meta_model(source: str) -> nn.Module:
    """The model that a configuration describes, without weights.

    Args:
        source: a ``config.json``, a folder with one, or a name that transformers resolves.

    Raises:
        ValueError: there is no such configuration, or transformers cannot make a model of it.
        ModuleNotFoundError: transformers is not installed.
    """
    import transformers

    config = _config(transformers, source)
    names = [name for name in config.architectures or [] if hasattr(transformers, name)]
    kind = getattr(transformers, names[0]) if names else transformers.AutoModel
    with torch.device("meta"):
        try:
            model: nn.Module = kind.from_config(config) if not names else kind._from_config(config)
        except ValueError as error:
            raise ValueError(f"transformers cannot make a model of {source!r}: {error}") from error
    return model


def _config(transformers: Any, source: str) -> Any:
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        try:
            return transformers.AutoConfig.from_pretrained(source)
        except (OSError, ValueError) as error:
            why = str(error).splitlines()[0]
            raise ValueError(f"{source!r} is no configuration file, no folder with one, and no model: {why}") from error
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
        return transformers.AutoConfig.for_model(**described)
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is no configuration that transformers understands: {error}") from error
