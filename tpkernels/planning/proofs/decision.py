"""Which groups of a model are cut: each is proven in its place, then all of them together on the whole model.

It owns the decision.  Groups are taken smallest first, and a layer is a column or a row in at most one of them.  A
proof that was found for one block is tried first on the blocks like it.  A replay of the whole model with all that was
found decides (:mod:`tpkernels.planning.proofs.whole_replays`): a group that it blames is given up, and the replay is
repeated.  Pairs of convolutions follow (:mod:`tpkernels.planning.proofs.decided_pairs`).

A plan for several numbers of ranks (:func:`tpkernels.planning.splits.for_degrees`) cuts at each of them what the
largest one cuts: code with a literal number of heads runs on one rank, and does not on eight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Any

from tpkernels.planning.modules.part_norms import KnownNorm, find_norms
from tpkernels.planning.proofs.decided_pairs import decide_pairs
from tpkernels.planning.proofs.hypotheses import Proof
from tpkernels.planning.proofs.joined_groups import join
from tpkernels.planning.proofs.own_products import decide_products
from tpkernels.planning.proofs.pairs_beside import NO_PAIRS, pairs_beside
from tpkernels.planning.proofs.random_draws import may_drop, random_pairs
from tpkernels.planning.proofs.replay_checks import drawn_for_whole, half_partial
from tpkernels.planning.proofs.search_again import SearchAgain
from tpkernels.planning.proofs.search_gathered import prove_with_arguments
from tpkernels.planning.proofs.search_leaving import prove_leaving
from tpkernels.planning.proofs.search_states import recordings_beside
from tpkernels.planning.proofs.tied_groups import Ties, held_by_twins, shared_by_groups, unlike_twins
from tpkernels.planning.proofs.whole_replays import Blamed, WholeReplays
from tpkernels.planning.replays.kept_parts import Kept
from tpkernels.planning.replays.replay import Replay, Role
from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.planning.runs.layer_groups import SMALL_GROUP, Group, find_groups
from tpkernels.planning.runs.session import Scope
from tpkernels.planning.runs.shadow import Shadow
from tpkernels.planning.runs.trace import Recording
from tpkernels.planning.splits import HandedOn, Unproven, degrees, divisor

__all__ = ["OWN_CODE", "Decision", "decide"]

OWN_CODE = "runs code of its own, which takes whole tensors here"
"""Why a layer may not be cut with others; it may stay whole beside them."""
JOINT_ATTEMPTS, JOINT_SLICES = 12, 3


@dataclass
class Decision:
    """What is proven, and why the rest is not."""

    proven: dict[Group, Proof] = field(default_factory=dict)
    refused: dict[Group, Unproven] = field(default_factory=dict)
    norms: dict[str, KnownNorm] = field(default_factory=dict)
    """Norms over features that are cut."""
    pairs: dict[Group, Proof] = field(default_factory=dict)
    """Groups of convolutions, and of layers beside them, that are cut by channels;"""
    unpaired: dict[Group, Unproven] = field(default_factory=dict)
    """why others are not."""
    products: dict[Group, Proof] = field(default_factory=dict)
    """Groups of parameters that code multiplies by itself."""
    by_channel: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """What works on each channel by itself, and the segments of channels that it takes parts of."""
    gathering: set[str] = field(default_factory=set)
    """Convolutions that take and give channels that are cut, and gather the ones."""
    streaming: set[str] = field(default_factory=set)
    """Layers of ``proven`` pairs beside which a stream is cut by channels."""
    cut_results: tuple[tuple[int, int, int], ...] = ()
    """Of what the model returns, what is cut: its number, the dimension, and the size of that in the whole;"""
    result_bytes: int = 0
    """sent to gather these."""
    fed: set[str] = field(default_factory=set)
    """Columns that read what a feeder gives, so that they do not sum the gradient of their input."""
    partial: set[str] = field(default_factory=set)
    """Parameters of whole modules that meet parts: their gradients are summed."""
    random: list[tuple[str, str]] = field(default_factory=list)
    whole_draws: tuple[str, ...] = ()
    """Modules called between such layers that draw for whole tensors, which all ranks share."""
    statistics: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """Modules that take sums, means or spreads over features that are cut: how many there are, and on each rank."""
    maxima: tuple[str, ...] = ()
    """Modules that take the largest element of what is cut."""
    kept: Kept = field(default_factory=dict)
    """Attributes in which modules keep parts from one call for the next."""
    state_bytes: dict[str, int] = field(default_factory=dict)
    """What is gathered for states that modules write parts to, by module and argument."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Layers of narrow pairs whose other layer is cut with a larger group, and that one."""
    together: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """For layers of groups that were refused, but could have been one: all layers of the group."""
    conflicts: list[str] = field(default_factory=list)
    """What speaks against roles that the user forced."""


