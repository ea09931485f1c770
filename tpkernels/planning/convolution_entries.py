"""Entries of a plan for convolutions: which dimension of a parameter is cut, and what is sent."""

from __future__ import annotations

from torch import nn

from tpkernels.planning.experts_entries import Traffic

__all__ = ["convolution_traffic"]


def convolution_traffic(module: nn.Module, elements: tuple[int, int] | None, world_size: int) -> Traffic:
    """Collectives of a convolution that is cut by its output channels, with the bytes that a rank sends at best.

    ``elements``: those of the input whose gradient is wanted, and of the output; None where they are not known.
    """
    grouped = module.groups != 1
    backward = "all-gather of dx" if grouped else "all-reduce of dx"
    if elements is None:
        return Traffic("all-gather of y", backward, None, None)
    weight = module._parameters["weight"]
    assert weight is not None
    takes, gives = elements
    total = ((1 if grouped else 2) * takes + gives) * weight.element_size()
    sent = total * (world_size - 1) // world_size
    return Traffic("all-gather of y", backward if takes else "-", sent, None)
