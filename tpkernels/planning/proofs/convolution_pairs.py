"""Which convolutions are cut in pairs: one gives a rank's channels, another takes them and is summed.

It owns the choice.  Groups are those of the data flow (:func:`find_groups`), with convolutions among their layers.  One
is a candidate if a rank sends no more than it does where each of its layers is cut by itself, by the bytes that the
plan would say; those that save most are taken first, and a layer is in at most one.  What stands between is proven by
a replay within the module around the group (:mod:`tpkernels.planning.proofs.pair_proofs`);
:mod:`tpkernels.planning.proofs.decision` proves all of them on the whole model.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from tpkernels.ops.checks import DTYPES
from tpkernels.planning.alone.single_layers import by_rule
from tpkernels.planning.entries.convolution_entries import channel_cuts, convolution_traffic
from tpkernels.planning.entries.plan_entries import traffic_of
from tpkernels.planning.proofs.hypotheses import Proof
from tpkernels.planning.proofs.pair_proofs import prove
from tpkernels.planning.proofs.search import Search
from tpkernels.planning.runs.layer_groups import Group, find_groups
from tpkernels.planning.runs.row_counts import elements_in, untrained_in
from tpkernels.planning.runs.session import Scope
from tpkernels.planning.runs.shadow import Shadow
from tpkernels.planning.runs.trace import Recording
from tpkernels.planning.splits import Unproven
from tpkernels.planning.styles import Channels, Column, Row, Style

__all__ = ["GIVES", "MOST_LAYERS", "TAKES", "find_pairs"]

MOST_LAYERS = 8
"""Of a group; larger ones are residual streams, which stay whole."""
GIVES, TAKES = Channels(gather_output=False), Channels(inputs=True)


def find_pairs(
    search: Search, recording: Recording, world_size: int, excluded: Container[str]
) -> tuple[dict[Group, Proof], dict[Group, Unproven]]:
    """Groups that are proven within the modules around them, and why others are not.

    ``excluded``: layers, and modules with parameters, that are cut with others already, or may not be.
    """
    shadow, bytes_of = search.shadow, _Bytes(search.shadow, recording, world_size)
    saved: dict[Group, int] = {}
    refused: dict[Group, Unproven] = {}
    for group in find_groups(recording, convolutions=True):
        barred = next((why for n in group.layers if (why := _why_barred(n, shadow, recording, excluded))), None)
        if len(group.layers) > MOST_LAYERS:
            refused[group] = Unproven(f"a stream of {len(group.layers)} layers stays whole")
        elif barred is not None:
            refused[group] = Unproven(barred)
        else:
            saved[group] = sum(bytes_of.alone(name) - bytes_of.in_pair(name, group) for name in group.layers)
    found: dict[Group, Proof] = {}
    known: dict[Any, tuple[Group, Scope, Proof] | Unproven] = {}
    taken = set[str]()
    for group in sorted(saved, key=lambda group: -saved[group]):
        if used := taken & {*group.layers}:
            refused[group] = Unproven(f"{min(used)} is in another pair")
            continue
        if saved[group] < 0:
            refused[group] = Unproven("a pair would send more than each layer by itself does")
            continue
        try:
            proof = _proof(search, recording, group, world_size, excluded, known)
        except Unproven as error:
            refused[group] = error
            continue
        found[group] = proof
        taken |= {*group.layers}
    return found, refused


def _proof(
    search: Search, recording: Recording, group: Group, world_size: int, excluded: Container[str],
    known: dict[Any, tuple[Group, Scope, Proof] | Unproven],
) -> Proof:  # fmt: skip
    """One that was found for a group like it, or a new one.

    Raises:
        Unproven: there is none.
    """
    scope = search.scope_of(group)
    key = search.signature(group, scope)
    if key not in known:
        try:
            known[key] = group, scope, prove(search, recording, group, world_size)
        except Unproven as error:
            known[key] = error
    found = known[key]
    if isinstance(found, Unproven):
        raise found
    first, old, proof = found
    proof = proof.moved((first, old.name), (group, scope.name))
    for owner in (name.rpartition(".")[0] for name in proof.slices):
        if owner in excluded:
            raise Unproven(f"{owner} stays whole, or is cut with others")
    return proof


def _why_barred(name: str, shadow: Shadow, recording: Recording, excluded: Container[str]) -> str | None:
    """Why the layer cannot be cut with others, if so."""
    if name in excluded:
        return f"{name} stays whole, or is cut with others"
    if name in recording.called_otherwise:
        return f"{name} is called with more than a tensor, or inside of a module that needs values"
    if name in recording.direct or name in recording.rows_unknown:
        return f"{name} is used by code past it, or inside of a module that needs values"
    weight: Any = shadow.modules[name].weight
    if weight.dtype not in DTYPES or shadow.sizes[name].kind == "embedding":
        return f"{name} is a table, or has weights of {weight.dtype}"
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