def decide(
    observation: Observation,
    world_size: int,
    excluded: Mapping[str, str],
    forced: Mapping[str, Role],
    *,
    feeders: bool = True,
    says_all: bool = True,
    pairs: bool = False,
    ties: Ties = MappingProxyType({}),
    asked: Collection[str] = (),
) -> Decision:
    """Prove what can be proven.

    Args:
        excluded: layers that may not be cut with others, with the reason.
        ties: layers that may, if all that share a parameter with them are cut alike.
        feeders: whether layers that stay whole may have their gradients summed.
        pairs: whether convolutions may be cut in pairs.
        asked: modules that a user's overrides name, of which nothing else is cut.
        says_all: whether the plan can say that segments of a packed layer are copied, and arguments of modules cut.
        forced: roles of a user's overrides outside of any group that would be found; they are part of the last replay.
    """
    assert observation.shadow is not None and observation.recording is not None
    calls = [call for _, recording in observation.recordings for call in recording.norm_calls.values()]
    observation.shadow.norms = find_norms(observation.shadow.modules, calls)
    observation.shadow.kept = {*excluded}.union(*(recording.direct for _, recording in observation.recordings))
    widest = None
    for ranks in dict.fromkeys((divisor(world_size), world_size)):
        decider = _Decider(observation, observation.shadow, observation.recording, ranks, excluded, forced)
        decider.whole_inputs, decider.says_all, decider.pairs = not feeders, says_all, pairs and not degrees()
        decider.asked = asked
        decider.ties, decider.gathers = ties, feeders and says_all and not degrees()
        widest = decider.run(widest)
    assert widest is not None
    return widest


