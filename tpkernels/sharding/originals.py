"""The tensors of the model that was parallelized, in terms of those that a rank holds now.

Owns: original names and shapes, what they are made of, and where a rank's part lies in them.  A parameter that was cut
is a DTensor of the original shape.  One that was packed (query, key and value in one) has become several, which its
module tells by ``packed_parameters()``.  Tied names stay tied: the first is the tensor's, the others are its aliases.

Assumes that all ranks hold the same model, cut alike.  Refuses models that were not parallelized, and state that is no
tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

__all__ = [
    "Box",
    "Original",
    "Part",
    "box_of",
    "check_real",
    "local_of",
    "meshes_of",
    "originals_of",
    "unique",
    "whole_of",
]


@dataclass(frozen=True)
class Box:
    """A rank's part of a tensor: where it begins in each dimension, and how long it is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True)
class Part:
    """A tensor of the parallel model, and where it begins in the original along the original's ``dim``."""

    tensor: Tensor
    start: int


@dataclass(frozen=True)
class Original:
    """A tensor under the name and with the shape that it had before the model was parallelized."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    """The dimension along which the parts follow each other."""
    parts: tuple[Part, ...]
    aliases: tuple[str, ...] = ()
    """Other names of the same tensor."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.aliases

    def box(self, part: Part, tensor: Tensor | None = None) -> Box:
        """Where this rank's share of ``part`` (or of a ``tensor`` of its shape, such as its momentum) lies."""
        box = box_of(part.tensor if tensor is None else tensor)
        if len(self.parts) == 1:
            return box
        offsets = list(box.offsets)
        offsets[self.dim] += part.start
        return Box(tuple(offsets), box.sizes)


def originals_of(model: nn.Module) -> dict[str, Original]:
    """The tensors of ``model.state_dict()`` as they were before :func:`parallelize`, by all names and in its order.

    Raises:
        ValueError: the model was not parallelized, or keeps state that is no tensor.
    """
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            f"the {type(model).__name__} is not parallelized: call tpk.parallelize first, or use the model's own "
            "state_dict() and load_state_dict()"
        )
    held = model.state_dict(keep_vars=True)
    strange = [name for name, value in held.items() if not isinstance(value, Tensor)]
    if strange:
        raise ValueError(f"the model keeps state that is no tensor: {strange}")
    packed, inner = _packed(model)
    names: dict[tuple[int, ...], list[str]] = {}
    parts: dict[tuple[int, ...], tuple[int, list[Tensor]]] = {}
    for key in held:
        name = inner.get(key, key)
        dim, keys = packed.get(name, (0, (key,)))
        if key == keys[0]:
            tensors = [cast(Tensor, held[one]) for one in keys]
            identity = tuple(id(tensor) for tensor in tensors)
            names.setdefault(identity, []).append(name)
            parts[identity] = dim, tensors
    made = {identity: _original(names[identity], *parts[identity]) for identity in names}
    by_name = {name: original for original in made.values() for name in original.names}
    order = dict.fromkeys(inner.get(key, key) for key in held)
    return {name: by_name[name] for name in order}


def check_real(originals: Mapping[str, Original]) -> None:
    """Refuse a model on the meta device."""
    empty = [one.name for one in unique(originals) if any(part.tensor.is_meta for part in one.parts)]
    if empty:
        raise ValueError(f"the model is on the meta device ({', '.join(empty[:3])}, ...): load it first")


def unique(originals: Mapping[str, Original]) -> list[Original]:
    """Each tensor once, whatever number of names it has."""
    return [original for name, original in originals.items() if name == original.name]


def _original(names: list[str], dim: int, tensors: list[Tensor]) -> Original:
    shape, starts = list(tensors[0].shape), [0]
    if len(tensors) > 1:
        for tensor in tensors:
            starts.append(starts[-1] + tensor.shape[dim])
        shape[dim] = starts[-1]
    parts = tuple(Part(tensor, start) for tensor, start in zip(tensors, starts, strict=False))
    return Original(names[0], tuple(shape), tensors[0].dtype, dim, parts, tuple(names[1:]))


def _packed(model: nn.Module) -> tuple[dict[str, tuple[int, tuple[str, ...]]], dict[str, str]]:
    """Packed originals: dimension and the keys that make them up; and the original that such a key belongs to."""
    packed: dict[str, tuple[int, tuple[str, ...]]] = {}
    inner: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        tell = getattr(module, "packed_parameters", None)
        prefix = f"{path}." if path else ""
        for name, (dim, keys) in (tell() if callable(tell) else {}).items():
            packed[prefix + name] = dim, tuple(prefix + key for key in keys)
            inner |= {prefix + key: prefix + name for key in keys}
    return packed, inner


def box_of(tensor: Tensor) -> Box:
    """Where this rank's local tensor lies in ``tensor``."""
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    (chunk,) = tensor.__create_chunk_list__()
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``, without a place in a graph; writing to it changes ``tensor``."""
    return cast(DTensor, tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor.detach()


def whole_of(tensors: list[Tensor], dim: int) -> Tensor:
    """The original that these tensors make up, gathered from all ranks: a copy, equal everywhere."""
    wholes = [
        cast(DTensor, tensor.detach()).full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
        for tensor in tensors
    ]
    if len(wholes) > 1:
        return torch.cat(wholes, dim)
    # The only rank of a mesh, or one of replicas, gets its very tensor.
    return wholes[0].clone() if isinstance(tensors[0], DTensor) else wholes[0]


def meshes_of(model: nn.Module) -> list[DeviceMesh]:
    """The meshes that parameters live on, in the model's order."""
    meshes: list[DeviceMesh] = []
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh not in meshes:
            meshes.append(parameter.device_mesh)
    return meshes
