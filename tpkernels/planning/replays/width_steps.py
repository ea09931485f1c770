"""Steps of a replay with inputs of which a module's code may read this rank's width, and nothing else.

It owns :class:`WidthSteps`, between products with parameters and the replay of ops.  A module is called
with a tensor of that width, which no step of the recording has made.  The layers that the guess names take the whole
one, and whatever else takes it is told to take another tensor than the whole model.

Code may move rows of such a tensor, where the guess says so: it transposes them, picks some, and writes these to zeros
(Longformer's queries of all tokens), or adds others to them (DAB-DETR's places).  Each such op is replayed on the whole
tensor, and its result is shown in turn (:class:`tpkernels.nn.shown_width.MovedWidth` does so, where the code calls the
functions that it follows).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tpkernels.nn.shown_width import ADDS, MOVES
from tpkernels.planning.modules.numbers import may_move, width_in
from tpkernels.planning.replays.product_steps import ProductSteps
from tpkernels.planning.runs.events import TRANSPARENT
from tpkernels.planning.splits import Unproven

__all__ = ["MOVING", "WidthSteps"]

aten = torch.ops.aten
MOVING = {aten.transpose, aten.permute, aten.index, aten.index_put_, aten.new_zeros, aten.add, *TRANSPARENT}
"""Ops that may take a tensor of which the width is shown."""


class _Shown:
    """What stands behind a tensor that shows a width: the whole one, the layers that take it, whether it may move."""

    def __init__(self, shown: Tensor, whole: Tensor, layers: frozenset[str], *, moves: bool) -> None:
        self.shown, self.whole, self.layers, self.moves = shown, whole, layers, moves


class WidthSteps(ProductSteps):
    """A run next to a recording, of one rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._widths: dict[str, list[tuple[str, int]]] = {}
        """By module: a name of a width, and what is shown."""
        self._shown: dict[int, _Shown] = {}
        for (module, attribute), width in self.attributes.items():
            if width_in(attribute) is not None:
                self._widths.setdefault(module, []).append((attribute, width))

    def shown_to(self, module: str, taken: dict[str, Any]) -> dict[str, Tensor]:
        """What stands for arguments of a call of ``module``."""
        found = {}
        for attribute, width in self._widths.get(module, ()):
            read = width_in(attribute)
            assert read is not None
            argument, layers = read
            whole = taken.get(argument)
            if not isinstance(whole, Tensor):
                continue
            if id(whole) in self._splits or id(whole) in self._shown or whole.shape[-1] <= width:
                raise Unproven(f"{argument} of {module} is not whole")
            part = self.new_output(whole, (*whole.shape[:-1], width), whole.dtype)
            prefix = f"{module}." if module else ""
            names = frozenset(f"{prefix}{layer}" for layer in layers)
            self._shown[id(part)] = _Shown(part, whole, names, moves=may_move(attribute))
            found[argument] = part
        return found

    def taken_by(self, layer: str, x: Tensor) -> Tensor:
        """The tensor that a layer takes, which is called with ``x``."""
        known = self._shown.get(id(x))
        if known is None:
            return x
        if layer not in known.layers:
            raise Unproven(f"{layer} takes a tensor of which only the width may be read")
        return known.whole

    def moved(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Run an op on rows of a tensor that shows a width, here and on the whole one; None for any other op."""
        given = [known for tensor in tensors if (known := self._shown.get(id(tensor))) is not None and known.moves]
        followed = self.function in MOVES and func.overloadpacket in MOVING
        if not given or not followed or args[0] is not given[0].shown:
            return None
        first = given[0]
        width, features = first.shown.shape[-1], first.whole.shape[-1]
        whole_args = tree_map_only(Tensor, self._whole_for, args)
        shows, adds = True, self.function in ADDS
        if adds and (len(tensors) != 2 or self._whole_for(tensors[1]).shape[-1:] != first.whole.shape[-1:]):
            return None
        if func.overloadpacket is aten.new_zeros:
            shows = [*args[1]][-1:] == [width]
            whole_args = (whole_args[0], [*args[1][:-1], features], *args[2:]) if shows else whole_args
        whole_tensors = [self._whole_for(tensor) for tensor in tensors]
        made = self.op(func, whole_args, kwargs, whole_tensors)
        if not shows:
            return made
        self.kept.append(made)
        self.alike.passed(func, whole_args, kwargs, whole_tensors, [made])
        self.requiring.passed(func, whole_tensors, [made])
        out = self.new_output(made, (*made.shape[:-1], width), made.dtype) if adds else func(*args, **kwargs)
        if tuple(out.shape) != (*made.shape[:-1], width) or made.shape[-1] != features or id(made) in self._splits:
            raise Unproven(f"{func.overloadpacket} moves features of a tensor of which only the width may be read")
        self._shown[id(out)] = _Shown(out, made, first.layers, moves=True)
        return out

    def _whole_for(self, tensor: Tensor) -> Tensor:
        known = self._shown.get(id(tensor))
        return tensor if known is None else known.whole

    def _is_whole(self, tensor: Tensor, where: str) -> None:
        if id(tensor) in self._shown:
            raise Unproven(f"a tensor of which only the width may be read is {where}")
        super()._is_whole(tensor, where)
