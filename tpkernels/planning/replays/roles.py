"""What a layer, or a parameter, is to a group that is cut; and which ranks differ in what they have of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tpkernels.planning.splits import Split, share

__all__ = ["SUMMED", "Role", "both_roles", "unlike_ranks"]

SUMMED = ":summed:"
"""Between a module and its argument, in the name of a "summed" role: the argument may have another role as well."""


@dataclass(frozen=True)
class Role:
    """What a layer is to a group: "column" (its output is cut as ``segments``) or "row" (its input is cut).

    A layer that is a "row" as well as a "column" has the role of a column, with ``taken``, that of the row: ranks
    scatter the sum.

    Every rank has the last ``copied`` segments but ``behind`` whole, and a share of the gradients of their rows of the
    weight.  A "row" that is ``summed`` gives to parts what it has summed, and sums the gradient of that as well.
    A "slice" is a parameter of some other module, by its name, of which each rank has its part of dimension ``dim``.
    A "product" is one by which code multiplies, as a column's or a row's weight.
    An "argument" (``module:name``) is one of a call of a module that takes its part of each run of so many heads.
    So has one that is "gathered", whose module takes all of what a column gives, and a "state", which it writes to.
    One that is "summed" is whole and meets parts in its module, and ranks sum its gradient.
    A "table" is whole, and its rows meet parts.
    ``group`` is blamed where the cut cannot be proven; ``pieces`` as for :class:`Split`.
    """

    kind: str
    segments: tuple[int, ...]
    group: int = 0
    pieces: int = 0
    dim: int = -1
    copied: int = 0
    behind: int = 0
    summed: bool = False
    taken: Role | None = None

    def split(self, dim: int) -> Split:
        return Split(dim, self.segments, self.pieces, self.copied, self.behind)


def both_roles(some: Mapping[str, Role], others: Mapping[str, Role]) -> dict[str, Role]:
    """Roles of several groups: a layer that ends one of them and begins another has a role of both."""
    found = {**some, **others}
    for name in some.keys() & others.keys():
        row, column = sorted((some[name], others[name]), key=lambda role: role.kind == "column")
        if (row.kind, column.kind) == ("row", "column"):
            found[name] = replace(column, taken=row)
    return found


def unlike_ranks(roles: Mapping[str, Role], world_size: int) -> list[int]:
    """One rank for each set of ranks with equal sizes, the first: a proof for these holds for all."""
    every = [one for role in roles.values() for one in (role, role.taken) if one is not None]
    cuts = sorted({(size, role.pieces) for role in every for size in role.split(0).cut_segments})
    shares = [share(size, world_size, pieces) for size, pieces in cuts]
    firsts = {tuple(sizes[rank] for sizes in shares): rank for rank in reversed(range(world_size))}
    return sorted(firsts.values())
