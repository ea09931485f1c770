"""A layer by itself: how it is cut where nothing is known of its surroundings, and when it stays whole.

It owns the rule.  Whole tensors go in and come out: a linear that is much wider at its input takes its part of the
input and is summed, every other one is cut by columns and gathered, and a table is cut by vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

from tpkernels.planning.entries.plan_entries import Chosen
from tpkernels.planning.modules.layers import Layer
from tpkernels.planning.styles import Column, Replicate, Row, Vocabulary

__all__ = ["by_rule", "smallest_cut", "sums_its_gradient"]

EXPANSION = 1.5


def smallest_cut(layer: Layer) -> int:
    """The features that :func:`by_rule` cuts."""
    if layer.kind == "embedding":
        return layer.in_features
    return layer.in_features if layer.in_features > EXPANSION * layer.out_features else layer.out_features


def sums_its_gradient(chosen: Chosen) -> Chosen:
    """The same for a layer whose output meets parts: the ranks' shares of its gradient are summed."""
    style = chosen.style
    assert isinstance(style, Column | Row | Replicate)
    return replace(chosen, style=replace(style, summed_gradient=True), reason=f"{chosen.reason}; parts are made of it")


def by_rule(layer: Layer, why: str, *, tied: bool) -> Chosen:
    """What happens to ``layer``; ``why`` is added to the reason."""
    if layer.kind == "embedding":
        if layer.in_features <= layer.out_features and not tied:
            return Chosen(Replicate(), "rule", f"a table of {layer.in_features} rows is cheaper than a sum" + why)
        return Chosen(Vocabulary(), "rule", "by vocabulary" + why)
    if layer.in_features > EXPANSION * layer.out_features:
        return Chosen(Row(split_input=True), "rule", "contracts: by its input, summed" + why)
    word = "expands" if layer.out_features > EXPANSION * layer.in_features else "neither expands nor contracts"
    return Chosen(Column(gather_output=True), "rule", f"{word}: by its output, gathered" + why)
