"""Objects that keep parts between the calls of a model: key-value caches.

The next call needs this rank's parts, while a user who reads ``cache.layers[0].keys`` must not take them for all heads.
The object therefore gets a class of its own.  While a model runs, and in the object's own methods (``reorder_cache``,
...), its attributes are the parts.  To all other code they are DTensors of the whole shape, whose ``full_tensor()``
gathers; reading one raises an error with its name if a DTensor cannot describe how it is cut.  Code outside may assign
such a DTensor, a whole tensor, or this rank's part.  Of a dict of such parts it sees a view that cannot be written to.

The technique is that of :mod:`tpkernels.nn.replicated`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import getattr_static, isfunction
from itertools import takewhile
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from tpkernels.partition import chunk_sizes, offsets
from tpkernels.planning.splits import Split

__all__ = [
    "Kept", "attribute_of", "enter", "guard", "keep_in_modules", "kept_attributes", "kept_by", "leave", "misfits",
]  # fmt: skip

_ATTRIBUTE = "_tpkernels_kept"


class _Depth(threading.local):
    value = 0


_depth = _Depth()
"""How many models, and methods of objects that keep parts, this thread is in."""


def enter() -> None:
    """Note that a model runs, so that objects show their parts."""
    _depth.value += 1


def leave() -> None:
    """Note that the model has returned."""
    _depth.value -= 1


def _is_inside() -> bool:
    return torch.compiler.is_compiling() or _depth.value > 0


@contextmanager
def _inside() -> Iterator[None]:
    enter()
    try:
        yield
    finally:
        leave()


@dataclass(frozen=True)
class Kept:
    """How the attributes of an object are cut over ``mesh``: dimension and whole size; this rank's runs, of which ranks
    have a part each; or None where no rule knows."""

    mesh: DeviceMesh
    cuts: Mapping[str, tuple[int, int] | Split | None]

    def __deepcopy__(self, memo: Any) -> Kept:
        return self

    def whole(self, owner: str, name: str, part: Any) -> Any:
        """What a reader from outside gets for ``part``."""
        if type(part) is dict and isinstance(self.cuts[name], tuple):  # what is written to a copy would be lost
            return MappingProxyType({key: self.whole(owner, name, one) for key, one in part.items()})
        if not any(isinstance(leaf, Tensor) and leaf.numel() for leaf in tree_leaves(part)):
            return part  # nothing was kept yet
        cut = self.cuts[name]
        if not isinstance(cut, tuple) or not isinstance(part, Tensor):
            why = "no rule knows how it is cut" if cut is None else "no DTensor describes parts of several runs"
            raise RuntimeError(
                f"{owner}.{name} holds this rank's part of a tensor, and {why}: you can pass it back to the model, but "
                "not read it"
            )
        dim, total = cut
        shape = torch.Size((*part.shape[:dim], total, *part.shape[dim + 1 :]))
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(part, self.mesh, [Shard(dim)], run_check=False, shape=shape, stride=strides)

    def part(self, name: str, value: Any) -> Any:
        """What the model is to find for a ``value`` that is assigned from outside."""
        cut = self.cuts[name]
        if isinstance(value, dict | MappingProxyType) and isinstance(cut, tuple):
            return {key: self.part(name, one) for key, one in value.items()}
        if not isinstance(cut, tuple) or not isinstance(value, Tensor) or not value.numel():
            return value
        dim, total = cut
        if isinstance(value, DTensor):
            return value.redistribute(self.mesh, [Shard(dim)]).to_local()
        if value.dim() <= dim or value.shape[dim] != total:
            return value
        sizes, rank = chunk_sizes(total, self.mesh.size()), self.mesh.get_local_rank()
        return value.narrow(dim, offsets(sizes)[rank], sizes[rank])


def kept_by(holder: Any) -> Kept | None:
    """How the attributes of an object that :func:`guard` has seen are cut."""
    return cast("Kept | None", vars(holder).get(_ATTRIBUTE))


def guard(holder: Any, kept: Kept) -> None:
    """Hide the parts that ``holder`` keeps from all code but models and its own methods."""
    before = kept_by(holder)
    if before is not None and (before.cuts == kept.cuts or before.cuts.keys() >= kept.cuts.keys()):
        return
    if before is not None:
        kept = Kept(kept.mesh, {**before.cuts, **kept.cuts})
    holder.__dict__[_ATTRIBUTE] = kept
    cls: Any = type(holder)
    holder.__class__ = _guarded(getattr(cls, "_unguarded", cls), tuple(sorted(kept.cuts)))


def keep_in_modules(kept: Mapping[str, tuple[int, int]], modules: Mapping[str, nn.Module], mesh: DeviceMesh) -> None:
    """Let modules keep parts as attributes ``kept`` (``block.state``) from now on: dimension, and whole size.

    Of a whole tensor that a module has kept of an earlier call its rank takes its part.
    """
    for key, cut in kept.items():
        owner, _, attribute = key.rpartition(".")
        module = modules[owner]
        guard(module, Kept(mesh, {attribute: cut}))
        if attribute in vars(module):
            setattr(module, attribute, vars(module)[attribute])


def kept_attributes(module: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Parts that a module keeps now, and the dimension that is cut; those of a dict as ``name['key']``."""
    kept, found = kept_by(module), dict[str, tuple[Tensor, int]]()
    for name, cut in {} if kept is None else kept.cuts.items():
        value = vars(module).get(name)
        held = {f"{name}[{key!r}]": one for key, one in value.items()} if type(value) is dict else {name: value}
        if isinstance(cut, tuple):
            found |= {key: (one, cut[0]) for key, one in held.items() if isinstance(one, Tensor)}
    return found


