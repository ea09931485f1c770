"""Steps of a replay that take the largest or smallest element of a tensor that is cut, between the layers of a group.

It owns :class:`MaximumSteps`, between the steps that take statistics of features and products with parameters.  Such a
call is one step (:mod:`tpkernels.nn.part_maxima`): what it gives is whole, and each rank has a share of its gradient,
if the code has not detached x.  It is proven only in the module that calls the layers of the group, or inside of it,
and only where this module, and those in it, take it of nothing that is whole, and not detached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tpkernels.nn.part_maxima import Extreme
from tpkernels.planning.replays.statistic_steps import StatisticSteps
from tpkernels.planning.runs.tensors import storage_of
from tpkernels.planning.splits import CROSSED, Unproven, degrees

__all__ = ["MaximumSteps"]


class MaximumSteps(StatisticSteps):
    """A run next to a recording, of one rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.maxima: dict[str, frozenset[int]] = {}
        """Modules that take the largest element of what is cut, and of which groups that is,"""
        self._other_maxima: set[str] = set()
        """and those that take it of something else, or have a module in them that does."""

    def know(self, other: Any) -> None:
        """What any run takes, all do."""
        super().know(other)
        self._other_maxima |= other._other_maxima
        for name, groups in other.maxima.items():
            self.maxima[name] = self.maxima.get(name, frozenset()) | groups

    def maximum_taken(self, taken: Extreme, run: Callable[[], Tensor]) -> Tensor:
        x, trained = taken.x, taken.x not in self.detached
        module = self.inside[-1] if self.inside else ""
        split = self._splits.get(id(x)) if self.quiet is None else None
        cut = split is not None and split != CROSSED and not split.copied and not degrees()
        if not cut or not self.is_near(self._groups[id(x)], module):
            self._other_maxima.update(("", *self.inside) if trained else ())
            return run()
        self.not_from_before([x])
        call, groups = self.recording.maxima.get(self._at), self._groups[id(x)]
        self.blame = groups
        told = module, self.source(x), taken.smallest
        if call is None or (call.module, call.source, call.smallest) != told or call.stop > self._stop:
            raise Unproven("with one rank's sizes the largest element of another tensor is taken")
        self.maxima[module] = self.maxima.get(module, frozenset()) | groups
        self._at = call.stop
        out = self.new_output(x, (), x.dtype)
        self.made[id(out)] = call.result
        if trained:
            self._summed.add(id(out))
        else:  # a constant to the gradients
            del self.origins[storage_of(out)]
        self._groups[id(out)] = groups
        return out

    def _check_gradients(self) -> None:
        super()._check_gradients()
        for name in sorted(self.maxima.keys() & self._other_maxima):
            self.blame = self.maxima[name]
            raise Unproven(f"{name} takes the largest element of what is whole, too")
