"""Proofs of groups with arguments of modules: those that take all of what a column gives besides (``Group.gathered``),
and those that are whole and meet parts (``Group.summed_arguments``), or of which their modules take a part
(``Group.taken_arguments``).

It owns what such a group has of its own: the module around all of it, and which layouts are not tried.  Key-value heads
are not copied there: what is gathered would be more than the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from tpkernels.planning.entries.plan import ShardingPlan
from tpkernels.planning.proofs.hypotheses import Proof
from tpkernels.planning.proofs.search import Search
from tpkernels.planning.runs.argument_groups import find_argument_groups
from tpkernels.planning.runs.gathered_groups import find_gathered_groups
from tpkernels.planning.runs.layer_groups import Group
from tpkernels.planning.runs.row_counts import bytes_given
from tpkernels.planning.runs.session import Scope
from tpkernels.planning.runs.trace import Recording
from tpkernels.planning.splits import Unproven

__all__ = ["SearchGathered", "gathered_arguments", "prove_with_arguments", "summed_arguments", "taken_bytes"]


class SearchGathered(Search):
    """Proofs for the groups of one recording at one number of ranks."""

    def _around(self, group: Group, others: Sequence[str]) -> list[str]:
        around = [module.rpartition(".")[0] for module, _, _ in group.gathered]
        return super()._around(group, [*others, *around, *(module for module, *_ in _whole_outside(group))])

    def signature(self, group: Group, scope: Scope) -> tuple[Any, ...]:
        cut = len(scope.name) + 1 if scope.name else 0
        met = ((module, argument) for module, argument, _ in group.gathered)
        arguments = tuple((one[0][cut:], *one[1:]) for one in (*met, *_whole_outside(group)))
        return (*super().signature(group, scope), bool(group.gathered), arguments)

    def _with_copies(self, group: Group, scope: Scope, heads: int, total: int) -> Proof | None:
        return None if _has_arguments(group) else super()._with_copies(group, scope, heads, total)

    def _shared(self, group: Group, scope: Scope) -> Proof | None:
        return None if _has_arguments(group) else super()._shared(group, scope)


def _has_arguments(group: Group) -> bool:
    return bool(group.gathered or _whole_outside(group))


def _whole_outside(group: Group) -> tuple[tuple[Any, ...], ...]:
    return (*group.summed_arguments, *group.taken_arguments)


def prove_with_arguments(
    search: SearchGathered, used: Container[str], barred: Container[str], contradicts: Callable[[Group], bool]
) -> dict[Group, Proof]:
    """Groups of layers that are neither ``used`` nor ``barred``, and proven within the modules around them.

    What cannot be proven is gathered layer by layer, for the reason that it is without such arguments.
    """
    found: dict[Group, Proof] = {}
    known: dict[Any, tuple[Group, Scope, Proof] | None] = {}
    taken = set[str]()
    for group in (*find_gathered_groups(search.recording), *find_argument_groups(search.recording, used)):
        free = not any(name in taken or name in used or name in barred for name in group.layers)
        few = any(size < search.world_size for *_, size in group.taken_arguments)
        if not free or few or contradicts(group) or not search.is_called(group):
            continue
        scope = search.scope_of(group)
        key = search.signature(group, scope)
        if key not in known:
            try:
                known[key] = group, scope, search.prove(group)
            except Unproven:
                known[key] = None
        if (one := known[key]) is not None and not one[2].feeders:
            first, old, proof = one
            found[group] = proof.moved((first, old.name), (group, scope.name))
            taken |= {*group.layers}
    return found


def gathered_arguments(
    proven: Mapping[Group, Proof], recordings: Sequence[Recording]
) -> tuple[dict[str, tuple[int, int]], int]:
    """What a plan says of them: by module and name, all features, and the unit that ranks have multiples of; and how
    many bytes all of them have in these recordings."""
    found = {}
    for group, proof in proven.items():
        for module, argument, layer in group.gathered:
            (features,) = proof.segments[layer]
            found[f"{module}.{argument}" if module else argument] = features, proof.unit(features)
    return found, bytes_given(recordings, found)


def summed_arguments(proven: Mapping[Group, Proof], recordings: Sequence[Recording]) -> tuple[tuple[str, ...], int]:
    """By module and name, those whose gradients are summed; and how many bytes they have in these recordings."""
    every = (argument for group in proven for argument in group.summed_arguments)
    names = tuple(dict.fromkeys(".".join(filter(None, one)) for one in every))
    return names, bytes_given(recordings, names, trained=True)


def taken_bytes(plan: ShardingPlan, recordings: Sequence[Recording]) -> int:
    """What a rank sends to gather the gradients of arguments of which modules take a part."""
    return bytes_given(recordings, plan.arguments, trained=True) * (plan.world_size - 1) // plan.world_size
