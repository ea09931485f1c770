"""The first module of a parallel model that computes something else than in the unsharded one.

Forward, modules are entered and left in one order on all ranks.  The first module whose output differs although its
input does not is the one to name.  If the input of a module differs already, the code of its caller made the
difference.  Backward, the same holds for gradients in the opposite order.  Parts whose place in the whole is not known
are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpkernels.planning.style_names import style_to_dict
from tpkernels.planning.styles import Style
from tpkernels.verification.bounds import FACTOR, bounds_of
from tpkernels.verification.model_passes import Event, is_state
from tpkernels.verification.part_places import part_at
from tpkernels.verification.verdict import Difference

__all__ = ["Search"]


@dataclass
class Search:
    """Events of the three models, and what to say about their modules."""

    exact: Sequence[Event]
    plain: Sequence[Event]
    actual: Sequence[Event]
    styles: Mapping[str, Style]
    kinds: Mapping[str, str]
    """Classes in the unsharded model."""
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        self._plain = {event.key: event for event in self.plain}
        self._actual = {event.key: event for event in self.actual}

    def forward(self) -> tuple[int, dict[str, Any]] | None:
        """The number of the first event that differs on this rank, and a :class:`Difference` as JSON can say it."""
        agreed, passed_over = "", 0
        for number, event in enumerate(self.exact):
            ratio = self._ratio(event, "values")
            if ratio is None:
                passed_over += 1
                continue
            if not ratio <= FACTOR:
                return number, self._forward_difference(event, ratio, agreed, passed_over)
            agreed, passed_over = event.module, 0
        return None

    def backward(self, wrong: Mapping[str, float]) -> tuple[int, dict[str, Any]] | None:
        """As :meth:`forward`, with the last number; ``wrong``: parameters whose gradients differ, and how much."""
        for number in reversed(range(len(self.exact))):
            event = self.exact[number]
            ratio = self._ratio(event, "gradients")
            if ratio is not None and not ratio <= FACTOR:
                return number, self._backward_difference(event, ratio)
            if event.leaves and event.turn == 0:
                own = next((name for name in wrong if name.rpartition(".")[0] == event.module), None)
                if own is not None:
                    what = f"the gradient of its {own.rpartition('.')[2]}"
                    return number, self._say(event.module, what, wrong[own])
        return None

    def _ratio(self, event: Event, what: str) -> float | None:
        """How far off an event's tensors are; None where nothing can be compared."""
        plain, actual = self._plain.get(event.key), self._actual.get(event.key)
        if plain is None or actual is None:
            return None
        mine, others, theirs = (getattr(one, what) for one in (event, plain, actual))
        pairs = {
            path: (tensor, others[path]) for path, tensor in mine.items()
            if path in others and others[path].shape == tensor.shape
        }  # fmt: skip
        ratios = []
        for path, bound in bounds_of(pairs, {}).items():
            if path not in theirs:
                continue
            found = part_at(
                theirs[path], mine[path], self.styles.get(event.module),
                leaves=event.leaves, rank=self.rank, world_size=self.world_size,
            )  # fmt: skip
            if found is not None:
                ratios.append(bound.ratio(*found))
            elif what == "values" and not event.module and event.leaves and not is_state(path):
                ratios.append(float("inf"))  # the model must give whole tensors
        return max(ratios) if ratios else None

    def _forward_difference(self, event: Event, ratio: float, agreed: str, passed_over: int) -> dict[str, Any]:
        between = f", or one of {passed_over} tensors before it that are parts" if passed_over else ""
        if event.leaves:
            inner = [other for other in self.kinds if other.startswith(f"{event.module}." if event.module else "")]
            own = "its own code: all that it calls agrees" if any(inner) and event.module != agreed else ""
            return self._say(event.module, f"its output{between}", ratio, own)
        if event.parent is None:
            return self._say(event.module, "what it is called with", ratio)
        after = f"between {agreed!r} and {event.module!r}" if agreed else f"before {event.module!r}"
        return self._say(event.parent, f"what it gives to {event.module!r}{between}", ratio, f"its own code, {after}")

    def _backward_difference(self, event: Event, ratio: float) -> dict[str, Any]:
        if event.leaves:
            note = "computed by what uses it afterwards, not by it"
            return self._say(event.module, "the gradient of its output", ratio, note)
        mine = {id(tensor) for tensor in event.held.values()}
        readers = [
            other.module for other in self.exact
            if not other.leaves and mine & {id(tensor) for tensor in other.held.values()}
        ]  # fmt: skip
        inner = [one for one in dict.fromkeys(readers) if not any(other.startswith(f"{one}.") for other in readers)]
        inner = [one for one in inner if one] or [event.module]
        note = f"or that of {', '.join(inner[1:])}, which read the same tensor" if inner[1:] else ""
        return self._say(inner[0], "the gradient of its input", ratio, note)

    def _say(self, module: str, what: str, ratio: float, note: str = "") -> dict[str, Any]:
        return describe(module, what, ratio, self.styles, self.kinds, note)


def describe(
    module: str, what: str, ratio: float, styles: Mapping[str, Style], kinds: Mapping[str, str], note: str = ""
) -> dict[str, Any]:
    """A :class:`Difference` as JSON can say it."""
    said = style_to_dict(styles[module]) if module in styles else {"style": "not in the plan"}
    options = ", ".join(f"{key}={value}" for key, value in said.items() if key != "style")
    style = f"{said['style']}({options})" if options else str(said["style"])
    return vars(Difference(module, kinds.get(module, "?"), style, what, ratio, note))
