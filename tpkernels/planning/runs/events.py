"""What the steps of a run are, in the form in which two runs are compared: ops, layers, and modules that are one step.

It owns :class:`Event`, with what stands in it: shapes in place of tensors, and which tensor each one was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = [
    "Event",
    "Mixture",
    "NotOpaque",
    "Opaque",
    "Shape",
    "Source",
    "TRANSPARENT",
    "as_given",
    "as_shapes",
    "canonical",
    "constant_of",
    "is_random",
]

aten = torch.ops.aten
TRANSPARENT = {aten.clone, aten.detach, aten.alias, aten.contiguous}
"""Copies: whether one is needed may depend on sizes, so they are no part of what must agree between two runs."""
_VIEWS = {aten._unsafe_view, aten.reshape, aten._reshape_alias}

Source = tuple[int, int, int] | int
"""Which tensor it is, in every run alike: the recording, event and output that made it, or the id of one given."""


@dataclass(frozen=True)
class Opaque:
    """The packet of an opaque module's call."""

    name: str


@dataclass(frozen=True)
class Mixture:
    """The packet of a call of experts, which take and give whole tensors."""

    name: str


class NotOpaque(Exception):
    """The opaque module ``name`` does more than take and give tensors."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} needs the values of tensors, and {why}")
        self.name = name


class Shape(tuple[int, ...]):
    """The shape of a tensor among arguments."""


@dataclass
class Event:
    """One step of a run: an op with its arguments, or (``layer``) the call of a layer."""

    packet: Any
    whole: list[Any]
    kwargs: dict[str, Any]
    outputs: list[Shape]
    layer: str | None = None
    sources: tuple[Source, ...] = ()
    """Of the tensors among the arguments."""
    constant: bytes | None = None
    """The numbers of a tensor that Python made (``torch.tensor(...)``)."""

    def anywhere(self) -> Event:
        """The event without the identity of its recording, for comparison with another one."""
        sources = tuple((0, *source[1:]) if isinstance(source, tuple) else source for source in self.sources)
        return replace(self, sources=sources)

    def of_any_size(self) -> Event:
        """The same without the sizes of tensors and the numbers that code makes of them."""
        kwargs = {key: _without_numbers(value) for key, value in self.kwargs.items()}
        constant = None if self.constant is None else b""
        outputs = [Shape([0] * len(shape)) for shape in self.outputs]
        return replace(
            self.anywhere(), whole=_without_numbers(self.whole), kwargs=kwargs, outputs=outputs, constant=constant
        )


def _without_numbers(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_numbers(item) for item in value]
    return 0 if isinstance(value, int | float) and not isinstance(value, bool) else value


def canonical(func: Any) -> Any:
    packet = func.overloadpacket
    return aten.view if packet in _VIEWS else packet


def as_shapes(value: Any) -> Any:
    """Arguments with tensors as :class:`Shape` and sequences as lists."""
    if isinstance(value, Tensor):
        return Shape(value.shape)
    if isinstance(value, list | tuple):
        return [as_shapes(item) for item in value]
    return value


def as_given(value: Any) -> Any:
    """What an opaque module is called with, so that two calls can be compared: shapes and dtypes, numbers, kinds."""
    if isinstance(value, Tensor):
        return (*value.shape, value.dtype)
    if isinstance(value, list | tuple):
        return (type(value).__qualname__, *map(as_given, value))
    if isinstance(value, Mapping):
        return tuple((key, as_given(item)) for key, item in value.items())
    if isinstance(value, bool | int | float | str | None | torch.dtype | torch.device):
        return value
    return type(value).__qualname__


def constant_of(func: Any, tensors: list[Tensor]) -> bytes | None:
    """The numbers of a real tensor that becomes part of the run; None for every other op."""
    if func.overloadpacket is not aten.lift_fresh or isinstance(tensors[0], FakeTensor):
        return None
    with torch.utils._python_dispatch._disable_current_modes():
        flat = tensors[0].detach().cpu().contiguous().flatten()
        return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""  # of which a view may be refused


def is_random(func: Any, args: Any) -> bool:
    """Whether the op draws random numbers; torch counts attention kernels even where they drop nothing."""
    attention = "scaled_dot_product" in func._schema.name
    drops = not attention or (len(args) > 3 and isinstance(args[3], float) and args[3] > 0)
    return torch.Tag.nondeterministic_seeded in func.tags and drops
