"""The tensors of the model that was parallelized, in terms of those that a rank holds now.

It owns original names and shapes, what they are made of, and where a rank's part lies in them.  A parameter that was
cut is a DTensor of the original shape.  One that was packed (query, key and value in one) has become several, which its
module names in ``packed_parameters()``.  One that is cut by heads that do not divide has a dimension for the heads,
which its module names in ``parameters_by_unit()``, and perhaps places for more heads than there are.  Tied names stay
tied: the first is the tensor's name, the others are its aliases.

It assumes that all ranks hold the same model, cut alike.  It refuses models that were not parallelized, and state that
is not a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpkernels.nn.cut_experts import CutExperts
from tpkernels.nn.embedding import VocabParallelEmbedding
from tpkernels.nn.gathering import gathered, pieces_of
from tpkernels.nn.parallel_linear import ParallelLinear

__all__ = [
    "Box",
    "Original",
    "Part",
    "as_held",
    "box_of",
    "check_real",
    "holds_as_held",
    "is_held_otherwise",
    "keys_of",
    "local_of",
    "meshes_of",
    "originals_of",
    "unique",
]

_AS_HELD: ContextVar[bool] = ContextVar("as_held", default=False)
_Units = tuple[int | None, tuple[int, ...]]
"""``units`` and ``held`` of a :class:`Part`."""
_NONE: _Units = None, ()
_CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module."
"""Is part of the names of modules, and by torch's own hooks not of the names of state."""


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
    units: int | None = None
    """The dimension of the original for which the tensor has two, units and what is in them."""
    held: tuple[int, ...] = ()
    """How many units there are in each of so many runs of places, where there are more places: the first of a run."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape, with the original's dimensions."""
        shape = list(self.tensor.shape)
        if self.units is not None and self.held:
            shape[self.units] = sum(self.held)
        return self._merged(shape)

    @property
    def box(self) -> Box:
        """Where this rank's share lies in a tensor of ``shape``."""
        box = box_of(self.tensor)
        if self.units is None:
            return box
        unit = self.tensor.shape[self.units + 1]
        assert box.sizes[self.units + 1] == unit, "units are cut"
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[self.units], sizes[self.units] = self._units_in(offsets[self.units], sizes[self.units])
        offsets[self.units] *= unit
        del offsets[self.units + 1]
        return Box(tuple(offsets), self._merged(sizes))

    def _units_in(self, start: int, places: int) -> tuple[int, int]:
        """The first unit in ``places`` from ``start`` on, and how many are there."""
        if not self.held or not places:
            return start, places
        return self._units_before(start), self._units_before(start + places) - self._units_before(start)

    def _units_before(self, place: int) -> int:
        run, within = divmod(place, self._room)
        return sum(self.held[:run]) + (min(within, self.held[run]) if within else 0)

    @property
    def _room(self) -> int:
        """Places of a run."""
        assert self.units is not None
        return self.tensor.shape[self.units] // len(self.held)

    def _occupied(self, start: int, places: int) -> list[slice]:
        """Which of the ``places`` from ``start`` on hold units, by runs."""
        found = []
        for run in range(start // self._room, -(-(start + places) // self._room)):
            first = run * self._room
            low, high = max(start, first), min(start + places, first + self.held[run])
            if low < high:
                found.append(slice(low - start, high - start))
        return found

    @property
    def local(self) -> Tensor:
        """This rank's share, with the original's dimensions."""
        mine = local_of(self.tensor)
        if self.units is not None and self.held:
            start, places = box_of(self.tensor).offsets[self.units], mine.shape[self.units]
            mine = self._units_of(mine, start, places)
        return mine.reshape(self._merged(mine.shape))

    def placed(self, values: Tensor) -> Tensor:
        """``values`` for this rank's share, with the tensor's dimensions; zeros in places without a unit."""
        shape = local_of(self.tensor).shape
        if self.units is None or not self.held:
            return values.view(shape)
        units, dim = values.shape[self.units] // shape[self.units + 1], self.units
        values, made = values.unflatten(dim, (units, shape[dim + 1])), values.new_zeros(shape)
        first = 0
        for run in self._occupied(box_of(self.tensor).offsets[dim], shape[dim]):
            count = run.stop - run.start
            made.narrow(dim, run.start, count).copy_(values.narrow(dim, first, count))
            first += count
        return made

    def _units_of(self, held: Tensor, start: int, places: int) -> Tensor:
        """The units in ``held``, which has ``places`` from ``start`` on."""
        assert self.units is not None
        runs = [held.narrow(self.units, run.start, run.stop - run.start) for run in self._occupied(start, places)]
        if len(runs) == 1:
            return runs[0]
        return torch.cat(runs, self.units) if runs else held.narrow(self.units, 0, 0)

    def whole(self) -> Tensor:
        """A tensor of ``shape``, gathered from all ranks; on the only rank of a mesh it may be the very tensor."""
        whole = gathered(self.tensor)
        if self.units is not None and self.held:
            whole = self._units_of(whole, 0, whole.shape[self.units])
        return whole.reshape(self.shape)

    def _merged(self, sizes: Sequence[int]) -> tuple[int, ...]:
        if self.units is None:
            return tuple(sizes)
        return (*sizes[: self.units], sizes[self.units] * sizes[self.units + 1], *sizes[self.units + 2 :])


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

    @property
    def is_held_whole(self) -> bool:
        """Whether one tensor of the parallel model has its shape: a DTensor, or one that is not cut."""
        return len(self.parts) == 1 and self.parts[0].units is None

    def box(self, part: Part) -> Box:
        """Where this rank's share of ``part`` lies."""
        box = part.box
        if len(self.parts) == 1:
            return box
        offsets = list(box.offsets)
        offsets[self.dim] += part.start
        return Box(tuple(offsets), box.sizes)

    def whole(self) -> Tensor:
        """The original, gathered from all ranks: a copy, equal everywhere."""
        wholes = [part.whole() for part in self.parts]
        return torch.cat(wholes, self.dim) if len(wholes) > 1 else wholes[0].clone()


@contextmanager
def as_held() -> Iterator[None]:
    """Within it, ``state_dict`` and ``load_state_dict`` of modules use the tensors that they hold, locally."""
    token = _AS_HELD.set(True)
    try:
        yield
    finally:
        _AS_HELD.reset(token)


def holds_as_held() -> bool:
    """Whether the caller is within :func:`as_held`."""
    return _AS_HELD.get()


def originals_of(model: nn.Module) -> dict[str, Original]:
    """The tensors of the unsharded ``model.state_dict()``, by all names and in its order.

    Raises:
        ValueError: the model was not parallelized, or keeps state that is no tensor.
    """
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            f"the {type(model).__name__} is not parallelized: call tpk.parallelize first, or use the model's own "
            "state_dict() and load_state_dict()"
        )
    held = _held(model)
    strange = [name for name, value in held.items() if not isinstance(value, Tensor)]
    if strange:
        raise ValueError(f"the model keeps state that is not a tensor: {strange}")
    return _originals(model, held)


