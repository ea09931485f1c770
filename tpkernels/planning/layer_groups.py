"""Which layers belong together: groups found in the data flow of a recording.

It owns the graph walk.  Every layer has two faces: what goes in and what comes out.  An output face and all the input
faces that it reaches without passing through another layer form a group: the outputs may be cut by features (column) if
the inputs are (row), and nothing else sees them.  The replay proves whether the ops between allow it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tpkernels.planning.session import Node
from tpkernels.planning.trace import Recording

__all__ = ["Group", "find_groups"]


@dataclass(frozen=True)
class Group:
    """Layers whose output may be cut, and the layers that take it; in the order of their calls."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    random: bool
    """Dropout, or another random op, runs on what is cut."""
    feeders: tuple[str, ...] = ()
    """Layers that stay whole and give to the columns and to what is cut; their output's gradient is summed."""
    summed: tuple[str, ...] = ()
    """Rows that give what they sum to columns or to what is cut; so is the gradient of that."""

    @property
    def layers(self) -> tuple[str, ...]:
        return (*self.columns, *self.rows, *self.feeders)


def find_groups(recording: Recording, *, convolutions: bool = False) -> list[Group]:
    """All groups that could be cut, smallest first, and by order of calls.

    ``convolutions``: those over all channels count as layers, and groups without one, or with inner layers, do not.
    """
    order = {event.layer: index for index, event in reversed(list(enumerate(recording.events))) if event.layer}
    sources: dict[str, set[str]] = {}
    closed: dict[str, bool] = {}
    random: dict[str, bool] = {}
    inputs_of = dict(recording.layer_inputs)
    if convolutions:
        inputs_of |= recording.convolution_inputs
        order |= {call.name: index for index, call in reversed(list(recording.channel_calls.items()))}
    for layer, inputs in inputs_of.items():
        sources[layer], closed[layer], random[layer] = _walk_back(recording, inputs, convolutions)
    seen_outside, _, _ = _walk_back(recording, recording.outputs, convolutions)
    groups = []
    for component in _components(sources):
        columns, rows = component
        if convolutions and (columns & rows or not recording.convolution_inputs.keys() & (columns | rows)):
            continue
        for columns, rows, feeders, summed in _ways(sources, *component):
            sound = columns and rows and not columns & rows and not columns & seen_outside
            if sound and all(closed[row] for row in rows):
                noisy = any(random[row] for row in rows)
                ordered = [tuple(sorted(some, key=order.__getitem__)) for some in (columns, rows, feeders, summed)]
                groups.append(Group(ordered[0], ordered[1], noisy, ordered[2], ordered[3]))
    return sorted(groups, key=lambda group: (len(group.columns) + len(group.rows), order[group.columns[0]]))


_Way = tuple[set[str], set[str], set[str], set[str]]
"""Columns, rows, feeders, and the rows that give to parts."""


def _ways(sources: dict[str, set[str]], columns: set[str], rows: set[str]) -> Iterator[_Way]:
    """How a component might be cut, where some of its layers are inner ones, which read from others of it.

    What they read from may stay whole: latent attention has a layer whose output goes into the projection of keys and
    values, and beside it, as the part of the keys that all heads share.  Or they are rows themselves: what selects the
    states of Mamba is made of all channels, and used on each.  Further inner layers that read from these are columns.
    """
    inner = columns & rows
    feeders = {layer for name in inner for layer in sources[name]}
    if not inner or feeders & rows:
        yield columns, rows, set(), set()
    else:
        yield columns - feeders, rows - inner, feeders, set()
    summed = {name for name in inner if sources[name] <= columns - inner}
    fed = inner - summed
    if summed and all(sources[name] <= summed for name in fed):
        yield (columns - inner) | fed, rows - fed, set(), summed


def _walk_back(recording: Recording, start: list[int], convolutions: bool) -> tuple[set[str], bool, bool]:
    """Layers whose outputs reach nodes ``start``; whether nothing else does that may want a gradient, an input of the
    model or the result of an opaque module; whether random ops are between.

    ``convolutions``: those over all channels count as layers.
    """
    layers: set[str] = set()
    random = False
    seen, todo = set(start), list(start)
    while todo:
        node = recording.nodes[todo.pop()]
        layer = _layer_of(node, convolutions)
        if layer is not None:
            layers.add(layer)
            continue
        random |= node.random
        fresh = [index for index in node.inputs if index not in seen]
        seen.update(fresh)
        todo += fresh
    return layers, _is_closed(recording, start, convolutions), random


def _layer_of(node: Node, convolutions: bool) -> str | None:
    return node.layer or (node.convolution if convolutions else None)


def _is_closed(recording: Recording, start: list[int], convolutions: bool) -> bool:
    """A mask that is a comparison of an input may come along, the input itself may not."""
    seen, todo = set(start), list(start)
    while todo:
        node = recording.nodes[todo.pop()]
        if _layer_of(node, convolutions) is not None or node.severed:
            continue
        if node.is_input or node.opaque:
            return False
        fresh = [index for index in node.inputs if index not in seen]
        seen.update(fresh)
        todo += fresh
    return True


def _components(sources: dict[str, set[str]]) -> list[tuple[set[str], set[str]]]:
    """Connected components of output faces and input faces."""
    readers: dict[str, set[str]] = defaultdict(set)
    for row, columns in sources.items():
        for column in columns:
            readers[column].add(row)
    found, done = [], set[str]()
    for row in sources:
        if row in done or not sources[row]:
            continue
        columns, rows, todo = set[str](), {row}, [row]
        while todo:
            for column in sources[todo.pop()] - columns:
                columns.add(column)
                fresh = readers[column] - rows
                rows |= fresh
                todo += fresh
        done |= rows
        found.append((columns, rows))
    return found
