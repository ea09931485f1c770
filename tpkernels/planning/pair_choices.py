"""What a plan says of convolutions that are cut in pairs, and of what stands between them."""

from __future__ import annotations

from tpkernels.planning.channel_modules import ChannelParts, parts_by_channel
from tpkernels.planning.convolution_pairs import GIVES, TAKES
from tpkernels.planning.hypotheses import Attributes
from tpkernels.planning.plan_entries import Chosen
from tpkernels.planning.proofs import Decision
from tpkernels.planning.shadow import Shadow
from tpkernels.planning.styles import Channels, Column, Row, Sliced, Style

__all__ = ["numbers_by_channel", "pair_choices", "refuse_by_hand"]


def pair_choices(decision: Decision, shadow: Shadow, world_size: int) -> dict[str, Chosen]:
    """The styles that the proof of ``decision`` is of."""
    found: dict[str, Chosen] = {}
    for group in decision.pairs:
        ends, begins = (
            ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names)) for names in (group.rows, group.columns)
        )
        for name in group.columns:
            style: Channels | Column = GIVES if name in shadow.convolutions else Column()
            found[name] = Chosen(style, "data flow", f"by channels, up to {ends}")
        for name in group.rows:
            last: Channels | Row = TAKES if name in shadow.convolutions else Row()
            found[name] = Chosen(last, "data flow", f"sums what {begins} cut")
    for name, parts in _parts(decision, shadow, world_size).items():
        if parts.dims:
            found[name] = Chosen(
                Sliced(tuple(sorted(parts.dims.items()))), "data flow", "cut with the channels it takes"
            )
    return found


def numbers_by_channel(decision: Decision, shadow: Shadow, world_size: int) -> Attributes:
    """How many groups each rank has of modules that work on groups of channels."""
    return {
        (name, attribute): values
        for name, parts in _parts(decision, shadow, world_size).items()
        for attribute, values in parts.numbers.items()
    }


def _parts(decision: Decision, shadow: Shadow, world_size: int) -> dict[str, ChannelParts]:
    found = {name: parts_by_channel(shadow.modules[name], world_size) for name in sorted(decision.by_channel)}
    return {name: parts for name, parts in found.items() if parts is not None}


def refuse_by_hand(name: str, style: Style) -> None:
    """Refuse an override that leaves a part where nothing is proven.

    Raises:
        ValueError: it asks for one convolution of a pair.
    """
    if isinstance(style, Channels) and style.paired:
        raise ValueError(
            f"the override of {name!r} asks for one convolution of a pair, which only the data flow can prove: use "
            '"channels", which gathers, or leave it to the plan'
        )
