"""Steps of a replay before which a rank takes its part of a module's arguments, or all of them, or shows its width.

It owns :class:`ArgumentSteps`, between states that a module writes to and the parts that modules keep.  What is made
for all heads, a constant or keys and values that are given, is taken by heads here
(:mod:`tpkernels.nn.sliced_arguments`); the rest is done before.  The gradient of a part is gathered, so that the
argument's is whole.  Code that writes to the part, or changes a dict or list in which it stands, is refused: others
would not see that.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tpkernels.nn.sliced_arguments import Holders, named_arguments, with_arguments
from tpkernels.ops.checks import DTYPES
from tpkernels.planning.replays.roles import Role
from tpkernels.planning.replays.state_steps import StateSteps
from tpkernels.planning.runs.tensors import storage_of, written_by
from tpkernels.planning.splits import HandedOn, Split, Unproven

__all__ = ["ArgumentSteps"]


class ArgumentSteps(StateSteps):
    """A run next to a recording, of one rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._arguments: dict[str, dict[str, Role]] = {}
        """By module: arguments of which it takes a part."""
        self._holding: list[tuple[str, Holders]] = []
        """Of the calls of modules that are running: the dicts and lists in which such arguments stand."""
        self._taken_parts: dict[int, str] = {}
        """By storage: parts that were taken, and of what."""
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
        self._holding.append((name, Holders(module, args, kwargs, self._arguments.get(name, {}))))
        return args, kwargs

    def left(self, name: str, output: Any = None) -> Any:
        given = super().left(name, output)
        while self._holding and self._holding[-1][0] not in self.inside:
            module, holders = self._holding.pop()
            if changed := holders.changed:
                self.blame = frozenset(role.group for role in self._arguments[module].values())
                raise Unproven(f"{module} changes what {', '.join(changed)} holds, of which it has a part")
        return given

    def before_written(self, func: Any, args: Any, kwargs: Any) -> None:
        super().before_written(func, args, kwargs)
        for tensor in written_by(func, args, kwargs) if func._schema.is_mutable and self._taken_parts else ():
            if said := self._taken_parts.get(storage_of(tensor)):
                self.blame = self._groups.get(id(tensor), self.blame)
                raise Unproven(f"{said}, of which a rank has a part, is written to")

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
            if whole.dtype not in DTYPES or role.pieces not in (0, heads):
                raise Unproven(f"{argument} of {name} is of a kind that is not taken in part")
            self._is_whole(whole, f"{argument} of {name}, of which a rank would take its part")
            split = Split(role.dim, role.segments * (whole.shape[role.dim] // heads), role.pieces)
            part = self.new_output(whole, split.local_shape(whole.shape, self.world_size, self.rank), whole.dtype)
            if self.has_origin(whole):
                self._complete |= self.origin(whole) or set()
            else:
                del self.origins[storage_of(part)]
            if whole in self.requiring:
                self.requiring.made([part])
            self.made[id(part)] = self.source(whole)
            self._mark(part, split, frozenset([role.group]))
            self._taken_parts[storage_of(part)] = f"{argument} of {name}"
            found[argument] = part
        return found
