"""Replays of the whole model with all groups that are to be cut: in every mode, of every call, by ranks that differ.

It owns what is said against them: which groups a replay blames, and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from tpkernels.planning.proofs.hypotheses import Attributes, Hypotheses, Proof, Whole
from tpkernels.planning.proofs.pair_proofs import roles_of
from tpkernels.planning.replays.replay import Replay, Role, unlike_ranks
from tpkernels.planning.replays.roles import both_roles
from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.planning.runs.layer_groups import Group
from tpkernels.planning.runs.shadow import MODES, Mode, Shadow
from tpkernels.planning.runs.trace import Recording
from tpkernels.planning.splits import HandedOn, Unproven

__all__ = ["Blamed", "WholeReplays"]


class Blamed(Unproven):
    """What a replay says, and the numbers of the groups that it says so of."""

    def __init__(self, error: Unproven, groups: Iterable[int]) -> None:
        super().__init__(error.reason, count=error.count)
        self.error, self.groups = error, frozenset(groups)


class WholeReplays:
    """Of the model that was observed; ``forced``: roles of a user's overrides outside of any group."""

    def __init__(
        self,
        observation: Observation,
        shadow: Shadow,
        world_size: int,
        hypotheses: Hypotheses,
        forced: Mapping[str, Role],
    ) -> None:
        self.observation, self.shadow, self.world_size = observation, shadow, world_size
        self._hypotheses, self._forced = hypotheses, forced

    def run(self, proofs: Mapping[Group, Proof], pairs: Mapping[Group, Proof] | None = None) -> Replay:
        """Replay the whole model in every mode; the result knows what all of these replays have found.

        Args:
            pairs: groups with convolutions, whose numbers follow those of ``proofs``.

        Raises:
            Blamed: it does not hold.
        """
        try:
            return self._replay_modes(proofs, pairs or {})
        finally:
            self.shadow.set_mode(self.observation.mode)

    def _replay_modes(self, proofs: Mapping[Group, Proof], pairs: Mapping[Group, Proof]) -> Replay:
        roles: dict[str, Role] = {}
        attributes: Attributes = {}
        whole: Whole = {}
        widths: dict[str, int] = {}
        for number, (group, proof) in enumerate(proofs.items()):
            roles |= self._hypotheses.roles(
                group, proof.segments, number, proof.pieces, proof.slices, proof.feeders, proof.copied, proof.behind,
                proof.arguments, proof.states,
            )  # fmt: skip
            attributes |= proof.attributes
            whole |= proof.whole_attributes
            widths |= {name: sum(proof.segments[name]) for name in proof.copies}
        for number, (group, proof) in enumerate(pairs.items(), start=len(proofs)):
            roles = both_roles(roles, roles_of(group, self.shadow, proof, number))
            attributes |= proof.attributes
        count = len(proofs) + len(pairs)
        for name, role in self._forced.items():
            roles.setdefault(name, replace(role, group=count))
        leaving = frozenset(number for number, one in enumerate([*proofs, *pairs]) if one.results)
        results: list[dict[tuple[int, int, int], Tensor]] = []
        ranks = unlike_ranks(roles, self.world_size)
        merged: Replay | None = None
        begun_after = {id(recording.after) for _, recording in self.observation.recordings}
        ran: dict[int, list[Replay]] = {}
        for mode, recording in self.observation.recordings:
            call, first, after = self.observation.calls[id(recording)], id(recording), recording.after
            self.shadow.set_mode(mode)
            if widths:
                dice, settled = recording.dice, recording.settled
                recording = Recording(self.shadow, whole, widths, recording.after, recording.paths, recording.turns)
                recording.dice, recording.settled = dice, settled
                recording.run(call)
            replays = [Replay(self.shadow, recording, roles, attributes, self.world_size, rank) for rank in ranks]
            for number, replay in enumerate(replays):
                replay.may_leave = leaving
                try:
                    if merged is not None:
                        replay.know(merged)
                    if after is not None:
                        replay.begin_after(ran[id(after)][number] if id(after) in ran else None)
                    replay.run_model(call)
                except Unproven as error:
                    raise Blamed(_in_mode(error, mode), replay.blame) from error
            if any(replay.partial != replays[0].partial for replay in replays):
                unlike = Unproven("ranks of different sizes would have gradients of different kinds")
                raise Blamed(unlike, range(count))
            merged = replays[0]
            results += [] if call.method else [merged.cut_results]
            if any(one.keys() != results[0].keys() for one in results):
                raise Blamed(Unproven("calls of the model return results that are cut otherwise"), leaving)
            if first in begun_after:
                ran[first] = replays
        assert merged is not None
        merged.cut_results = results[0] if results else {}
        return merged


def _in_mode(error: Unproven, mode: Mode) -> Unproven:
    return (
        error
        if mode == MODES[0] or isinstance(error, HandedOn)
        else Unproven(f"{error.reason} (in {mode})", count=error.count)
    )
