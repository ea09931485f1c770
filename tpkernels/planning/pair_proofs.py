"""How a group with convolutions among its layers can be cut: by channels in one piece, or as code takes them apart.

It owns the proof within the module around the group.  Where code takes what a column gives apart along its channels (a
gated linear unit, a split), that one is cut as these segments.  Where what is cut meets a parameter of some other
module as a whole (a slope for each channel), that is cut with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise, product
from math import prod
from typing import Any

import torch
from torch import nn

from tpkernels.planning.gate_rules import halves_of
from tpkernels.planning.hypotheses import Proof, Slice
from tpkernels.planning.layer_groups import Group
from tpkernels.planning.replay import Replay
from tpkernels.planning.roles import Role, unlike_ranks
from tpkernels.planning.search import Search
from tpkernels.planning.session import Scope, Shape
from tpkernels.planning.shadow import Shadow
from tpkernels.planning.splits import Unproven, share
from tpkernels.planning.trace import Recording

__all__ = ["moved", "prove", "roles_of"]

MOST_LAYOUTS, MOST_SLICES = 8, 16
"""Attempts for one group, and parameters of other modules that are cut with it."""
aten = torch.ops.aten


def roles_of(group: Group, shadow: Shadow, proof: Proof, number: int = 0) -> dict[str, Role]:
    """Each layer cut by its output or input channels or features, and parameters that are cut with these."""
    found = {name: Role("column", proof.segments[name], number) for name in group.columns}
    found |= {name: Role("row", (shadow.sizes[name].in_features,), number) for name in group.rows}
    return found | {name: Role("slice", cut.runs, number, dim=cut.dim) for name, cut in proof.slices.items()}


def prove(search: Search, recording: Recording, group: Group, world_size: int) -> Proof:
    """Find a way to cut the group within the module around it.

    Raises:
        Unproven: there is none; the reason is that of the first attempt, or of one that takes the channels apart.
    """
    scope, failures = search.scope_of(group), list[Unproven]()
    for segments in islice(_layouts(search.shadow, recording, group, scope), MOST_LAYOUTS):
        try:
            return _sliced(search, recording, group, Proof(segments, {}), world_size)
        except Unproven as error:
            failures.append(error)
            if not error.segmented:
                break
    raise next((error for error in failures if not error.segmented), failures[0])


def _layouts(shadow: Shadow, recording: Recording, group: Group, scope: Scope) -> Iterator[dict[str, tuple[int, ...]]]:
    """Segments of every column: one, or as code takes so many channels apart."""
    sizes = [shadow.sizes[name].out_features for name in group.columns]
    for chosen in product(*([(size,), *_cuts_of(recording, scope, size)] for size in sizes)):
        yield dict(zip(group.columns, chosen, strict=True))


def _cuts_of(recording: Recording, scope: Scope, size: int) -> list[tuple[int, ...]]:
    """How code takes a dimension of ``size`` channels apart."""
    found: list[tuple[int, ...]] = []
    points: dict[int, set[int]] = {}
    for event in recording.events[scope.start : scope.stop]:
        if event.layer or not event.whole or not isinstance(event.whole[0], Shape) or not event.whole[0]:
            continue
        shape, given = event.whole[0], [*event.whole, *event.kwargs.values()]
        if event.packet is aten.glu:
            dim = (given[1] if len(given) > 1 else -1) % len(shape)
            found += [halves_of(size)] if shape[dim] == size and size % 2 == 0 else []
        elif event.packet in (aten.split, aten.split_with_sizes, aten.chunk):
            dim = (given[2] if len(given) > 2 else 0) % len(shape)
            found += [tuple(one[dim] for one in event.outputs)] if shape[dim] == size else []
        elif event.packet is aten.slice and len(event.whole) > 3 and shape[event.whole[1]] == size:
            points.setdefault(event.whole[1] % len(shape), {0, size}).update(slice(*event.whole[2:4]).indices(size)[:2])
    found += [tuple(b - a for a, b in pairwise(sorted(ends))) for ends in points.values() if len(ends) > 2]
    return [sizes for sizes in dict.fromkeys(found) if len(sizes) > 1 and sum(sizes) == size and 0 not in sizes]


def _sliced(search: Search, recording: Recording, group: Group, proof: Proof, world_size: int) -> Proof:
    """The proof, with parameters of other modules cut that met parts as a whole, one after the other as they do."""
    for _ in range(MOST_SLICES):
        try:
            _replay(search, recording, group, proof, world_size)
        except Unproven as error:
            more = _slices_for(search, group, proof, error)
            if not more:
                raise
            proof = replace(proof, slices={**proof.slices, **more})
            continue
        return proof
    raise Unproven(f"more than {MOST_SLICES} parameters of other modules would be cut")


def _replay(search: Search, recording: Recording, group: Group, proof: Proof, world_size: int) -> None:
    roles, scope = roles_of(group, search.shadow, proof), search.scope_of(group)
    if any(0 in share(size, world_size) for role in roles.values() for size in role.segments):
        raise Unproven(f"there are fewer channels than {world_size} ranks")
    for rank in unlike_ranks(roles, world_size):
        Replay(search.shadow, recording, roles, {}, world_size, rank).run_scope(scope)


def _slices_for(search: Search, group: Group, proof: Proof, error: Unproven) -> dict[str, Slice]:
    """Parameters inside of the scope that are to blame, cut in the dimension in which they meet what is cut."""
    shadow, scope = search.shadow, search.scope_of(group).name
    if error.met is None or len(error.met.segments) > 1 or error.met.copied:
        return {}
    (size,), found = error.met.segments, dict[str, Slice]()
    own = shadow.own_tensors()
    for name in sorted(error.parameters - proof.slices.keys()):
        owner = name.rpartition(".")[0]
        inside = owner == scope or owner.startswith(f"{scope}." if scope else "")
        if not inside or owner in shadow.convolutions or owner in shadow.by_channel or owner in shadow.kept:
            continue
        tensor: Any = own.get(name)
        if isinstance(tensor, nn.Parameter) and prod(tensor.shape) == size:  # a number for each channel
            found[name] = Slice(tuple(tensor.shape).index(size), (size,))
    return found


def moved(known: tuple[Group, Scope, Proof], group: Group, scope: Scope) -> Proof:
    """The proof of one group, restated for another group that differs only in its place."""
    first, old, proof = known
    names = dict(zip(first.layers, group.layers, strict=True))
    segments = {names[name]: sizes for name, sizes in proof.segments.items()}
    return replace(
        proof, segments=segments, slices={scope.name + key[len(old.name) :]: cut for key, cut in proof.slices.items()}
    )
