"""Why a layer is cut by itself: what stands against a cut together with the layers before or behind it.

It owns the words of a plan's rows.  A group that was tried says itself why it does not hold.  Of layers that are in no
group the data flow says why there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from tpkernels.planning.proofs.decision import Decision
from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.planning.runs.layer_groups import SMALL_GROUP, Component, components

__all__ = ["Neighbours"]


class Neighbours:
    """The layers around each, as the runs of ``observation`` show them and ``decision`` leaves them.

    ``pairs``: whether convolutions may be cut in pairs.
    """

    def __init__(self, observation: Observation, decision: Decision, *, pairs: bool) -> None:
        self._observation, self._decision, self._pairs = observation, decision, pairs

    def why_alone(self, name: str, *, table: bool) -> str:
        """The reason, "" where no other layer is around; of a table, which is cut by vocabulary wherever it stands,
        only that of a group that was tried."""
        refused = next((reason for members, reason in self._refused if name in members), "")
        if refused or table or name in self._given:
            return refused
        inside = self._opaque_around(name)
        if inside:
            return f"{inside} needs the values of tensors, and what it runs cannot be followed"
        around = [one for one in self._components if name in one.columns | one.rows]
        return self._against(min(around, key=_size)) if around else ""

    def why_unpaired(self, name: str) -> str:
        """The reason of a convolution that is cut by itself."""
        if not self._pairs:
            return "none is with sequence parallelism, or with same_bits"
        groups = sorted(self._decision.unpaired.items(), key=lambda item: len(item[0].layers))
        refused = next((error.reason for group, error in groups if name in group.layers), "")
        return refused or self._not_tried(name)

    def _not_tried(self, name: str) -> str:
        """Why a convolution is in no group at all."""
        shadow, recordings = self._observation.shadow, [one for _, one in self._observation.firsts]
        if shadow is None or name not in shadow.convolutions:
            return "it has groups of channels, hooks, or a weight that is made of other parameters"
        if not any(name in one.convolution_inputs for one in recordings):
            called = any(name in one.called_otherwise for one in recordings)
            within = "it is called with more than a tensor, or inside of a module that needs values"
            return within if called else "it is not called by the example"
        around = [one for one in self._components_of_channels if one.rows and name in one.columns | one.rows]
        return self._against_pair(min(around, key=_size)) if around else "it gives to no layer, and takes from none"

    def _against_pair(self, one: Component) -> str:
        """What stands against a pair of these layers."""
        shadow = self._observation.shadow
        inner = {name for name in one.columns & one.rows if shadow is None or name not in shadow.convolutions}
        linear = f"{min(inner)}, no convolution, stands between others that give and take the same" if inner else ""
        return self._left_open(one) or linear

    def _against(self, one: Component) -> str:
        """What stands against a cut of these layers."""
        if _size(one) > SMALL_GROUP:
            return f"{_size(one)} layers give and take the same features"
        if left := self._left_open(one):
            return left
        inner = one.columns & one.rows
        if inner:
            return f"{min(inner)} stands between others that give and take the same features"
        cut = {name for group in self._decision.proven for name in group.layers} & (one.columns | one.rows)
        return f"{min(cut)} is cut with others" if cut else ""

    def _left_open(self, one: Component) -> str:
        """What else takes from these layers, or gives to them."""
        if one.seen_outside and (one.asked or not one.results):
            opaque = self._observation.shadow is not None and any(self._observation.shadow.asking)
            beside = "a result of the model" + (", or a module that needs values" if opaque else "")
            return f"{min(one.seen_outside)} also gives to {beside}"
        return f"{min(one.open)} also takes what no layer gives" if one.open else ""

    @cached_property
    def _given(self) -> set[str]:
        """Layers that give whole tensors to what is cut: their rows say so."""
        found = self._decision.proven.items()
        return {name for group, proof in found for name in (*group.feeders, *group.summed, *proof.feeders)}

    @cached_property
    def _refused(self) -> list[tuple[frozenset[str], str]]:
        """Groups of a few layers."""
        groups = self._decision.refused.items()
        return [
            (frozenset(group.layers), error.reason)
            for group, error in groups if group.size <= SMALL_GROUP
        ]  # fmt: skip

    @cached_property
    def _components(self) -> list[Component]:
        return [one for _, recording in self._observation.firsts for one in components(recording)]

    @cached_property
    def _components_of_channels(self) -> list[Component]:
        firsts = [(one, one.shadow.convolutions.keys()) for _, one in self._observation.firsts]
        return [one for recording, names in firsts for one in components(recording, convolutions=names)]

    def _opaque_around(self, name: str) -> str:
        shadow, recording = self._observation.shadow, self._observation.recording
        if shadow is None or recording is None or name not in recording.rows_unknown:
            return ""
        return next((around for around in _around(name) if around in shadow.opaque), "")


def _around(name: str) -> Iterator[str]:
    """Names of the modules around one, the innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _size(one: Component) -> int:
    return len(one.columns | one.rows)
