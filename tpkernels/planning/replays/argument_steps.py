"""Steps of a replay before which a rank takes its part of a module's arguments, or all of them, or shows its width.

It owns :class:`ArgumentSteps`, between states that a module writes to and the parts that modules keep.  A constant that
is made for all heads is taken by heads here (:mod:`tpkernels.nn.sliced_arguments`); the rest is done before.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tpkernels.nn.sliced_arguments import named_arguments, with_arguments
from tpkernels.planning.replays.roles import Role
from tpkernels.planning.replays.state_steps import StateSteps
from tpkernels.planning.runs.tensors import storage_of
from tpkernels.planning.splits import HandedOn, Split, Unproven

__all__ = ["ArgumentSteps"]


class ArgumentSteps(StateSteps):
    """A run next to a recording, of one rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._arguments: dict[str, dict[str, Role]] = {}
        """By module: arguments of which it takes a part."""
        for name, role in self.roles.items():
            if role.kind == "argument":
                module, _, argument = name.rpartition(":")
                self._arguments.setdefault(module, {})[argument] = role

    def given(self, name: str, args: Any, kwargs: Any) -> Any:
        """The call with this rank's part of the arguments that are cut, with all of those that are gathered, and with
        this rank's width of others."""
        if not any(name in some for some in (self._arguments, self._gathered, self._met, self._widths, self._stated)):
            return None
        module = self.shadow.modules[name]
        taken = named_arguments(module, args, kwargs)
        values = self.shown_to(name, taken) | self.gathered_for(name, taken) | self.summed_for(name, taken)
        values |= self.states_for(name, taken) | self._parts_for(name, taken)
        if not values:
            return None
        args, kwargs = with_arguments(module, args, kwargs, values)
        self.given_states(name, args, kwargs)
        return args, kwargs

    def _parts_for(self, name: str, taken: dict[str, Any]) -> dict[str, Tensor]:
        found = {}
        for argument, role in self._arguments.get(name, {}).items():
            whole = taken.get(argument)
            if whole is None:
                continue
            (heads,), self.blame = role.segments, frozenset([role.group])
            if id(whole) in self._splits:  # what gives it has cut it already
                raise HandedOn(name, argument)
            if not isinstance(whole, Tensor) or whole.dim() <= role.dim or whole.shape[role.dim] % heads:
                raise Unproven(f"{argument} of {name} has no runs of {heads} heads")
            if self.has_origin(whole) or whole in self.requiring:
                raise Unproven(f"{argument} of {name} has a gradient")
            split = Split(role.dim, role.segments * (whole.shape[role.dim] // heads), role.pieces)
            part = self.new_output(whole, split.local_shape(whole.shape, self.world_size, self.rank), whole.dtype)
            del self.origins[storage_of(part)]
            self.made[id(part)] = self.source(whole)
            self._mark(part, split, frozenset([role.group]))
            found[argument] = part
        return found
