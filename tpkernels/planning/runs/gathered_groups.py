"""Groups of layers one of which gives to a module besides, which takes all of that: the rest may still be cut.

It owns the guess.  The values of FunASR's attention go to the heads, and into a convolution whose result is added to
the residual, so that the layers would be one group with all others along the stream.  Where the module is called with
what the layer gives, ranks can gather that for it (:mod:`tpkernels.nn.gathered_arguments`), and what it makes of it is
whole.  Modules that differ only in their place in the model are guessed at once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from tpkernels.nn.sliced_arguments import named_arguments
from tpkernels.planning.runs.layer_groups import SMALL_GROUP, Group, find_groups
from tpkernels.planning.runs.trace import Recording

__all__ = ["find_gathered_groups"]


@dataclass
class _Doors:
    """Arguments that one kind of module would take as a whole."""

    edges: set[tuple[int, int]] = field(default_factory=set)
    """Steps in such modules, and the node of what a layer gives that each of them takes."""
    arguments: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """By layer: modules that are called with what it gives, and the name of the argument."""


def find_gathered_groups(recording: Recording) -> list[Group]:
    """Groups that could be cut if such arguments are gathered, smallest first."""
    found: dict[Group, None] = {}
    for doors in _doors(recording):
        for group in find_groups(recording, without=frozenset(doors.edges)):
            given = tuple((*door, name) for name in group.columns for door in doors.arguments.get(name, ()))
            if given and group.size <= SMALL_GROUP and not group.given:
                found[replace(group, gathered=tuple(dict.fromkeys(given)))] = None
    return sorted(found, key=lambda group: group.size)


def _doors(recording: Recording) -> list[_Doors]:
    layers, takers = recording.shadow.layers, defaultdict[int, list[int]](list)
    for number, node in enumerate(recording.nodes):
        for index in node.inputs:
            takers[index].append(number)
    found: dict[Any, _Doors] = {}
    for scope in recording.scopes:
        if scope.name in layers:
            continue
        module, inside = recording.shadow.modules[scope.name], range(*scope.nodes)
        for argument, x in named_arguments(module, scope.args, scope.kwargs).items():
            place = recording.node_of(x) if isinstance(x, Tensor) else None
            layer = None if place is None else recording.nodes[place].layer
            if place is None or layer is None or layer not in layers or layers[layer].kind == "embedding":
                continue
            edges = {(number, place) for number in takers[place] if number in inside}
            if not edges or len(edges) == len(takers[place]):  # all that is made of it is made there
                continue
            doors = found.setdefault((type(module), argument, re.sub(r"\d+", "*", scope.name)), _Doors())
            doors.edges |= edges
            doors.arguments.setdefault(layer, []).append((scope.name, argument))
    return list(found.values())
