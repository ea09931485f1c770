"""Steps of a replay that take a sum, a mean or a spread over features that are cut, between a column and its row.

It owns :class:`StatisticSteps`, between the steps that are cut by channels and products with parameters.  Such a call
is one step (:mod:`tpkernels.nn.part_statistics`): what it gives is whole, and each rank has a share of its gradient.
It is proven only in the module that calls the layers of the group, or inside of it, and where the parallel model can
tell these calls from others by their number of features.
"""

from __future__ import annotations

from collections.abc import Callable
from os.path import commonpath
from pathlib import PurePosixPath
from typing import Any

from torch import Tensor

from tpkernels.nn.part_statistics import Statistic
from tpkernels.planning.replays.channel_steps import ChannelSteps
from tpkernels.planning.splits import Split, Unproven, degrees

__all__ = ["StatisticSteps"]


class StatisticSteps(ChannelSteps):
    """A run next to a recording, of one rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.statistics: dict[str, tuple[int, tuple[int, ...]]] = {}
        """Modules that take some over features that are cut: how many there are, and on each rank,"""
        self._statistics_of: dict[str, frozenset[int]] = {}
        """of which groups,"""
        self._other_statistics: dict[str, set[int]] = {}
        """and of what sizes modules, and modules in them, take others."""

    def know(self, other: Any) -> None:
        """They are told apart in all runs at once."""
        super().know(other)
        for name, told in other.statistics.items():
            self._tell(name, told, other._statistics_of[name])
        for name, sizes in other._other_statistics.items():
            self._other_statistics.setdefault(name, set()).update(sizes)

    def statistic_taken(self, statistic: Statistic, run: Callable[[], Tensor]) -> Tensor:
        x, module = statistic.x, self.inside[-1] if self.inside else ""
        split = self._splits.get(id(x)) if self.quiet is None else None
        if split is None or split.dim != x.dim() - 1 or not self._is_proven(statistic, split, module):
            for name in ("", *self.inside):
                self._other_statistics.setdefault(name, set()).add(x.shape[-1])
            return run()
        self.not_from_before([x])
        call, groups = self.recording.statistics.get(self._at), self._groups[id(x)]
        self.blame = groups
        if call is None or (call.module, call.source) != (module, self.source(x)) or call.stop > self._stop:
            raise Unproven(f"with one rank's sizes the {statistic.kind} of another tensor is taken")
        features = sum(split.segments)
        sizes = [split.local_shape((*x.shape[:-1], features), self.world_size, r)[-1] for r in range(self.world_size)]
        self._tell(module, (features, tuple(sizes)), groups)
        self._at = call.stop
        out = self.new_output(x, call.shape, statistic.dtype or x.dtype)
        self.made[id(out)] = call.result
        self._summed.add(id(out))
        self._groups[id(out)] = groups
        return out

    def _is_proven(self, statistic: Statistic, split: Split, module: str) -> bool:
        """Whether it is over all features of a group in one piece, and in the module around its layers, or in that."""
        groups = self._groups[id(statistic.x)]
        one_piece = len(split.segments) == 1 and not split.copied and statistic.correction < split.segments[0]
        return self.is_near(groups, module) and one_piece and not degrees()

    def is_near(self, groups: frozenset[int], module: str) -> bool:
        """Whether the module is around the layers of these groups, or in what is."""
        layers = [name for name, role in self.roles.items() if role.group in groups and role.kind in ("column", "row")]
        if not layers:
            return False  # between parameters
        around = PurePosixPath(commonpath([name.replace(".", "/") for name in layers]))
        asked = PurePosixPath(module.replace(".", "/"))
        return around.is_relative_to(asked) or asked.is_relative_to(around)

    def _tell(self, module: str, told: tuple[int, tuple[int, ...]], groups: frozenset[int]) -> None:
        if self.statistics.setdefault(module, told) != told:
            self.blame = groups
            raise Unproven(f"{module} takes sums, means or spreads over different numbers of features that are cut")
        self._statistics_of[module] = self._statistics_of.get(module, frozenset()) | groups

    def _check_gradients(self) -> None:
        super()._check_gradients()
        for name, (_, sizes) in self.statistics.items():
            if alike := self._other_statistics.get(name, set()).intersection(sizes):
                self.blame = self._statistics_of[name]
                raise Unproven(f"{name} takes sums, means or spreads over {min(alike)} features that are whole, too")