def keys_of(module: nn.Module) -> tuple[dict[str, Original], dict[str, tuple[str, ...]], list[str]]:
    """The originals of any module, the names of the tensors that hold each, and the names of state that is no tensor.

    All names are those of the module's own ``load_state_dict``.
    """
    held = _held(module)
    packed, inner, _ = _packed(module)
    keys = {
        name: packed[name][1] if name in packed else (name,)
        for name in dict.fromkeys(inner.get(key, key) for key, value in held.items() if isinstance(value, Tensor))
    }
    return _originals(module, held), keys, [key for key, value in held.items() if not isinstance(value, Tensor)]


def is_held_otherwise(module: nn.Module) -> bool:
    """Whether a rank holds other tensors than the originals' own parts, or by other names."""
    originals, keys, _ = keys_of(module)
    return any(not one.is_held_whole or keys[name] != (name,) for name, one in originals.items())


def _held(model: nn.Module) -> dict[str, Any]:
    with as_held():
        return model.state_dict(keep_vars=True)


def _originals(model: nn.Module, held: Mapping[str, Any]) -> dict[str, Original]:
    held = {key: value for key, value in held.items() if isinstance(value, Tensor)}
    packed, inner, units = _packed(model)
    names: dict[tuple[int, ...], list[str]] = {}
    parts: dict[tuple[int, ...], tuple[int, list[tuple[Tensor, _Units]]]] = {}
    for key in held:
        name = inner.get(key, key)
        dim, keys = packed.get(name, (0, (key,)))
        if key == keys[0]:
            tensors = [held[one] for one in keys]
            identity = tuple(id(tensor) for tensor in tensors)
            names.setdefault(identity, []).append(name)
            parts[identity] = dim, [(tensor, units.get(one, _NONE)) for tensor, one in zip(tensors, keys, strict=True)]
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


def _original(names: list[str], dim: int, tensors: list[tuple[Tensor, _Units]]) -> Original:
    parts: list[Part] = []
    start = 0
    for tensor, (units, held) in tensors:
        parts.append(Part(tensor, start, units, held))
        start += parts[-1].shape[dim] if len(tensors) > 1 else 0
    shape = list(parts[0].shape)
    if len(parts) > 1:
        shape[dim] = start
    return Original(names[0], tuple(shape), tensors[0][0].dtype, dim, tuple(parts), tuple(names[1:]))


def _packed(model: nn.Module) -> tuple[dict[str, tuple[int, tuple[str, ...]]], dict[str, str], dict[str, _Units]]:
    """Packed originals: dimension and the keys that make them up; the original that such a key belongs to; and which
    keys have a dimension for units, with those of each rank where there are more places."""
    packed: dict[str, tuple[int, tuple[str, ...]]] = {}
    inner: dict[str, str] = {}
    units: dict[str, _Units] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        tell = getattr(module, "packed_parameters", None)
        prefix = (f"{path}." if path else "").replace(_CHECKPOINT_WRAPPER, "")
        if isinstance(module, ParallelLinear | VocabParallelEmbedding | CutExperts):
            held = module.units_held() if not isinstance(module, CutExperts) and module.has_free_places else ()
            units |= {prefix + name: (dim, held) for name, dim in module.parameters_by_unit().items()}
        for name, (dim, keys) in (tell() if callable(tell) else {}).items():
            packed[prefix + name] = dim, tuple(prefix + key for key in keys)
            inner |= {prefix + key: prefix + name for key in keys}
    return packed, inner, units


def box_of(tensor: Tensor) -> Box:
    """Where this rank's local tensor lies in ``tensor``.

    Raises:
        ValueError: in several places.
    """
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    if pieces_of(tensor) is not None:
        raise ValueError(
            f"this rank's part of a tensor {tuple(tensor.shape)} is several pieces of it ({tensor.placements}), "
            "as of gate and up in one weight: use tpk.parallelize or prepare()"
        )
    (chunk,) = tensor.__create_chunk_list__()
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``, without a place in a graph; writing to it changes ``tensor``."""
    return cast(DTensor, tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor.detach()


def meshes_of(model: nn.Module) -> list[DeviceMesh]:
    """The meshes that parameters live on, in the model's order."""
    meshes: list[DeviceMesh] = []
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh not in meshes:
            meshes.append(parameter.device_mesh)
    return meshes
