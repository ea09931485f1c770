"""Code that reads the width of its module's input to view what layers give: ``batch, length, width = x.shape``.

It owns the guess that such code may find this rank's width there, which is tried where nothing else could be proven;
the number is told as one of the module's (:func:`tpkernels.planning.modules.numbers.width_name`).  The replay shows it,
and refuses whatever else is done with the tensor (:mod:`tpkernels.planning.replays.width_steps`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tpkernels.nn.sliced_arguments import named_arguments
from tpkernels.planning.modules.numbers import width_name
from tpkernels.planning.proofs.hypotheses import Attributes, Proof, Whole, names_read
from tpkernels.planning.proofs.search import MAX_LAYERS
from tpkernels.planning.proofs.search_gathered import SearchGathered
from tpkernels.planning.replays.width_steps import MOVING
from tpkernels.planning.runs.events import Source
from tpkernels.planning.runs.layer_groups import Group
from tpkernels.planning.runs.session import Scope
from tpkernels.planning.runs.shadow import Shadow
from tpkernels.planning.runs.trace import Recording
from tpkernels.planning.splits import Unproven, divisor, share

__all__ = ["SearchWidths"]

_SIZES = {"shape", "size"}
# Code that checkpoints a layer calls it anew in the backward pass, when the call of the module is over, and what the
# layer takes in place of the shown tensor is told by nobody.  Around the module nothing is in the way.
_AGAIN = "checkpoint"


class SearchWidths(SearchGathered):
    """Proofs in which modules are shown this rank's width of what they are called with, where there is no other."""

    def __init__(self, shadow: Shadow, recording: Recording, world_size: int) -> None:
        super().__init__(shadow, recording, world_size)
        self._widths: Whole = {}
        """Those that are shown by the hypotheses of one search."""

    def prove(self, group: Group) -> Proof:
        """As :meth:`Search.prove`, and then with widths shown."""
        try:
            return super().prove(group)
        except Unproven:
            proof = self._by_width(group)
            if proof is None:
                raise
            return proof

    def attribute_sets(
        self,
        scopes: Sequence[Scope],
        world_size: int,
        pieces: int = 0,
        parts: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
    ) -> Iterator[Attributes]:
        cut = pieces or divisor(world_size)
        if any(width % cut for width in self._widths.values()):
            return
        shown = {key: share(width, world_size, cut) for key, width in self._widths.items()}
        for attributes in super().attribute_sets(scopes, world_size, pieces, parts):
            yield attributes | shown

    def _by_width(self, group: Group) -> Proof | None:
        if not self.says_all or self.world_size == 1 or len(group.layers) > MAX_LAYERS:
            return None
        scope = self.scope_of(group)
        counts = filter(self.can_be_cut, dict.fromkeys([*self._counts, *self._named(scope)]))
        self._widths = self._read_in(group, scope)
        try:
            found = (self._try_all(group, scope, [], pieces) for pieces in (0, *counts) if self._widths)
            return next((proof for proof in found if proof is not None), None)
        finally:
            self._widths = {}

    def shown_widths(self, group: Group, scope: Scope) -> Attributes:
        """All widths that code of modules around the group's columns may read, with the ranks' values; none if one does
        not divide."""
        read, pieces = self._read_in(group, scope), divisor(self.world_size)
        if not self.says_all or any(width % pieces for width in read.values()):
            return {}
        return {key: share(width, self.world_size, pieces) for key, width in read.items()}

    def _read_in(self, group: Group, scope: Scope) -> Whole:
        """Widths of arguments that columns of the group take, of modules whose code asks tensors for their sizes."""
        found: Whole = {}
        for call in self.recording.scopes:
            if not scope.start <= call.start <= call.stop <= scope.stop:
                continue
            module, prefix = self.shadow.modules[call.name], f"{call.name}." if call.name else ""
            kind: Any = type(module)
            inside = [event for event in self.recording.events[call.start : call.stop] if event.layer is not None]
            around = {self._around_layer(event.layer) for event in inside if event.layer in group.columns}
            read = names_read(kind)
            if call.name not in around or not _SIZES & read or any(_AGAIN in name for name in read):
                continue
            for argument, x in named_arguments(module, call.args, call.kwargs).items():
                if not isinstance(x, Tensor) or not x.dim() or not argument.isidentifier():
                    continue  # what stands in a tuple is not shown
                rows = self._rows_of(x, call)
                taking = dict.fromkeys(str(event.layer) for event in inside if {*event.sources} & rows)
                moved = any({*event.sources} & (rows - {self.recording.source(x)}) for event in inside)
                layers = [name for name in taking if name.startswith(prefix)]
                wide = all(self.shadow.layers[name].in_features == x.shape[-1] for name in layers)
                if wide and {*layers} & {*group.columns}:
                    names = [name.removeprefix(prefix) for name in layers]
                    found[call.name, width_name(argument, names, moved=moved)] = x.shape[-1]
        return found

    def _rows_of(self, x: Tensor, call: Scope) -> set[Source]:
        """What the code of a call makes of ``x`` by moving its rows, and ``x`` itself; before a layer takes any, others
        may be added to them."""
        found, taken = {self.recording.source(x)}, False
        for number in range(call.start, call.stop):
            event = self.recording.events[number]
            taken = taken or event.layer is not None
            if event.packet is torch.ops.aten.add and taken:
                continue
            if event.packet in MOVING and found & {*event.sources} and event.outputs[0][-1:] == x.shape[-1:]:
                found.add((id(self.recording), number, 0))
        return found

    def _around_layer(self, layer: str | None) -> str:
        """The innermost module around a layer that is called."""
        name = str(layer).rpartition(".")[0]
        while name and name not in self._calls:
            name = name.rpartition(".")[0]
        return name
