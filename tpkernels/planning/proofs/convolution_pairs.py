"""Which convolutions are cut in pairs: one gives a rank's channels, another takes them and is summed.

It owns the choice.  Groups are those of the data flow (:func:`find_groups`), with convolutions among their layers: the
three of a bottleneck are two groups, and the last ones and the first ones of all bottlenecks along a residual stream
are one.  A convolution that ends one group may begin another, if both are cut; then ranks scatter what they sum, or
gather what they take, if that is less.  So what a layer sends depends on the groups on both of its sides.  A stream may
end in what the model returns, which is gathered (:mod:`tpkernels.sharding.outputs`), if all of it sends less then.

Groups are taken one after the other, always the one that saves the most bytes by the plan's own count beside those that
are taken, until each further one would send more: a rank never sends more than it does where each layer is cut by
itself.  Convolutions in groups stand between the others, and may be ends of pairs where they are in none: they take
this rank's channels of a whole tensor, or gather their own.

What stands between is proven by a replay within the module around the group
(:mod:`tpkernels.planning.proofs.pair_proofs`); :mod:`tpkernels.planning.proofs.decided_pairs` has all of them proven on
the whole model.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence, Set
from typing import Any

from tpkernels.ops.checks import DTYPES
from tpkernels.planning.modules.channel_modules import parts_by_channel
from tpkernels.planning.proofs.channel_bytes import ChannelBytes
from tpkernels.planning.proofs.hypotheses import Proof
from tpkernels.planning.proofs.pair_proofs import prove
from tpkernels.planning.proofs.pairs_beside import NO_PAIRS, Beside
from tpkernels.planning.proofs.search_widths import SearchWidths
from tpkernels.planning.runs.layer_groups import Group, find_groups, joined_groups
from tpkernels.planning.runs.session import Scope
from tpkernels.planning.runs.shadow import Shadow
from tpkernels.planning.runs.trace import Recording
from tpkernels.planning.splits import Unproven

__all__ = ["PairChoice", "names_gathering", "sent_for_results"]


class PairChoice:
    """The groups of one recording, and which of them are cut.

    ``excluded``: layers, and modules with parameters, that are cut with others already, or may not be.
    ``grouped``: convolutions in groups that may be ends of pairs; then only groups with one of them count.
    ``beside``: layers of pairs that hold; then only streams beside some of them count.
    """

    def __init__(
        self, search: SearchWidths, recording: Recording, world_size: int, excluded: Set[str],
        grouped: Set[str] = frozenset(), beside: Beside = NO_PAIRS,
    ) -> None:  # fmt: skip
        self.search, self.recording, self.world_size, self._excluded = search, recording, world_size, excluded
        self.refused: dict[Group, Unproven] = {}
        """Groups that cannot be cut, whichever others are; and why."""
        self.bytes, self._beside = ChannelBytes(search.shadow, recording, world_size, beside.columns), beside
        self._known: dict[Any, tuple[Group, Scope, Proof] | Unproven] = {}
        self._apart: list[Group] = []
        """Groups that are not proven by themselves."""
        ends = search.shadow.convolutions.keys() | grouped
        found = find_groups(recording, convolutions=ends) if ends else []
        some = grouped or (beside.columns | beside.rows)
        self.groups = [group for group in found if not some or {*group.layers} & some]
        for group in self.groups:
            cut = [name for name in group.layers if beside.may_be_in(group, name)]
            left = excluded - {*cut}
            barred = (_why_barred(name, search.shadow, recording, left, world_size) for name in group.layers)
            why = next(filter(None, barred), None)
            if why is not None:
                self.refused[group] = Unproven(why)

    def choose(self, used: Container[str]) -> tuple[dict[Group, Proof], dict[Group, Unproven]]:
        """Groups that are proven within the modules around them, without layers that are ``used``; why others are not
        taken."""
        taken: dict[Group, Proof] = {}
        beside: dict[Group, Unproven] = {}
        self._take(taken, beside, used)
        joined = joined_groups(self._apart, self.search.shadow.convolutions)
        if fresh := [group for group in joined if group not in self.groups]:
            self.groups += fresh
            self._take(taken, beside, used)
        return taken, self.refused | beside

    def _take(self, taken: dict[Group, Proof], beside: dict[Group, Unproven], used: Container[str]) -> None:
        """Take those that save bytes, one after the other."""
        free = [group for group in self.groups if not any(name in used for name in group.layers)]
        while free := [group for group in free if not any(group in some for some in (self.refused, beside, taken))]:
            added = {group: self._added(group, taken) for group in free}
            best = min(added, key=lambda group: (added[group], bool(group.results)))
            if added[best] > 0:
                beside |= dict.fromkeys(free, Unproven("a pair would send more than its layers do without it"))
                break
            if added[best] == 0 and best.results:
                beside[best] = Unproven("with the result of the model that it would gather, a pair would send as much")
                continue
            try:
                proof = self._proof(best)
            except Unproven as error:
                self.refused[best] = error
                self._apart.append(best)
                continue
            if added[best] + self.bytes.sent_in_norms(proof.norms) > 0:
                self.refused[best] = Unproven("with its norms a pair would send more than its layers do without it")
                continue
            clash = self._clash(best, proof, taken)
            if clash is None:
                taken[best] = proof
            else:
                beside[best] = Unproven(f"{clash} is in another pair")

    def _added(self, group: Group, taken: Mapping[Group, Proof]) -> int:
        """How many bytes more a rank sends if the group is cut beside those ``taken``."""
        takes = {*self._beside.rows}.union(*(other.rows for other in taken))
        gives = {*self._beside.columns}.union(*(other.columns for other in taken))
        return sum(
            self.bytes.sent(n, takes=n in takes or n in group.rows, gives=n in gives or n in group.columns)
            - self.bytes.sent(n, takes=n in takes, gives=n in gives)
            for n in dict.fromkeys(group.layers)
        ) + self.sent_for_results(group)

    def sent_for_results(self, group: Group) -> int:
        """By a rank, to gather what the model returns of the group; each rank has its part of the gradient."""
        total = sum(self.recording.returned[number][1] for number in group.results)
        return total * (self.world_size - 1) // self.world_size

    def _clash(self, group: Group, proof: Proof, taken: Mapping[Group, Proof]) -> str | None:
        """A layer that cannot be in this group and in one that is taken: only a convolution that gives its channels in
        one piece can end one group and begin another."""
        for other, known in taken.items():
            for name in {*group.layers} & {*other.layers}:
                segments = proof.segments.get(name) or known.segments[name]
                if self.search.shadow.sizes[name].kind != "convolution" or len(segments) > 1:
                    return name
        return None

    def _proof(self, group: Group) -> Proof:
        """One that was found for a group like it, or a new one.

        Raises:
            Unproven: there is none.
        """
        scope = self.search.scope_of(group)
        key = self.search.signature(group, scope)
        if key not in self._known:
            try:
                self._known[key] = group, scope, prove(self.search, self.recording, group, self.world_size)
            except Unproven as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, Unproven):
            raise found
        first, old, proof = found
        proof = proof.moved((first, old.name), (group, scope.name))
        for owner in (name.rpartition(".")[0] for name in proof.slices):
            if owner in self._excluded:
                raise Unproven(f"{owner} stays whole, or is cut with others")
        return proof


def names_gathering(choices: Sequence[PairChoice], pairs: Mapping[Group, Proof]) -> set[str]:
    """Convolutions that end one of ``pairs`` and begin another, and gather what they take: they send less so, or give
    several segments, as nobody scatters a sum in these."""
    between = {name for group in pairs for name in group.rows} & {name for group in pairs for name in group.columns}
    packed = {name for proof in pairs.values() for name, sizes in proof.segments.items() if len(sizes) > 1} & between
    layers = {name for one in choices for name in one.search.shadow.layers}  # these scatter their sums
    counted = {name: next(one.bytes for one in choices if name in one.bytes.elements) for name in between - layers}
    return {name for name, sent in counted.items() if name in packed or sent.gathers(name)}


def sent_for_results(choices: Sequence[PairChoice], pairs: Collection[Group]) -> int:
    """By a rank, to gather what the model returns of ``pairs``."""
    return sum(next(one for one in choices if group in one.groups).sent_for_results(group) for group in pairs)


def _why_barred(
    name: str, shadow: Shadow, recording: Recording, excluded: Container[str], world_size: int
) -> str | None:
    """Why the layer cannot be cut with others, if so."""
    if name in excluded:
        return f"{name} stays whole, or is cut with others"
    if name in recording.called_otherwise:
        return f"{name} is called with more than a tensor, or inside of a module that needs values"
    if name in recording.direct or name in recording.rows_unknown:
        return f"{name} is used by code past it, or inside of a module that needs values"
    if name in shadow.grouped and parts_by_channel(shadow.modules[name], world_size) is None:
        return f"{name} has groups of channels that do not divide over {world_size} ranks"
    weight: Any = shadow.modules[name].weight
    if weight.dtype not in DTYPES or shadow.sizes[name].kind == "embedding":
        return f"{name} is a table, or has weights of {weight.dtype}"
    return None
