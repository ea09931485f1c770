"""Code that takes the largest or smallest element of a tensor that is cut over the ranks, as Grounding DINO's fused
attention does, and I-BERT for the ranges of its activations.

::

    x.max()    runs as   y = max over ranks of max(x_r)
    x.min()    runs as   y = -(max over ranks of max(-x_r))

x_r is this rank's part of ``x``, along whatever dimension, and y is whole and equal on every rank.  The gradient of y
is summed over the ranks, each of which has the share of what it made of y, and goes to the elements that are as large
as y, in equal shares, as that of ``torch.max`` does: each rank's number of them is sent with its maximum.  So a call
sends two numbers in fp32 (fp64 for fp64): an all-gather forward and a reduce-scatter backward.

It owns what such a call is, for the planner that records it and for the parallel model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from tpkernels.nn.function_modes import run_within
from tpkernels.nn.part_statistics import taken_of
from tpkernels.ops import all_gather

__all__ = ["Extreme", "PartMaxima", "over_all_ranks", "take_maxima", "taken_from"]


class Extreme(NamedTuple):
    """Of what a call takes the largest, or the ``smallest`` element."""

    x: Tensor
    smallest: bool


def taken_from(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Extreme | None:
    """What a call takes, or None if it is another call."""
    smallest = func in (torch.min, Tensor.min)
    if not (smallest or func in (torch.max, Tensor.max)) or len(args) + len(kwargs) != 1:
        return None
    x = args[0] if args else kwargs.get("input")
    return Extreme(x, smallest) if isinstance(x, Tensor) and x.dtype.is_floating_point else None


def over_all_ranks(x: Tensor, mesh: DeviceMesh, *, smallest: bool = False) -> Tensor:
    """The equation above for this rank's part, on every rank of the mesh."""
    if smallest:
        return -over_all_ranks(-x, mesh)
    own = torch.ops.aten.max.default(x)  # no call of torch.max: a module around may take its own over all ranks
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    as_large = torch.eq(x.detach(), own.detach()).sum()
    largest, counts = all_gather(torch.stack((own.to(wide), as_large.to(wide))).unsqueeze(0), mesh).unbind(1)
    return _Largest.apply(largest, counts.detach()).to(x.dtype)  # type: ignore[no-untyped-call, no-any-return]


class _Largest(torch.autograd.Function):
    """The largest of some numbers, each of which ``counts`` elements have."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, counts: Tensor) -> Tensor:
        y = numbers.max()
        shares = torch.where(numbers == y, counts, 0)
        ctx.save_for_backward(shares / shares.sum())
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy * ctx.saved_tensors[0], None


@dataclass(frozen=True)
class _Ranks:
    mesh: DeviceMesh

    def __deepcopy__(self, memo: object) -> _Ranks:
        return self  # copies of a model are on the same ranks


class PartMaxima(TorchFunctionMode):
    """Within it, the largest element of a tensor is that of the parts of all ranks, and so is the smallest.

    Of a tensor that is whole it is its own: only a gradient, of which ranks would sum shares, must not be asked for.
    """

    def __init__(self, ranks: _Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        taken = taken_from(func, args, kwargs or {})
        if taken is None:
            return func(*args, **(kwargs or {}))
        told = None if torch.compiler.is_compiling() or not taken.x.requires_grad else taken_of.get()
        if told is not None:
            told(taken.x)
        return over_all_ranks(taken.x, self.ranks.mesh, smallest=taken.smallest)


def take_maxima(names: Iterable[str], modules: Mapping[str, nn.Module], mesh: DeviceMesh) -> None:
    """Let the code of these modules take largest and smallest elements over all ranks, from now on."""
    for name in names if mesh.size() > 1 else ():
        run_within(modules[name], PartMaxima, _Ranks(mesh))
