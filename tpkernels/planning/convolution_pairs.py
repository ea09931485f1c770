"""Which convolutions are cut in pairs: one gives a rank's channels, another takes them and is summed.

It owns the choice.  Groups are those of the data flow (:func:`find_groups`), with convolutions among their layers.  One
is a candidate if a rank sends no more than it does where each of its layers is cut by itself, by the bytes that the
plan would say; those that save most are taken first, and a layer is in at most one.  What stands between is proven by
a replay within the module around the group; :mod:`tpkernels.planning.proofs` proves all of them on the whole model.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from tpkernels.ops.checks import DTYPES
from tpkernels.planning.convolution_entries import channel_cuts, convolution_traffic
from tpkernels.planning.layer_groups import Group, find_groups
from tpkernels.planning.plan_entries import traffic_of
from tpkernels.planning.replay import Replay
from tpkernels.planning.roles import Role, unlike_ranks
from tpkernels.planning.row_counts import elements_in, untrained_in
from tpkernels.planning.search import Search
from tpkernels.planning.shadow import Shadow
from tpkernels.planning.single_layers import by_rule
from tpkernels.planning.splits import Unproven, share
from tpkernels.planning.styles import Channels, Column, Row, Style
from tpkernels.planning.trace import Recording

__all__ = ["MOST_LAYERS", "GIVES", "TAKES", "find_pairs", "roles_of"]

MOST_LAYERS = 8
"""Of a group; larger ones are residual streams, which stay whole."""
GIVES, TAKES = Channels(gather_output=False), Channels(inputs=True)


def roles_of(group: Group, shadow: Shadow, number: int = 0) -> dict[str, Role]:
    """Each layer cut in one piece, by its output or input channels or features."""
    found = {name: Role("column", (shadow.sizes[name].out_features,), number) for name in group.columns}
    return found | {name: Role("row", (shadow.sizes[name].in_features,), number) for name in group.rows}


def find_pairs(
    search: Search, recording: Recording, world_size: int, excluded: Container[str]
) -> tuple[list[Group], dict[Group, Unproven]]:
    """Groups that are proven within the modules around them, and why others are not.

    ``excluded``: layers that are cut with others already, or may not be.
    """
    shadow, bytes_of = search.shadow, _Bytes(search.shadow, recording, world_size)
    saved: dict[Group, int] = {}
    for group in find_groups(recording, convolutions=True):
        if len(group.layers) <= MOST_LAYERS and not any(
            _is_barred(n, shadow, recording, excluded) for n in group.layers
        ):
            saved[group] = sum(bytes_of.alone(name) - bytes_of.in_pair(name, group) for name in group.layers)
    found: list[Group] = []
    refused: dict[Group, Unproven] = {}
    known: dict[Any, Unproven | None] = {}
    used: set[str] = set()
    for group in sorted(saved, key=lambda group: -saved[group]):
        if used & {*group.layers}:
            continue
        if saved[group] < 0:
            refused[group] = Unproven("a pair would send more than each layer by itself does")
            continue
        try:
            key = search.signature(group, search.scope_of(group))
            if key not in known:
                known[key] = _why_not(search, recording, group, world_size)
            error = known[key]
        except Unproven as unproven:
            error = unproven
        if error is None:
            found.append(group)
            used |= {*group.layers}
        else:
            refused[group] = error
    return found, refused


def _is_barred(name: str, shadow: Shadow, recording: Recording, excluded: Container[str]) -> bool:
    """Whether the layer cannot be cut with others."""
    if name in excluded or name in recording.called_otherwise or name in recording.direct:
        return True
    weight: Any = shadow.modules[name].weight
    return weight.dtype not in DTYPES or shadow.sizes[name].kind == "embedding" or name in recording.rows_unknown


def _why_not(search: Search, recording: Recording, group: Group, world_size: int) -> Unproven | None:
    """What a replay within the module around the group says against it."""
    roles, scope = roles_of(group, search.shadow), search.scope_of(group)
    if any(0 in share(size, world_size) for role in roles.values() for size in role.segments):
        return Unproven(f"there are fewer channels than {world_size} ranks")
    try:
        for rank in unlike_ranks(roles, world_size):
            Replay(search.shadow, recording, roles, {}, world_size, rank).run_scope(scope)
    except Unproven as error:
        return error
    return None


class _Bytes:
    """What a rank sends for a layer in one step, by itself or as one of a pair."""

    def __init__(self, shadow: Shadow, recording: Recording, world_size: int) -> None:
        self.shadow, self.recording, self.world_size = shadow, recording, world_size
        self.elements: Mapping[str, tuple[int, int]] = elements_in([recording])
        self.untrained = untrained_in([recording])

    def alone(self, name: str) -> int:
        if name in self.shadow.convolutions:
            return self._of(name, Channels())
        return self._of(name, by_rule(self.shadow.layers[name], "", tied=False).style)

    def in_pair(self, name: str, group: Group) -> int:
        if name in self.shadow.convolutions:
            return self._of(name, TAKES if name in group.rows else GIVES)
        return self._of(name, Row() if name in group.rows else Column())

    def _of(self, name: str, style: Style) -> int:
        module = self.shadow.modules[name]
        if isinstance(style, Channels):
            dims = channel_cuts(self.shadow.model, name, style)
            sent = convolution_traffic(module, dims, self.elements.get(name), self.world_size, style).wire_bytes
        else:
            rows, own = self.recording.layer_rows.get(name), dict(module.named_parameters(recurse=False))
            needs_dx = name not in self.untrained
            sent = traffic_of(style, self.shadow.layers[name], own, rows, self.world_size, None, needs_dx).wire_bytes
        return sent or 0
