"""Groups of several examples that share layers, as one: two projections of which each call takes one, up to a layer
that both give to (Granite Docling's connector).

What one example shows of such a layer is a part of its group: the layer is cut only if all that give to it are. Whether
the two agree is for the replay of the whole model to say, which runs all examples.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from tpkernels.planning.proofs.hypotheses import Proof
from tpkernels.planning.runs.layer_groups import Group

__all__ = ["join"]

T = TypeVar("T")


def join(first: Group, one: Proof, second: Group, other: Proof) -> tuple[Group, Proof]:
    """Both groups with their proofs as one; of what both proofs tell, the first one's counts."""
    group = Group(
        _both(first.columns, second.columns), _both(first.rows, second.rows), first.random or second.random,
        _both(first.feeders, second.feeders), _both(first.summed, second.summed), _both(first.tables, second.tables),
        _both(first.scattered, second.scattered), _both(first.results, second.results),
        _both(first.gathered, second.gathered),
    )  # fmt: skip
    proof = replace(
        one,
        segments={**other.segments, **one.segments},
        attributes=other.attributes | one.attributes,
        whole_attributes=other.whole_attributes | one.whole_attributes,
        copies={**other.copies, **one.copies},
        slices={**other.slices, **one.slices},
        feeders=_both(one.feeders, other.feeders),
        arguments={**other.arguments, **one.arguments},
    )
    return group, proof


def _both(some: tuple[T, ...], others: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys((*some, *others)))
