"""What every run of a model asks about tensors: which can have a gradient, their storage, those in a nested result,
those that an op writes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["can_require_grad", "storage_of", "tensors_in", "written_by"]


def can_require_grad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def tensors_in(value: Any, depth: int = 8) -> list[Tensor]:
    """All tensors of a nested result, dataclasses included, and of other objects the tensors that are attributes."""
    found: list[Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):
            found += tensors_in(list(leaf.values()), depth)
        elif is_dataclass(leaf) and not isinstance(leaf, type) and depth:  # one may refer to itself
            found += tensors_in([getattr(leaf, field.name, None) for field in fields(leaf)], depth - 1)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module):
            found += [item for item in vars(leaf).values() if isinstance(item, Tensor)]
    return found


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an op writes to."""
    named = zip(func._schema.arguments, args, strict=False)
    written = [value for argument, value in named if argument.alias_info is not None and argument.alias_info.is_write]
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in kwargs:
            written.append(kwargs[argument.name])
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]
