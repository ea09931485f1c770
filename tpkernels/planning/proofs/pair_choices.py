"""What a plan says of convolutions that are cut in pairs, and of what stands between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from tpkernels.planning.entries.plan_entries import Chosen
from tpkernels.planning.modules.channel_modules import ChannelParts, parts_by_channel
from tpkernels.planning.modules.source_reads import maybe_read
from tpkernels.planning.proofs.channel_bytes import style_in_pairs
from tpkernels.planning.proofs.decision import Decision
from tpkernels.planning.proofs.hypotheses import Attributes
from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.planning.runs.shadow import Shadow
from tpkernels.planning.styles import Channels, Column, Row, Sliced, Style

__all__ = ["numbers_by_channel", "pair_choices", "refuse_by_hand", "seen_elsewhere"]

MOST_NAMES = 4
"""That a reason tells."""


def pair_choices(decision: Decision, shadow: Shadow, world_size: int) -> dict[str, Chosen]:
    """The styles that the proof of ``decision`` is of."""
    found: dict[str, Chosen] = {}
    taken = {name: group for group in decision.pairs for name in group.rows}
    given = {name: group for group in decision.pairs for name in group.columns}
    for name in (one for one in dict.fromkeys([*given, *taken]) if one not in decision.streaming):
        gathers, grouped = name in decision.gathering, name in shadow.grouped
        convolution = shadow.sizes[name].kind == "convolution"
        style = style_in_pairs(convolution=convolution, takes=name in taken, gives=name in given, gathers=gathers)
        does = "gathers" if gathers else "takes" if grouped else "sums"
        what = f"{does} what {_last_names(taken[name].columns)} cut" if name in taken else "by channels"
        if name in given:
            sizes = decision.pairs[given[name]].segments[name]
            if len(sizes) > 1 and not isinstance(style, Row):
                proof = decision.pairs[given[name]]
                style, before = replace(style, segments=sizes), f"{what}, " if name in taken else ""
                what = f"{before}by channels of each segment"
                style = replace(style, copied=proof.copied, behind=proof.behind)
                if proof.copied:
                    what = f"{what}, and the narrow ones whole"
            between = ", and gives channels" if gathers or grouped else ", and scatters the sum"
            scattered = between if name in taken else ""
            what = f"{what}{scattered}, up to {_last_names(given[name].rows)}"
        sizes = decision.pairs[taken[name]].taken.get(name, ()) if name in taken else ()
        if isinstance(style, Channels):
            style = replace(style, taken=sizes)
        elif isinstance(style, Row):
            style = replace(style, segments=sizes)
        found[name] = Chosen(style, "data flow", what)
    slices: dict[str, list[tuple[str, int]]] = {}
    for parameter, cut in (item for proof in decision.pairs.values() for item in proof.slices.items()):
        owner, _, key = parameter.rpartition(".")
        slices.setdefault(owner, []).append((key, cut.dim))
    for name, cuts in slices.items():
        keys = ", ".join(key for key, _ in cuts)
        found[name] = Chosen(Sliced(tuple(sorted(cuts))), "data flow", f"{keys} cut with the channels met")
    for name, parts in _parts(decision, shadow, world_size).items():
        if parts.dims:
            sizes = decision.by_channel[name]
            sliced = Sliced(tuple(sorted(parts.dims.items())), segments=sizes if len(sizes) > 1 else ())
            found[name] = Chosen(sliced, "data flow", "cut with the channels it takes")
    return found


def _last_names(names: Iterable[str]) -> str:
    """A few of them, as they are called in the modules around them."""
    last = [*dict.fromkeys(name.rpartition(".")[2] for name in names)]
    return ", ".join(last[:MOST_NAMES]) + ", ..." * (len(last) > MOST_NAMES)


def numbers_by_channel(decision: Decision, shadow: Shadow, world_size: int) -> Attributes:
    """How many groups each rank has of modules that work on groups of channels, and numbers that code between reads."""
    read = {key: values for proof in decision.pairs.values() for key, values in proof.attributes.items()}
    return read | {
        (name, attribute): values
        for name, parts in _parts(decision, shadow, world_size).items()
        for attribute, values in parts.numbers.items()
    }


def _parts(decision: Decision, shadow: Shadow, world_size: int) -> dict[str, ChannelParts]:
    found = {name: parts_by_channel(shadow.modules[name], world_size) for name in decision.by_channel}
    return {name: parts for name, parts in found.items() if parts is not None}


def seen_elsewhere(observation: Observation, model: nn.Module) -> dict[str, str]:
    """Where parts of a model alone were followed: what works by channels and stays whole, with the reason.

    These are the modules whose parameters other code may use, and those without parameters, whose call with all
    channels nothing would refuse.
    """
    shadow = observation.shadow
    if observation.followed or shadow is None:
        return {}
    read, found = maybe_read(model), dict[str, str]()
    for name in sorted(shadow.convolutions.keys() | set(shadow.by_channel)):
        if name in read:
            found[name] = f"has a weight that the code of {read[name]} may use without calling the module"
        elif not any(True for _ in shadow.modules[name].parameters()):
            found[name] = "has no parameters, and may be called by code that was not followed"
    return found


def refuse_by_hand(name: str, style: Style) -> None:
    """Refuse an override that leaves a part where nothing is proven.

    Raises:
        ValueError: it asks for one convolution of a pair.
    """
    if isinstance(style, Row) and style.scatter_unit:
        raise ValueError(
            f'the override of {name!r} asks for a sum that is scattered, which only the data flow can prove: use "row" '
            'or "row_split", or leave it to the plan'
        )
    if isinstance(style, Column) and style.gather_input:
        raise ValueError(
            f"the override of {name!r} asks for a column that takes parts, which only the data flow can prove: use "
            '"column" or "column_gather", or leave it to the plan'
        )
    if isinstance(style, Row) and style.segments:
        raise ValueError(
            f"the override of {name!r} asks for a row of several segments, which only the data flow can prove: use "
            '"row" or "row_split", or leave it to the plan'
        )
    if isinstance(style, Channels) and style.paired:
        raise ValueError(
            f"the override of {name!r} asks for one convolution of a pair, which only the data flow can prove: use "
            '"channels", which gathers, or leave it to the plan'
        )
