"""Which layers belong together: groups found in the data flow of a recording.

It owns the graph walk.  Every layer has two faces: what goes in and what comes out.  An output face and all the input
faces that it reaches without passing through another layer form a group: the outputs may be cut by features (column) if
the inputs are (row), and nothing else sees them.  The replay proves whether the ops between allow it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from tpkernels.planning.modules.layers import Layer
from tpkernels.planning.runs.session import Node
from tpkernels.planning.runs.trace import Recording

__all__ = ["SMALL_GROUP", "Component", "Edges", "Group", "components", "find_groups"]

Edges = Set[tuple[int, int]]
"""Nodes of a recording's graph, each with one of its inputs."""
_RESULT = "result "
"""What the results of the model are called among the rows of a component: no module's name has a space."""
SMALL_GROUP = 8
"""Layers; larger groups are residual streams, which nobody expects to be cut by features."""


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
    tables: tuple[str, ...] = ()
    """Tables that stay whole and give to what is cut; the gradients of their weights are summed."""
    scattered: tuple[str, ...] = ()
    """Rows that are columns as well: ranks scatter the sum, each of them takes its features of it."""
    results: tuple[int, ...] = ()
    """What the model returns of it, which is gathered: numbers of :attr:`Recording.returned`."""
    gathered: tuple[tuple[str, str, str], ...] = ()
    """Modules that take all of what a column gives: the module, its argument, and the column."""
    summed_arguments: tuple[tuple[str, str], ...] = ()
    """Arguments that are whole and meet parts within their modules, where their gradients are summed: module, name."""
    taken_arguments: tuple[tuple[str, str, int, int], ...] = ()
    """Arguments that are whole, of which their modules take a part: module, name, the dimension and its size."""
    multiplied: tuple[str, ...] = ()
    """In place of columns: parameters of one module, by whose parts its code multiplies;"""
    summing: tuple[str, ...] = ()
    """and in place of rows: those whose products are summed."""

    @property
    def layers(self) -> tuple[str, ...]:
        return (*self.columns, *self.rows, *self.feeders, *self.tables)

    @property
    def given(self) -> tuple[str, ...]:
        """Layers that give something whole to what is cut."""
        return (*self.feeders, *self.summed, *self.tables)

    @property
    def size(self) -> int:
        """How many layers are cut."""
        return len(self.columns) + len(self.rows) - len(self.scattered)


@dataclass(frozen=True)
class Component:
    """Layers that give to one another: everything that one of ``rows`` takes from layers is of ``columns``."""

    columns: frozenset[str]
    rows: frozenset[str]
    seen_outside: frozenset[str]
    """Columns of which results of the model are made, or what goes into an opaque module."""
    open: frozenset[str]
    """Rows that take something else as well: an input of the model, or what an opaque module gives."""
    noisy: frozenset[str]
    """Rows before which random ops run."""
    sources: dict[str, set[str]]
    """Of each row: the columns that it takes."""
    results: frozenset[int] = frozenset()
    """What the model returns of it, where that counts: numbers of :attr:`Recording.returned`,"""
    asked: bool = False
    """and whether an opaque module takes any of it, or random ops run before a result of convolutions."""


def find_groups(
    recording: Recording,
    *,
    convolutions: Set[str] = frozenset(),
    without: Edges = frozenset(),
    results: bool = False,
    filled: bool = False,
) -> list[Group]:
    """All groups that could be cut, smallest first, and by order of calls; behind them those of which less is cut.

    ``convolutions``: those that count as layers, and may be columns and rows of one group; groups without one do not
    count.  ``without``: edges of the graph that give whole tensors, whatever is cut.  ``results``: whether groups may
    give to what the model returns, as those with convolutions may.  ``filled``: what is written to views of a tensor
    belongs with that (:attr:`Graph.filled`); it may be whole and written to parts, as well.
    """
    order = {event.layer: index for index, event in reversed(list(enumerate(recording.events))) if event.layer}
    if convolutions:
        order |= {call.name: index for index, call in reversed(list(recording.channel_calls.items()))}
    layers = recording.shadow.layers
    tables = {name for name, layer in layers.items() if layer.kind == "embedding"}
    groups: list[Group] = []
    fed: list[Group] = []
    for one in components(recording, convolutions=convolutions, without=without, results=results, filled=filled):
        first = _channel_ways(one, convolutions) if convolutions else _ways(one)
        less = () if convolutions or results else (
            *_fed_ways(one, tables), *_ways_beside(one, tables, layers), *_scattered_ways(one, layers)
        )  # fmt: skip
        for found, ways in ((groups, first), (fed, less)):
            for way in ways:
                apart = way.columns & way.rows <= convolutions | way.scattered
                left_open = one.asked if one.results else bool(way.columns & one.seen_outside)
                closed = not left_open and not way.rows & one.open
                if way.columns and way.rows and apart and closed:
                    columns, rows, *others = (tuple(sorted(some, key=order.__getitem__)) for some in way)
                    feeders, summed, given, scattered = others
                    found.append(
                        Group(
                            columns, rows, bool(way.rows & one.noisy), feeders, summed, given, scattered,
                            tuple(sorted(one.results)),
                        )
                    )  # fmt: skip

    def place(group: Group) -> tuple[int, int]:
        return group.size, order[group.columns[0]]

    return sorted(groups, key=place) + sorted(fed, key=place)