def attribute_of(name: str) -> str:
    """The attribute that a name of :func:`kept_attributes` is of."""
    return name.partition("[")[0]


def misfits(module: nn.Module) -> dict[str, str]:
    """Attributes that do not hold this rank's part now, as the plan says: what they hold, and what they should."""
    found: dict[str, str] = {}
    for name, (tensor, dim) in kept_attributes(module).items():
        kept = cast(Kept, kept_by(module))
        total: Any = kept.cuts[attribute_of(name)]
        size = chunk_sizes(total[1], kept.mesh.size())[kept.mesh.get_local_rank()]
        if tensor.numel() and (tensor.dim() <= dim or tensor.shape[dim] != size):
            found[name] = f"{list(tensor.shape)}, which is not this rank's {size} of {total[1]} along dimension {dim}"
    return found


@functools.lru_cache(maxsize=256)
def _guarded(cls: type, names: tuple[str, ...]) -> type:
    """A subclass of ``cls`` whose attributes ``names`` depend on who reads them."""
    members: dict[str, Any] = {
        name: _method(getattr(cls, name))
        for name in {key for one in takewhile(lambda one: one is not nn.Module, cls.__mro__) for key in vars(one)}
        if isfunction(getattr_static(cls, name)) and not name.startswith("__")
    }
    members |= {name: _property(name) for name in names}
    members |= {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
    if hasattr(cls, "_layer_type"):  # transformers registers subclasses of its cache layers that have one
        members["_layer_type"] = None
    return type(cls.__name__, (cls,), members | {"_unguarded": cls})


def _method(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_inside():
            return method(self, *args, **kwargs)
        with _inside():
            return method(self, *args, **kwargs)

    return run


def _property(name: str) -> property:
    def read(self: Any) -> Any:
        if name not in self.__dict__:
            return getattr(type(self)._unguarded, name)  # a default of its class
        value = self.__dict__[name]
        if _is_inside():
            return value
        return self.__dict__[_ATTRIBUTE].whole(type(self).__name__, name, value)

    def write(self: Any, value: Any) -> None:
        self.__dict__[name] = value if _is_inside() else self.__dict__[_ATTRIBUTE].part(name, value)

    def delete(self: Any) -> None:
        if name not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        del self.__dict__[name]

    return property(read, write, delete)
