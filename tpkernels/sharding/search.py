"""How a group of layers can be cut: tried hypothesis by hypothesis, until one is proven.

Owns: the hypotheses.  A model's code may count on sizes that a rank does not have: attributes such as ``num_heads``,
and the layout of packed projections.  Attributes of one rank's value, layouts of segments, and copies of key-value
heads are guesses; the replay decides, so that a wrong guess costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise, product
from math import lcm
from typing import Any

import torch

from tpkernels.partition import chunk_sizes
from tpkernels.sharding.groups import Group
from tpkernels.sharding.layout import Unproven
from tpkernels.sharding.replay import Replay, Role
from tpkernels.sharding.trace import Recording, Scope, Shadow, Shape

__all__ = ["Copies", "Proof", "Search"]

Attributes = dict[tuple[str, str], int]
MAX_BITS = 6
MAX_ATTEMPTS = 160
NOT_SIZES = ("idx", "index", "layer_id", "max_", "vocab", "num_layers", "eps", "pad")
"""Attributes with these in their names say where or how often, not how many features."""
aten = torch.ops.aten


@dataclass(frozen=True)
class Copies:
    """Key-value heads that do not divide: ``heads`` of them, each computed on several ranks, ``total`` in all."""

    heads: int
    total: int
    features: int
    """Of one head."""


@dataclass(frozen=True)
class Proof:
    """How a group can be cut, proven on its scope."""

    segments: Mapping[str, tuple[int, ...]]
    attributes: Attributes
    """One rank's values."""
    whole_attributes: Attributes = field(default_factory=dict)
    """Values of the whole model that copies of key-value heads change."""
    copies: Mapping[str, Copies] = field(default_factory=dict)
    heads: int = 0


