"""Pairs of layers beside which a stream goes on in parts: the MLPs of blocks between two convolutions.

It owns which pairs may, and what becomes of them.  A residual stream that a convolution begins and another one ends is
a group of these two and of all layers along it, which are in pairs of their own within the blocks
(:class:`tpkernels.planning.proofs.convolution_pairs.PairChoice`).  Where the stream is cut by channels, the first layer
of such a pair gathers what it takes, and the last one scatters what it sums: as many bytes as the sums that both make
otherwise.  The convolutions send less.  Pairs are those of one column and one row, and no other layer reads what the
column does: each of several would gather the same, where they share the sum of a gradient otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.modules.conv import _ConvNd

from tpkernels.planning.entries.plan_entries import Chosen
from tpkernels.planning.modules.layers import Layer
from tpkernels.planning.proofs.hypotheses import Attributes, Proof
from tpkernels.planning.runs.layer_groups import Group
from tpkernels.planning.runs.shadow import Mode
from tpkernels.planning.runs.trace import Recording
from tpkernels.planning.splits import share
from tpkernels.planning.styles import Column, Row

__all__ = ["NO_PAIRS", "Beside", "beside_streams", "channels_read", "pairs_beside"]


@dataclass(frozen=True)
class Beside:
    """The layers of pairs beside which a stream may be cut; none if no stream is asked for."""

    columns: Set[str] = frozenset()
    """They give to the rows, and may gather what they take;"""
    rows: Set[str] = frozenset()
    """these may scatter what they sum."""

    def may_be_in(self, group: Group, name: str) -> bool:
        """Whether one of these layers takes what ``group`` cuts, or is one of those that cut it, and not both."""
        takes, gives = name in group.rows, name in group.columns
        return name in (self.columns if takes else self.rows) and takes != gives


NO_PAIRS = Beside()


def pairs_beside(
    proven: Mapping[Group, Proof], barred: Container[str], layers: Mapping[str, Layer],
    firsts: Sequence[tuple[Mode, Recording]],
) -> Beside:  # fmt: skip
    """Of the groups that hold, the pairs whose layers are not ``barred``, and whose columns alone read what they do."""
    sharing = set[str]()
    for _, recording in firsts:
        times = Counter(read for reads in recording.layer_reads.values() for read in {*reads})
        sharing |= {name for name, reads in recording.layer_reads.items() if any(times[read] > 1 for read in reads)}
    found = [
        group for group, proof in proven.items()
        if _is_plain(group, proof) and not any(name in barred or name not in layers for name in group.layers)
        and layers[group.columns[0]].kind != "embedding" and group.columns[0] not in sharing
    ]  # fmt: skip
    return Beside(frozenset(one.columns[0] for one in found), frozenset(one.rows[0] for one in found))


def _is_plain(group: Group, proof: Proof) -> bool:
    """Whether it is of one column and one row, cut by features in one piece, and nothing else gives to it."""
    more = (group.given, group.scattered, group.results, group.gathered, group.summed_arguments)
    asks = (proof.heads, proof.pieces, proof.copies, proof.feeders, proof.arguments, proof.states)
    pair = len(group.columns) == len(group.rows) == 1
    return pair and not any((*more, *asks)) and len(proof.segments[group.columns[0]]) == 1


def channels_read(modules: Mapping[str, nn.Module], names: Iterable[str], world_size: int) -> Attributes:
    """Of modules around convolutions that take parts: how many channels these take on each rank, where they keep it."""
    found = {}
    for name in names:
        around, taken = name.rpartition(".")[0], getattr(modules[name], "in_channels", None)
        own = vars(modules[around]).get("in_channels")
        if isinstance(modules[name], _ConvNd) and type(own) is int and own == taken:
            found[around, "in_channels"] = share(own, world_size)
    return found


def beside_streams(streaming: Set[str], chosen: Mapping[str, Chosen]) -> dict[str, Chosen]:
    """The styles of layers of pairs beside which streams are cut, made of those of the pairs by themselves."""
    found = {}
    for name in sorted(streaming):
        style, said = chosen[name].style, chosen[name].reason
        assert isinstance(style, Column | Row)
        if isinstance(style, Column):
            style, what = replace(style, gather_input=True), "gathers what it takes of a stream that is cut by channels"
        else:
            style, what = replace(style, scatter_unit=1), "scatters the sum to a stream that is cut by channels"
        found[name] = replace(chosen[name], style=style, reason=f"{said}; {what}")
    return found
