"""The cut that was proven for the largest number of ranks, looked for at a smaller one (``same_bits``).

A search of its own may find another cut that holds as well: of grouped queries the pairs that share a key, where the
largest number of ranks has copies of the key-value heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tpkernels.planning.proofs.hypotheses import Proof
from tpkernels.planning.proofs.search_states import SearchStates
from tpkernels.planning.runs.layer_groups import Group
from tpkernels.planning.splits import Unproven

__all__ = ["SearchAgain"]


class SearchAgain(SearchStates):
    """Proofs like those that another number of ranks has."""

    def prove_like(self, group: Group, other: Proof) -> Proof:
        """The same cut for this number of ranks, with attributes of its own; else any.

        Raises:
            Unproven: as :meth:`prove`.
        """
        scope = self.scope_of(group)
        self._queries, self._counts = other.heads, {}
        copies = next(iter(other.copies.values()), None)
        if copies is not None:
            found = self._with_copies(group, scope, copies.heads, copies.total)
        else:
            found = self._try_all(group, scope, [], other.pieces, shared=bool(other.copied))
        if found is not None and (found.segments, found.copies) == (other.segments, other.copies):
            return found
        return self.prove(group)

    def more_slices(self, proof: Proof, error: Unproven) -> Iterator[Proof]:
        """The proof with one more parameter cut that met parts as a whole."""
        for name in sorted(error.parameters - proof.slices.keys()):
            for cut in self._cuts(name, proof, error.met):
                yield replace(proof, slices={**proof.slices, name: cut})
