"""Entries of a plan for convolutions: which dimension of a parameter is cut, and what is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import nn
from torch.nn.modules.conv import _ConvNd

from tpkernels.nn.convolution import channel_dims
from tpkernels.nn.normed_weight import norm_dim
from tpkernels.nn.paired_convolution import pair_dims
from tpkernels.partition import copied_places
from tpkernels.planning.entries.experts_entries import Traffic
from tpkernels.planning.runs.row_counts import Elements
from tpkernels.planning.styles import Channels

__all__ = ["NORMED", "channel_cuts", "convolution_traffic"]

NORMED = "parametrizations.weight"
"""Where a convolution has what makes its weight."""


def channel_cuts(model: nn.Module, name: str, style: Channels) -> dict[str, int | None]:
    """The dimension in which each parameter of a convolution, or of what makes its weight, is cut."""
    module = model.get_submodule(name)
    normed = name.endswith(NORMED)
    convolution = model.get_submodule(name.removesuffix(NORMED).removesuffix(".")) if normed else module
    gives, takes = not style.gather_output, style.inputs and not style.gather_input
    dims = pair_dims(convolution, inputs=takes, outputs=gives) if style.paired else channel_dims(convolution)
    if not normed:
        return {**dims}
    dim = dims["weight"]
    return {"original0": dim if norm_dim(module) == dim else None, "original1": dim}


def convolution_traffic(
    module: nn.Module,
    dims: Mapping[str, int | None],
    elements: Elements | None,
    world_size: int,
    style: Channels,
) -> Traffic:
    """Collectives of a convolution that is cut by its channels, with the bytes that a rank sends at best.

    ``dims``: those of :func:`channel_cuts`; ``elements``: None where they are not known.
    """
    if not isinstance(module, _ConvNd):
        return _norm_traffic(module, dims["original0"] is not None, world_size)
    grouped = module.groups != 1
    forward, given = ("all-reduce of y", 2) if style.inputs and not grouped else ("all-gather of y", 1)
    backward, taken = ("all-gather of dx", 1) if grouped else ("all-reduce of dx", 2)
    if not style.gather_output:
        forward, given = "-", 0
    if style.inputs:
        backward, taken = "-", 0
    if style.gather_input:
        return _traffic_of_gathering(module, elements, world_size)
    if style.inputs and not style.gather_output and not grouped:
        wanted = elements is None or elements.wanted > 0 or any(one.requires_grad for one in module.parameters())
        forward, backward, given = "reduce-scatter of y", "all-gather of dy" if wanted else "-", 1 + wanted
    if elements is None:
        return Traffic(forward, backward, None, None)
    takes = elements.wanted
    total = (taken * takes + given * elements.given) * next(module.parameters()).element_size()
    backward = backward if takes or not taken else "-"
    if style.copied:
        total += 2 * _bytes_copied(module, style)
        backward = " and ".join(filter(lambda one: one != "-", (backward, "all-reduce of dw")))
    return Traffic(forward, backward, total * (world_size - 1) // world_size, None)


def _bytes_copied(module: _ConvNd, style: Channels) -> int:
    """Of the segments that every rank has whole, whose gradients are summed."""
    places = copied_places(len(style.segments), style.copied, style.behind)
    copied = sum(size for size, place in zip(style.segments, places, strict=True) if place)
    trained = [one for one in module.parameters() if one.requires_grad]
    return sum(one.numel() * one.element_size() for one in trained) * copied // module.out_channels


def _traffic_of_gathering(module: _ConvNd, elements: Elements | None, world_size: int) -> Traffic:
    """Of one that gathers its input, and gives what it computes of its own output channels."""
    backward = "reduce-scatter of dx" if elements is None or elements.wanted else "-"
    if elements is None:
        return Traffic("all-gather of x", backward, None, None)
    total = (elements.taken + elements.wanted) * next(module.parameters()).element_size()
    return Traffic("all-gather of x", backward, total * (world_size - 1) // world_size, None)


def _norm_traffic(normed: nn.Module, own: bool, world_size: int) -> Traffic:
    """Of what makes a weight, for one call: a norm over channels of all ranks sums squares, and gradients of two."""
    if own:
        return Traffic("-", "-", 0, None)
    g = cast(nn.Parameter, normed._parameters["original0"])
    total = 2 * g.numel() * (2 * max(4, g.element_size()) + g.element_size())
    return Traffic(
        "all-reduce of sums of squares", "all-reduce of their gradient, all-reduce of dg",
        total * (world_size - 1) // world_size, None,
    )  # fmt: skip
