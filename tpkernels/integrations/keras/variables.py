"""Keras variables of which each rank holds a part: they take whole values, and give whole ones to NumPy.

It owns :class:`Shards`, what one model has cut.  A cut variable stays the same object, under a subclass of its class:

* ``value`` and ``shape`` are this rank's, so that layers compute and optimizers make slots on the part;
* ``assign`` takes the part, or a whole value, of which it keeps the part;
* ``numpy()`` and ``np.asarray`` give the whole.  They are collective: every rank calls them, in the same order.

While rank 0 writes a file (:meth:`Shards.served`), it alone reads, and the others answer it, one variable at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpkernels.comm.groups import Group, resolve
from tpkernels.integrations.keras import backend
from tpkernels.integrations.keras.cuts import Cut
from tpkernels.integrations.keras.stored import Stored
from tpkernels.ops import all_gather
from tpkernels.ops.mesh_exchange import broadcast

__all__ = ["Shards", "checked_only", "is_cut", "slice_of"]

_DONE, _FAILED = -1, -2


class Shards:
    """The cut variables of one model and its optimizer, in an order that is equal on all ranks."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self.pg = pg
        self.group: Group = resolve(pg)
        self.rank, self.world_size = self.group.rank, self.group.size
        self.variables: list[Any] = []
        self._serving = False

    def cut(self, variable: Any, cut: Cut) -> None:
        """Keep this rank's part of a whole variable."""
        value: Tensor = backend.raw_value(variable)
        part = cut.part(value.detach(), self.rank)
        local = nn.Parameter(part.contiguous().clone(), requires_grad=value.requires_grad)
        backend.put_value(variable, local)
        backend.off_meta(variable)
        self.adopt(variable, cut)

    def adopt(self, variable: Any, cut: Cut) -> None:
        """Take over a variable that has this rank's shape already."""
        kind: Any = type(variable)
        variable.__class__ = _subclass(kind)
        backend.bare(variable, "tensor_parallel_cut", cut)
        backend.bare(variable, "tensor_parallel_place", (self, len(self.variables)))
        self.variables.append(variable)

    # ------------------------------------------------------------------ whole values

    def whole(self, variable: Any) -> Tensor:
        """The whole value, on every rank that asks; on rank 0 alone while the others serve."""
        if self._serving:
            _, place = variable.tensor_parallel_place
            self._tell(place)
        return self._gather(variable)

    def _gather(self, variable: Any) -> Tensor:
        cut: Cut = variable.tensor_parallel_cut
        part: Tensor = backend.raw_value(variable).detach().contiguous()
        return cut.joined(all_gather(part, self.pg, dim=cut.dim, shard_sizes=cut.sizes))

    def set_weights(self, layer: Any, weights: Sequence[Any]) -> None:
        """Give a layer, or the model, whole weights, as ``get_weights`` gives them: this rank keeps its parts.

        Raises:
            ValueError: there are more or fewer than it has, or one has another shape; nothing has changed.
        """
        variables = layer.weights
        if len(variables) != len(weights):
            raise ValueError(f"set_weights got {len(weights)} arrays, and {layer.name!r} has {len(variables)} weights")
        for variable, value in zip(variables, weights, strict=True):
            shape = variable.tensor_parallel_cut.shape if is_cut(variable) else tuple(variable.shape)
            if tuple(value.shape) != tuple(shape):
                raise ValueError(f"{variable.path} has shape {tuple(shape)}, got {tuple(value.shape)}")
        for variable, value in zip(variables, weights, strict=True):
            variable.assign(value)

    @property
    def serving(self) -> bool:
        return self._serving

    def served(self, what: str, write: Callable[[], Any]) -> Any:
        """Run ``write`` on rank 0, which reads whole variables meanwhile; the other ranks send their parts.

        Raises:
            ValueError: on every rank, if it fails on rank 0.
        """
        if self.world_size == 1:
            return write()
        if self.rank:
            return self._answer(what)
        self._serving = True
        try:
            result = write()
        except BaseException as error:
            self._tell(_FAILED, f"{type(error).__name__}: {error}")
            raise
        finally:
            self._serving = False
        self._tell(_DONE)
        return result

    def _answer(self, what: str) -> None:
        while True:
            place, length = self._hear(2)
            if place == _DONE:
                return
            if place == _FAILED:
                text = bytes(self._hear(length)).decode() if length else ""
                raise ValueError(f"{what} failed on rank 0: {text}")
            self._gather(self.variables[place])

    def _tell(self, place: int, text: str = "") -> None:
        data = text.encode()
        self._send([place, len(data)])
        if data:
            self._send(list(data))

    def _send(self, numbers: list[int]) -> None:
        message = torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)
        broadcast([self.group], "which variable is written", message)

    def _hear(self, count: int) -> list[int]:
        message = torch.zeros(count, dtype=torch.int64).view(torch.uint8)
        broadcast([self.group], "which variable is written", message)
        return [int(number) for number in message.view(torch.int64)]

    @contextmanager
    def whole_shapes(self) -> Iterator[None]:
        """Inside, cut variables say the shape of the whole."""
        for variable in self.variables:
            backend.set_shape(variable, variable.tensor_parallel_cut.shape)
        try:
            yield
        finally:
            for variable in self.variables:
                backend.set_shape(variable, variable.tensor_parallel_cut.shape_on(self.rank))


