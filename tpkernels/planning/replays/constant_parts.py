"""Tensors of one number that a run makes of one rank's sizes: a part of a larger one, however that is cut.

It owns :class:`ConstantParts`, between the parts that modules keep and the replay of ops.  The shape of such a tensor
says that it is a part, but not of which layout: zeros for the heads of a batch may be one run of all heads, or one for
each sequence.  Both are right while all numbers are the same.  The first part that is written to it, or added to it and
the like, decides: from there on the tensor and all its views are cut as that is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tpkernels.planning.replays.kept_parts import KeptParts
from tpkernels.planning.runs.tensors import storage_of, written_by
from tpkernels.planning.splits import Split, Unproven

__all__ = ["COPIES", "ConstantParts"]

aten = torch.ops.aten
COPIES = (aten.expand, aten.repeat)
"""Ops that copy what is whole, once for each piece."""


class ConstantParts(KeptParts):
    """A run next to a recording, of one rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._constants: set[int] = set()
        """Tensors that are the same for each piece, by their ids,"""
        self._one_number: set[int] = set()
        """and the storages of those to which nothing has been written."""

    def constant_made(self, packet: Any, tensor: Tensor) -> None:
        self._constants.add(id(tensor))
        if packet not in COPIES:  # whose rows may hold several numbers
            self._one_number.add(storage_of(tensor))

    def before_written(self, func: Any, args: Any, kwargs: Any) -> None:
        super().before_written(func, args, kwargs)
        for tensor in written_by(func, args, kwargs) if func._schema.is_mutable and self._one_number else ():
            if storage_of(tensor) not in self._one_number:
                continue
            value = args[1] if func.overloadpacket is aten.copy_ else None
            if isinstance(value, Tensor) and (cut := self._splits.get(id(value))) is not None:
                self._cut_as(tensor, cut.at(cut.dim + tensor.dim() - value.dim()))
            self._one_number.discard(storage_of(tensor))

    def before_met(self, func: Any, tensors: list[Tensor]) -> None:
        """An op is about to take tensors; of some ops, elements of one with the same elements of the others."""
        if not self._one_number or not (torch.Tag.pointwise in func.tags or func.overloadpacket is aten.baddbmm):
            return
        known = [(tensor, cut) for tensor in tensors if (cut := self._splits.get(id(tensor))) is not None]
        constants = [tensor for tensor, _ in known if storage_of(tensor) in self._one_number]
        others = {(cut, cut.dim - tensor.dim()) for tensor, cut in known if storage_of(tensor) not in self._one_number}
        if len(others) == 1:
            (cut, place) = others.pop()
            for tensor in constants:
                self._cut_as(tensor, cut.at(tensor.dim() + place))

    def _cut_as(self, written: Tensor, cut: Split) -> None:
        """Take a constant to be cut as what meets it, or a view of it."""
        guess = self._splits.get(id(written))
        if guess is None or guess == cut or guess.dim != cut.dim or cut.copied or guess.copied:
            return
        if sum(guess.segments) != sum(cut.segments):
            return
        kept = [one for one in self.kept if isinstance(one, Tensor) and storage_of(one) == storage_of(written)]
        for view in {id(one): one for one in (written, *kept) if id(one) in self._splits}.values():
            known = self._splits[id(view)]
            if known.at(0) != guess.at(0):
                raise Unproven("views of a constant are cut in different ways, and a part is written to one of them")
            self._mark(view, replace(cut, dim=known.dim), self._groups[id(view)])
