"""Proofs of groups in a module that keeps tensors for its next call: they must hold in all examples at once.

A recurrence begins with a state of zeros only where it is asked to keep one, so that a call without it needs fewer
numbers of a rank than one with it.  It owns the choice of a hypothesis that holds in both; where there is none, one
that holds alone goes on to the replay of the whole model, which decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tpkernels.planning.proofs.hypotheses import Attributes, Proof, Whole, names_read
from tpkernels.planning.proofs.search_widths import SearchWidths
from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.planning.runs.layer_groups import Group
from tpkernels.planning.runs.session import Scope
from tpkernels.planning.runs.shadow import Mode, Shadow
from tpkernels.planning.runs.trace import Recording
from tpkernels.planning.splits import Unproven, divisor, share

__all__ = ["SearchStates", "recordings_beside"]


def recordings_beside(observation: Observation, recording: Recording) -> list[tuple[Mode, Recording]]:
    """First recordings of other examples; and where modules write to states that they do not in these, another one."""
    found = [(mode, other) for mode, other in observation.firsts if other is not recording]
    known = {frozenset(other.states_written.items()) for other in (recording, *(other for _, other in found))}
    for mode, other in observation.recordings:
        written = frozenset(other.states_written.items())
        if written and written not in known:
            known.add(written)
            found.append((mode, other))
    return found


class SearchStates(SearchWidths):
    """A search whose proofs hold in ``elsewhere`` as well, recordings of other calls, if some do."""

    elsewhere: Sequence[tuple[Mode, Recording]] = ()

    def __init__(self, shadow: Shadow, recording: Recording, world_size: int) -> None:
        super().__init__(shadow, recording, world_size)
        self._sizes: Whole = {}
        """Attributes that are as large as what a column gives: the state that is kept has their size."""

    def prove(self, group: Group) -> Proof:
        others, scope = self.elsewhere, self.scope_of(group).name
        self.elsewhere = [(mode, other) for mode, other in others if self._keeps(other, scope)]
        self._sizes = self._as_large(group, scope) if self.elsewhere else {}
        try:
            return super().prove(group)
        except Unproven:
            if not self.elsewhere:
                raise
            self.elsewhere, self._sizes = (), {}
            return super().prove(group)
        finally:
            self.elsewhere, self._sizes = others, {}

    def attribute_sets(
        self,
        scopes: Sequence[Scope],
        world_size: int,
        pieces: int = 0,
        parts: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
    ) -> Iterator[Attributes]:
        cut = pieces or divisor(world_size)
        sizes = {key: share(value, world_size, cut) for key, value in self._sizes.items() if value % cut == 0}
        for attributes in super().attribute_sets(scopes, world_size, pieces, parts):
            yield attributes
            if sizes.keys() - attributes.keys():
                yield sizes | attributes

    def _as_large(self, group: Group, scope: str) -> Whole:
        prefix, widths = f"{scope}." if scope else "", {self.shadow.sizes[name].out_features for name in group.columns}
        others = {*self.shadow.sizes, *self.shadow.by_channel}
        inside = {
            name: module for name, module in self.shadow.modules.items()
            if (name == scope or name.startswith(prefix)) and name not in others
        }  # fmt: skip
        found: Whole = {}
        for name, module in inside.items():
            kind: Any = type(module)
            sizes = {key: size for key, size in vars(module).items() if type(size) is int and size in widths}
            found |= {(name, key): size for key, size in sizes.items() if key in names_read(kind)}
        return found

    def _attempt(self, recording: Recording, scope: Scope, group: Group, *args: Any, **kwargs: Any) -> int:
        heads = super()._attempt(recording, scope, group, *args, **kwargs)
        before = Mode(self.shadow.model.training, self.shadow.gradients)
        for mode, other in self.elsewhere if recording is self.recording else ():
            around = {call.name: call for call in reversed(other.scopes)}
            if scope.name not in around:
                continue
            call = around.get("", around[scope.name])  # the model's own code may have made the state (RecurrentGemma)
            self.shadow.set_mode(mode)
            try:
                super()._attempt(other, call, group, *args, **kwargs)
            finally:
                self.shadow.set_mode(before)
        return heads

    @staticmethod
    def _keeps(recording: Recording, scope: str) -> bool:
        """Whether the module, or one in it, keeps a tensor in this run that it has made of others, or writes to one
        that it is given in a list."""
        prefix, keeping = f"{scope}." if scope else "", [name for name, _ in recording.kept_states]
        return any(name == scope or name.startswith(prefix) for name in (*keeping, *recording.states_written))
