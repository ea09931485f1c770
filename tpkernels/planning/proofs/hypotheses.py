"""How a group of layers might be cut: segments of packed projections, and the ranks' values of numbers that code reads.

It owns the guesses and what a proof of one says; :mod:`tpkernels.planning.proofs.search` tries them.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, combinations, pairwise, product, takewhile
from types import CodeType, FunctionType, MappingProxyType
from typing import NamedTuple

import torch
from torch import nn

from tpkernels.planning.modules.numbers import config_numbers
from tpkernels.planning.replays.roles import SUMMED, Role, both_roles
from tpkernels.planning.runs.events import Shape
from tpkernels.planning.runs.layer_groups import Group
from tpkernels.planning.runs.session import Scope
from tpkernels.planning.runs.shadow import Shadow
from tpkernels.planning.runs.trace import Recording
from tpkernels.planning.splits import Split, divisor, share
from tpkernels.planning.styles import Column, CopiedHeads, Row, Style

__all__ = ["Attributes", "Copies", "Hypotheses", "Proof", "Slice", "Whole", "names_read"]

Attributes = dict[tuple[str, str], tuple[int, ...]]
"""By module and name: the value on each rank."""
Whole = dict[tuple[str, str], int]
MAX_BITS, MAX_NESTED = 6, 4
NOT_SIZES = ("idx", "index", "layer_id", "max_", "vocab", "num_layers", "eps", "pad", "kernel")
"""Attributes with these in their names say where or how often, not how many features."""
aten = torch.ops.aten
_TAKING_APART = (aten.split, aten.split_with_sizes, aten.chunk)


@dataclass(frozen=True)
class Copies:
    """Key-value heads that do not divide: ``heads`` heads, each computed on several ranks, ``total`` copies in all."""

    heads: int
    total: int
    features: int
    """Of one head."""

    def style(self, sizes: tuple[int, ...], unit: int) -> Style:
        """Of a layer that gives copies alone, or copies behind queries that are cut in multiples of ``unit``."""
        if len(sizes) == 1:
            return CopiedHeads(self.heads, self.total)
        first, rest = sizes[0], (self.heads * self.features,) * (len(sizes) - 1)
        units = (unit, *(1,) * len(rest)) if unit > 1 else ()
        return Column(
            segments=(first, *rest), units=units, copied=len(rest), copied_heads=self.heads, copies=self.total
        )

    def reason(self, world_size: int) -> str:
        return f"{self.heads} key-value heads for {world_size} ranks: whole on every rank"


class Slice(NamedTuple):
    """How a parameter is cut: each of ``runs``, one after the other in dimension ``dim``, by itself."""

    dim: int
    runs: tuple[int, ...]
    copied: int = 0
    behind: int = 0
    """As for :class:`tpkernels.planning.splits.Split`."""


@dataclass(frozen=True)
class Proof:
    """How a group can be cut, proven on its scope."""

    segments: Mapping[str, tuple[int, ...]]
    attributes: Attributes
    whole_attributes: Whole = field(default_factory=dict)
    """Values of the whole model that copies of key-value heads change."""
    copies: Mapping[str, Copies] = field(default_factory=dict)
    heads: int = 0
    pieces: int = 0
    """Where heads do not divide: how many there are to be cut, of query or of key and value."""
    slices: Mapping[str, Slice] = field(default_factory=dict)
    """Parameters of other modules that are cut with the heads, or the features."""
    feeders: tuple[str, ...] = ()
    """Layers that stay whole, and whose output's gradient is summed, beside those of the group."""
    arguments: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """By module and name: arguments of which a rank takes its heads' part; the dimension, and how many heads."""
    states: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """By module and name: arguments that it writes to, of which a rank takes its part; the dimension, and its size."""
    copied: int = 0
    behind: int = 0
    """How many segments of the packed column every rank has whole, the key and value that all queries share, and how
    many are behind these."""
    taken: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of convolutions that take parts of several segments of channels."""
    norms: tuple[str, ...] = ()
    """Of channels that are cut, within the scope of a pair."""

    def unit(self, features: int) -> int:
        """Of how many of ``features`` a part is a multiple."""
        return features // self.pieces if self.pieces else 1

    def column(self, name: str) -> Column:
        """The style of a layer of which each rank has its part, or its part of each segment."""
        sizes = self.segments[name]
        if len(sizes) == 1:
            return Column(unit=self.unit(sizes[0]))
        copied = Split(0, sizes, 0, self.copied, self.behind).are_copied
        units = tuple(1 if whole else self.unit(size) for size, whole in zip(sizes, copied, strict=True))
        return Column(segments=sizes, units=units if self.pieces else (), copied=self.copied, behind=self.behind)

    def row(self, takes: int, gives: int, *, scattered: bool) -> Row:
        """The style of a layer that takes its part of so many features; ``scattered``: it gives its part as well."""
        return Row(unit=self.unit(takes), scatter_unit=self.unit(gives) if scattered else 0)

    def moved(self, known: tuple[Group, str], other: tuple[Group, str]) -> Proof:
        """Restated for another group and the name of its scope, which differ only in their place."""
        (first, old), (group, scope) = known, other
        names = dict(zip(first.layers, group.layers, strict=True))

        def moved(name: str) -> str:
            return scope + name[len(old) :]

        def moved_parameter(name: str) -> str:
            """Of a module around the scope, as well: as many levels up."""
            first, second = old.split("."), scope.split(".")
            while first and name.split(".")[: len(first)] != first:
                first, second = first[:-1], second[:-1]
            return ".".join([*second, *name.split(".")[len(first) :]])

        return Proof(
            {names[name]: sizes for name, sizes in self.segments.items()},
            {(moved(name), attribute): value for (name, attribute), value in self.attributes.items()},
            {(moved(name), attribute): value for (name, attribute), value in self.whole_attributes.items()},
            {names[name]: copies for name, copies in self.copies.items()},
            self.heads,
            self.pieces,
            {moved_parameter(name): cut for name, cut in self.slices.items()},
            tuple(moved_parameter(name) for name in self.feeders),
            {(moved(name), argument): cut for (name, argument), cut in self.arguments.items()},
            {(moved(name), argument): cut for (name, argument), cut in self.states.items()},
            self.copied,
            self.behind,
            {names[name]: sizes for name, sizes in self.taken.items()},
            tuple(map(moved, self.norms)),
        )

    def each(self, world_size: int) -> str:
        """What a rank has."""
        copies = ", and the key and value of all" if self.copied else ""
        copies = ", and what all of them read" if self.behind else copies
        if not self.heads:
            return f"by features{copies}"
        if not self.pieces:
            return f"{self.heads} heads, {self.heads // world_size} per rank{copies}"
        sizes = "/".join(map(str, share(self.heads, world_size, self.pieces)))
        return f"{self.heads} heads, {sizes} per rank{copies}"


class Hypotheses:
    """Guesses for the groups of one recording."""

    def __init__(self, shadow: Shadow, recording: Recording) -> None:
        self.shadow, self.recording = shadow, recording

    def roles(
        self,
        group: Group,
        segments: Mapping[str, tuple[int, ...]],
        number: int = 0,
        pieces: int = 0,
        slices: Mapping[str, Slice] = MappingProxyType({}),
        feeders: tuple[str, ...] = (),
        copied: int = 0,
        behind: int = 0,
        arguments: Mapping[tuple[str, str], tuple[int, int]] = MappingProxyType({}),
        states: Mapping[tuple[str, str], tuple[int, int]] = MappingProxyType({}),
    ) -> dict[str, Role]:
        """What layers, parameters and arguments are to a group that is cut so."""
        found = {
            name: Role("column", segments[name], number, pieces, copied=copied, behind=behind) for name in group.columns
        }
        taken = {name: (self.shadow.layers[name].in_features,) for name in group.rows}
        found = both_roles(
            found,
            {name: Role("row", sizes, number, pieces, summed=name in group.summed) for name, sizes in taken.items()},
        )
        whole = dict.fromkeys((*group.feeders, *feeders), "feeder") | dict.fromkeys(group.tables, "table")
        found |= {name: Role(kind, (), number, pieces) for name, kind in whole.items()}
        found |= {
            name: Role("slice", cut.runs, number, pieces, cut.dim, cut.copied, cut.behind)
            for name, cut in slices.items()
        }
        for kind, some in (("argument", arguments), ("state", states)):
            for (module, name), (dim, size) in some.items():
                found[f"{module}:{name}"] = Role(kind, (size,), number, pieces, dim)
        for module, name, layer in group.gathered:
            found[f"{module}:{name}"] = replace(found[layer], kind="gathered")
        for module, name in group.summed_arguments:
            found[f"{module}{SUMMED}{name}"] = Role("summed", (), number, pieces)
        return found

    def layouts(self, group: Group, scope: Scope) -> Iterator[tuple[dict[str, tuple[int, ...]], bool]]:
        """Segments of every column, and whether they are a guess that nothing in the model suggests."""
        widest = max(self.shadow.layers[name].in_features for name in group.rows)
        choices = []
        known: set[tuple[int, ...]] = set()
        for name in group.columns:
            size = self.shadow.layers[name].out_features
            options: list[tuple[int, ...]] = [(size,)]
            if name in group.scattered:  # what is summed is scattered in one piece
                pass
            elif len(group.columns) == 1 or size > widest:
                options += self._cuts_of(size, scope)
                known |= set(options)
                options += [(size // count,) * count for count in (3, 2) if size % count == 0]
                nested = self._cuts_within(size, scope)
                options += nested
                known |= set(nested)
            else:
                options += self._heads_taken_apart(size, scope)
                known |= set(options)
            choices.append(list(dict.fromkeys(options)))
        widths = [self.shadow.layers[name].out_features for name in group.columns]
        by_width = dict(zip(widths, choices, strict=True))
        likely = (dict(zip(by_width, some, strict=True)) for some in product(*by_width.values()))
        tried = set()
        for combination in chain((tuple(some[width] for width in widths) for some in likely), product(*choices)):
            if combination in tried:
                continue
            tried.add(combination)
            guessed = any(len(sizes) > 1 and sizes not in known for sizes in combination)
            yield dict(zip(group.columns, combination, strict=True)), guessed

    def _cuts_of(self, size: int, scope: Scope) -> list[tuple[int, ...]]:
        """How the model itself takes a dimension of ``size`` features apart, also where they are seen as heads."""
        found: list[tuple[int, ...]] = []
        points: dict[int, set[int]] = {}
        for event in self.recording.events[scope.start : scope.stop]:
            if event.layer or not event.whole or not isinstance(event.whole[0], Shape) or not event.whole[0]:
                continue
            shape = event.whole[0]
            if event.packet in _TAKING_APART and shape[-1] == size:
                found.append(tuple(shape[-1] for shape in event.outputs))
            elif event.packet == aten.slice and len(event.whole) > 3:
                inner = 1 if event.whole[1] % len(shape) == len(shape) - 1 else shape[-1]
                count = shape[event.whole[1]]
                if count * inner == size:
                    ends = slice(*event.whole[2:4]).indices(count)[:2]
                    points.setdefault(inner, {0, size}).update(inner * end for end in ends)
        found += [tuple(b - a for a, b in pairwise(sorted(ends))) for ends in points.values() if len(ends) > 2]
        return [sizes for sizes in found if sum(sizes) == size and 0 not in sizes]

    def _heads_taken_apart(self, size: int, scope: Scope) -> list[tuple[int, ...]]:
        """How the model takes heads apart that are ``size`` features: the values of pairs of heads (DiffLlama)."""
        found: list[tuple[int, ...]] = []
        for event in self.recording.events[scope.start : scope.stop]:
            if event.packet not in _TAKING_APART or not isinstance(event.whole[0], Shape):
                continue
            shape = event.whole[0]
            dim = (event.whole[2] if len(event.whole) > 2 else event.kwargs.get("dim", 0)) % len(shape)
            if dim < len(shape) - 1 and shape[dim] * shape[-1] == size:
                found.append(tuple(part[dim] * shape[-1] for part in event.outputs))
        return [sizes for sizes in dict.fromkeys(found) if 0 not in sizes]

    def _cuts_within(self, size: int, scope: Scope) -> list[tuple[int, ...]]:
        """The same where one of the parts is taken apart further on: what goes through the convolution of Mamba 2."""
        return [
            (*sizes[:place], *inner, *sizes[place + 1 :])
            for sizes in self._cuts_of(size, scope)
            for place, part in enumerate(sizes) if part < size
            for inner in self._cuts_of(part, scope) if len(inner) > 1
        ][:MAX_NESTED]  # fmt: skip

    def attribute_sets(
        self,
        scopes: Sequence[Scope],
        world_size: int,
        pieces: int = 0,
        parts: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
    ) -> Iterator[Attributes]:
        """Sets of attributes that could be numbers of features or heads, with the ranks' values; small sets first.

        ``parts``: sizes of runs of a layout with many segments, and what ranks have of these.  Behind the empty set
        come those whose attributes have these sizes, alone and with one other.
        """
        pieces = pieces or divisor(world_size)
        if world_size > 1 and parts:
            yield {}
            yield from self._sets_of_runs(scopes, world_size, pieces, parts)
        bits = self._bits(scopes, pieces)[:MAX_BITS] if world_size > 1 else []
        for count in range(len(bits) + 1):
            for chosen in combinations(bits, count):
                yield {key: share(value, world_size, pieces) for bit in chosen for key, value in bit.items()}

    def _sets_of_runs(
        self, scopes: Sequence[Scope], world_size: int, pieces: int, parts: Mapping[int, tuple[int, ...]]
    ) -> Iterator[Attributes]:
        likely: dict[int, Whole] = {}
        around = {scope.name for scope in scopes}
        bits = self._bits(scopes, pieces, parts)
        for bit in sorted(bits, key=lambda bit: not any(name in around for name, _ in bit)):
            for value in {*bit.values()} & parts.keys():
                likely.setdefault(value, bit)
        own = [(key, value) for bit in likely.values() for key, value in bit.items()]
        sizes = {key: parts[value] for key, value in own if set(parts[value]) != {value}}
        yield sizes
        for bit in self._bits(scopes, pieces):
            if not bit.keys() & sizes.keys():
                yield sizes | {key: share(value, world_size, pieces) for key, value in bit.items()}

    def _bits(self, scopes: Sequence[Scope], pieces: int, parts: Collection[int] = ()) -> list[Whole]:
        """Attributes, likely ones first, that are numbers of ``pieces``, or among ``parts``."""
        numbers: set[int] = set()
        found: dict[tuple[type, str, int], Whole] = {}
        for scope in scopes:
            for event in self.recording.events[scope.start : scope.stop]:
                numbers.update(*event.outputs)
            prefix = f"{scope.name}." if scope.name else ""
            for name, module in self.shadow.modules.items():
                if name in self.shadow.layers or not (name == scope.name or name.startswith(prefix)):
                    continue
                for attribute, value in (vars(module) | config_numbers(module)).items():
                    if type(value) is not int or value < 2 or value not in numbers:
                        continue
                    if value not in parts if parts else value % pieces:
                        continue
                    if attribute.startswith("_") or any(word in attribute for word in NOT_SIZES):
                        continue
                    found.setdefault((type(module), attribute, value), {})[name, attribute] = value

        called = {scope.name for scope in self.recording.scopes}

        def unlikely(key: tuple[type, str, int]) -> tuple[bool, bool, bool, str]:
            """Features are what wrappers of layers note down, and no code of theirs reads (LoRA)."""
            kind, name, _ = key
            runs = any(module in called for module, _ in found[key])
            unread = not runs or name.rpartition(".")[2] not in names_read(kind)
            return "head" not in name or "dim" in name or "size" in name, unread, "features" in name, name

        return [found[key] for key in sorted(found, key=unlikely)]


@lru_cache(maxsize=1024)
def names_read(kind: type) -> frozenset[str]:
    """Names in the code of a class's methods, but for the one that sets an object up."""
    found: set[str] = set()
    methods = [
        value
        for own in takewhile(lambda one: one not in (nn.Module, object), kind.__mro__)
        for key, value in vars(own).items()
        if key != "__init__"
    ]
    todo = [inspect.unwrap(method).__code__ for method in methods if isinstance(method, FunctionType)]
    while todo:
        code = todo.pop()
        found.update(code.co_names)
        todo += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return frozenset(found)
