"""A sequence-parallel MLP block, forward and backward, in every way that `overlap_netlab.py` compares.

    h = gelu(all_gather(x_shard_m) W1^T)      x_shard_m [M/W, d]   W1 [ff/W, d]
    y_shard_m = reduce_scatter(h W2^T)        W2 [d, ff/W]
    backward: dh needs all_gather(dy), dx is reduce-scattered; dW1 and dW2 are local sums over all M rows

Every result (y, dx, dW1, dW2) is checked against the fp64 bound before it is timed: on sampled rows of y and dx and
sampled features of the weight gradients, because the whole would take minutes per rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import tpkernels as tpk
from tpkernels.comm import gloo_threads
from tpkernels.measure.cases import Shape, TimedCase, torch_all_gather, torch_reduce_scatter
from tpkernels.testing.numeric import Bounded

_SAMPLED = 32
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]  # y, dx, dW1, dW2


class _Gather(torch.autograd.Function):
    """What a user writes: all-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        return torch_all_gather(x, group)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        return torch_reduce_scatter(dy.contiguous(), ctx.group), None


class _Scatter(torch.autograd.Function):
    """The mirror: reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        return torch_reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        return torch_all_gather(dy.contiguous(), ctx.group), None


class MlpBlock:
    """This rank's share of the block; M and ff must be multiples of the world size (the torch baseline needs that)."""

    def __init__(self, m: int, d: int, ff: int, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.world_size = group, group.rank(), group.size()
        if m % self.world_size or ff % self.world_size:
            raise ValueError(f"M ({m}) and ff ({ff}) must be multiples of the world size ({self.world_size})")
        self.m, self.d, self.ff, self.dtype = m, d, ff, dtype
        self.x, self.dy = self._random(1, m, d), self._random(2, m, d)
        # Scaled as at initialisation, so that the activation sees values of order 1.
        self.w1 = (self._random(3, ff, d).float() * d**-0.5).to(dtype)
        self.w2 = (self._random(4, d, ff).float() * ff**-0.5).to(dtype)
        rows, features = self._rows, self._features
        self.x_whole = self.x.clone().requires_grad_()
        self.x_shard = self.x[rows].clone().requires_grad_()
        self.dy_shard = self.dy[rows].clone()
        self.w1_shard = self.w1[features].clone().requires_grad_()
        self.w2_shard = self.w2[:, features].clone().requires_grad_()
        # One exchange of shards is one all-gather's or one reduce-scatter's ideal transfer: both move M/W x d.
        self._transfer = TimedCase("all_gather_matmul", Shape(m, d, 1), dtype, group, torch.device("cpu"))

    def _random(self, seed: int, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    @property
    def _rows(self) -> slice:
        size = self.m // self.world_size
        return slice(self.rank * size, (self.rank + 1) * size)

    @property
    def _features(self) -> slice:
        size = self.ff // self.world_size
        return slice(self.rank * size, (self.rank + 1) * size)

    def gemm_only(self) -> Gradients:
        """The same local arithmetic, activation and its gradient included, with everything already here."""
        h = F.gelu(F.linear(self.x_whole, self.w1_shard))
        y = F.linear(h, self.w2_shard)
        return (y, *torch.autograd.grad(y, (self.x_whole, self.w1_shard, self.w2_shard), self.dy))

    def comm_only(self) -> None:
        """x and dy gathered, y and dx reduce-scattered: four one-way transfers of M/W x d."""
        for _ in range(4):
            self._transfer.comm_only()

    def torch_baseline(self) -> Gradients:
        with gloo_threads.as_torch_made_them():
            h = F.gelu(F.linear(_Gather.apply(self.x_shard, self.group), self.w1_shard))
            y = _Scatter.apply(F.linear(h, self.w2_shard), self.group)
            return self._with_gradients(y)

    def ours(self, implementation: str, *, save_gathered: bool = True) -> Callable[[], Gradients]:
        """save_gathered: keep the gathered x for dW1, as the torch baseline does; else it crosses the wire again."""

        def run() -> Gradients:
            h = tpk.all_gather_matmul(
                self.x_shard,
                self.w1_shard,
                self.group,
                activation="gelu",
                save_gathered=save_gathered,
                implementation=implementation,
            )
            return self._with_gradients(
                tpk.matmul_reduce_scatter(h, self.w2_shard, self.group, implementation=implementation)
            )

        return run

    def _with_gradients(self, y: Tensor) -> Gradients:
        return (y, *torch.autograd.grad(y, (self.x_shard, self.w1_shard, self.w2_shard), self.dy_shard))

    # -- the judge -------------------------------------------------------------------------------------------------

    def verify(self, name: str, result: object) -> None:
        if name in ("gemm", "comm"):
            return
        assert isinstance(result, tuple)
        y, dx, dw1, dw2 = result
        rows, features = self._sampled_rows, self._sampled_features
        y_bound, dx_bound = self._row_bounds
        dw1_bound, dw2_bound = self._feature_bounds
        y_bound.check(y[rows], f"{name} y")
        dx_bound.check(dx[rows], f"{name} dx")
        dw1_bound.check(dw1[features], f"{name} dW1")
        dw2_bound.check(dw2[:, features].T, f"{name} dW2")

    @cached_property
    def _sampled_rows(self) -> Tensor:
        return torch.linspace(0, self.m // self.world_size - 1, _SAMPLED).long()

    @cached_property
    def _sampled_features(self) -> Tensor:
        return torch.linspace(0, self.ff // self.world_size - 1, _SAMPLED).long()

    def _products(self, a: Tensor | Bounded, b: Tensor | Bounded) -> Bounded:
        return Bounded.sum_of_products([a], [b], dtype=self.dtype)

    def _over_ranks(self, a: Bounded, b: Tensor) -> Bounded:
        """a [rows, ff] times b [d, ff] as the ranks do it: one rounded partial per slice of ff."""
        size = self.ff // self.world_size
        slices = [slice(start, start + size) for start in range(0, self.ff, size)]
        parts = [Bounded(a.value[:, s], a.error[:, s]) for s in slices]
        total = Bounded.sum_of_products(parts, [b[:, s] for s in slices], dtype=self.dtype, partials_rounded=True)
        return total.rounded(self.dtype)

    @cached_property
    def _row_bounds(self) -> tuple[Bounded, Bounded]:
        """y and dx on the sampled rows."""
        rows = self._sampled_rows + self._rows.start
        z = self._products(self.x[rows], self.w1)
        h = z.activation("gelu", dtype=self.dtype).rounded(self.dtype)
        dh = self._products(self.dy[rows], self.w2.T.contiguous()).rounded(self.dtype)
        dz = z.activation_gradient("gelu", dh, dtype=self.dtype).rounded(self.dtype)
        return self._over_ranks(h, self.w2), self._over_ranks(dz, self.w1.T.contiguous())

    @cached_property
    def _feature_bounds(self) -> tuple[Bounded, Bounded]:
        """dW1 and dW2^T on the sampled features of this rank."""
        features = self._sampled_features + self._features.start
        z = self._products(self.x, self.w1[features])
        h = z.activation("gelu", dtype=self.dtype).rounded(self.dtype)
        dh = self._products(self.dy, self.w2[:, features].T.contiguous()).rounded(self.dtype)
        dz = z.activation_gradient("gelu", dh, dtype=self.dtype).rounded(self.dtype)
        dw1 = self._products(dz.transposed(), self.x.T.contiguous()).rounded(self.dtype)
        dw2 = self._products(h.transposed(), self.dy.T.contiguous()).rounded(self.dtype)
        return dw1, dw2
