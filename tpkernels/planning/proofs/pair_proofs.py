"""How a group with convolutions among its layers can be cut: by channels in one piece, or as code takes them apart.

It owns the proof within the module around the group.  Where code takes what a column gives apart along its channels (a
gated linear unit, a split), that one is cut as these segments; those of too few channels every rank has whole.  Where
code concatenates what is cut, the row behind takes parts of these segments.  Where what is cut meets a parameter of
some other module as a whole (a slope for each channel), that is cut with it; so are the buffers of a frozen batch norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice, pairwise, product, takewhile
from math import prod

import torch
from torch import nn

from tpkernels.planning.proofs.hypotheses import Attributes, Proof, Slice
from tpkernels.planning.proofs.search_widths import SearchWidths
from tpkernels.planning.replays.gate_rules import halves_of
from tpkernels.planning.replays.replay import Replay
from tpkernels.planning.replays.roles import Role, both_roles, unlike_ranks
from tpkernels.planning.runs.events import Shape
from tpkernels.planning.runs.layer_groups import SMALL_GROUP, Group
from tpkernels.planning.runs.session import Scope
from tpkernels.planning.runs.shadow import Shadow
from tpkernels.planning.runs.trace import Recording
from tpkernels.planning.splits import Split, Unproven, parts_of_runs, share

__all__ = ["narrow_segments", "prove", "roles_of"]

MOST_LAYOUTS, MOST_NUMBERS, MOST_SIZES, MOST_SLICES = 8, 24, 4, 64
"""Attempts for one group, by layout, by numbers that code reads, and for each layout by sizes that it reads; and how
often tensors of other modules are cut."""
aten = torch.ops.aten


def roles_of(group: Group, shadow: Shadow, proof: Proof, number: int = 0) -> dict[str, Role]:
    """Each layer cut by its output or input channels or features, and parameters that are cut with these."""
    gives = {
        name: Role("column", sizes, number, copied=copied, behind=behind)
        for name in group.columns for sizes in (proof.segments[name],)
        for copied, behind in [(proof.copied, proof.behind) if len(sizes) > 1 else (0, 0)]
    }  # fmt: skip
    takes = {name: proof.taken.get(name, (shadow.sizes[name].in_features,)) for name in group.rows}
    found = both_roles(gives, {name: Role("row", sizes, number) for name, sizes in takes.items()})
    kinds = dict.fromkeys((*group.multiplied, *group.summing), "product")
    return found | {
        name: Role(kinds.get(name, "slice"), cut.runs, number, dim=cut.dim) for name, cut in proof.slices.items()
    }


def prove(search: SearchWidths, recording: Recording, group: Group, world_size: int) -> Proof:
    """Find a way to cut the group within the module around it.

    Raises:
        Unproven: there is none; the reason is that of the first attempt, or of one that takes the channels apart.
    """
    scope, failures = search.scope_of(group), list[Unproven]()
    layouts = islice(_layouts(search.shadow, recording, group, scope), MOST_LAYOUTS)
    begun = [_begun(segments, world_size) for segments in layouts]
    for proof in begun:
        try:
            return _sliced(search, recording, group, proof, world_size)
        except Unproven as error:
            failures.append(error)
            if not error.segmented:
                break
    for attributes in islice(_numbers(search, group, scope, world_size), MOST_NUMBERS):
        with suppress(Unproven):
            pieces = {name: (search.shadow.sizes[name].out_features,) for name in group.columns}
            return _sliced(search, recording, group, Proof(pieces, attributes), world_size)
    for proof in begun:
        for attributes in islice(_sizes_read(search, group, scope, proof, world_size), MOST_SIZES):
            with suppress(Unproven):
                return _sliced(search, recording, group, replace(proof, attributes=attributes), world_size)
    for proof in _with_widths(search, group, scope, begun, world_size):
        with suppress(Unproven):
            return _sliced(search, recording, group, proof, world_size)
    for segments in _alike(search.shadow, recording, group, scope):
        sets = _own(search.shadow, group, search.attribute_sets([scope], world_size))
        for attributes in islice(chain([{}], sets), MOST_NUMBERS):
            with suppress(Unproven):
                return _sliced(search, recording, group, Proof(segments, attributes), world_size)
    raise next((error for error in failures if not error.segmented), failures[0])


def _with_widths(
    search: SearchWidths, group: Group, scope: Scope, begun: Sequence[Proof], world_size: int
) -> Iterator[Proof]:
    """Layouts of several segments, where code reads the width of its module's input to take apart what a linear layer
    gives (FocalNet's modulation): it is shown this rank's.  Segments that are narrow beside the others may be whole."""
    linear = {*group.columns} & search.shadow.layers.keys()
    if len(group.layers) > SMALL_GROUP or not linear or world_size == 1:
        return
    shown = search.shown_widths(group, scope)
    for proof in begun if shown else ():
        packed = [sizes for sizes in proof.segments.values() if len(sizes) > 1]
        if len(packed) == 1:
            yield replace(proof, attributes=shown)
            if not proof.copied and (narrow := narrow_segments(packed[0], world_size)) is not None:
                copied, behind = narrow
                yield replace(proof, attributes=shown, copied=copied, behind=behind)


def narrow_segments(sizes: Sequence[int], world_size: int) -> tuple[int, int] | None:
    """How many segments side by side are narrower than the widest, and how many are behind them; None if there are
    none, or if they have more channels than a rank's part of the others."""
    narrow = [size < max(sizes) for size in sizes]
    if not any(narrow):
        return None
    first, count = narrow.index(True), sum(narrow)
    few = sum(sizes[first : first + count])
    if not all(narrow[first : first + count]) or few * world_size > sum(sizes) - few:
        return None
    return count, len(sizes) - first - count


def _begun(segments: dict[str, tuple[int, ...]], world_size: int) -> Proof:
    """A proof of these segments, of which each rank has those whole that are of too few channels for all ranks: one
    channel weighs all others (MobileViT V2).  Not where they are not side by side, nor beside other columns of several
    segments, as a proof says it of all of them."""
    packed = [sizes for sizes in segments.values() if len(sizes) > 1]
    narrow = [0 in share(size, world_size) for size in packed[0]] if len(packed) == 1 else []
    count = sum(narrow)
    if not 0 < count < len(narrow):
        return Proof(segments, {})
    first = narrow.index(True)
    together = all(narrow[first : first + count])
    return Proof(segments, {}, copied=count, behind=len(narrow) - first - count) if together else Proof(segments, {})


def _numbers(search: SearchWidths, group: Group, scope: Scope, world_size: int) -> Iterator[Attributes]:
    """Numbers of heads and channels that code reads, where convolutions in groups are ends of the group (SqueezeBERT's
    make queries, keys and values), or linear layers are beside convolutions (ConvBERT's make queries that meet its
    keys).  Those of modules around the layers alone: a block like them may run in the scope."""
    shadow = search.shadow
    beside = len(group.layers) <= SMALL_GROUP and {*group.columns} & shadow.layers.keys()
    if beside or {*group.layers} & shadow.grouped.keys():
        yield from _own(shadow, group, search.attribute_sets([scope], world_size))


def _sizes_read(
    search: SearchWidths, group: Group, scope: Scope, proof: Proof, world_size: int
) -> Iterator[Attributes]:
    """Sizes of segments that code reads which takes a column apart: so many channels of keys, so many of values."""
    packed = [sizes for sizes in proof.segments.values() if len(sizes) > 1]
    if len(packed) == 1 and len(group.layers) <= SMALL_GROUP:
        parts = parts_of_runs(Split(0, packed[0], 0, proof.copied, proof.behind), world_size)
        beside = search.shadow.convolutions.keys() | {*search.shadow.by_channel}
        sets = search.attribute_sets([scope], world_size, 0, parts)
        read = ({key: one for key, one in some.items() if key[0] not in beside} for some in sets)
        yield from _own(search.shadow, group, read)


def _own(shadow: Shadow, group: Group, sets: Iterator[Attributes]) -> Iterator[Attributes]:
    """Of each set, what modules around the layers alone have."""
    levels = zip(*(name.split(".")[:-1] for name in group.layers), strict=False)
    around = "".join(f"{level[0]}." for level in takewhile(lambda level: len({*level}) == 1, levels))
    for attributes in sets:
        own = {key: values for key, values in attributes.items() if f"{key[0]}.".startswith(around)}
        if own and not {name for name, _ in own} & (shadow.convolutions.keys() | {*shadow.by_channel}):
            yield own


def _layouts(shadow: Shadow, recording: Recording, group: Group, scope: Scope) -> Iterator[dict[str, tuple[int, ...]]]:
    """Segments of every column: one, or as code takes so many channels apart."""
    sizes = {name: shadow.sizes[name].out_features for name in group.columns}
    inner = {*group.columns} & {*group.rows}  # ranks scatter what these sum in one piece
    cuts = ([(n,), *(() if name in inner else _cuts_of(recording, scope, n))] for name, n in sizes.items())
    for chosen in product(*cuts):
        yield dict(zip(group.columns, chosen, strict=True))


def _alike(shadow: Shadow, recording: Recording, group: Group, scope: Scope) -> Iterator[dict[str, tuple[int, ...]]]:
    """Segments of columns of one size alike, where convolutions between others are of several: those gather what they
    take (a WaveNet, whose gates, and whose sums for the next block and the last, are halves)."""
    sizes = {name: shadow.sizes[name].out_features for name in group.columns}
    inner = {*group.columns} & {*group.rows}
    options = {size: [(size,), *_cuts_of(recording, scope, size)] for size in sizes.values()}
    for chosen in islice(product(*options.values()), MOST_LAYOUTS):
        of = dict(zip(options, chosen, strict=True))
        packed = {name for name, size in sizes.items() if len(of[size]) > 1}
        if packed & inner and not packed & shadow.layers.keys():
            yield {name: of[size] for name, size in sizes.items()}


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


def _sliced(search: SearchWidths, recording: Recording, group: Group, proof: Proof, world_size: int) -> Proof:
    """The proof, with tensors of other modules cut that met parts as a whole, one after the other as they do."""
    for _ in range(MOST_SLICES):
        roles, scope = roles_of(group, search.shadow, proof), search.scope_of(group)
        every = [one for role in roles.values() for one in (role, role.taken) if one]
        sizes = {size for one in every for size in one.split(0).cut_segments}
        if any(0 in share(size, world_size) for size in sizes):
            raise Unproven(f"there are fewer channels than {world_size} ranks")
        replay, norms = None, set[str]()
        try:
            for rank in unlike_ranks(roles, world_size):
                replay = Replay(search.shadow, recording, roles, proof.attributes, world_size, rank)
                replay.run_scope(scope)
                norms |= replay.cut_norms.keys()
        except Unproven as error:
            packed = error.taken is not None and len(proof.segments.get(error.taken[0], ())) > 1
            if error.taken is not None and error.taken[0] not in proof.taken and not packed:
                proof = replace(proof, taken={**proof.taken, error.taken[0]: error.taken[1]})
                continue
            running = "" if replay is None else recording.module_at(replay.place)
            more = _slices_for(search.shadow, scope.name, proof, error, running)
            if not more:
                raise
            proof = replace(proof, slices={**proof.slices, **more})
            continue
        return replace(proof, norms=tuple(sorted(norms)))
    raise Unproven(f"more than {MOST_SLICES} parameters of other modules would be cut")


def _slices_for(shadow: Shadow, scope: str, proof: Proof, error: Unproven, running: str) -> dict[str, Slice]:
    """Tensors inside of ``scope`` that are to blame, cut by the channels that they meet.

    These are parameters, or, where buffers take part, all that the module that was ``running`` has.
    """
    if error.met is None or len(error.met.segments) > 1 or error.met.copied:
        return {}
    (size,), own = error.met.segments, shadow.own_tensors()
    blamed = {name for name in error.parameters if isinstance(own.get(name), nn.Parameter)}
    if not blamed and not shadow.modules[running]._modules:
        module, prefix = shadow.modules[running], f"{running}." if running else ""
        blamed = {f"{prefix}{key}" for key, one in (module._parameters | module._buffers).items() if one is not None}
    found: dict[str, Slice] = {}
    for name in sorted(blamed - proof.slices.keys()):
        owner = name.rpartition(".")[0]
        inside = owner == scope or owner.startswith(f"{scope}." if scope else "")
        if not inside or owner in shadow.convolutions or owner in shadow.by_channel or owner in shadow.kept:
            continue
        tensor = own.get(name)
        if tensor is not None and prod(tensor.shape) == size:  # a number for each channel
            found[name] = Slice(tuple(tensor.shape).index(size), (size,))
    return found
