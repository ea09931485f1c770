"""The model that a command line names: a configuration of transformers, or a function that returns a model.

``tpkernels plan`` and ``tpkernels verify`` take the same names.  :func:`source` refuses a wrong one while the command
line is parsed; :func:`meta_model` and :func:`real_model` make the model.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tpkernels.packages import needed

__all__ = ["HELP", "meta_model", "real_model", "source"]

HELP = (
    "a config.json, a folder with one, a name on the Hugging Face hub, or package.module:function for a function that "
    "returns a model"
)
_HUB_TIMEOUT_S = 5.0


def source(text: str) -> str:
    """The argument type of a model's name.  It looks, and builds nothing."""
    if _is_function(text):
        _function(text)
        return text
    path = Path(text)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ArgumentTypeError(f"the folder {text} has no config.json")
    elif not path.is_file():
        if path.suffix or text.startswith((".", "/")) or text.count("/") > 1:
            raise ArgumentTypeError(f"there is no file {text}; give {HELP}")
        _check_hub(text)
    return text


def meta_model(name: str) -> nn.Module:
    """The model without weights, on the meta device."""
    if _is_function(name):
        with torch.device("meta"):
            return _checked(name, _made(name))
    from tpkernels.integrations import transformers

    return transformers.meta_model(name)


def real_model(name: str, layers: int | None) -> tuple[nn.Module, object]:
    """The model with random weights, and inputs if the function returns a pair; ``layers``: of each stack of blocks.

    Raises:
        ValueError: ``layers`` for a function; a function that returns something else.
    """
    if not _is_function(name):
        from tpkernels.integrations import transformers
        from tpkernels.verification.model_copies import randomise_

        model = transformers.real_model(name, layers=layers)
        randomise_(model)
        return model, None
    if layers is not None:
        raise ValueError("--layers is for configurations of transformers")
    made = _made(name)
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    return _checked(name, model), inputs


def _is_function(name: str) -> bool:
    module, separator, _ = name.partition(":")
    return bool(separator) and "/" not in module


def _function(name: str) -> Callable[[], Any]:
    module, _, function = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as python -m does: a module in the current directory
    try:
        found = getattr(importlib.import_module(module), function, None) if module else None
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise  # the module is there, and lacks something itself
        raise ArgumentTypeError(
            f"there is no module {module!r}: it is looked for in this folder and among the installed packages"
        ) from None
    if not callable(found):
        raise ArgumentTypeError(f"module {module!r} has no function {function!r}; write package.module:function")
    return found  # type: ignore[no-any-return]


def _made(name: str) -> Any:
    """What the function returns; it is called without arguments."""
    function = _function(name)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(
            f"{name} is called without arguments: {error}; name a function that takes none and returns a model"
        ) from None
    except ValueError:
        pass  # written in C, it has no signature
    return function()


def _checked(name: str, model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def _check_hub(name: str) -> None:
    """A name that is neither a file nor a folder is in the hub's cache, or on the hub; transformers itself retries."""
    with needed("transformers", "a model that is named by its configuration"):
        import huggingface_hub as hub
    if isinstance(hub.try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        hub.model_info(name, timeout=_HUB_TIMEOUT_S)
    except (hub.errors.RepositoryNotFoundError, hub.errors.HFValidationError):
        raise ArgumentTypeError(f"there is no file, no folder and no public model {name!r}; give {HELP}") from None
    except Exception as error:  # noqa: BLE001 - whatever the network does, the sentence is the same
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ArgumentTypeError(
            f"there is no file and no folder {name!r}, and the Hugging Face hub cannot be asked ({why}); give a "
            "config.json, a folder with one, or package.module:function"
        ) from None
