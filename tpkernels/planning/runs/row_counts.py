"""How many rows every layer sees in a recorded run, and which layers need a gradient, for the bytes of a plan.

Of convolutions it counts elements: those of the input, and of these the ones that somebody wants the gradient of, and
those of the output.
Means and spreads over features that are cut belong to no layer, and are counted in bytes.

A recording does not treat torch's ``MultiheadAttention`` as a layer.  Its rows are read from the arguments of its call:
those of the queries for its output, those of every distinct input for the sum of gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from tpkernels.nn.convolution import own_code
from tpkernels.nn.sliced_arguments import named_arguments
from tpkernels.planning.runs.events import Event
from tpkernels.planning.runs.session import Scope
from tpkernels.planning.runs.trace import Recording

__all__ = [
    "Elements",
    "bytes_given",
    "bytes_of_products",
    "bytes_of_statistics",
    "count_rows",
    "elements_in",
    "untrained_in",
]


class Elements(NamedTuple):
    """How many go into a convolution and come out of it, over all its calls."""

    wanted: int
    """Of the input, of whose calls somebody wants the gradient;"""
    given: int
    taken: int
    """of the input of all calls."""


def count_rows(recordings: Sequence[Recording]) -> dict[str, int | None]:
    """Rows that go into each layer, over all its calls; None where that depends on the values of tensors.

    Of several examples the first that calls the layer counts.
    """
    found: dict[str, int | None] = {}
    for recording in reversed(recordings):
        found |= _rows_of(recording)
    return found


def _rows_of(recording: Recording) -> dict[str, int | None]:
    rows: dict[str, int | None] = dict(recording.layer_rows)
    for scope in recording.scopes:
        if not isinstance(recording.shadow.modules[scope.name], nn.MultiheadAttention):
            continue
        query, *others = _inputs(scope.args, scope.kwargs)
        inner = f"{scope.name}.out_proj" if scope.name else "out_proj"
        rows[inner] = (rows.get(inner) or 0) + _rows(query)
        distinct = {id(x): _rows(x) for x in (query, *others) if not recording.is_input(x)}
        rows[scope.name] = (rows.get(scope.name) or 0) + sum(distinct.values())
    for call in recording.norm_calls.values():
        known = recording.shadow.norms.get(call.name)
        own = prod(call.shape[:-1]) if known is None else known.rows_in(call.shape)
        rows[call.name] = (rows.get(call.name) or 0) + own
    return rows | dict.fromkeys(recording.rows_unknown)


def untrained_in(recordings: Sequence[Recording]) -> frozenset[str]:
    """Layers that read nothing but the model's own inputs."""
    only: dict[str, bool] = {}
    for recording in recordings:
        for name, nodes in recording.layer_inputs.items():
            alone = bool(nodes) and all(recording.nodes[node].is_input for node in nodes)
            only[name] = only.get(name, True) and alone
    return frozenset(name for name, alone in only.items() if alone)


def bytes_of_statistics(
    recordings: Sequence[Recording],
    statistics: Mapping[str, tuple[int, tuple[int, ...]]],
    maxima: Collection[str],
    world_size: int,
) -> int:
    """What one rank sends for sums, means and spreads over features that are cut, and for largest elements of what is,
    forward and backward, over all calls.

    Of several examples the first that takes one in a module counts.
    """
    found: dict[str, int] = {}
    for recording in reversed(recordings):
        one: dict[str, int] = {}
        for call in recording.statistics.values():
            x, numbers = call.statistic.x, 2 if call.statistic.summed else 2 * world_size
            if call.module in statistics and x.shape[-1] == statistics[call.module][0]:
                item = 8 if (call.statistic.dtype or x.dtype) == torch.float64 else 4
                sent = 2 * numbers * item * _rows(x) * (world_size - 1) // world_size
                one[call.module] = one.get(call.module, 0) + sent
        for largest in recording.maxima.values():
            if largest.module in maxima:
                ways, item = 2 if largest.trained else 1, 8 if largest.dtype == torch.float64 else 4
                one[largest.module] = one.get(largest.module, 0) + ways * 2 * item * (world_size - 1)
        found |= one
    return sum(found.values())


def bytes_of_products(recordings: Sequence[Recording], dims: Mapping[str, int], world_size: int) -> int:
    """What one rank sends for products with parameters that are cut, by name along dimensions, over all calls: the
    gradient of x, where somebody wants it, or the result.

    Of several examples the first that multiplies by one counts.
    """
    found: dict[str, int] = {}
    for recording in reversed(recordings):
        one: dict[str, int] = {}
        for call in recording.product_calls.values():
            place = call.product.place(dims[call.name]) if call.name in dims else None
            if place is not None:
                numbers = prod(call.shape) if place[0] else call.product.x.numel() * call.trained
                sent = 2 * numbers * call.dtype.itemsize * (world_size - 1) // world_size
                one[call.name] = one.get(call.name, 0) + sent
        found |= one
    return sum(found.values())


def bytes_given(recordings: Sequence[Recording], arguments: Container[str], *, trained: bool = False) -> int:
    """Of arguments of modules, by module and name, over all calls; of several examples the first that calls a module
    counts.  ``trained``: of those alone whose gradient somebody wants."""
    found: dict[str, int] = {}
    for recording in reversed(recordings):
        one: dict[str, int] = {}
        for scope in recording.scopes:
            given = named_arguments(recording.shadow.modules[scope.name], scope.args, scope.kwargs)
            for name, x in given.items():
                key = f"{scope.name}.{name}" if scope.name else name
                if key in arguments and isinstance(x, Tensor) and (not trained or x in recording.requiring):
                    one[key] = one.get(key, 0) + x.numel() * x.element_size()
        found |= one
    return sum(found.values())


def elements_in(recordings: Sequence[Recording]) -> dict[str, Elements]:
    """For each convolution, over all its calls; of several examples the first that calls it counts."""
    found: dict[str, Elements] = {}
    for recording in reversed(recordings):
        one: dict[str, Elements] = {}
        for scope in recording.scopes:
            module = recording.shadow.modules[scope.name]
            if isinstance(module, _ConvNd):
                events = recording.events[scope.start : scope.stop]
                calls = [event for event in events if event.packet is torch.ops.aten.convolution]
                gives = sum(prod(event.outputs[0]) for event in calls)
                before, takes = one.get(scope.name, Elements(0, 0, 0)), _taken(module, scope, calls)
                one[scope.name] = Elements(
                    before.wanted + takes * scope.trained, before.given + gives, before.taken + takes
                )
        found |= one
    return found


def _taken(module: _ConvNd, scope: Scope, calls: Sequence[Event]) -> int:
    """Elements of the input; of a convolution within code of its own, of what that gives it."""
    if own_code(module) is not None:
        return sum(prod(event.whole[0]) for event in calls)
    x: Tensor = scope.args[0] if scope.args else scope.kwargs["input"]
    return x.numel()


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
    return [named[name] for name in ("query", "key", "value")]


def _rows(x: Tensor) -> int:
    return x.numel() // max(1, x.shape[-1])