class _Decider:
    def __init__(
        self,
        observation: Observation,
        shadow: Shadow,
        recording: Recording,
        world_size: int,
        excluded: Mapping[str, str],
        forced: Mapping[str, Role],
    ) -> None:
        self.observation, self.shadow, self.recording = observation, shadow, recording
        self.world_size, self.excluded, self.forced = world_size, excluded, forced
        self.search = SearchAgain(shadow, recording, world_size)
        self.replays = WholeReplays(observation, shadow, world_size, self.search, forced)
        self.scopes: dict[Group, str] = {}
        """The modules around the groups."""
        self.noisy: set[Group] = set()
        """Groups between whose layers random numbers are drawn for parts."""
        self.decision = Decision()
        self.whole_inputs, self.says_all, self.pairs = False, True, False
        self.gathers = False
        """Whether modules may take all of what a column gives, and ranks sum the gradients of what modules take."""
        self.ties: Ties = {}
        self.asked: Collection[str] = ()
        self._widest: Mapping[Group, Proof] | None = None
        self._sent_for_results: dict[Group, int] = {}

    def run(self, widest: Decision | None) -> Decision:
        """``widest``: what the largest number of ranks decided, where this is a smaller one."""
        if widest is not None:
            self._widest = widest.proven
            self.decision.refused |= widest.refused
            self.decision.adapters |= widest.adapters
            self.decision.conflicts += widest.conflicts
        for mode, recording in self.observation.firsts:
            if recording is not self.recording:
                self.search = SearchAgain(self.shadow, recording, self.world_size)
            self.search.whole_inputs, self.search.says_all = self.whole_inputs, self.says_all
            self.search.elsewhere = recordings_beside(self.observation, recording)
            self.shadow.set_mode(mode)
            waiting = self._prove_alone(recording)
            self._prove_together(waiting)
            if self.gathers:
                self._prove_with_arguments()
                self._prove_leaving()
        self.shadow.set_mode(self.observation.mode)
        self._prove_whole()
        if self.pairs:
            self._pair_convolutions(frozenset())
            self._pair_convolutions(frozenset(), streams=True)
            if left := self.shadow.grouped.keys() - self.decision.by_channel:
                self._pair_convolutions(left)
            self._multiply_parts()
        self.decision.result_bytes += sum(self._sent_for_results.get(group, 0) for group in self.decision.proven)
        if not self.observation.mode.training:
            self.noisy = {group for group, scope in self.scopes.items() if may_drop(self.shadow, scope)}
            self.noisy &= self.decision.proven.keys() | self.decision.products.keys()
        self.decision.random = random_pairs(self.observation, self.noisy)
        for group, error in self.decision.refused.items():
            if group.size <= SMALL_GROUP or error.count:
                names = (*group.columns, *group.rows)
                self.decision.together |= {name: names for name in names if name not in self.excluded}
        return self.decision

    def _prove_alone(self, recording: Recording) -> dict[Any, list[Group]]:
        """Groups that could not be proven within their scope, by what they have in common."""
        found: dict[Any, tuple[Group, Scope, Proof] | Unproven] = {}
        waiting: dict[Any, list[Group]] = {}
        used = {name for group in self.decision.proven for name in group.layers}
        groups = find_groups(recording, filled=True)
        groups += [group for group in find_groups(recording) if recording.filled and group not in groups]
        small = self._small_beside(groups)
        for group in sorted(groups, key=lambda group: group in small or self._is_narrow(group)):
            if group in self.decision.refused or not self.search.is_called(group):
                continue
            if self._widest is not None and group not in self._widest:
                continue
            layers = set(group.layers)
            if group.scattered and degrees():
                self.decision.refused[group] = Unproven(
                    f"{group.scattered[0]} would scatter a sum, which is in no blocks"
                )
                continue
            if group.given and self.whole_inputs:
                self.decision.refused[group] = Unproven(f"{group.given[0]} gives a whole tensor to work on parts")
                continue
            barred = next((name for name in group.layers if self._bars(name, group)), None)
            if barred is not None:
                self.decision.refused[group] = Unproven(f"{barred} {self.excluded[barred]}")
                continue
            if self._is_narrow(group):
                shared = layers & {name for other in self.decision.proven if other.size > 2 for name in other.layers}
                self.decision.adapters |= {name: min(shared) for name in layers - used if shared}
            if self._contradicts(group):
                continue
            if layers & used:
                self._join(group, groups)
                continue
            scope = self.search.scope_of(group)
            self.scopes[group] = scope.name
            key = self.search.signature(group, scope)
            if key not in found:
                try:
                    found[key] = group, scope, self._proof(group)
                except Unproven as error:
                    found[key] = error
            known = found[key]
            if isinstance(known, Unproven):
                self.decision.refused[group] = known
                waiting.setdefault(key, []).append(group)
                continue
            first, old, proof = known
            proof = proof.moved((first, old.name), (group, scope.name))
            barred = next((name for name in proof.feeders if name in self.excluded or name in used), None)
            if barred is not None:
                self.decision.refused[group] = Unproven(f"{barred}, which gives to it, cannot stay whole as it is")
                continue
            used |= layers | set(proof.feeders)
            self.decision.proven[group] = proof
        return waiting

    def _join(self, group: Group, seen: Collection[Group]) -> None:
        """Prove a group that shares layers with one that another example has shown, and make one of both."""
        others = [other for other in self.decision.proven if {*group.layers} & {*other.layers}]
        if len(others) != 1 or others[0] in seen or {*group.layers} <= {*others[0].layers} or degrees():
            return
        if {*group.columns} & {*others[0].rows} or {*group.rows} & {*others[0].columns}:
            return
        scope = self.search.scope_of(group).name
        if self.scopes[others[0]] != scope:
            return
        try:
            joined, proof = join(others[0], self.decision.proven[others[0]], group, self._proof(group))
        except Unproven as error:
            self.decision.refused[group] = error
            return
        del self.decision.proven[others[0]]
        self.decision.proven[joined], self.scopes[joined] = proof, scope

    def _prove_with_arguments(self) -> None:
        """Prove groups of the layers that are left, with arguments that are gathered, or whose gradients are summed."""
        found = prove_with_arguments(self.search, self._used(), {*self.excluded, *self.ties}, self._contradicts)
        self._add(found)

    def _prove_leaving(self) -> None:
        """Prove groups of the layers that are left, which give to what the model returns."""
        found = prove_leaving(self.search, self._used(), {*self.excluded, *self.ties}, self._contradicts)
        self._add(found.proven)
        self.decision.refused |= found.refused
        self._sent_for_results |= found.sent

    def _used(self) -> set[str]:
        return {name for group, proof in self.decision.proven.items() for name in (*group.layers, *proof.feeders)}

    def _add(self, found: Mapping[Group, Proof]) -> None:
        self.scopes |= {group: self.search.scope_of(group).name for group in found}
        self.decision.proven |= found

    def _bars(self, name: str, group: Group) -> bool:
        return name in self.excluded and not (name in group.tables and self.excluded[name] == OWN_CODE)

    def _proof(self, group: Group) -> Proof:
        return self.search.prove(group) if self._widest is None else self.search.prove_like(group, self._widest[group])

    def _is_narrow(self, group: Group) -> bool:
        """Whether it is a pair like the A and B of LoRA, which a cut serves little: larger groups come first."""
        layers = self.shadow.layers
        if group.size > 2 or any(name not in layers for name in group.layers):
            return False
        first, last = layers[group.columns[0]], layers[group.rows[0]]
        return first.out_features < min(first.in_features, last.out_features)

    def _small_beside(self, groups: Sequence[Group]) -> set[Group]:
        """A layer and what takes it, among which is a column of another group, whose other layers are larger: what
        makes a bias per head (Swin 2), or a latent of the queries, which an indexer reads as well (DeepSeek V3.2)."""
        layers = self.shadow.layers

        def size(names: Iterable[str]) -> int:
            return sum(layers[name].in_features * layers[name].out_features for name in names if name in layers)

        others: dict[str, list[Group]] = {}
        for group in groups:
            for name in group.columns if group.size <= SMALL_GROUP else ():
                others.setdefault(name, []).append(group)
        return {
            group for group in groups if len(group.columns) == 1 and group.size <= SMALL_GROUP
            for row in group.rows for other in others.get(row, ())
            if size({*other.layers} - {*group.layers}) > size(group.layers)
        }  # fmt: skip

    def _contradicts(self, group: Group) -> bool:
        """Whether the user wants one of the layers to be the opposite, a row for a column."""
        kinds = dict.fromkeys(group.columns, "column") | dict.fromkeys(group.rows, "row")
        return any(name in self.forced and self.forced[name].kind != kind for name, kind in kinds.items())

    def _prove_together(self, waiting: Mapping[Any, list[Group]]) -> None:
        """Prove groups that depend on each other all at once, such as blocks that hand a bias per head to the next."""
        for groups in waiting.values():
            used = {name for group in self.decision.proven for name in (*group.columns, *group.rows)}
            error = self.decision.refused[groups[0]]
            pieces = error.count if self.search.can_be_cut(error.count) else 0
            if error.count != pieces or any(used & {*group.columns, *group.rows} for group in groups):
                continue
            if groups[0].size > SMALL_GROUP and len(groups) == 1 and groups[0].columns[0] in self.shadow.layers:
                continue  # the residual stream of a whole model: no layout carries features through its norms
            scopes = [self.search.scope_of(group) for group in groups]
            segments = [{n: (self.shadow.layers[n].out_features,) for n in group.columns} for group in groups]
            pairs = list(zip(groups, segments, strict=True))
            if not all(self.search.fits(group, sizes, pieces) for group, sizes in pairs):
                continue
            for attributes in islice(self.search.attribute_sets(scopes, self.world_size, pieces), JOINT_ATTEMPTS):
                trial = {group: Proof(sizes, attributes, heads=pieces, pieces=pieces) for group, sizes in pairs}
                holding = self._holds_together(trial, JOINT_SLICES)
                if holding is None:
                    continue
                self.decision.proven |= holding
                for group in groups:
                    del self.decision.refused[group]
                break

    def _holds_together(self, trial: Mapping[Group, Proof], tries: int) -> Mapping[Group, Proof] | None:
        """The trial, if it holds on the whole model, or one with parameters cut that met parts as a whole."""
        try:
            self.replays.run(self.decision.proven | dict(trial))
        except Blamed as blamed:
            first, error = next(iter(trial)), blamed.error
            cuts = self.search.more_slices(trial[first], error) if tries and self.says_all else ()
            found = (self._holds_together({**trial, first: proof}, tries - 1) for proof in cuts)
            return next((holding for holding in found if holding is not None), None)
        return trial

    def _prove_whole(self) -> None:
        """Replay all groups at once, and give up those that are blamed until the rest holds."""
        while True:
            while unlike := unlike_twins(self.decision.proven, self.ties):
                self._give_up(unlike)
            groups = list(self.decision.proven)
            try:
                replay = self.replays.run(self.decision.proven)
            except Blamed as blamed:
                guilty = [groups[index] for index in blamed.groups if index < len(groups)]
                if isinstance(blamed.error, HandedOn) and guilty:
                    proof, given = self.decision.proven[guilty[0]], blamed.error.argument
                    left = {key: cut for key, cut in proof.arguments.items() if key != given}
                    self.decision.proven[guilty[0]] = replace(proof, arguments=left)
                    continue
                if self.forced and (not guilty or len(groups) in blamed.groups):
                    self.decision.conflicts.append(blamed.error.reason)
                    return
                for group in guilty or groups:
                    self.decision.refused[group] = blamed.error
                    del self.decision.proven[group]
                if not groups:
                    return
                continue
            wrong = half_partial(replay, self.shadow.modules) | drawn_for_whole(replay, self.says_all)
            tied = shared_by_groups(self.decision.proven, replay, self.shadow.modules, self.ties)
            wrong |= dict.fromkeys(tied, Unproven("a module would have gradients of two kinds"))
            wrong = {index: error for index, error in wrong.items() if index < len(groups)}
            if not wrong:
                self._take(replay, groups)
                return
            self._give_up({groups[index]: error for index, error in wrong.items()})

    def _give_up(self, refused: Mapping[Group, Unproven]) -> None:
        self.decision.refused |= refused
        for group in refused:
            del self.decision.proven[group]

    def _take(self, replay: Replay, groups: Sequence[Group]) -> None:
        """What a replay of the whole model that holds has found of ``groups``, which it knows by their numbers."""
        self.noisy = {group for number, group in enumerate(groups) if number in replay.part_draws_in}
        self.decision.partial = held_by_twins(self.shadow.modules, replay.partial)
        self.decision.cut_results = tuple(replay.cut_results)
        self.decision.fed = {name for name, fed in replay.fed.items() if fed}
        self.decision.norms = {name: self.shadow.norms[name] for name in sorted(replay.cut_norms)}
        self.decision.by_channel = dict(sorted(replay.cut_segments.items()))
        self.decision.whole_draws = tuple(sorted(replay.whole_draws))
        self.decision.statistics = dict(sorted(replay.statistics.items()))
        self.decision.maxima = tuple(sorted(replay.maxima))
        self.decision.kept = dict(sorted(replay.kept_parts.items()))
        self.decision.state_bytes = replay.state_bytes

    def _multiply_parts(self) -> None:
        """Cut modules by parameters that their code multiplies by itself, beside what is cut already."""
        proven, pairs = self.decision.proven, self.decision.pairs
        barred = {name.rpartition(".")[0] for proof in (proven | pairs).values() for name in proof.slices}
        found = decide_products(self.replays, proven, pairs, barred | {*self.asked})
        if found.replay is not None:
            self._take(found.replay, [*proven, *pairs, *found.products])
            self.decision.products = found.products
            self.scopes |= {group: group.multiplied[0].rpartition(".")[0] for group in found.products}

    def _pair_convolutions(self, grouped: Set[str], *, streams: bool = False) -> None:
        """Cut convolutions in pairs as well, beside what is cut already.

        ``grouped``: those in groups that may be ends of pairs, beside the pairs found without; ``streams``: those that
        begin and end a stream beside pairs of layers.
        """
        proven, before = self.decision.proven, self.decision.pairs
        barred = {*self.excluded, *self.forced, *self.decision.adapters, *self.ties}
        beside = pairs_beside(proven, barred, self.shadow.layers, self.observation.firsts) if streams else NO_PAIRS
        if streams and not beside.columns:
            return
        barred |= {name for group, proof in proven.items() for name in (*group.layers, *proof.feeders)}
        barred |= {name for group in before for name in group.layers}
        barred |= {name.rpartition(".")[0] for proof in (proven | before).values() for name in proof.slices}
        known = {*self.decision.statistics, *self.decision.maxima}
        found = decide_pairs(self.replays, proven, before, barred, grouped, beside, known)
        self.decision.unpaired |= found.unpaired
        if found.replay is not None:
            self._take(found.replay, [*proven, *before, *found.pairs])
            self.decision.pairs = before | found.pairs
            self.decision.gathering |= found.gathering
            self.decision.streaming |= found.streaming
            self.decision.result_bytes += found.result_bytes
