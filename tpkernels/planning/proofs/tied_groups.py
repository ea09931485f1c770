"""Groups of layers whose weights are tied to those of other groups, as of blocks that share all weights (Zamba 2).

It owns the rule.  A weight is one parameter, whoever holds it, so all layers that hold it must be cut alike: each of
them a column in one piece, or each of them a row, of the same number of ranks.  Groups are proven one by one, as others
are.  Those of which a tied layer is something else than its twins are then given up; so are those that share more than
layers, such as a norm over features that are cut.  A parameter that works on parts (the norm of a head's queries in
DiffusionGemma, whose encoder and decoder have one) may be shared by modules whose gradients are all summed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from tpkernels.planning.modules.layers import Layer
from tpkernels.planning.proofs.hypotheses import Proof
from tpkernels.planning.replays.replay import Replay
from tpkernels.planning.runs.layer_groups import Group
from tpkernels.planning.splits import Unproven
from tpkernels.planning.styles import Column, Row, Style

__all__ = ["held_by_twins", "shared_by_groups", "tied_layers", "unlike_twins"]

Ties = Mapping[str, Collection[str]]
"""Layers that may be cut with others although they share a parameter, each with all that share it, itself too."""


def tied_layers(modules: Mapping[str, nn.Module], layers: Mapping[str, Layer]) -> dict[str, set[str]]:
    """Linear layers that share parameters with other linear layers alone, under the same name in each."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for name, module in modules.items():
        for key, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((name, key))
    found: dict[str, set[str]] = {}
    barred: set[str] = set()
    for held in (held for held in owners.values() if len(held) > 1):
        names = {name for name, _ in held}
        linear = all(name in layers and layers[name].kind == "linear" for name in names)
        if not linear or len({key for _, key in held}) > 1:
            barred |= names
        for name in names:
            found.setdefault(name, set()).update(names)
    return {name: twins for name, twins in found.items() if not twins & barred}


def unlike_twins(proven: Mapping[Group, Proof], ties: Ties) -> dict[Group, Unproven]:
    """Groups with a tied layer that is not cut as its twins are, and why they are given up."""
    roles = {name: _role(name, group, proof) for group, proof in proven.items() for name in _names(group, proof)}
    found: dict[Group, Unproven] = {}
    for group, proof in proven.items():
        for name in filter(ties.__contains__, _names(group, proof)):
            others = sorted(twin for twin in ties[name] if roles.get(twin) != roles[name])
            if others or roles[name] is None:
                found[group] = Unproven(
                    f"{name} has a weight that is tied to that of {(others or [name])[0]}, and both "
                    "are not cut in one piece as columns, or as rows"
                )
    return found


def shared_by_groups(
    proven: Mapping[Group, Proof], replay: Replay, modules: Mapping[str, nn.Module], ties: Ties
) -> set[int]:
    """Numbers of the groups with tied layers that cut, or sum the gradient of, a parameter which is tied and belongs to
    no layer, and not to all who hold it alike."""
    if not ties:
        return set()
    held = _owners(modules)
    called = {scope.name for scope in replay.recording.scopes}

    def own(name: str) -> list[nn.Parameter]:
        return list(modules[name].parameters(recurse=False))

    def is_tied(name: str) -> bool:
        return any(len(held[id(one)]) > 1 for one in own(name))

    summed = {id(_parameter(modules, name)) for name in replay.partial}

    def is_summed(name: str) -> bool:
        return name in called and all(id(one) in summed for one in own(name))

    found: set[int] = set()
    for name, groups in replay.partial_groups.items():
        owners = held[id(_parameter(modules, name))]
        found |= groups if len(owners) > 1 and not all(map(is_summed, owners)) else set()
    for name, groups in (*replay.cut_norms.items(), *replay.cut_channels.items()):
        found |= groups if is_tied(name) else set()
    for number, proof in enumerate(proven.values()):
        if any(is_tied(name.rpartition(".")[0]) for name in proof.slices):
            found.add(number)
    return found & {at for at, group in enumerate(proven) if any(name in ties for name in group.layers)}


def held_by_twins(modules: Mapping[str, nn.Module], names: Collection[str]) -> set[str]:
    """These parameters by all names that they have in the model; those that are none of torch's have one."""
    held, found = _owners(modules), {*names}
    for one in (_parameter(modules, name) for name in names):
        for owner in () if one is None else held[id(one)]:
            keys = [key for key, other in modules[owner].named_parameters(recurse=False) if other is one]
            found |= {f"{owner}.{key}" if owner else key for key in keys}
    return found


def _parameter(modules: Mapping[str, nn.Module], name: str) -> nn.Parameter | None:
    owner, _, key = name.rpartition(".")
    return dict(modules[owner].named_parameters(recurse=False)).get(key)


def _owners(modules: Mapping[str, nn.Module]) -> dict[int, list[str]]:
    """Of each parameter by its id, the modules that hold it."""
    found: dict[int, list[str]] = {}
    for name, module in modules.items():
        for _, parameter in module.named_parameters(recurse=False):
            found.setdefault(id(parameter), []).append(name)
    return found


def _names(group: Group, proof: Proof) -> tuple[str, ...]:
    return (*group.layers, *proof.feeders)


def _role(name: str, group: Group, proof: Proof) -> type[Style] | None:
    """None for what a tied layer cannot be."""
    if proof.pieces or name in proof.copies or name in (*group.given, *proof.feeders):
        return None
    if name in group.rows:
        return Row
    return Column if len(proof.segments[name]) == 1 else None