def joined_groups(groups: Sequence[Group], convolutions: Container[str]) -> list[Group]:
    """Those that share convolutions, each the end of one and the beginning of another, as one: where blocks take the
    channels of a stream apart by a number of the stream's own, only both can be cut (WaveNet)."""
    found: list[Group] = []
    left = [group for group in groups if not group.results and all(name in convolutions for name in group.layers)]
    while left:
        joined, names = [left.pop(0)], set[str]()
        while names != (names := {name for one in joined for name in one.layers}):
            joined += [one for one in left if {*one.layers} & names]
            left = [one for one in left if one not in joined]
        columns = tuple(name for one in joined for name in one.columns)
        rows = tuple(name for one in joined for name in one.rows)
        if len(joined) > 1:
            found.append(Group(columns, rows, any(one.random for one in joined)))
    return found


def components(
    recording: Recording,
    *,
    convolutions: Set[str] = frozenset(),
    without: Edges = frozenset(),
    results: bool = False,
    filled: bool = False,
) -> list[Component]:
    """All layers that take something from others, with these; ``convolutions`` and the others as above."""
    without = without if filled else without | recording.filled
    beside = {name: inputs for name, inputs in recording.convolution_inputs.items() if name in convolutions}
    taken = recording.layer_inputs | beside
    walks = {
        layer: _walk_back(recording, inputs, convolutions, without)
        for layer, inputs in (taken | _left_of(recording, without)).items()
    }
    sources = {layer: found for layer, (found, _, _) in walks.items()}
    outside, _, _ = _walk_back(recording, recording.outputs, convolutions, without)
    asked, _, _ = _walk_back(recording, recording.into_opaque, convolutions, without)
    leaving = recording.returned if convolutions or results else []
    returned = [_walk_back(recording, [node], convolutions, without) for node, _ in leaving]
    ends = {f"{_RESULT}{number}": found for number, (found, _, _) in enumerate(returned)}
    found = []
    for columns, readers in _components(sources | ends):
        rows = readers - ends.keys()
        given = frozenset(int(one.removeprefix(_RESULT)) for one in readers & ends.keys())
        drawn = any(returned[number][2] for number in given) and not results
        found.append(
            Component(
                frozenset(columns), frozenset(rows), frozenset(columns & outside),
                frozenset(row for row in rows if not walks[row][1]), frozenset(row for row in rows if walks[row][2]),
                {row: sources[row] for row in rows},
                given, bool(columns & asked) or drawn,
            )
        )  # fmt: skip
    return found


class _Way(NamedTuple):
    """The layers of a group by what they are in it, in the order of its fields."""

    columns: Set[str]
    rows: Set[str]
    feeders: Set[str] = frozenset()
    summed: Set[str] = frozenset()
    tables: Set[str] = frozenset()
    scattered: Set[str] = frozenset()


def _ways(one: Component) -> Iterator[_Way]:
    """How a component might be cut, where some of its layers are inner ones, which read from others of it.

    What they read from may stay whole: latent attention has a layer whose output goes into the projection of keys and
    values, and beside it, as the part of the keys that all heads share.  Or they are rows themselves: what selects the
    states of Mamba is made of all channels, and used on each.  Further inner layers that read from these are columns.
    """
    columns, rows, sources = set(one.columns), set(one.rows), one.sources
    inner = columns & rows
    feeders = {layer for name in inner for layer in sources[name]}
    if not inner or feeders & rows:
        yield _Way(columns, rows)
    else:
        yield _Way(columns - feeders, rows - inner, feeders)
    summed = {name for name in inner if sources[name] <= columns - inner}
    fed = inner - summed
    if summed and all(sources[name] <= summed for name in fed):
        yield _Way((columns - inner) | fed, rows - fed, summed=summed)


def _channel_ways(one: Component, convolutions: Set[str]) -> Iterator[_Way]:
    """A component with a convolution, in which inner layers take parts and give them: convolutions can, and in a
    component of few layers linear ones (:func:`_scattered_ways`), such as what makes kernels of the queries (ConvBERT).
    """
    inner, every = one.columns & one.rows, one.columns | one.rows
    linear = inner - convolutions
    if every & convolutions and (
        not linear or (len(every) <= SMALL_GROUP and inner < one.columns and inner < one.rows)
    ):
        yield _Way(one.columns, one.rows, scattered=linear)


