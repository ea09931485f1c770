"""What a rank sends for a layer that is cut with others by channels, or by itself: the plan's own count of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from tpkernels.planning.alone.single_layers import by_rule
from tpkernels.planning.entries.convolution_entries import NORMED, channel_cuts, convolution_traffic
from tpkernels.planning.entries.plan_entries import traffic_of
from tpkernels.planning.runs.row_counts import Elements, count_rows, elements_in, untrained_in
from tpkernels.planning.runs.shadow import Shadow
from tpkernels.planning.runs.trace import Recording
from tpkernels.planning.styles import Channels, Column, PartNorm, Row, Style

__all__ = ["ChannelBytes", "style_in_pairs"]


def style_in_pairs(*, convolution: bool, takes: bool, gives: bool, gathers: bool = False) -> Channels | Column | Row:
    """The style of a layer that takes a rank's channels, gives them, or does both.

    ``gathers``: where it does both, it gathers its input, and does not scatter a sum.
    """
    if not convolution and gathers and takes and gives:
        return Column(gather_input=True)
    if convolution:
        return Channels(inputs=takes, gather_output=not gives, gather_input=gathers and takes and gives)
    return Row(scatter_unit=int(gives)) if takes else Column()


class ChannelBytes:
    """Of one step of training; ``gathering``: linear layers that gather what they take, where they take parts."""

    def __init__(
        self, shadow: Shadow, recording: Recording, world_size: int, gathering: Set[str] = frozenset()
    ) -> None:
        self.shadow, self.recording, self.world_size = shadow, recording, world_size
        self._gathering = gathering
        self.elements: Mapping[str, Elements] = elements_in([recording])
        self._untrained, self._rows = untrained_in([recording]), count_rows([recording])
        self._known: dict[tuple[str, bool, bool], int] = {}

    def gathers(self, name: str) -> bool:
        """Whether a convolution that takes and gives this rank's channels sends less if it gathers the ones than if it
        scatters a sum of the others: one that gives more than it takes (in the decoder of a neural codec).  One in
        groups sends nothing between two others, and gathers nothing."""
        return self._sent_between(name, gathers=True) < self._sent_between(name, gathers=False)

    def _sent_between(self, name: str, *, gathers: bool) -> int:
        return self._of(name, style_in_pairs(convolution=True, takes=True, gives=True, gathers=gathers))

    def sent(self, name: str, *, takes: bool, gives: bool) -> int:
        """By a layer that takes and gives this rank's channels, or whole tensors: one that is cut by itself."""
        key = name, takes, gives
        if key not in self._known:
            convolution = self.shadow.sizes[name].kind == "convolution"
            if takes or gives or convolution:
                gathers = self.gathers(name) if convolution and takes and gives else name in self._gathering
                style: Style = style_in_pairs(convolution=convolution, takes=takes, gives=gives, gathers=gathers)
            else:
                style = by_rule(self.shadow.layers[name], "", tied=False).style
            self._known[key] = self._of(name, style)
        return self._known[key]

    def sent_in_norms(self, names: Iterable[str]) -> int:
        """For the sums of these norms, over all ranks."""
        return sum(self._of(name, PartNorm(*self.shadow.norms[name])) for name in names)

    def _of(self, name: str, style: Style) -> int:
        if isinstance(style, Channels):
            return sum(
                self._of_channels(one, style) for one in (name, f"{name}.{NORMED}") if one in self.shadow.modules
            )
        layer, own = self.shadow.layers.get(name), dict(self.shadow.modules[name].named_parameters(recurse=False))
        rows, needs_dx = self._rows.get(name), name not in self._untrained
        return traffic_of(style, layer, own, rows, self.world_size, None, needs_dx).wire_bytes or 0

    def _of_channels(self, name: str, style: Channels) -> int:
        """Of a convolution, or of what makes its weight."""
        module, dims = self.shadow.modules[name], channel_cuts(self.shadow.model, name, style)
        return convolution_traffic(module, dims, self.elements.get(name), self.world_size, style).wire_bytes or 0
