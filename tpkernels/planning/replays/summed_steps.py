"""Steps of a replay before which a module is given a copy of a whole argument, whose gradient ranks sum.

It owns :class:`SummedSteps`, between the steps that gather arguments and those with states.  Within the module the
copy may meet parts, and whatever else it meets has a share of its gradient as well, as what a feeder gives
(:mod:`tpkernels.planning.replays.gradients`).  Outside of it the argument is whole, and so is its gradient
(:mod:`tpkernels.nn.summed_arguments`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tpkernels.planning.replays.gather_steps import GatherSteps
from tpkernels.planning.replays.roles import SUMMED, Role
from tpkernels.planning.runs.tensors import can_require_grad
from tpkernels.planning.splits import Unproven

__all__ = ["SummedSteps"]


class SummedSteps(GatherSteps):
    """A run next to a recording, of one rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._met: dict[str, dict[str, Role]] = {}
        """By module: arguments whose gradients are summed."""
        for name, role in self.roles.items():
            if role.kind == "summed":
                module, _, argument = name.partition(SUMMED)
                self._met.setdefault(module, {})[argument] = role

    def summed_for(self, module: str, taken: dict[str, Any]) -> dict[str, Tensor]:
        """What stands for arguments of a call of ``module``."""
        found = {}
        for argument, role in self._met.get(module, {}).items():
            x = taken.get(argument)
            if not isinstance(x, Tensor) or not can_require_grad(x):
                continue
            self.blame = frozenset([role.group])
            self.not_from_before([x])
            if id(x) in self._splits or id(x) in self._summed:
                raise Unproven(f"{argument} of {module} is not whole, or has a part of its gradient already")
            if self.has_origin(x):
                self._complete |= self.origin(x) or set()
            copy = self.new_output(x, tuple(x.shape), x.dtype)
            self.made[id(copy)] = self.source(x)
            self._summed.add(id(copy))
            self._groups[id(copy)] = self.blame
            if x in self.requiring:
                self.requiring.made([copy])
            found[argument] = copy
        return found
