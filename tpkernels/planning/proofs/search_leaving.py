"""Proofs of groups that give to what the model returns (``Group.results``): attention whose weights every caller gets.

It owns which of them are tried: those whose layers, with what ranks gather of the results, send less than the layers do
where each is cut by itself.  A few weights of each head are less than its features; those of long sequences are more.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

from tpkernels.planning.proofs.channel_bytes import ChannelBytes
from tpkernels.planning.proofs.hypotheses import Proof
from tpkernels.planning.proofs.search import Search
from tpkernels.planning.runs.layer_groups import SMALL_GROUP, Group, find_groups
from tpkernels.planning.runs.session import Scope
from tpkernels.planning.splits import Unproven

__all__ = ["Leaving", "prove_leaving"]


@dataclass
class Leaving:
    """Those that are proven within the modules around them, and why others are not."""

    proven: dict[Group, Proof] = field(default_factory=dict)
    refused: dict[Group, Unproven] = field(default_factory=dict)
    sent: dict[Group, int] = field(default_factory=dict)
    """Bytes by a rank, to gather what the model returns of those that are proven."""


def prove_leaving(
    search: Search, used: Container[str], barred: Container[str], contradicts: Callable[[Group], bool]
) -> Leaving:
    """Groups of linear layers that are neither ``used`` nor ``barred``."""
    found, known = Leaving(), dict[Any, tuple[Group, Scope, Proof] | Unproven]()
    recording, world_size, layers = search.recording, search.world_size, search.shadow.layers
    count = ChannelBytes(search.shadow, recording, world_size)
    for group in find_groups(recording, results=True):
        linear = all(name in layers and layers[name].kind != "embedding" for name in group.layers)
        barring = any(name in used or name in barred for name in group.layers)
        wanted = group.results and not group.given and group.size <= SMALL_GROUP and linear and not barring
        if not wanted or contradicts(group) or not search.is_called(group):
            continue
        given = sum(recording.returned[number][1] for number in group.results) * (world_size - 1) // world_size
        together = sum(count.sent(n, takes=n in group.rows, gives=n in group.columns) for n in group.layers)
        if given + together >= sum(count.sent(name, takes=False, gives=False) for name in group.layers):
            found.refused[group] = Unproven(
                "with the result of the model that it would gather, a pair would send as much"
            )
            continue
        scope = search.scope_of(group)
        key = search.signature(group, scope)
        if key not in known:
            try:
                known[key] = group, scope, search.prove(group)
            except Unproven as error:
                known[key] = error
        like = known[key]
        if isinstance(like, Unproven):
            found.refused[group] = like
        elif not like[2].feeders:
            first, old, proof = like
            found.proven[group], found.sent[group] = proof.moved((first, old.name), (group, scope.name)), given
    return found
