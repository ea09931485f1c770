"""Steps of a replay before which ranks gather an argument of a module, which is called with their parts of it.

It owns :class:`GatherSteps`, between the steps that show a width and those that sum gradients.  What is gathered is
whole, so that the module's code goes on as in the whole model; whatever meets a part with it is refused, as for any
other whole activation.  Its gradient is then whole on every rank, and that of the part is a slice of it
(:mod:`tpkernels.nn.gathered_arguments`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tpkernels.planning.replays.roles import Role
from tpkernels.planning.replays.width_steps import WidthSteps
from tpkernels.planning.splits import Unproven, how

__all__ = ["GatherSteps"]


class GatherSteps(WidthSteps):
    """A run next to a recording, of one rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._gathered: dict[str, dict[str, Role]] = {}
        """By module: arguments that are gathered before each call."""
        for name, role in self.roles.items():
            if role.kind == "gathered":
                module, _, argument = name.rpartition(":")
                self._gathered.setdefault(module, {})[argument] = role

    def gathered_for(self, module: str, taken: dict[str, Any]) -> dict[str, Tensor]:
        """What stands for arguments of a call of ``module``."""
        found = {}
        for argument, role in self._gathered.get(module, {}).items():
            x = taken.get(argument)
            if x is None:
                continue
            self.blame = frozenset([role.group])
            if len(role.segments) > 1:
                raise Unproven(f"{argument} of {module} is made of several segments, which are not gathered")
            split = self._splits.get(id(x)) if isinstance(x, Tensor) else None
            if split is None or split != role.split(x.dim() - 1):
                raise Unproven(f"{argument} of {module} is {how(split)}, not cut by features as it would be gathered")
            self.not_from_before([x])
            whole = self.new_output(x, (*x.shape[:-1], *role.segments), x.dtype)
            self.made[id(whole)] = self.source(x)
            if x in self.requiring:
                self.requiring.made([whole])
            found[argument] = whole
        return found
