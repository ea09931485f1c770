"""What stands before a block: norms of torch, norms as models write them, and modules in their place that are none.

Each has a parameter, so that under sequence parallelism it is called with a part of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fuzz.functions import StraightThrough

__all__ = ["FED", "NORMS", "ODD", "norm"]

_RUNS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "hand": lambda x, w, like: w * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "of rows": lambda x, w, like: (F.normalize(x.reshape(-1, x.shape[-1]), dim=-1) * w).view(x.shape),
    "turned": lambda x, w, like: (x.transpose(1, 2) * w.unsqueeze(-1)).transpose(1, 2),
    "two": lambda x, w, like: x * w + like,
    "by length": lambda x, w, like: x * w / x.shape[1],
    "by size": lambda x, w, like: x * w / x.numel() ** 0.5,
    "by a length's tensor": lambda x, w, like: x * w / torch.tensor(float(x.shape[1])),
    "long": lambda x, w, like: x * w if x.shape[1] > 3 else x - w,
    "positions": lambda x, w, like: x * w + torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(-1),
    "first row": lambda x, w, like: x * w + like[:, :1],
    "along": lambda x, w, like: x * w + like.mean(1, keepdim=True),
    "rows of a sequence": lambda x, w, like: (x * w).flatten(1).unflatten(1, (x.shape[1], -1)),
    "its own backward": lambda x, w, like: StraightThrough.apply(x * w),
    "in place": lambda x, w, like: (x * 1.5).mul_(w),
}
ODD = tuple(name for name in _RUNS if name != "hand")


class Written(nn.Module):
    """A function of the residual, twice, and of a parameter."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, like: Tensor | None = None) -> Tensor:
        return _RUNS[self.kind](x, self.weight, x if like is None else like)


FED = ("two", "along")
"""Given the residual by name as well."""
NORMS = ("layer", "rms", "none", "hand", "after")


def norm(kind: str, width: int) -> nn.Module:
    if kind in ("layer", "after"):
        return nn.LayerNorm(width)
    if kind in _RUNS:
        return Written(kind, width)
    return nn.RMSNorm(width) if kind == "rms" else nn.Identity()
