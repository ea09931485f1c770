"""Steps of a replay that take and give whole tensors: opaque modules, experts, and layers inside of opaque modules.

It owns :class:`WholeSteps`, between the bookkeeping of gradients and the replay of ops, and the place in the recording.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tpkernels.planning.replays.gradients import Gradients
from tpkernels.planning.replays.roles import Role
from tpkernels.planning.runs.conditions import Rest
from tpkernels.planning.runs.events import Event, Mixture, Opaque, Shape, Source, as_given, is_random
from tpkernels.planning.runs.rests import passes
from tpkernels.planning.runs.shadow import Shadow
from tpkernels.planning.runs.trace import Recording
from tpkernels.planning.splits import Unproven

__all__ = ["WholeSteps"]


class WholeSteps(Gradients):
    """A run next to ``recording``."""

    def __init__(
        self, shadow: Shadow, recording: Recording, attributes: Mapping[tuple[str, str], int], roles: Mapping[str, Role]
    ) -> None:
        super().__init__(shadow, attributes, roles)
        self.recording = recording
        self._at, self._stop = 0, len(recording.events)
        self._open = False
        """Whether a column ran, and its row has not yet."""

    @property
    def place(self) -> int:
        """The event of the recording that came last."""
        return self._at - 1

    def _next(self, packet: Any, layer: str | None, sources: tuple[Source, ...]) -> Event:
        if self._at >= self._stop:
            raise Unproven("with one rank's sizes the model runs more ops")
        event = self.recording.events[self._at]
        self._at += 1
        if event.packet != packet or event.layer != layer:
            error = Unproven(f"with one rank's sizes {layer or packet} runs where {event.layer or event.packet} was")
            error.parameters = self._whole_parameters(self._whole_of(event.sources))
            raise error
        if event.sources != sources:
            raise Unproven(f"with one rank's sizes {layer or packet} takes another tensor")
        return event

    def _whole_of(self, sources: tuple[Source, ...]) -> list[Tensor]:
        """The tensors that the recording knows by ``sources``."""
        kept = [tensor for tensor in self.recording.kept if isinstance(tensor, Tensor)]
        return [tensor for tensor in kept if self.recording.source(tensor) in sources]

    def _made(self, outputs: list[Tensor]) -> None:
        """By the event that came last."""
        event = self._at - 1
        self.made |= {id(out): (id(self.recording), event, place) for place, out in enumerate(outputs)}

    def before_decision(self, number: int, tensors: list[Tensor]) -> None:
        """All ranks answer alike what they ask of the same tensors as the whole model."""
        for tensor in tensors:
            self._is_whole(tensor, "asked for a condition, and ranks would not answer alike")
        asked = tuple(map(self.source, tensors))
        if number >= len(self.recording.decisions) or self.recording.decisions[number].asked != asked:
            raise Unproven("with one rank's sizes the model asks for another condition")
        if number not in self.recording.settled:
            super().before_decision(number, tensors)

    def before_opaque(self, name: str, args: Any, kwargs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            self._is_whole(tensor, f"given to {name}, which needs values of tensors")
        event = self._next(Opaque(name), None, tuple(map(self.source, tensors)))
        if [as_given((args, kwargs))] != event.whole:
            raise Unproven(f"what is given to {name} depends on the number of features of one rank")
        inside = [key for key in self.attributes if key[0] == name or key[0].startswith(f"{name}.")]
        if inside:
            raise Unproven(f"{name} needs values of tensors, and has the number {'.'.join(inside[0])}")
        if self._open and any(isinstance(m, nn.Dropout) for m in self.shadow.modules[name].modules()):
            raise Unproven(f"{name} draws random numbers between layers of the group")
        self._taken(tensors)

    def _taken(self, tensors: list[Tensor]) -> None:
        """What is made of whole tensors is whole, and so is the gradient that they get of it."""
        self._completed(tensors)
        for tensor in tensors:
            if self.has_origin(tensor):
                self._complete |= self.origin(tensor) or set()

    def after_opaque(self, name: str, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        event = self.recording.events[self._at - 1]
        if [tuple(output.shape) for output in outputs] != [tuple(shape) for shape in event.outputs]:
            raise Unproven(f"{name} gives other shapes with one rank's sizes")
        self._made(outputs)

    def before_rest(self, rest: Rest, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self._is_whole(tensor, f"asked by {rest.module} for a condition, and ranks would not answer alike")
        event = self._next(Opaque(rest.module), None, rest.sources)
        if rest.asked != event.whole:
            raise Unproven(f"what {rest.module} asks for a condition depends on the number of features of one rank")

    def rest_gives(self, rest: Rest, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self._is_whole(tensor, f"given by {rest.module}, which branches on a condition")
        self._taken([*tensors])

    def after_rest(self, rest: Rest, given: Any, outputs: list[Tensor]) -> None:
        event, recorded = self.recording.events[self._at - 1], self.recording.rest_at[self._at - 1]
        told = given, passes(self, rest), sorted(rest.kept)
        if rest.steps != recorded.steps or tuple(event.kwargs[key] for key in ("gives", "passes", "keeps")) != told:
            raise Unproven(f"what {rest.module} runs after a condition depends on the number of features of one rank")
        self._made(outputs)

    def before_mixture(self, name: str, given: list[Tensor]) -> None:
        for tensor in given:
            self._is_whole(tensor, f"given to {name}, which takes whole tokens")
        event = self._next(Mixture(name), None, tuple(map(self.source, given)))
        if [Shape(tensor.shape) for tensor in given] != event.whole:
            raise Unproven(f"what is given to {name} depends on the number of features of one rank")
        self._taken(given)

    def after_mixture(self, name: str, given: list[Tensor], out: Tensor, slots: int) -> None:
        self._made([out])

    def mixture_read_quietly(self, name: str, given: list[Tensor]) -> None:
        for tensor in given:
            self._is_whole(tensor, f"given to {name}, inside of a module that needs values of tensors")
            if self.has_origin(tensor):
                self._complete |= self.origin(tensor) or set()

    def read_quietly(self, func: Any, args: Any, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            after = "after a condition" if self.rest is not None else "which needs values of tensors"
            self._is_whole(tensor, f"read by {self.quiet}, {after}")
            if id(tensor) in self.shadow.names:
                self._complete |= self.origin(tensor) or set()
        if self.rest is not None:
            self._taken([*tensors])
        if self._open and is_random(func, args):
            raise Unproven(f"{self.quiet} draws random numbers between layers of the group")

    def layer_called_quietly(self, name: str, x: Tensor) -> Tensor:
        self._is_whole(x, f"the input of {name}, inside of a module that needs values of tensors")
        if name in self.roles:
            raise Unproven(f"{name} is inside of a module that needs values of tensors")
        return super().layer_called_quietly(name, x)
