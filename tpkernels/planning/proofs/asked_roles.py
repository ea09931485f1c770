"""What a user's overrides ask of the data flow: the roles of layers that are to be cut with their neighbours.

A proof is of one cut.  It says nothing of another one that an override's ``unit`` asks for: such a group is given up,
and the roles that were asked for are tried by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

from tpkernels.planning.modules.layers import Layer
from tpkernels.planning.proofs.hypotheses import Proof
from tpkernels.planning.replays.roles import Role
from tpkernels.planning.runs.layer_groups import Group
from tpkernels.planning.splits import pieces_of
from tpkernels.planning.styles import Column, Features, Row, Style

__all__ = ["asked_in_other_pieces", "roles_asked_for"]


def roles_asked_for(
    forced: Mapping[str, Style], layers: Mapping[str, Layer], world_size: int
) -> tuple[dict[str, Role], dict[str, str]]:
    """The roles that the overrides ``forced`` ask for, and why the other overridden modules have none."""
    roles, excluded = dict[str, Role](), dict[str, str]()
    for name, style in forced.items():
        layer = layers.get(name)
        if layer is not None and isinstance(style, Column) and not style.gather_output:
            total = layer.out_features
            pieces = pieces_of(total, style.unit, world_size) if not style.segments else 0
            roles[name] = Role("column", style.segments or (total,), pieces=pieces)
        elif layer is not None and isinstance(style, Features) and not style.gather_output:
            roles[name] = Role("column", (layer.out_features,))
        elif layer is not None and isinstance(style, Row) and not style.split_input:
            total = layer.in_features
            roles[name] = Role("row", (total,), pieces=pieces_of(total, style.unit, world_size))
        else:
            excluded[name] = "is overridden"
    return roles, excluded


def asked_in_other_pieces(roles: Mapping[str, Role], proven: Mapping[Group, Proof]) -> dict[str, str]:
    """Layers of groups that are proven for another cut than one of them is asked for."""
    return {
        name: f"{asked} is asked for in multiples of its own"
        for group, proof in proven.items()
        for asked in group.layers
        if asked in roles and roles[asked].pieces not in (0, proof.pieces)
        for name in group.layers
    }