@contextmanager
def checked_only(variables: Sequence[Any]) -> Iterator[None]:
    """Inside, ``assign`` reads what it would keep of the value and compares the shape, and changes nothing."""

    def check(variable: Any) -> Callable[[Any], Any]:
        def assign(value: Any) -> Any:
            cut = variable.tensor_parallel_cut if is_cut(variable) else None
            whole = cut.shape if cut else backend.plain_shape(variable)
            shape = value.shape if isinstance(value, Stored) else tuple(np.asarray(value).shape)
            own = isinstance(value, Tensor) and shape == backend.plain_shape(variable)  # zeros for LoRA, not of a file
            if shape != tuple(whole) and not own:
                raise ValueError(f"{variable.path} has shape {tuple(whole)}, and the value has {shape}")
            if isinstance(value, Stored):  # so that a file that is damaged there is noticed
                value.part(cut, variable.tensor_parallel_place[0].rank) if cut else np.asarray(value)
            return value

        return assign

    for variable in variables:
        backend.bare(variable, "assign", check(variable))
    try:
        yield
    finally:
        for variable in variables:
            object.__delattr__(variable, "assign")


def is_cut(variable: Any) -> bool:
    return hasattr(variable, "tensor_parallel_cut")


class _CutVariable:
    """What a cut variable does differently; see the module's docstring."""

    tensor_parallel_cut: Cut
    tensor_parallel_place: tuple[Shards, int]

    @property
    def value(self) -> Any:
        shards, _ = self.tensor_parallel_place
        return shards.whole(self) if shards.serving else super().value  # type: ignore[misc]

    def assign(self, value: Any) -> Any:
        cut = self.tensor_parallel_cut
        shards, _ = self.tensor_parallel_place
        if isinstance(value, Stored) and value.shape == cut.shape:
            value = value.part(cut, shards.rank)
        elif tuple(getattr(value, "shape", ())) == cut.shape != cut.shape_on(shards.rank):
            value = cut.part(backend.keras_module().ops.convert_to_tensor(value), shards.rank)
        return super().assign(value)  # type: ignore[misc]

    def __array__(self, dtype: Any = None) -> Any:
        shards, _ = self.tensor_parallel_place
        found = backend.keras_module().ops.convert_to_numpy(shards.whole(self))
        return found if dtype is None else found.astype(dtype)

    def numpy(self) -> Any:
        return self.__array__()


def slice_of(variable: Any, cut: Cut, shards: Shards) -> Any:
    """A variable of the same name and kind whose value is this rank's part of the memory of a whole one."""
    kind: Any = type(variable)
    found: Any = object.__new__(_subclass(kind))
    found.__dict__.update(vars(variable))
    backend.put_value(found, cut.part(backend.raw_value(variable).detach(), shards.rank))
    backend.bare(found, "tensor_parallel_cut", cut)
    backend.bare(found, "tensor_parallel_place", (shards, -1))
    return found


@lru_cache(maxsize=16)
def _subclass(kind: Any) -> type:
    """A class for cut variables of ``kind``; Keras sees the same name."""
    return type(kind.__name__, (_CutVariable, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
