"""Steps of a replay with inputs of which a module's code may read this rank's width, and nothing else.

It owns :class:`WidthSteps`, between the steps that take statistics of parts and the replay of ops.  A module is called
with a tensor of that width, which no step of the recording has made.  The layers that the guess names take the whole
one, and whatever else takes it is told to take another tensor than the whole model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tpkernels.planning.modules.numbers import width_in
from tpkernels.planning.replays.statistic_steps import StatisticSteps
from tpkernels.planning.splits import Unproven

__all__ = ["WidthSteps"]


class WidthSteps(StatisticSteps):
    """A run next to a recording, of one rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._widths: dict[str, list[tuple[str, tuple[str, ...], int]]] = {}
        """By module: an argument, the layers that take it, and the width that is shown."""
        self._shown: dict[int, tuple[Tensor, frozenset[str]]] = {}
        """For tensors that show a width: the whole one, and the layers that take it instead."""
        for (module, attribute), width in self.attributes.items():
            if (read := width_in(attribute)) is not None:
                self._widths.setdefault(module, []).append((*read, width))

    def shown_to(self, module: str, taken: dict[str, Any]) -> dict[str, Tensor]:
        """What stands for arguments of a call of ``module``."""
        found = {}
        for argument, layers, width in self._widths.get(module, ()):
            whole = taken.get(argument)
            if not isinstance(whole, Tensor):
                continue
            if id(whole) in self._splits or id(whole) in self._shown or whole.shape[-1] <= width:
                raise Unproven(f"{argument} of {module} is not whole")
            part = self.new_output(whole, (*whole.shape[:-1], width), whole.dtype)
            prefix = f"{module}." if module else ""
            self._shown[id(part)] = whole, frozenset(f"{prefix}{layer}" for layer in layers)
            found[argument] = part
        return found

    def taken_by(self, layer: str, x: Tensor) -> Tensor:
        """The tensor that a layer takes, which is called with ``x``."""
        whole, layers = self._shown.get(id(x), (x, frozenset([layer])))
        if layer not in layers:
            raise Unproven(f"{layer} takes a tensor of which only the width may be read")
        return whole

    def _is_whole(self, tensor: Tensor, where: str) -> None:
        if id(tensor) in self._shown:
            raise Unproven(f"a tensor of which only the width may be read is {where}")
        super()._is_whole(tensor, where)
