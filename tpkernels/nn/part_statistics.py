"""Code that takes a sum, the mean or the spread of features that are cut over the ranks, as Gemma 3n's sparse MLP and a
norm without parameters do.

::

    torch.sum(x, -1)    runs as   s = sum over ranks of sum(x_r, -1)
    torch.mean(x, -1)   runs as   m = s / features
    torch.var(x, -1)    runs as   v = sum over ranks of n_r * (v_r + (m_r - m) ** 2) / (features - correction)
    torch.std(x, -1)    runs as   sqrt(v)

x_r ``[..., n_r]`` is this rank's part of the features, and m_r and v_r are its mean and variance, without a correction.
A sum and a mean cost one number per row, an all-reduce forward and one backward; the others two numbers per row, an
all-gather forward and a reduce-scatter backward.  They compute in fp32 (fp64 for fp64), rounded once.  Variances are
joined as Chan, Golub and LeVeque do (1979), as those of :mod:`tpkernels.nn.part_norm` are.

What comes out is whole and equal on every rank.  Its gradient is summed over the ranks, each of which has the share of
its own features.  It owns what such a call is, for the planner that records it and for the parallel model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from tpkernels.nn.function_modes import run_within
from tpkernels.ops import all_gather, all_reduce, copy_to_group

__all__ = ["Parts", "PartStatistics", "Statistic", "over_parts", "statistic_of", "take_over_parts", "taken_of"]

taken_of: ContextVar[Callable[[Tensor], None] | None] = ContextVar("taken_of", default=None)
"""Who is told of what one is taken: a call that is followed."""

_KINDS: dict[Any, str] = {
    torch.sum: "sum", Tensor.sum: "sum", torch.mean: "mean", Tensor.mean: "mean",
    torch.var: "var", Tensor.var: "var", torch.std: "std", Tensor.std: "std",
}  # fmt: skip
_OTHER_NAMES = {"axis": "dim", "keepdims": "keepdim"}


@dataclass(frozen=True)
class Statistic:
    """A call of one of these functions that takes the last dimension alone."""

    kind: str
    x: Tensor
    keepdim: bool
    correction: float
    """0 of a sum or a mean."""
    dtype: torch.dtype | None
    """That a sum or a mean is asked for in."""

    @property
    def summed(self) -> bool:
        """Whether one number per row is added up over the ranks."""
        return self.kind in ("sum", "mean")


@dataclass(frozen=True)
class Parts:
    """How many of the features each rank of ``mesh`` has."""

    sizes: tuple[int, ...]
    mesh: DeviceMesh

    def __deepcopy__(self, memo: object) -> Parts:
        return self  # copies of a model are on the same ranks


def statistic_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Statistic | None:
    """What a call asks for, or None if it is another one."""
    kind = _KINDS.get(func)
    if kind is None:
        return None
    named = {_OTHER_NAMES.get(name, name): value for name, value in kwargs.items()}
    names = ("input", "dim", "keepdim") if kind in ("sum", "mean") else ("input", "dim", "unbiased", "keepdim")
    if len(args) > len(names) or {*names[: len(args)]} & named.keys():
        return None
    named |= dict(zip(names, args, strict=False))
    x, dim, dtype = named.pop("input", None), named.pop("dim", None), named.pop("dtype", None)
    keepdim, unbiased = named.pop("keepdim", False), named.pop("unbiased", True)
    correction = named.pop("correction", None)
    if correction is None:
        correction = 1 if unbiased else 0
    if named or not isinstance(x, Tensor) or not x.dtype.is_floating_point or not _is_last(dim, x.dim()):
        return None
    return Statistic(kind, x, bool(keepdim), 0 if kind in ("sum", "mean") else correction, dtype)


def _is_last(dim: Any, count: int) -> bool:
    dims = list(dim) if isinstance(dim, tuple | list) else [dim]
    return count > 0 and len(dims) == 1 and type(dims[0]) is int and dims[0] in (-1, count - 1)


def over_parts(statistic: Statistic, parts: Parts) -> Tensor:
    """The equations above for this rank's part, on every rank of the mesh."""
    x, sizes, mesh = statistic.x, parts.sizes, parts.mesh
    features, given = sum(sizes), statistic.dtype or x.dtype
    x = x.to(torch.float64 if given == torch.float64 else torch.float32)
    if statistic.summed:
        own = torch.ops.aten.sum(x, [-1], True)  # no call of torch.sum: a module around may take its own over all ranks
        y = copy_to_group(all_reduce(own, mesh), mesh)
        y = y / features if statistic.kind == "mean" else y
    else:
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        means, variances = all_gather(torch.stack((mean, variance), -1).unsqueeze(0), mesh).unbind(-1)
        shares = means.new_tensor(sizes).view(-1, *(1,) * mean.dim())
        joined = (shares * means).sum(0) / features
        y = (shares * (variances + (means - joined).square())).sum(0) / (features - statistic.correction)
        y = _root(y) if statistic.kind == "std" else y
    return (y if statistic.keepdim else y.squeeze(-1)).to(given)


def _root(variance: Tensor) -> Tensor:
    """With a gradient of 0 where all features are equal, as that of torch.std."""
    spread = variance > 0
    return torch.where(spread, torch.where(spread, variance, 1).sqrt(), 0)


class PartStatistics(TorchFunctionMode):
    """Within it, a sum, mean or spread over as many features as this rank has of ``parts`` is one over all of them."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.parts = parts

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        statistic = statistic_of(func, args, kwargs)
        if statistic is not None and statistic.x.shape[-1] == self.parts.sizes[self.parts.mesh.get_local_rank()]:
            if (told := None if torch.compiler.is_compiling() else taken_of.get()) is not None:
                told(statistic.x)
            return over_parts(statistic, self.parts)
        return func(*args, **kwargs)


def take_over_parts(
    takers: Mapping[str, tuple[int, tuple[int, ...]]], modules: Mapping[str, nn.Module], mesh: DeviceMesh
) -> None:
    """Let the code of each of ``takers`` take such statistics over all ranks, from now on.

    ``takers``: by module, the features, and how many each rank has.
    """
    for name, (_, sizes) in takers.items() if mesh.size() > 1 else ():
        run_within(modules[name], PartStatistics, Parts(sizes, mesh))
