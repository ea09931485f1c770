"""Groups of layers within a module, which is called with something else that meets what they cut.

It owns the guess.  Where a deformable attention samples, the places that are asked about meet the offsets of all heads,
and go whole into other layers besides (LW-DETR): the layers would be one group with everything that takes them, and the
gradient of the places incomplete on every rank.  Where the module is called with them, ranks can sum their gradient
there (:mod:`tpkernels.nn.summed_arguments`), so that all that is outside of the module sees whole tensors.  Or they can
take their heads' part there (:mod:`tpkernels.nn.sliced_arguments`), as of keys and values that another model has made,
which a dict holds for all layers (the assistant of Gemma 4).

A row and its columns are looked for in the innermost module that calls them, and nothing else may go into that row but
what the columns give, and arguments of this module.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from tpkernels.nn.sliced_arguments import named_arguments
from tpkernels.planning.modules.layers import Layer
from tpkernels.planning.runs.layer_groups import SMALL_GROUP, Group, find_groups
from tpkernels.planning.runs.session import Scope
from tpkernels.planning.runs.trace import Recording

__all__ = ["find_argument_groups"]

_Edges = set[tuple[int, int]]


@dataclass
class _Doors:
    """Where arguments of modules meet what layers in them give."""

    edges: _Edges = field(default_factory=set)
    """Steps in such modules, and the node of an argument that each of them takes."""
    arguments: dict[str, dict[tuple[str, str], None]] = field(default_factory=dict)
    """By row: modules that it is called in, and the names of arguments that go into it."""
    shapes: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    """Of these arguments."""


def find_argument_groups(recording: Recording, used: Container[str]) -> list[Group]:
    """Groups of layers that are not ``used`` and could be cut if the gradients of such arguments are summed, or if
    modules take a part of them."""
    doors = _doors(recording, used)
    found = []
    for group in find_groups(recording, without=frozenset(doors.edges)) if doors.edges else ():
        met = {door: None for row in group.rows for door in doors.arguments.get(row, ())}
        if met and group.size <= SMALL_GROUP and not group.given and not any(name in used for name in group.layers):
            found.append(replace(group, summed_arguments=tuple(met)))
            found += _taking_parts(found[-1], doors.shapes, [recording.shadow.layers[name] for name in group.columns])
    return found


def _taking_parts(group: Group, shapes: Mapping[tuple[str, str], tuple[int, ...]], columns: list[Layer]) -> list[Group]:
    """The same where arguments are cut in a dimension that all of them have alike, of which features are made."""
    met = group.summed_arguments
    places = dict.fromkeys(place for door in met for place in enumerate(shapes[door]))
    found = []
    for dim, size in places:
        if size > 1 and all(layer.out_features % size == 0 for layer in columns):
            taken = [door for door in met if (dim, size) in enumerate(shapes[door])]
            summed = tuple(door for door in met if door not in taken)
            cut = tuple((*door, dim, size) for door in taken)
            found.append(replace(group, summed_arguments=summed, taken_arguments=cut))
    return found


def _doors(recording: Recording, used: Container[str]) -> _Doors:
    layers, doors = recording.shadow.layers, _Doors()
    calls: dict[str, list[Scope]] = {}
    for scope in recording.scopes:
        if scope.name not in layers:
            calls.setdefault(scope.name, []).append(scope)
    for number, node in enumerate(recording.nodes):
        name = node.layer
        if name is None or name in used or name not in layers or layers[name].kind == "embedding":
            continue
        for scope in _calls_around(name, number, calls):
            columns, edges = _within(recording, number, range(*scope.nodes))
            if columns:
                arguments, shapes = _arguments(recording, scope)
                if edges and all(place in arguments for _, place in edges):
                    doors.edges |= edges
                    given = {(scope.name, arguments[place]): None for _, place in sorted(edges)}
                    doors.arguments.setdefault(name, {}).update(given)
                    doors.shapes |= {(scope.name, argument): shape for argument, shape in shapes.items()}
                break
    return doors


def _calls_around(name: str, number: int, calls: dict[str, list[Scope]]) -> Iterator[Scope]:
    """The calls of modules around a layer in which node ``number`` was made, the innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield from (scope for scope in calls.get(name, ()) if number in range(*scope.nodes))


def _within(recording: Recording, row: int, inside: range) -> tuple[set[str], _Edges]:
    """The layers in a call that give to ``row`` without another layer between, and by which edges of the graph
    anything else does that the call has not made."""
    columns, edges, seen, todo = set[str](), _Edges(), {row}, [row]
    while todo:
        number = todo.pop()
        node = recording.nodes[number]
        if node.severed:
            continue
        if number != row and node.layer is not None:
            columns.add(node.layer)
            continue
        edges |= {(number, index) for index in node.inputs if index not in inside}
        fresh = {index for index in node.inputs if index in inside} - seen
        seen |= fresh
        todo += fresh
    return columns, edges


def _arguments(recording: Recording, scope: Scope) -> tuple[dict[int, str], dict[str, tuple[int, ...]]]:
    """Names of a call's arguments by the nodes that made them; and their shapes, by name."""
    given = named_arguments(recording.shadow.modules[scope.name], scope.args, scope.kwargs)
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    places = {name: recording.node_of(x) for name, x in tensors.items()}
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    return {place: name for name, place in places.items() if place is not None}, shapes
