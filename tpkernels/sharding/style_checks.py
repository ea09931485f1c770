"""Whether a style fits the module that a plan gives it, for styles with much to check, and what it means.

It refuses with the module's name, before ``parallelize`` touches anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn

from tpkernels.nn.copied_heads import check_copies
from tpkernels.nn.normed_weight import weight_norm_of
from tpkernels.nn.parameters import check_unit
from tpkernels.partition import copied_places
from tpkernels.planning.alone.convolutions import check_channels
from tpkernels.planning.modules.layers import Layer
from tpkernels.planning.styles import Channels, Column, CopiedHeads, Features, Heads, Row, Style

__all__ = ["check_column", "check_row", "convolutions_in", "makes_parts"]


def check_column(name: str, layer: Layer, style: Column, world_size: int) -> None:
    """Refuse options of a column style that contradict each other, or the layer."""
    check_unit(f"{name}: out_features", layer.out_features, style.unit)
    if style.segments:
        if sum(style.segments) != layer.out_features or min(style.segments) < 1:
            raise ValueError(
                f"{name}: segments {list(style.segments)} must be positive and sum to out_features "
                f"({layer.out_features})"
            )
        if style.gather_output or style.unit != 1:
            raise ValueError(f"{name}: segments go with neither gather_output nor unit (but with units, one for each)")
    places = copied_places(len(style.segments), style.copied, style.behind, of=f"{name}: ")
    for size in (size for size, copied in zip(style.segments, places, strict=True) if copied and style.copies):
        check_copies(f"{name}: ", size, style.copied_heads, style.copies, world_size)
    if style.units and len(style.units) != len(style.segments):
        raise ValueError(f"{name}: units {list(style.units)} must be as many as segments {list(style.segments)}")
    for size, unit in zip(style.segments, style.units, strict=False):
        check_unit(f"{name}: a segment", size, unit)


def check_row(name: str, layer: Layer, style: Row) -> None:
    """Refuse options of a row style that contradict the layer."""
    check_unit(f"{name}: in_features", layer.in_features, style.unit)
    if style.scatter_unit:
        check_unit(f"{name}: out_features", layer.out_features, style.scatter_unit)
    if style.segments and (sum(style.segments) != layer.in_features or min(style.segments) < 1):
        raise ValueError(
            f"{name}: segments {list(style.segments)} must be positive and sum to in_features ({layer.in_features})"
        )


def convolutions_in(
    model: nn.Module, modules: Mapping[str, nn.Module], styles: Mapping[str, Style], world_size: int, same_bits: int
) -> list[tuple[nn.Module, Channels]]:
    """The modules that are to be cut by their channels, each once, and how.

    Raises:
        ValueError: one is no convolution that can be cut so, or shares a parameter with another module.
    """
    cut = {name: style for name, style in styles.items() if isinstance(style, Channels)}
    found = {id(modules[name]): name for name in cut}
    normed = {id(made) for name in found.values() if (made := weight_norm_of(modules[name])) is not None}
    found = {key: name for key, name in found.items() if key not in normed}  # these go with their convolutions
    holders = Counter(id(one) for _, module in model.named_modules() for one in module.parameters(recurse=False))
    for name in found.values():
        check_channels(name, modules[name], world_size, cut[name], same_bits)
        if any(holders[id(one)] > 1 for one in modules[name].parameters()):
            raise ValueError(f"module {name!r} has a parameter that is tied to another module's: leave both whole")
    return [(modules[name], cut[name]) for name in found.values()]


def makes_parts(style: Style) -> bool:
    """Whether code behind the module may be given parts."""
    paired = isinstance(style, Channels) and style.paired
    scattered = isinstance(style, Row) and style.scatter_unit > 0
    return paired or scattered or isinstance(style, Column | CopiedHeads | Features | Heads)
