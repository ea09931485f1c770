"""Which layers belong together: groups found in the data flow of a recording.

It owns the graph walk.  Every layer has two faces: what goes in and what comes out.  An output face and all the input
faces that it reaches without passing through another layer form a group: the outputs may be cut by features (column) if
the inputs are (row), and nothing else sees them.  The replay proves whether the ops between allow it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

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

    @property
    def layers(self) -> tuple[str, ...]:
        return (*self.columns, *self.rows, *self.feeders)


def find_groups(recording: Recording) -> list[Group]:
    """All groups that could be cut, smallest first, and by order of calls."""
    order = {event.layer: index for index, event in reversed(list(enumerate(recording.events))) if event.layer}
    sources: dict[str, set[str]] = {}
    closed: dict[str, bool] = {}
    random: dict[str, bool] = {}
    for layer, inputs in recording.layer_inputs.items():
        sources[layer], closed[layer], random[layer] = _walk_back(recording, inputs)
    seen_outside, _, _ = _walk_back(recording, recording.outputs)
    groups = []
    for columns, rows, feeders in map(_without_feeders(sources), _components(sources)):
        sound = columns and rows and not columns & rows and not columns & seen_outside
        if sound and all(closed[row] for row in rows):
            noisy = any(random[row] for row in rows)
            ordered = [tuple(sorted(some, key=order.__getitem__)) for some in (columns, rows, feeders)]
            groups.append(Group(ordered[0], ordered[1], noisy, ordered[2]))
    return sorted(groups, key=lambda group: (len(group.columns) + len(group.rows), order[group.columns[0]]))


def _without_feeders(
    sources: dict[str, set[str]],
) -> Callable[[tuple[set[str], set[str]]], tuple[set[str], set[str], set[str]]]:
    """Take out of a component what feeds its columns: latent attention has a layer whose output goes into the
    projection of keys and values, and beside it, as the part of the keys that all heads share."""

    def taken(component: tuple[set[str], set[str]]) -> tuple[set[str], set[str], set[str]]:
        columns, rows = component
        inner = columns & rows
        feeders = {layer for name in inner for layer in sources[name]}
        if not inner or feeders & rows:
            return columns, rows, set[str]()
        return columns - feeders, rows - inner, feeders

    return taken


def _walk_back(recording: Recording, start: list[int]) -> tuple[set[str], bool, bool]:
    """Layers whose outputs reach nodes ``start``; whether no model input does; whether random ops are between."""
    layers: set[str] = set()
    closed, random = True, False
    seen, todo = set(start), list(start)
    while todo:
        node = recording.nodes[todo.pop()]
        if node.layer is not None:
            layers.add(node.layer)
            continue
        closed &= not (node.is_input or node.opaque)
        random |= node.random
        fresh = [index for index in node.inputs if index not in seen]
        seen.update(fresh)
        todo += fresh
    return layers, closed, random


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