def _fed_ways(one: Component, tables: Set[str]) -> Iterator[_Way]:
    """A component that falls apart into blocks without the columns that all of its rows take, and these as feeders:
    one layer before many blocks, such as what BROS makes of the places of words for the scores of all heads.

    Tables cannot be feeders: one that is cut by vocabulary sums its output, not the gradient of that.
    """
    shared = set[str].intersection(*one.sources.values()) - tables
    if shared and _blocks_without(one, shared) > 1:
        yield _Way(one.columns - shared, one.rows, shared)


def _scattered_ways(one: Component, layers: Mapping[str, Layer]) -> Iterator[_Way]:
    """A component of few layers whose inner ones take parts and give them: of the values of all heads Doge makes
    numbers for each head, which its scores take."""
    inner, every = one.columns & one.rows, one.columns | one.rows
    linear = all(name in layers and layers[name].kind != "embedding" for name in every)  # neither tables nor experts
    if inner and linear and len(every) <= SMALL_GROUP and inner < one.columns and inner < one.rows:
        yield _Way(one.columns, one.rows, scattered=inner)


def _ways_beside(one: Component, tables: Set[str], layers: Mapping[str, Layer]) -> Iterator[_Way]:
    """A component without its tables, which stay whole: all heads read the same rows of relative positions, as long as
    one head (Conformers, RoFormer).  A stream of many layers, to which word embeddings give, is not cut for that: rows
    as long as the stream are larger than what would be cut, and shorter ones could not be cut with the heads anyway."""
    given = one.columns & tables
    columns, blocks = one.columns - given, _blocks_without(one, given)
    few = len(columns | one.rows) <= SMALL_GROUP
    if given and columns and blocks > (not few):
        shortest = min(layers[name].out_features for name in columns)
        long = {name for name in given if layers[name].out_features >= shortest}
        if _numbers_in(long, layers) < _numbers_in(columns, layers):
            yield _Way(columns, one.rows, tables=given)


def _numbers_in(names: Set[str], layers: Mapping[str, Layer]) -> int:
    """How many numbers the weights of these layers have."""
    return sum(layers[name].in_features * layers[name].out_features for name in names)


def _blocks_without(one: Component, given: Set[str]) -> int:
    """Into how many components it falls without some of its columns; 0 if any row takes nothing else, or gives."""
    rest = _components({row: found - given for row, found in one.sources.items()})
    whole = sum(len(rows) for _, rows in rest) == len(one.rows) and not one.columns & one.rows
    return len(rest) if whole else 0


def _left_of(recording: Recording, without: Edges) -> dict[str, list[int]]:
    """What the layers that have such an edge take by others."""
    cut = {layer for number, _ in without if (layer := recording.nodes[number].layer) is not None}
    left: dict[str, list[int]] = {layer: [] for layer in cut}
    for number, node in enumerate(recording.nodes) if cut else ():
        if node.layer in cut:
            left[node.layer] += [index for index in node.inputs if (number, index) not in without]
    return left


def _walk_back(
    recording: Recording, start: list[int], convolutions: Set[str], without: Edges
) -> tuple[set[str], bool, bool]:
    """Layers whose outputs reach nodes ``start``; whether nothing else does that may want a gradient, an input of the
    model or the result of an opaque module; whether random ops are between.

    ``convolutions``: those that count as layers.  What is compared, or turned into whole numbers, on the
    way does not count: a mask that is made of the shape of the embeddings gives no features to the layers behind it.
    A part that is compared stays a part, so that the replay still sees it where it matters.
    """
    found = list(_nodes_behind(recording, start, convolutions, without, severed=False))
    layers = {layer for node in found if (layer := _layer_of(node, convolutions)) is not None}
    closed = not any(node.is_input or node.opaque for node in found if _layer_of(node, convolutions) is None)
    random = any(node.random for node in _nodes_behind(recording, start, convolutions, without, severed=True))
    return layers, closed, random


def _nodes_behind(
    recording: Recording, start: list[int], convolutions: Set[str], without: Edges, *, severed: bool
) -> Iterator[Node]:
    """Nodes that reach ``start``, up to the next layers; ``severed``: also by way of whole numbers and conditions."""
    seen, todo = set(start), list(start)
    while todo:
        number = todo.pop()
        node = recording.nodes[number]
        if node.severed and not severed:
            continue
        yield node
        if _layer_of(node, convolutions) is None:
            fresh = [index for index in node.inputs if index not in seen and (number, index) not in without]
            seen.update(fresh)
            todo += fresh


def _layer_of(node: Node, convolutions: Set[str]) -> str | None:
    return node.layer or (node.convolution if node.convolution in convolutions else None)


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
