"""Steps of a replay with states that a module is given whole, and of which it reads and writes parts.

It owns :class:`StateSteps`, between the steps that sum gradients and those that take a part of arguments.  The module's
code finds its part of a state, whose gradient is gathered; where it writes a part to that, by an index, ranks gather
what they write for the whole state (:mod:`tpkernels.nn.written_states`).  Any other write to either of them is refused,
and so is a change of the list that holds it.  Behind the module the state is whole, as the whole model's is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tpkernels.nn.sliced_arguments import named_arguments
from tpkernels.nn.written_states import items_changed, place_written, states_back
from tpkernels.ops.checks import DTYPES
from tpkernels.planning.replays.roles import Role
from tpkernels.planning.replays.summed_steps import SummedSteps
from tpkernels.planning.runs.tensors import storage_of, written_by
from tpkernels.planning.splits import Unproven, degrees, how

__all__ = ["StateSteps"]


@dataclass
class _State:
    """A state in one call: all of it, this rank's part, and by which name."""

    argument: str
    role: Role
    whole: Tensor
    part: Tensor


@dataclass
class _Call:
    """A call of a module with states, and what it is given, by the ids of that."""

    module: str
    states: list[_State]
    args: Any
    kwargs: Any
    before: dict[str, int]


class StateSteps(SummedSteps):
    """A run next to a recording, of one rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.state_bytes: dict[str, int] = {}
        """What is gathered for states, by module and argument."""
        self._stated: dict[str, dict[str, Role]] = {}
        """By module: its states."""
        self._calls: list[_Call] = []
        """With states, the innermost last."""
        self._left_behind: set[int] = set()
        """Storages of parts whose modules have returned: nobody writes there what the whole states get."""
        self._writing: int | None = None
        """The storage of the part that is being written to by an index."""
        self._may_be_states: list[tuple[str, dict[int, tuple[str, tuple[int, ...]]]]] = []
        """By the storages, what modules that are being called write to in the recording, and the shapes."""
        for name, role in self.roles.items():
            if role.kind == "state":
                module, _, argument = name.rpartition(":")
                self._stated.setdefault(module, {})[argument] = role

    def know(self, other: Any) -> None:
        """Of several examples the first that calls a module counts."""
        super().know(other)
        self.state_bytes |= other.state_bytes

    def entered(self, name: str, args: Any, kwargs: Any) -> None:
        super().entered(name, args, kwargs)
        written = self.recording.states_written.get(name, frozenset())
        if written:
            given = named_arguments(self.shadow.modules[name], args, kwargs)
            listed = {key: one for key in sorted(written) if isinstance(one := given.get(key), Tensor)}
            found = {storage_of(one): (key, tuple(one.shape)) for key, one in listed.items()}
            self._may_be_states.append((name, found))

    def states_behind(self, tensors: list[Tensor]) -> dict[tuple[str, str], tuple[int, ...]]:
        """Modules and arguments that they write to, with their shapes: those that whole ``tensors`` are views of, else
        all of the innermost module, of which they may be made."""
        whole = {storage_of(tensor) for tensor in tensors if id(tensor) not in self._splits}
        views = [(name, {one: known[one] for one in whole & known.keys()}) for name, known in self._may_be_states]
        for module, known in [*reversed([one for one in views if one[1]]), *reversed(self._may_be_states)][:1]:
            return {(module, argument): shape for argument, shape in known.values()}
        return {}

    def states_for(self, module: str, taken: dict[str, Any]) -> dict[str, Tensor]:
        """What stands for states in a call of ``module``."""
        states: list[_State] = []
        for argument, role in self._stated.get(module, {}).items():
            whole = taken.get(argument)
            if whole is None:
                continue
            self.blame = frozenset([role.group])
            self._check_state(f"{argument} of {module}", whole, role, [*states, *self._open_states()])
            split = role.split(role.dim)
            part = self.new_output(whole, split.local_shape(whole.shape, self.world_size, self.rank), whole.dtype)
            if self.has_origin(whole):
                self._complete |= self.origin(whole) or set()
            else:
                del self.origins[storage_of(part)]
            if whole in self.requiring:
                self.requiring.made([part])
            self.made[id(part)] = self.source(whole)
            self._mark(part, split, frozenset([role.group]))
            states.append(_State(argument, role, whole, part))
        if states:
            self._calls.append(_Call(module, states, (), {}, {}))
        return {state.argument: state.part for state in states}

    def _check_state(self, said: str, whole: Any, role: Role, others: list[_State]) -> None:
        (features,) = role.segments
        if not isinstance(whole, Tensor) or whole.dim() <= role.dim or whole.shape[role.dim] != features:
            raise Unproven(f"{said} has no dimension of {features} features, of which a rank could take its part")
        self._is_whole(whole, f"{said}, of which a rank would take its part")
        if whole.dtype not in DTYPES or role.pieces or degrees():
            raise Unproven(f"{said} is of a kind that is not taken in part")
        if storage_of(whole) in {storage_of(one) for state in others for one in (state.whole, state.part)}:
            raise Unproven(f"{said} is a state already")

    def _open_states(self) -> list[_State]:
        return [state for call in self._calls for state in call.states]

    def given_states(self, module: str, args: Any, kwargs: Any) -> None:
        """The call as it goes on, behind :meth:`states_for`."""
        if self._calls and self._calls[-1].module == module and not self._calls[-1].before:
            call = self._calls[-1]
            before = named_arguments(self.shadow.modules[module], args, kwargs)
            call.args, call.kwargs, call.before = args, kwargs, {name: id(one) for name, one in before.items()}
            self.kept += [args, kwargs]

    def item_written(self, target: Tensor, index: Any, value: Any, run: Callable[[], Any]) -> Any:
        state = next((one for one in self._open_states() if one.part is target), None)
        if state is None or self.quiet is not None:
            return run()
        self.blame = frozenset([state.role.group])
        place = place_written(index, tuple(target.shape), state.role.dim)
        split = self._splits.get(id(value)) if isinstance(value, Tensor) else None
        if place is None or not isinstance(value, Tensor) or tuple(value.shape) != place[1]:
            raise Unproven(f"{state.argument} is written to in a way that ranks do not follow")
        if split != state.role.split(place[0]) or value.dtype not in DTYPES:
            raise Unproven(f"what is written to {state.argument} is {how(split)}, not a part as that is")
        self.not_from_before([value])
        module = next(call.module for call in self._calls if state in call.states)
        key = f"{module}.{state.argument}" if module else state.argument
        (features,) = state.role.segments
        whole = value.nbytes // value.shape[place[0]] * features
        self.state_bytes[key] = self.state_bytes.get(key, 0) + whole
        self._writing = storage_of(target)
        try:
            return run()
        finally:
            self._writing = None

    def not_from_before(self, tensors: list[Tensor]) -> None:
        super().not_from_before(tensors)
        for tensor in tensors if self._left_behind else ():
            if storage_of(tensor) in self._left_behind:
                self.blame = self._groups.get(id(tensor), self.blame)
                raise Unproven("a part of a state is read behind the module that has taken it")

    def before_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """An op is about to write to tensors, if it writes at all."""
        for state in self._open_states() if func._schema.is_mutable else ():
            own = {storage_of(one) for one in (state.part, state.whole)} - {self._writing}
            if any(storage_of(tensor) in own for tensor in written_by(func, args, kwargs)):
                self.blame = frozenset([state.role.group])
                raise Unproven(f"{state.argument} is written to in a way that ranks do not follow")

    def left(self, name: str, output: Any = None) -> Any:
        super().left(name, output)
        while self._may_be_states and self._may_be_states[-1][0] not in self.inside:
            self._may_be_states.pop()
        if not self._calls or self._calls[-1].module != name:
            return None
        call = self._calls.pop()
        self.blame = frozenset(state.role.group for state in call.states)
        if changed := items_changed(call.args, call.kwargs, call.before, self.shadow.modules[name]):
            raise Unproven(f"{name} changes {', '.join(changed)}, of which it has a part")
        self._left_behind |= {storage_of(state.part) for state in call.states}
        for state in call.states:
            if self.has_origin(state.part):
                self.set_origin(state.whole, None)
            if state.part in self.requiring:
                self.requiring.made([state.whole])
        return states_back(output, {id(state.part): state.whole for state in call.states})
