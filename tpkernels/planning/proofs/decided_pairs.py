"""Which convolutions are cut in pairs beside the groups that hold already, as far as that holds on the whole model.

It owns the way there: each first run of an example has its choice (:mod:`tpkernels.planning.proofs.convolution_pairs`),
and what a replay of the whole model blames is chosen no more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace

from tpkernels.planning.proofs.convolution_pairs import PairChoice, names_gathering, sent_for_results
from tpkernels.planning.proofs.hypotheses import Proof
from tpkernels.planning.proofs.pairs_beside import NO_PAIRS, Beside, channels_read
from tpkernels.planning.proofs.replay_checks import half_partial
from tpkernels.planning.proofs.search_again import SearchAgain
from tpkernels.planning.proofs.whole_replays import Blamed, WholeReplays
from tpkernels.planning.replays.replay import Replay
from tpkernels.planning.runs.layer_groups import Group
from tpkernels.planning.runs.shadow import Mode
from tpkernels.planning.splits import Unproven

__all__ = ["DecidedPairs", "decide_pairs"]


@dataclass
class DecidedPairs:
    """Those that hold, and why others are not taken."""

    pairs: dict[Group, Proof] = field(default_factory=dict)
    unpaired: dict[Group, Unproven] = field(default_factory=dict)
    replay: Replay | None = None
    """Of the whole model with them; None if there are none."""
    streaming: set[str] = field(default_factory=set)
    """Layers of pairs beside which streams are cut: columns that gather what they take, rows that scatter their sum."""
    gathering: set[str] = field(default_factory=set)
    """Convolutions that take and give channels that are cut, and gather the ones."""
    result_bytes: int = 0
    """Sent to gather what the model returns of them."""


def decide_pairs(
    replays: WholeReplays,
    proven: Mapping[Group, Proof],
    before: Mapping[Group, Proof],
    barred: Set[str],
    grouped: Set[str],
    beside: Beside = NO_PAIRS,
    known: Collection[str] = (),
) -> DecidedPairs:
    """Choose pairs until a replay of the whole model holds.

    Args:
        proven: groups of layers that hold.
        before: pairs that hold.
        barred: layers, and modules with parameters, that are cut already, or may not be.
        grouped: convolutions in groups that may be ends of pairs; then only pairs with one of them count.
        beside: layers of pairs in ``proven``; then only streams beside some of them count.
        known: modules that take sums over what is cut already.
    """
    shadow, world_size, firsts = replays.shadow, replays.world_size, replays.observation.firsts
    choices = [
        (mode, PairChoice(SearchAgain(shadow, one, world_size), one, world_size, barred, grouped, beside))
        for mode, one in firsts
    ]
    every, number = [choice for _, choice in choices], len(proven) + len(before)
    while True:
        found = _chosen(replays, choices)
        if not found.pairs:
            return found
        try:
            found.replay = replays.run(proven, {**before, **found.pairs})
            guilty = half_partial(found.replay, shadow.modules)
            if beside is not NO_PAIRS:
                guilty |= _against_streams(found.pairs, found.replay, number, known)
            if not guilty:
                break
            error = next(iter(guilty.values()))
        except Blamed as blamed:
            guilty, error = dict.fromkeys(blamed.groups, blamed.error), blamed.error
        wrong = [group for index, group in enumerate(found.pairs, start=number) if index in guilty] or found.pairs
        for choice in every:
            choice.refused |= dict.fromkeys(wrong, error)
    if beside is not NO_PAIRS:
        _tell_widths(replays, proven, before, found, number)
    found.streaming = {n for group in found.pairs for n in group.layers if n in beside.columns or n in beside.rows}
    found.gathering = names_gathering(every, found.pairs)
    found.result_bytes = sent_for_results(every, found.pairs)
    return found


def _chosen(replays: WholeReplays, choices: Sequence[tuple[Mode, PairChoice]]) -> DecidedPairs:
    """A choice for each first run, of layers that those before it have left."""
    found = DecidedPairs()
    for mode, choice in choices:
        replays.shadow.set_mode(mode)
        chosen, refused = choice.choose({name for group in found.pairs for name in group.layers})
        found.pairs |= chosen
        found.unpaired |= refused
    found.unpaired = {group: error for group, error in found.unpaired.items() if group not in found.pairs}
    return found


def _against_streams(
    pairs: Collection[Group], replay: Replay, number: int, known: Collection[str]
) -> dict[int, Unproven]:
    """Streams that hold and are not taken, by their numbers, of which ``number`` is the first.

    Of sums that code beside the layers makes, in modules that are not ``known`` to, it is not asked which stream they
    are of.

    Args:
        replay: of the whole model with all of them.
    """
    numbers = range(number, number + len(pairs))
    if not {*replay.statistics, *replay.maxima} <= {*known}:
        return dict.fromkeys(numbers, Unproven("code beside its layers takes sums over what it would cut"))
    drawn = Unproven("random numbers are drawn for parts of a stream, beside pairs that draw their own")
    return {index: drawn for index in numbers if index in replay.part_draws_in}


def _tell_widths(
    replays: WholeReplays,
    proven: Mapping[Group, Proof],
    before: Mapping[Group, Proof],
    found: DecidedPairs,
    number: int,
) -> None:
    """Let code around convolutions read how many channels a rank has, where that holds: under the name that torch has
    for it, as a cache of what is padded reads it in calls that no example makes (VibeVoice's)."""
    assert found.replay is not None
    told = {}
    for index, (group, proof) in enumerate(found.pairs.items(), start=number):
        between = (name for name, groups in found.replay.cut_channels.items() if index in groups)
        widths = channels_read(replays.shadow.modules, [*group.rows, *between], replays.world_size)
        told[group] = replace(proof, attributes={**widths, **proof.attributes})
    with suppress(Blamed):
        found.replay, found.pairs = replays.run(proven, {**before, **told}), told
