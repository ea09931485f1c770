"""What the manifest of a snapshot may say.

A manifest whose digest is right may still come from another program: whatever does not fit is a ``ValueError`` before
anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tpkernels.nn.digests import MODULUS

__all__ = ["check_manifest", "check_option"]


def check_manifest(body: Mapping[str, Any]) -> None:
    """Check the kinds of all values, and that names in one part are in the other.

    Raises:
        ValueError: names the first value that does not fit.
    """
    _want("the manifest", body, {"tensors", "optimizer", "extra"} <= body.keys(), "tensors, optimizer and extra")
    tensors, optimizer = body["tensors"], body["optimizer"]
    _want("tensors", tensors, isinstance(tensors, dict), "an object")
    for key, entry in tensors.items():
        _check_tensor(key, entry)
    names = {key.removeprefix("model.") for key, entry in tensors.items() if "slot" not in entry}
    for key, entry in tensors.items():
        _want(f"'of' of {key}", entry.get("of"), "slot" not in entry or entry["of"] in names, "the name of a tensor")
    if optimizer is not None:
        _check_optimizer(optimizer, names)


def _check_tensor(key: str, entry: Any) -> None:
    _want(key, entry, isinstance(entry, dict) and {"shape", "dtype", "digest"} <= entry.keys(), "shape, dtype, digest")
    shape, digest = entry["shape"], entry["digest"]
    sizes = isinstance(shape, list) and all(_is_int(size) and 0 <= size < 2**63 for size in shape)
    _want(f"the shape of {key}", shape, sizes, "a list of sizes")
    _want(f"the dtype of {key}", entry["dtype"], _is_dtype(entry["dtype"]), "the name of a dtype")
    _want(f"the digest of {key}", digest, _is_int(digest) and 0 <= digest < MODULUS, "a digest")
    if "slot" in entry:
        _want(f"the slot of {key}", entry["slot"], isinstance(entry["slot"], str), "a name")
        _want(f"'of' of {key}", entry.get("of"), isinstance(entry.get("of"), str), "a name")


def _check_optimizer(optimizer: Any, names: set[str]) -> None:
    parts = isinstance(optimizer, dict) and {"kind", "groups", "values"} <= optimizer.keys()
    _want("optimizer", optimizer, parts, "kind, groups and values")
    groups, values = optimizer["groups"], optimizer["values"]
    _want("the optimizer's kind", optimizer["kind"], isinstance(optimizer["kind"], str), "a name")
    _want("the optimizer's groups", groups, isinstance(groups, list), "a list")
    for index, group in enumerate(groups):
        params = group.get("params") if isinstance(group, dict) else None
        known = isinstance(params, list) and all(isinstance(name, str) and name in names for name in params)
        _want(f"the parameters of group {index}", params, known, "names of tensors")
        for key, value in group.items():
            if key != "params":
                _check_value(f"option {key!r} of group {index}", value)
    _want("the optimizer's values", values, isinstance(values, dict) and values.keys() <= names, "values by name")
    for name, held in values.items():
        _want(f"the values of {name}", held, isinstance(held, dict), "an object")
        for slot, value in held.items():
            _check_value(f"{slot} of {name}", value)


def _check_value(what: str, value: Any) -> None:
    """A plain value, or a tensor of one element: see :func:`tpkernels.state.optimizer_state.plain`."""
    if isinstance(value, list):
        for item in value:
            _check_value(what, item)
    elif isinstance(value, dict):
        fits = value.keys() == {"tensor", "dtype"} and _is_dtype(value["dtype"]) and _is_number(value["tensor"])
        _want(what, value, fits, "a tensor of one element")


def check_option(what: str, now: Any, saved: Any) -> None:
    """An option of an optimizer has the kind of value that it had when the optimizer was made; None fits any.

    Raises:
        ValueError: it has not.
    """
    if now is None or saved is None:
        return
    if isinstance(now, tuple | list):
        fits = isinstance(saved, list) and len(saved) == len(now)
        _want(what, saved, fits, f"a list of {len(now)}")
        for one, other in zip(now, saved, strict=True):
            check_option(what, one, other)
    elif isinstance(now, bool | str):
        _want(what, saved, type(saved) is type(now), type(now).__name__)
    else:
        _want(what, saved, isinstance(saved, dict) or (_is_number(saved) and not isinstance(saved, bool)), "a number")


def _is_number(value: Any) -> bool:
    """Also of a tensor of one element, which may be a truth value; no integer that torch could not hold."""
    return isinstance(value, bool | float) or (_is_int(value) and -(2**63) <= value < 2**63)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_dtype(name: Any) -> bool:
    return isinstance(name, str) and isinstance(getattr(torch, name, None), torch.dtype)


def _want(what: str, value: Any, fits: bool, expected: str) -> None:
    if not fits:
        raise ValueError(f"{what} must be {expected} in a snapshot's manifest, got {str(value)[:80]!r}")
