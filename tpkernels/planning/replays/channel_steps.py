"""Steps of a replay that are cut by channels: convolutions of a pair, and what works on each channel between them.

It owns :class:`ChannelSteps`, between the steps that take whole tensors and the replay of ops.  Such a call is one step
where its channels are cut; any other call of the module runs its code, op by op.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tpkernels.nn.packed_norm import is_batch_norm
from tpkernels.planning.modules.channel_modules import ChannelCall, parts_by_channel
from tpkernels.planning.replays.roles import Role
from tpkernels.planning.replays.whole_steps import WholeSteps
from tpkernels.planning.splits import Split, Unproven, degrees, how

__all__ = ["ChannelSteps"]


class ChannelSteps(WholeSteps):
    """A run next to a recording, of one rank."""

    world_size: int
    rank: int
    _open_groups: set[int]
    _open_pairs: set[int]

    def channels_called(self, name: str, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        self.not_from_before([x])
        role = self.roles.get(name)
        if role is not None and role.kind in ("column", "row"):
            return self._paired(name, role, x)
        return self._by_channel(name, forward, x)

    def channels_called_otherwise(self, name: str) -> None:
        self._whole_channels.add(name)
        if name in self.roles:
            raise Unproven(f"{name} is called with more than a tensor, or inside of a module that needs values")

    def _paired(self, name: str, role: Role, x: Tensor) -> Tensor:
        """A convolution that gives this rank's channels of a whole tensor, or sums over them, or both."""
        split, call = self._splits.get(id(x)), self._call_of(name, x)
        taken, answer = (role, None) if role.kind == "row" else (role.taken, role.split(1))
        if taken is not None:
            self.blame = frozenset([taken.group])
            if split != taken.split(1):
                raise Unproven.of_input(name, split, 1, "channels as its weight is")
            self._open_pairs.discard(taken.group)
            if taken.group in self._open_groups:
                self._open_groups.discard(taken.group)
                self._open = False
        else:
            if split is not None:
                raise Unproven(f"the input of {name} is {how(split)}, which takes it whole")
            if tuple(x.shape) != call.taken:
                raise Unproven(f"the input of {name} has shape {list(x.shape)} instead of {list(call.taken)}")
            if id(x) in self._summed:
                raise Unproven(f"{name} reads what has a part of its gradient")
        if self.has_origin(x):
            self._complete |= self.origin(x) or set()
        if answer is not None:
            self._open_pairs.add(role.group)
        return self._step(x, call, answer, frozenset() if answer is None else frozenset([role.group]))

    def _by_channel(self, name: str, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """What works on each channel by itself: one step where these are cut."""
        split = self._splits.get(id(x))
        if split is None:
            self._whole_channels.add(name)
            return forward(x)
        told = name in self.shadow.kept or any(module == name for module, _ in self.attributes)
        parts = None if told or degrees() else parts_by_channel(self.shadow.modules[name], self.world_size)
        if name in self.shadow.convolutions or parts is None:
            return forward(x)
        packed = is_batch_norm(self.shadow.modules[name]) and sum(split.segments) == parts.taken
        if split != (Split(1, split.segments) if packed else Split(1, (parts.taken,))):
            return forward(x)
        self._takes_segments(name, split.segments)
        call = self._call_of(name, x)
        groups = self.blame = self._groups.get(id(x), self.blame)
        self.cut_channels[name] = self.cut_channels.get(name, frozenset()) | groups
        return self._step(x, call, split if packed else Split(1, (parts.given,)), groups)

    def _call_of(self, name: str, x: Tensor) -> ChannelCall:
        call = self.recording.channel_calls.get(self._at)
        self.blame = self._groups.get(id(x), self.blame)
        if call is None or call.name != name or call.stop > self._stop or call.source != self.source(x):
            raise Unproven(f"with one rank's sizes {name} takes another tensor")
        return call

    def _step(self, x: Tensor, call: ChannelCall, answer: Split | None, groups: frozenset[int]) -> Tensor:
        self._at = call.stop
        shape = call.given if answer is None else answer.local_shape(call.given, self.world_size, self.rank)
        out = self.new_output(x, shape, call.dtype)
        self.made[id(out)] = call.result
        self._mark(out, answer, groups)
        return out
