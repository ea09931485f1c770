"""The relus of several models let through what those of the exact one let through.

In bf16 the input of a relu that is almost 0 rounds to either side, and with it a whole row's share of a gradient comes
or goes: of nn.Transformer on two ranks 57 times the size of the unsharded model's error, and 2 to 4 where all relus
switch alike.  No bound on roundings covers a jump, so that the judge takes the switches as given; a value beside its
switch by a rounding is passed on, or not, as in the exact model, which is one rounding more.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["switch_alike"]


class _Switch(nn.Module):
    """A relu; the exact model's notes what it lets through, the others take that, or their rank's columns of it."""

    def __init__(self, path: str, passes: dict[str, Tensor], notes: bool) -> None:
        super().__init__()
        self.path, self.passes, self.notes = path, passes, notes

    def forward(self, x: Tensor) -> Tensor:
        if self.notes:
            self.passes[self.path] = x.detach() > 0
        passes = self.passes[self.path]
        if passes.shape != x.shape:
            passes = passes.chunk(dist.get_world_size(), -1)[dist.get_rank()]
        assert passes.shape == x.shape, f"{self.path}: {tuple(x.shape)} is no part of {tuple(passes.shape)}"
        return x.where(passes, 0.0)


def switch_alike(model: nn.Module, passes: dict[str, Tensor], *, notes: bool = False) -> int:
    """Replace every relu that is an attribute of a module; returns how many there are.

    They read ``passes``, by their names; with ``notes``, as of the exact model, they write it.
    """
    found = [
        (module, name, f"{path}.{name}")
        for path, module in list(model.named_modules())
        for name, value in [*vars(module).items(), *module.named_children()]
        if isinstance(value, nn.ReLU) or value is nn.functional.relu or value is torch.relu
    ]
    for module, name, path in found:
        setattr(module, name, _Switch(path, passes, notes))
    return len(found)
