"""Curves of training runs that must be the same, and how far rounding may take two of them apart.

Two runs of the same arithmetic that add in different orders part by rounding, and training amplifies it.  How much is
measured, not assumed: one process trains a second time with every initial weight moved to a neighbouring number of its
dtype (:func:`shifted`), the smallest difference that there is.  The largest difference that this makes, plus the
rounding of the value itself, is the size of a difference that means nothing; others may differ by ``FACTOR`` times it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

__all__ = ["FACTOR", "Curve", "bound", "shifted"]

FACTOR = 8.0


@dataclass
class Curve:
    """One way of training on one rank: of each step the loss, the global norm of its gradient, and the seconds."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """Of the gradient before it is clipped."""
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    """Of tensors: weights, optimizer state, and the most that a step had alive beside them."""

    def difference(self, other: Curve, what: str = "losses") -> float:
        pairs: Iterable[tuple[float, float]] = zip(getattr(self, what), getattr(other, what), strict=True)
        differences = [abs(a - b) for a, b in pairs]
        return math.inf if any(map(math.isnan, differences)) else float(max(differences))


def bound(alone: Curve, moved: Curve, what: str = "losses") -> float:
    """How far losses or norms, both fp32, may be from those of one process; `moved` is its run from shifted weights."""
    values: list[float] = getattr(alone, what)
    rounding = torch.finfo(torch.float32).eps * max(map(abs, values))
    return FACTOR * (alone.difference(moved, what) + rounding)


@torch.no_grad()
def shifted(model: nn.Module, seed: int) -> nn.Module:
    """Moves each weight to a neighbouring number of its dtype, up or down at random; returns the model."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        up = (torch.rand(parameter.shape, generator=generator) < 0.5).to(parameter.device)
        target = torch.where(up, torch.inf, -torch.inf).to(parameter.dtype)
        parameter.copy_(torch.nextafter(parameter, target))
    return model