class Search:
    """Proofs for the groups of one recording at one number of ranks."""

    def __init__(self, shadow: Shadow, recording: Recording, world_size: int) -> None:
        self.shadow, self.recording, self.world_size = shadow, recording, world_size
        self._calls = {scope.name: scope for scope in reversed(recording.scopes)}
        self._queries = 0
        """The largest number of heads that the attempts of one group saw."""

    def scope_of(self, group: Group) -> Scope:
        """The innermost module that was called and holds all layers of the group."""
        parts = [name.split(".") for name in (*group.columns, *group.rows)]
        common: list[str] = []
        for level in zip(*(part[:-1] for part in parts), strict=False):
            if len(set(level)) > 1:
                break
            common.append(level[0])
        while common and ".".join(common) not in self._calls:
            common.pop()
        return self._calls[".".join(common)]

    def signature(self, group: Group, scope: Scope) -> tuple[Any, ...]:
        """Equal for groups that are the same up to where they stand in the model."""
        cut = len(scope.name) + 1 if scope.name else 0
        names = tuple(name[cut:] for name in (*group.columns, *group.rows))
        sizes = tuple(self.shadow.layers[name] for name in (*group.columns, *group.rows))
        shapes = tuple(str(event.outputs) for event in self.recording.events[scope.start : scope.stop])
        return type(self.shadow.modules[scope.name]), names, sizes, len(group.columns), hash(shapes)

    def prove(self, group: Group) -> Proof:
        """Find a way to cut the group within its scope.

        Raises:
            Unproven: none was found; the reason is that of the most promising attempt.
        """
        scope = self.scope_of(group)
        failures: list[Unproven] = []
        self._queries = 0
        for number, (segments, attributes) in enumerate(self.hypotheses(group, scope, failures)):
            if number >= MAX_ATTEMPTS:
                break
            try:
                heads = self._attempt(self.recording, scope, group, segments, attributes, self.world_size)
            except Unproven as error:
                failures.append(error)
                continue
            return Proof(segments, attributes, heads=heads)
        counted = [failure for failure in failures if failure.count]
        for heads in dict.fromkeys([failure.count for failure in counted] + [1]):
            proof = self._with_copies(group, scope, heads)
            if proof is not None:
                return proof
        raise counted[0] if counted else failures[0]

    def hypotheses(
        self, group: Group, scope: Scope, failures: list[Unproven]
    ) -> Iterator[tuple[dict[str, tuple[int, ...]], Attributes]]:
        """Layouts by attributes, likely ones first; a layout whose heads do not divide is given up at once."""
        for segments, guessed in self._layouts(group, scope):
            for attributes in self.attribute_sets([scope], self.world_size):
                before = len(failures)
                yield segments, attributes
                if any(failure.count for failure in failures[before:]):
                    if guessed:  # the number of heads of a layout that the model may not have
                        failures[before:] = [Unproven(failure.reason) for failure in failures[before:]]
                    break

    def roles(self, group: Group, segments: Mapping[str, tuple[int, ...]], number: int = 0) -> dict[str, Role]:
        found = {name: Role("column", segments[name], number) for name in group.columns}
        return found | {name: Role("row", (self.shadow.layers[name].in_features,), number) for name in group.rows}

    def _attempt(
        self,
        recording: Recording,
        scope: Scope,
        group: Group,
        segments: Mapping[str, tuple[int, ...]],
        attributes: Attributes,
        world_size: int,
    ) -> int:
        """The number of heads, or 0."""
        replay = Replay(self.shadow, recording, self.roles(group, segments), attributes, world_size)
        try:
            replay.run_scope(scope)
        finally:
            self._queries = max(self._queries, replay.heads.get(0, 0))
        for name, sizes in segments.items():
            if any(0 in chunk_sizes(size, world_size) for size in sizes):
                raise Unproven(f"{list(sizes)} features of {name} leave some of {world_size} ranks without any")
        return replay.heads.get(0, 0)

    def _layouts(self, group: Group, scope: Scope) -> Iterator[tuple[dict[str, tuple[int, ...]], bool]]:
        """Segments of every column, and whether they are a guess that nothing in the model suggests."""
        widest = max(self.shadow.layers[name].in_features for name in group.rows)
        choices = []
        known: set[tuple[int, ...]] = set()
        for name in group.columns:
            size = self.shadow.layers[name].out_features
            options: list[tuple[int, ...]] = [(size,)]
            if len(group.columns) == 1 or size > widest:
                options += self._cuts_of(size, scope)
                known |= set(options)
                options += [(size // count,) * count for count in (3, 2) if size % count == 0]
            choices.append(list(dict.fromkeys(options)))
        for combination in product(*choices):
            guessed = any(len(sizes) > 1 and sizes not in known for sizes in combination)
            yield dict(zip(group.columns, combination, strict=True)), guessed

    def _cuts_of(self, size: int, scope: Scope) -> list[tuple[int, ...]]:
        """How the model itself takes a dimension of ``size`` features apart."""
        found: list[tuple[int, ...]] = []
        points = {0, size}
        for event in self.recording.events[scope.start : scope.stop]:
            if event.layer or not event.whole or not isinstance(event.whole[0], Shape) or not event.whole[0]:
                continue
            if event.whole[0][-1] != size:
                continue
            if event.packet in (aten.split, aten.split_with_sizes, aten.chunk):
                found.append(tuple(shape[-1] for shape in event.outputs))
            elif event.packet == aten.slice and len(event.whole) > 3:
                points |= {min(point, size) for point in event.whole[2:4] if isinstance(point, int) and point >= 0}
        if len(points) > 2:
            ends = sorted(points)
            found.append(tuple(b - a for a, b in pairwise(ends)))
        return [sizes for sizes in found if sum(sizes) == size]

    def attribute_sets(self, scopes: Sequence[Scope], world_size: int) -> Iterator[Attributes]:
        """Sets of attributes that could be numbers of features or heads, with one rank's values; small sets first."""
        bits = self._bits(scopes, world_size) if world_size > 1 else []
        for count in range(len(bits) + 1):
            for chosen in combinations(bits, count):
                yield {key: value // world_size for bit in chosen for key, value in bit.items()}

    def _bits(self, scopes: Sequence[Scope], world_size: int) -> list[Attributes]:
        numbers: set[int] = set()
        found: dict[tuple[type, str, int], Attributes] = {}
        for scope in scopes:
            for event in self.recording.events[scope.start : scope.stop]:
                numbers.update(*event.outputs)
            prefix = f"{scope.name}." if scope.name else ""
            for name, module in self.shadow.modules.items():
                inside = name == scope.name or name.startswith(prefix)
                for attribute, value in vars(module).items() if inside and name not in self.shadow.layers else ():
                    if type(value) is not int or value < 2 or value % world_size or value not in numbers:
                        continue
                    if attribute.startswith("_") or any(word in attribute for word in NOT_SIZES):
                        continue
                    found.setdefault((type(module), attribute, value), {})[name, attribute] = value
        ranked = sorted(found, key=lambda key: ("head" not in key[1] or "dim" in key[1] or "size" in key[1], key[1]))
        return [found[key] for key in ranked[:MAX_BITS]]

    def _with_copies(self, group: Group, scope: Scope, heads: int) -> Proof | None:
        """Grouped queries whose key-value heads do not divide: every rank computes those that its queries need.

        Copies of a head stand next to each other, as the model's own repetition of heads for its queries does; that it
        does is proven by cutting between key-value heads.
        """
        sizes = {name: self.shadow.layers[name].out_features for name in group.columns}
        widest, narrow = max(sizes.values()), [name for name in group.columns if sizes[name] < max(sizes.values())]
        if not narrow or len({sizes[name] for name in narrow}) > 1 or sizes[narrow[0]] % heads:
            return None
        features = sizes[narrow[0]] // heads
        queries, total = widest // features, lcm(heads, self.world_size)
        if widest % features or queries % total or queries != self._queries:
            return None  # where queries were not seen as so many heads, features would be taken for heads
        segments = {name: (size,) for name, size in sizes.items()}
        if heads > 1 and not self._provable(group, scope, segments, heads):
            return None
        module = self.shadow.modules[scope.name]
        whole: Attributes = {}
        if getattr(module, "num_key_value_groups", None) == queries // heads:
            whole[scope.name, "num_key_value_groups"] = queries // total
        counted = getattr(module, "num_key_value_heads", None) == heads
        if counted:
            whole[scope.name, "num_key_value_heads"] = total
        recording = Recording(self.shadow, whole, {name: total * features for name in narrow})
        try:
            copied = recording.run_scope(scope, self.recording)
        except (RuntimeError, ValueError, TypeError, AssertionError):
            return None
        segments |= {name: (total * features,) for name in narrow}
        for chosen in self.attribute_sets([scope], self.world_size):
            attributes = whole | chosen
            if counted:
                attributes[scope.name, "num_key_value_heads"] = total // self.world_size
            try:
                self._attempt(recording, copied, group, segments, attributes, self.world_size)
            except Unproven:
                continue
            return Proof(segments, attributes, whole, dict.fromkeys(narrow, Copies(heads, total, features)), queries)
        return None

    def _provable(self, group: Group, scope: Scope, segments: Mapping[str, tuple[int, ...]], world_size: int) -> bool:
        for attributes in self.attribute_sets([scope], world_size):
            try:
                self._attempt(self.recording, scope, group, segments, attributes, world_size)
            except Unproven:
                continue
            return True
        return False
