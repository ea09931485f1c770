"""Groups of several examples that share layers, as one: two projections of which each call takes one, up to a layer
that both give to (Granite Docling's connector).

What one example shows of such a layer is a part of its group: the layer is cut only if all that give to it are. Whether
the two agree is for the replay of the whole model to say, which runs all examples.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from tpkernels.planning.modules.numbers import may_move, width_in, width_name
from tpkernels.planning.proofs.hypotheses import Attributes, Proof
from tpkernels.planning.runs.layer_groups import Group

__all__ = ["join"]

T = TypeVar("T")


def join(first: Group, one: Proof, second: Group, other: Proof) -> tuple[Group, Proof]:
    """Both groups with their proofs as one; of what both proofs tell, the first one's counts."""
    group = Group(
        _both(first.columns, second.columns), _both(first.rows, second.rows), first.random or second.random,
        _both(first.feeders, second.feeders), _both(first.summed, second.summed), _both(first.tables, second.tables),
        _both(first.scattered, second.scattered), _both(first.results, second.results),
        _both(first.gathered, second.gathered), _both(first.summed_arguments, second.summed_arguments),
        _both(first.taken_arguments, second.taken_arguments),
    )  # fmt: skip
    proof = replace(
        one,
        segments={**other.segments, **one.segments},
        attributes=_one_of_each_argument(other.attributes | one.attributes),
        whole_attributes=other.whole_attributes | one.whole_attributes,
        copies={**other.copies, **one.copies},
        slices={**other.slices, **one.slices},
        feeders=_both(one.feeders, other.feeders),
        arguments={**other.arguments, **one.arguments},
        states={**other.states, **one.states},
    )
    return group, proof


def _one_of_each_argument(attributes: Attributes) -> Attributes:
    """Widths of an argument that both proofs show, to layers of their own, as one that is shown to all of these."""
    found: Attributes = {}
    shown: dict[tuple[str, str], tuple[str, str]] = {}
    for (module, attribute), values in attributes.items():
        read, key = width_in(attribute), (module, attribute)
        known = None if read is None else shown.get((module, read[0]))
        if read is not None and known is not None and found[known] == values:
            before = width_in(known[1])
            assert before is not None
            moved = may_move(attribute) or may_move(known[1])
            del found[known]
            key = module, width_name(read[0], _both(before[1], read[1]), moved=moved)
        if read is not None:
            shown[module, read[0]] = key
        found[key] = values
    return found


def _both(some: tuple[T, ...], others: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys((*some, *others)))
