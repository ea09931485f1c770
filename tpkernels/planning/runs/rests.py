"""What a module that branches on a condition leaves behind, beside fresh tensors in the place of its results.

A module that notes the range of what passes through it (the observers of quantisation, I-BERT's ``QuantAct``) gives the
tensor that it was given, and puts the range into its buffers, in one way the first time and in another one later.  So
on whatever path:

* A result that was there before the condition, and is the same tensor on every path, is passed on as it is: it may be
  a part.
* Buffers of the module may be replaced by whole tensors of the same shape and dtype that have no gradient.  They are
  results as well: on every path the same buffers must be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from tpkernels.planning.runs.conditions import Renews, Rest
from tpkernels.planning.runs.module_state import Held
from tpkernels.planning.runs.tensors import storage_of

if TYPE_CHECKING:
    from tpkernels.planning.runs.session import Session

__all__ = ["is_own_buffer", "left_in_buffers", "passes", "passing_places"]


def passing_places(session: Session, rest: Rest, leaves: list[Any]) -> frozenset[int]:
    """The places of results that are tensors from before the condition, on every path.

    Raises:
        Renews: on this one they are others.
    """
    before = {
        place: leaf for place, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and id(leaf) not in rest.made and not session.is_born(leaf)
    }  # fmt: skip
    rest.passed = {place: session.source(leaf) for place, leaf in before.items()}
    passing = session.shadow.known.passing.get(rest.module, frozenset())
    if not passing <= before.keys():
        raise Renews(rest.module)
    return passing


def passes(session: Session, rest: Rest) -> list[Any]:
    """Which tensors they are, in every run alike."""
    passing = sorted(session.shadow.known.passing.get(rest.module, ()))
    return [one[1:] if isinstance(one := rest.passed[place], tuple) else one for place in passing]


def is_own_buffer(session: Session, rest: Rest, attribute: tuple[str, str], held: Held | None) -> bool:
    """Whether code puts a tensor without a gradient into a buffer of the module that asked."""
    before = rest.buffers.get(attribute[1]) if attribute[0] == rest.module else None
    if held is None or held.place != "_buffers" or not isinstance(before, Tensor):
        return False
    new = held.value
    alike = isinstance(new, Tensor) and (new.shape, new.dtype) == (before.shape, before.dtype)
    return alike and new in session.detached


def left_in_buffers(session: Session, rest: Rest) -> list[Tensor]:
    """What stands for that which a rest has put into buffers."""
    found = []
    for name, tensor in sorted(rest.kept.items()):
        left = session.new_output(tensor, tuple(tensor.shape), tensor.dtype)
        del session.origins[storage_of(left)]
        session.shadow.modules[rest.module]._buffers[name] = left
        session.changes.append(((rest.module, name), Held("_buffers", left)))
        found.append(left)
    return found
