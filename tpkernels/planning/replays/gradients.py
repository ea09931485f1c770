"""Whose gradient is complete in a run on parts, and whose is a rank's share: the bookkeeping of the replay.

A whole tensor that meets parts gets a share of its gradient on each rank.  For a parameter the shares are summed, if it
meets nothing else.  For an activation they are summed where a *feeder* gave it: a layer that stays whole, and of whose
output all that is made gives shares.  For any other activation nothing is proven.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tpkernels.planning.replays.roles import Role
from tpkernels.planning.runs.events import canonical
from tpkernels.planning.runs.gradient_code import Works
from tpkernels.planning.runs.session import Session
from tpkernels.planning.runs.shadow import Shadow
from tpkernels.planning.splits import Split, Unproven

__all__ = ["OWN_NUMBERS", "Gradients"]

OWN_NUMBERS = "a constant depends on the number of features of one rank"
"""Why a tensor of other numbers than the whole model's goes nowhere but into code that reads them one by one."""


class Gradients(Session):
    """After a run ``partial`` names parameters whose gradient each rank has a share of."""

    def __init__(self, shadow: Shadow, attributes: Mapping[tuple[str, str], int], roles: Mapping[str, Role]) -> None:
        super().__init__(shadow, attributes)
        self.roles = roles
        self.partial: set[str] = set()
        self.blame: frozenset[int] = frozenset()
        self.partial_groups: dict[str, frozenset[int]] = {}
        self.cut_norms: dict[str, frozenset[int]] = {}
        """Norms whose input was a part, and the groups that it was of."""
        self._whole_norms: set[str] = set()
        self.cut_channels: dict[str, frozenset[int]] = {}
        """The same of modules that work on each channel by itself,"""
        self.cut_segments: dict[str, tuple[int, ...]] = {}
        """the segments of channels that these took a part of each of,"""
        self._whole_channels: set[str] = set()
        """and of these, those that took a whole tensor."""
        self._complete: set[str] = set()
        self.fed: dict[str, bool] = {}
        """Of columns: whether the gradient of what they read is summed further up, by a feeder."""
        self.whole_draws: dict[str, frozenset[int]] = {}
        """Modules that draw random numbers for whole tensors, and the groups between whose layers they are called;"""
        self._part_draws: set[str] = set()
        """modules that draw them for parts,"""
        self.part_draws_in: set[int] = set()
        """and the groups between whose layers those are drawn."""
        self._summed: set[int] = set()
        """Whole tensors whose gradients are sums over the ranks, complete where a feeder gave them."""
        self._made_with: dict[int, frozenset[str]] = {}
        """Of these: the parameters that they met on the way from the feeder."""
        self._splits: dict[int, Split] = {}
        self._groups: dict[int, frozenset[int]] = {}
        self._own_numbers: dict[int, Tensor] = {}
        """Tensors that code makes of one rank's numbers, to read these again: a size in a tensor (WaveNet)."""
        self._from_before: set[int] = set()
        """Tensors that are parts, or have a part of their gradient, and were made before a condition that all ranks
        answer alike."""

    def know(self, other: Gradients) -> None:
        """Gradients must be of one kind in both runs, whatever they have in common."""
        self.partial |= other.partial
        self._complete |= other._complete
        self._whole_norms |= other._whole_norms
        self.whole_draws |= other.whole_draws
        self._part_draws |= other._part_draws
        self.part_draws_in |= other.part_draws_in
        self.cut_norms |= other.cut_norms
        self._whole_channels |= other._whole_channels
        for name, groups in other.cut_channels.items():
            self.cut_channels[name] = self.cut_channels.get(name, frozenset()) | groups
        for name, segments in other.cut_segments.items():
            self._takes_segments(name, segments)
        for name, fed in other.fed.items():
            self._feeds(name, fed)
        for name, groups in other.partial_groups.items():
            self.partial_groups[name] = self.partial_groups.get(name, frozenset()) | groups

    def _takes_segments(self, name: str, segments: tuple[int, ...]) -> None:
        if self.cut_segments.setdefault(name, segments) != segments:
            raise Unproven(f"{name} takes channels that are cut as {list(segments)}, and otherwise elsewhere")

    def came_from(self, tensor: Tensor) -> frozenset[str]:
        """The layers of which a tensor was made, without another layer between."""
        raise NotImplementedError

    def gradient_code_called(self, name: str, tensors: list[Tensor], made: list[Tensor], works: Works) -> None:
        cuts = [None if (split := self._splits.get(id(one))) is None else split.dim for one in tensors]
        constant = all(dim is not None or not self.has_origin(one) for one, dim in zip(tensors, cuts, strict=True))
        results = {None if (split := self._splits.get(id(one))) is None else split.dim for one in made}
        result = results.pop() if len(results) == 1 else None
        if result is not None and constant and works(cuts, result):
            return
        for tensor in tensors:
            self._is_whole(tensor, f"given to {name}, whose backward is code of its own")

    def before_decision(self, number: int, tensors: list[Tensor]) -> None:
        own = {id(part) for part in self.slices.values()}
        self._from_before |= (self._splits.keys() | self._summed) - own

    def not_from_before(self, tensors: list[Tensor]) -> None:
        """Check that ``tensors`` do not depend on an answer by being a part."""
        for tensor in tensors:
            if id(tensor) in self._own_numbers:
                raise Unproven(OWN_NUMBERS)
            if id(tensor) in self._from_before:
                self.blame = self._groups.get(id(tensor), self.blame)
                raise Unproven("a part of one rank is read behind a condition, and was made before it")

    def _is_whole(self, tensor: Tensor, where: str) -> None:
        if id(tensor) in self._own_numbers:
            raise Unproven(OWN_NUMBERS)
        if id(tensor) in self._splits or id(tensor) in self._summed:
            self.blame = self._groups.get(id(tensor), self.blame)
            what = "a part of one rank" if id(tensor) in self._splits else "what has a part of its gradient"
            raise Unproven(f"{what} is {where}")

    def _check_gradients(self) -> None:
        both = self.partial & self._complete
        if both:
            name = min(both)
            self.blame = self.partial_groups.get(name, self.blame)
            raise Unproven(f"parameter {name!r} meets whole and cut tensors: its gradient would be neither")
        for name, groups in self.cut_norms.items():
            own = {f"{name}.weight", f"{name}.bias"}
            if name in self._whole_norms or own & (self.partial | self._complete | self.slices.keys()):
                self.blame = groups or self.blame
                raise Unproven(f"norm {name!r} takes whole and cut tensors, or others use its weight")
        for name, groups in self.cut_channels.items():
            own = {f"{name}.{key}" for key, _ in self.shadow.modules[name].named_parameters(recurse=False)}
            if name in self._whole_channels or own & (self.partial | self._complete | self.slices.keys()):
                self.blame = groups or self.blame
                raise Unproven(f"{name!r} takes whole and cut tensors, or others use its parameters")

    def _pass_summed(self, func: Any, tensors: list[Tensor], outputs: list[Tensor]) -> None:
        """Whole results of what has a part of its gradient have one, too."""
        if not any(id(tensor) in self._summed for tensor in tensors):
            return
        groups = frozenset().union(*(self._groups.get(id(tensor), frozenset()) for tensor in tensors))
        parameters = self._whole_parameters(tensors)
        for output in outputs:
            if id(output) in self._splits:
                continue
            if func._schema.is_mutable:
                raise Unproven(f"{canonical(func)} writes to a tensor that has a part of its gradient")
            self._summed.add(id(output))
            self._made_with[id(output)] = parameters
            self._groups[id(output)] = groups

    def _whole_parameters(self, tensors: list[Tensor]) -> frozenset[str]:
        """Of which parameters, and nothing else but what a feeder gives, whole tensors are made; and buffers."""
        whole = [tensor for tensor in tensors if id(tensor) not in self._splits and self.has_origin(tensor)]
        found = [self.origin(tensor) or self._made_with.get(id(tensor), frozenset()) for tensor in whole]
        buffers = {self.shadow.buffers[id(tensor)] for tensor in tensors if id(tensor) in self.shadow.buffers}
        return frozenset().union(*found, buffers)

    def _feeds(self, name: str, summed: bool) -> None:
        """A layer reads a whole tensor: one with a part of its gradient only columns of one segment may."""
        role = self.roles.get(name)
        if summed and (role is None or role.kind != "column" or len(role.segments) > 1):
            raise Unproven(f"{name} reads what has a part of its gradient")
        if self.fed.setdefault(name, summed) != summed:
            raise Unproven(f"{name} reads what has a part of its gradient in one call, and all of it in another")

    def _mixed(self, tensor: Tensor) -> None:
        """A whole tensor meets parts, so that ranks have different shares of its gradient."""
        if not self.has_origin(tensor) or id(tensor) in self._summed:
            return
        origin = self.origin(tensor)
        if origin is None:
            error = Unproven("an activation that is whole meets parts: its gradient would be incomplete on every rank")
            error.layers = self.came_from(tensor)
            raise error
        self.partial |= origin
        for name in origin:
            self.partial_groups[name] = self.partial_groups.get(name, frozenset()) | self.blame

    def _completed(self, tensors: list[Tensor]) -> None:
        """Whole tensors meet; where activations take part, the parameters among them get their whole gradient."""
        if any(id(tensor) in self._summed for tensor in tensors):
            for tensor in tensors:
                self._mixed(tensor)
            return
        origins = [self.origin(tensor) for tensor in tensors if self.has_origin(tensor)]
        if None in origins:
            self._complete |= {name for origin in origins if origin is not None for name in origin}

    def _share(self, tensor: Tensor, func: Any, groups: frozenset[int]) -> None:
        """A copy taken out of a packed part: whole, and with a share of its gradient on every rank."""
        if func._schema.is_mutable:
            raise Unproven(f"{canonical(func)} writes to what every rank has a copy of")
        self._mark(tensor, None, groups)
        self._summed.add(id(tensor))
        self._groups[id(tensor)] = groups

    def _mark(self, tensor: Tensor, split: Split | None, groups: frozenset[int]) -> None:
        if split is None:
            self._splits.pop(id(tensor), None)
            return
        self._splits[id(tensor)] = split
        self._groups[id(tensor)] = groups
