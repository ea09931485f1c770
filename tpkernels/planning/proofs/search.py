"""How a group of layers can be cut: try one hypothesis after another, until one is proven.

A model's code may rely on sizes that a rank does not have: attributes such as ``num_heads``, and the layout of packed
projections.  The values of such attributes on one rank, layouts of segments, and copies of key-value heads are guesses
(:mod:`tpkernels.planning.proofs.hypotheses`).  The replay decides, so a wrong guess only costs time.

Heads that do not divide over the ranks are dealt out (:func:`tpkernels.partition.unit_sizes`), if there is one for each
rank; models rely on having at least one head.  Ranks then differ in their sizes and attributes, and a proof is one
replay for each kind of rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import lcm
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from tpkernels.nn.sliced_arguments import named_arguments
from tpkernels.partition import as_shard
from tpkernels.planning.modules.numbers import config_numbers
from tpkernels.planning.proofs.hypotheses import Attributes, Copies, Hypotheses, Proof, Slice, Whole
from tpkernels.planning.replays.replay import Replay, unlike_ranks
from tpkernels.planning.runs.layer_groups import Group
from tpkernels.planning.runs.session import Scope
from tpkernels.planning.runs.shadow import Shadow
from tpkernels.planning.runs.trace import Recording
from tpkernels.planning.splits import Split, Unproven, divisor, for_degrees, parts_of_runs, share, shared_runs

__all__ = ["Search"]

MAX_ATTEMPTS = 160
MAX_LAYERS, MAX_SLICINGS = 8, 12
"""Of groups for which parameters are cut as well, and how often for one hypothesis."""


class Search(Hypotheses):
    """Proofs for the groups of one recording at one number of ranks."""

    def __init__(self, shadow: Shadow, recording: Recording, world_size: int) -> None:
        super().__init__(shadow, recording)
        self.world_size, self._divisor = world_size, divisor(world_size)
        self._calls = {scope.name: scope for scope in reversed(recording.scopes)}
        self._queries = 0
        """The largest number of heads that the attempts of one group saw."""
        self._counts: dict[int, Unproven] = {}
        """Numbers of heads that stood against the attempts of one group, in order."""
        self._tries, self._torn = 0, list[Unproven]()
        """Of one hypothesis with more parameters cut: where code takes a layout apart within a segment."""
        self._own = shadow.own_tensors(recording.direct - recording.layer_rows.keys())
        self.whole_inputs = False
        """Whether layers that stay whole must have complete gradients."""
        self.says_all = True
        """Whether plans can say that segments of a packed layer are copied, and arguments of modules are cut."""

    def is_called(self, group: Group) -> bool:
        """Whether a module around all of its layers is called; with a method of the model there may be none."""
        return "" in self._calls or bool(self._around(group, ()))

    def _around(self, group: Group, others: Sequence[str]) -> list[str]:
        parts = [name.split(".")[:-1] for name in group.layers]
        parts += [name.split(".") if name else [] for name in others]
        common: list[str] = []
        for level in zip(*parts, strict=False):
            if len(set(level)) > 1:
                break
            common.append(level[0])
        while common and ".".join(common) not in self._calls:
            common.pop()
        return common

    def scope_of(self, group: Group, others: Sequence[str] = ()) -> Scope:
        """The innermost module that was called and holds all layers of the group, and modules ``others``."""
        name = ".".join(self._around(group, others))
        if name not in self._calls:
            raise Unproven("no module around it is called")
        return self._calls[name]

    def signature(self, group: Group, scope: Scope) -> tuple[Any, ...]:
        """A key that is equal for groups that differ only in their place in the model."""
        cut = len(scope.name) + 1 if scope.name else 0
        names = tuple(name[cut:] for name in group.layers)
        sizes = tuple(self.shadow.sizes[name] for name in group.layers)
        shapes = tuple(str(event.outputs) for event in self.recording.events[scope.start : scope.stop])
        return type(self.shadow.modules[scope.name]), names, sizes, len(group.columns), hash(shapes)

    def prove(self, group: Group) -> Proof:
        """Find a way to cut the group within its scope.

        Raises:
            Unproven: none was found; the reason is that of the most promising attempt.
        """
        scope = self.scope_of(group)
        failures: list[Unproven] = []
        self._queries, self._counts = 0, {}
        proof = self._try_all(group, scope, failures)
        if proof is not None:
            return proof
        counted = [failure for failure in failures if failure.count]
        known = dict(self._counts)
        packed = self._named(scope) if len(group.columns) == 1 else []
        for heads in dict.fromkeys([*(failure.count for failure in counted), *packed, 1]):
            proof = self._with_copies(group, scope, heads, lcm(heads, self._divisor))
            if proof is not None:
                return proof
        proof = self._shared(group, scope) or self._unevenly(group, scope) or self._uneven_copies(group, scope)
        if proof is not None:
            return proof
        if counted:  # of query, key and value in one, "3 heads" are these
            raise max(counted[:1] + list(known.values()), key=lambda failure: failure.count)
        likely = [failure.reason for failure in known.values() if failure.count >= self._divisor]
        raise Unproven(likely[0]) if likely else failures[0]

    def _try_all(
        self, group: Group, scope: Scope, failures: list[Unproven], pieces: int = 0, *, shared: bool = False
    ) -> Proof | None:
        """The first hypothesis that holds; why the others do not is added to ``failures``."""
        for number, (segments, attributes) in enumerate(self.hypotheses(group, scope, failures, pieces, shared)):
            if number >= MAX_ATTEMPTS:
                break
            copied, behind = shared_runs(segments[group.columns[0]]) if shared else (0, 0)
            args = self.recording, scope, group, segments, attributes, self.world_size, pieces
            taken = {(module, name): (dim, size) for module, name, dim, size in group.taken_arguments}
            begun = Proof(segments, attributes, pieces=pieces, copied=copied, behind=behind, arguments=taken)
            try:
                heads = self._attempt(*args, copied=copied, behind=behind, arguments=taken)
            except Unproven as error:
                failures.append(error)
                proof = self._sliced(group, begun, error)
                if proof is not None:
                    return proof
                failures += self._torn
                continue
            return replace(begun, heads=heads)
        return None

    def _shared(self, group: Group, scope: Scope) -> Proof | None:
        """A packed projection whose queries are cut, and whose one key and value, which all of them share, are not;
        or what all heads of a state space read."""
        if len(group.columns) > 1 or not self.says_all or self.shadow.layers[group.columns[0]].kind == "embedding":
            return None
        proof = self._try_all(group, scope, [], shared=True)
        for pieces in filter(self.can_be_cut, [*self._counts]):
            proof = proof or self._try_all(group, scope, [], pieces, shared=True)
        return proof

    def _sliced(self, group: Group, proof: Proof, error: Unproven) -> Proof | None:
        """The same with parameters cut that met parts as a whole, one after the other as they do."""
        self._torn.clear()
        if group.size > MAX_LAYERS:
            return None
        self._tries = MAX_SLICINGS
        return self._more_sliced(group, proof, error)

    def _more_sliced(self, group: Group, proof: Proof, error: Unproven) -> Proof | None:
        fresh = tuple(sorted(error.layers - {*group.layers, *proof.feeders}))
        tables = any(self.shadow.layers[name].kind == "embedding" for name in fresh)
        if fresh and not tables and self._tries and not self.whole_inputs:
            self._tries -= 1
            found = self._tried(group, replace(proof, feeders=(*proof.feeders, *fresh)))
            if found is not None:
                return found
        wanted = 0 if error.met is None else sum(error.met.segments)
        fresh_ones = sorted(error.parameters - proof.slices.keys())
        for name in sorted(fresh_ones, key=lambda name: name in self._own and wanted not in self._own[name].shape):
            for cut in self._cuts(name, proof, error.met):
                if not self._tries:
                    return None
                self._tries -= 1
                found = self._tried(group, replace(proof, slices={**proof.slices, name: cut}))
                if found is not None:
                    return found
        for key, part in self._states(error, proof):
            if not self._tries:
                return None
            self._tries -= 1
            found = self._tried(group, replace(proof, states={**proof.states, key: part}))
            if found is not None:
                return found
        for key, part in self._constants(group, error, proof) if self.says_all else ():
            if not self._tries:
                return None
            self._tries -= 1
            found = self._tried(group, replace(proof, arguments={**proof.arguments, key: part}))
            if found is not None:
                return found
        return None

    def _constants(
        self, group: Group, error: Unproven, proof: Proof
    ) -> Iterator[tuple[tuple[str, str], tuple[int, int]]]:
        """Arguments of the module around the group that need no gradient, and could be cut by the heads seen."""
        heads = error.met.segments[0] if error.met is not None else self._queries
        if error.count or heads < 2 or proof.pieces not in (0, heads) or (heads % self._divisor and not proof.pieces):
            return
        scope = self.scope_of(group)
        given = named_arguments(self.shadow.modules[scope.name], scope.args, scope.kwargs)
        for name, value in given.items():
            if not isinstance(value, Tensor) or not value.is_floating_point() or (scope.name, name) in proof.arguments:
                continue
            if not self.recording.has_origin(value):
                yield from (((scope.name, name), (d, heads)) for d, size in enumerate(value.shape) if size % heads == 0)

    def _states(self, error: Unproven, proof: Proof) -> Iterator[tuple[tuple[str, str], tuple[int, int]]]:
        """What a module writes to and met parts as a whole, by the dimension that is as large as all of these."""
        met = error.met
        if met is None or len(met.segments) > 1 or proof.pieces or self.whole_inputs or not self.says_all:
            return
        for key, shape in error.states.items():
            dims = [dim for dim, size in enumerate(shape) if size == met.segments[0]]
            yield from ((key, (dim, shape[dim])) for dim in dims if key not in proof.states)

    def _tried(self, group: Group, proof: Proof) -> Proof | None:
        """The proof, if it holds, or one with more parameters cut or more feeders."""
        owners = [name.rpartition(".")[0] for name in (*proof.slices, *proof.feeders)]
        scope = self.scope_of(group, owners)
        args = scope, group, proof.segments, proof.attributes, self.world_size, proof.pieces, proof.slices
        try:
            heads = self._attempt(
                self.recording, *args, feeders=proof.feeders, copied=proof.copied, behind=proof.behind,
                arguments=proof.arguments, states=proof.states,
            )  # fmt: skip
        except Unproven as error:
            self._torn += [error] if error.segmented else []
            return self._more_sliced(group, proof, error)
        return replace(proof, heads=heads)

    def _cuts(self, name: str, proof: Proof, met: Split | None) -> list[Slice]:
        """How a parameter can be cut: as what it ``met``, where that is packed, or in one dimension as heads are."""
        if name not in self._own or (proof.pieces and not as_shard(proof.pieces, self._divisor)):
            return []
        own, wanted = self._own[name], 0 if met is None else sum(met.segments)
        if (met is not None and len(met.segments) > 1) or not isinstance(own, nn.Parameter):
            return self._packed_cuts(name, proof, met) if met is not None and not proof.pieces else []
        dims = [
            dim for dim, size in enumerate(own.shape)
            if (size == proof.pieces if proof.pieces else size >= self._divisor and size % self._divisor == 0)
        ]  # fmt: skip
        return [Slice(dim, (own.shape[dim],)) for dim in sorted(dims, key=lambda dim: own.shape[dim] != wanted)]

    def _packed_cuts(self, name: str, proof: Proof, met: Split) -> list[Slice]:
        """Of a packed parameter, or of a buffer; a plan says of all of a module's what is copied."""
        owner, copies = name.rpartition(".")[0], (met.copied, met.behind)
        beside = [
            cut[2:] for other, cut in proof.slices.items() if other.rpartition(".")[0] == owner
            and (len(cut.runs) > 1 or not isinstance(self._own[other], nn.Parameter))
        ]  # fmt: skip
        if any(size % self._divisor for size in met.cut_segments) or any(other != copies for other in beside):
            return []
        sizes = enumerate(self._own[name].shape)
        return [Slice(dim, met.segments, *copies) for dim, size in sizes if size == sum(met.segments)]

    def _unevenly(self, group: Group, scope: Scope) -> Proof | None:
        """Some ranks with more heads than others; a number that fails may tell the right one (key-value heads)."""
        tried = set[int]()
        while True:
            numbers = dict.fromkeys([*self._counts, *self._named(scope)])
            pieces = next((count for count in numbers if count not in tried and self.can_be_cut(count)), 0)
            if not pieces:
                return None
            tried.add(pieces)
            proof = self._try_all(group, scope, [], pieces)
            if proof is not None:
                return proof

    def _named(self, scope: Scope) -> list[int]:
        """Attributes of modules whose names say that they are numbers of heads."""
        prefix = f"{scope.name}." if scope.name else ""
        modules = self.shadow.modules.items()
        inside = [module for name, module in modules if name == scope.name or name.startswith(prefix)]
        named = [
            (key, value) for module in inside
            for key, value in (vars(module) | config_numbers(module)).items() if type(value) is int
        ]  # fmt: skip
        return [value for key, value in named if "heads" in key or key == "n_head"]

    def _uneven_copies(self, group: Group, scope: Scope) -> Proof | None:
        """As many copies of key-value heads as go evenly with the queries, and unevenly over the ranks."""
        found = [sorted({size for sizes in one.values() for size in sizes}) for one in self._grouped(group, scope)]
        counts = dict.fromkeys([*self._counts, *(self._named(scope) if len(group.columns) == 1 else [])])
        for (narrow, wide), queries in product([sizes for sizes in found if len(sizes) == 2], counts):
            heads = narrow * queries // wide
            if wide % queries or heads < 1 or narrow * queries % wide or queries % heads:
                continue
            total = next((t for t in range(2 * heads, queries + 1, heads) if not queries % t and self.can_be_cut(t)), 0)
            proof = self._with_copies(group, scope, heads, total) if total else None
            if proof is not None:
                return proof
        return None

    def can_be_cut(self, pieces: int) -> bool:
        """Whether every rank gets some of them, and not all the same."""
        return pieces % self._divisor > 0 and pieces > self._divisor

    def hypotheses(
        self, group: Group, scope: Scope, failures: list[Unproven], pieces: int = 0, shared: bool = False
    ) -> Iterator[tuple[dict[str, tuple[int, ...]], Attributes]]:
        """Layouts by attributes, likely ones first; a layout whose heads do not divide is given up at once."""
        for segments, guessed in self.layouts(group, scope):
            sizes = segments[group.columns[0]]
            whole = Split(0, sizes, pieces, *(shared_runs(sizes) if shared else ()))
            if shared and (guessed or not whole.copied):
                continue
            if not self.fits(group, {group.columns[0]: whole.cut_segments} if shared else segments, pieces):
                failures.append(
                    Unproven(f"{pieces} heads do not make up {[list(s) for s in segments.values()]} features")
                )
                continue
            parts = parts_of_runs(whole, self.world_size) if len(sizes) > 3 else {}
            for attributes in self.attribute_sets([scope], self.world_size, pieces, parts):
                before = len(failures)
                yield segments, attributes
                if any(failure.segmented for failure in failures[before:]):
                    break
                if any(failure.count for failure in failures[before:]):
                    for failure in failures[before:]:
                        self._counts.setdefault(failure.count or 0, failure)
                    self._counts.pop(0, None)
                    if guessed:  # the number of heads of a layout that the model may not have
                        failures[before:] = [Unproven(failure.reason) for failure in failures[before:]]
                    break

    def fits(self, group: Group, segments: Mapping[str, tuple[int, ...]], pieces: int) -> bool:
        """Whether the layers' features are made of ``pieces``, and the tables' columns are these."""
        layers = self.shadow.layers
        if not pieces:
            return True
        tables = [sum(segments[name]) for name in segments if layers[name].kind == "embedding"]
        sizes = [size for some in segments.values() for size in some] + [
            layers[name].in_features for name in group.rows
        ]
        if not as_shard(pieces, self._divisor) and (tables or min(sizes) <= pieces):
            return False  # a dimension of heads alone has no free places
        return all(size % pieces == 0 for size in sizes) and all(size == pieces for size in tables)

    def _attempt(
        self,
        recording: Recording,
        scope: Scope,
        group: Group,
        segments: Mapping[str, tuple[int, ...]],
        attributes: Attributes,
        world_size: int,
        pieces: int = 0,
        slices: Mapping[str, Slice] = MappingProxyType({}),
        feeders: tuple[str, ...] = (),
        copied: int = 0,
        behind: int = 0,
        arguments: Mapping[tuple[str, str], tuple[int, int]] = MappingProxyType({}),
        states: Mapping[tuple[str, str], tuple[int, int]] = MappingProxyType({}),
    ) -> int:
        """The number of heads, or 0."""
        roles = self.roles(
            group, segments, pieces=pieces, slices=slices, feeders=feeders, copied=copied, behind=behind,
            arguments=arguments, states=states,
        )  # fmt: skip
        for rank in unlike_ranks(roles, world_size):
            replay = Replay(self.shadow, recording, roles, attributes, world_size, rank)
            try:
                replay.run_scope(scope)
            finally:
                self._queries = max(self._queries, replay.heads.get(0, 0))
            for name, sizes in segments.items():
                if any(0 in share(size, world_size, pieces) for size in roles[name].split(0).cut_segments):
                    raise Unproven(f"{list(sizes)} features of {name} leave some of {world_size} ranks without any")
        return replay.heads.get(0, 0)

    def _with_copies(self, group: Group, scope: Scope, heads: int, total: int) -> Proof | None:
        """Grouped queries whose key-value heads do not divide: every rank computes those that its queries need.

        Copies of a head stand next to each other, as the model's own repetition of heads for its queries does; that it
        does is proven by cutting between key-value heads.
        """
        for segments in self._grouped(group, scope) if heads > 1 or len(group.columns) > 1 else []:
            proof = self._copied(group, scope, heads, total, segments)
            if proof is not None:
                return proof
        return None

    def _grouped(self, group: Group, scope: Scope) -> list[dict[str, tuple[int, ...]]]:
        """Layouts of queries and fewer keys and values: layers of their own, or packed into one."""
        if len(group.columns) > 1:
            return [{name: (self.shadow.layers[name].out_features,) for name in group.columns}]
        packed = [segments for segments, _ in self.layouts(group, scope)] if self.says_all else []
        return [one for one in packed for first, *rest in one.values() if rest and max(rest) < first]

    def _copied(
        self, group: Group, scope: Scope, heads: int, total: int, segments: Mapping[str, tuple[int, ...]]
    ) -> Proof | None:
        widest = max(map(max, segments.values()))
        narrow = {size for sizes in segments.values() for size in sizes if size < widest}
        if len(narrow) != 1 or min(narrow) % heads or group.scattered:
            return None
        features = min(narrow) // heads
        queries = widest // features
        if widest % features or queries % total or (heads > 1 and not self._provable(group, scope, segments, heads)):
            return None
        if queries not in (self._queries, *self._counts):
            return None  # where queries were not seen as so many heads, features would be taken for heads
        module, pieces = self.shadow.modules[scope.name], total if total % self._divisor else 0
        whole: Whole = {}
        if getattr(module, "num_key_value_groups", None) == queries // heads:
            whole[scope.name, "num_key_value_groups"] = queries // total
        counted = getattr(module, "num_key_value_heads", None) == heads
        if counted:
            whole[scope.name, "num_key_value_heads"] = total
        copied = {name for name, sizes in segments.items() if min(sizes) < widest}
        segments = {
            name: tuple(size if size == widest else total * features for size in sizes)
            for name, sizes in segments.items()
        }
        recording = Recording(self.shadow, whole, {name: sum(segments[name]) for name in copied})
        try:
            run = recording.run_scope(scope, self.recording)
        except (RuntimeError, ValueError, TypeError, AssertionError):
            return None
        for chosen in self.attribute_sets([scope], self.world_size, pieces):
            attributes = {key: (value,) * self.world_size for key, value in whole.items()} | chosen
            if counted:
                attributes[scope.name, "num_key_value_heads"] = share(total, self.world_size, total)
            try:
                self._attempt(recording, run, group, segments, attributes, self.world_size, pieces)
            except Unproven:
                continue
            return Proof(segments, attributes, whole, dict.fromkeys(copied, Copies(heads, total, features)),
                         queries, pieces)  # fmt: skip
        return None

    def _provable(self, group: Group, scope: Scope, segments: Mapping[str, tuple[int, ...]], world_size: int) -> bool:
        with for_degrees(0):  # a number of heads, which stands for as many ranks
            for attributes in self.attribute_sets([scope], world_size):
                try:
                    self._attempt(self.recording, scope, group, segments, attributes, world_size)
                except Unproven:
                    continue
                return True
        return False
