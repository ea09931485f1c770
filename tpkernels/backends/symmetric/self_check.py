"""The check before ``symmetric`` is trusted with a kind of call: a small problem of that kind whose answer is known.

It runs on a group's first call of an op, a dtype and a way through the backend, on every rank, as the real call would:
the same kernels, copies, signals and slots, uneven shards, two chunks.  What every rank puts in is small integers that
are made from its number, so each rank knows the exact result by itself, bit for bit, whatever the order of sums; all
ranks then tell each other what they found.  Hardware, drivers and compilers that nobody has tried thus fail here, with
an error that says so, and not in somebody's model.

Owns the problems, the verdict and its text.  Waits are those of the backend, bounded by the group's time-out.  Costs
one exchange through the group's store and one wait for the device per kind of call.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpkernels.backends.symmetric.resource import channels_of
from tpkernels.comm import agreement
from tpkernels.comm.groups import Group
from tpkernels.comm.transport import TransportFailure
from tpkernels.dispatch import Costs, Problem, dtype_text
from tpkernels.errors import UnsupportedProblem
from tpkernels.gemm import fp8
from tpkernels.gemm.dealt import DealtRows
from tpkernels.gemm.fp8 import ExpertMatrices, Operand, Scaled, ScaledExperts
from tpkernels.gemm.grouped import TokenRows
from tpkernels.ops.contract import (
    AllGather,
    AllGatherGroupedMatmul,
    AllGatherMatmul,
    AllReduce,
    Context,
    DispatchGroupedMatmul,
    GroupedMatmulAllReduce,
    GroupedMatmulCombine,
    GroupedMatmulReduceScatter,
    MatmulAllReduce,
    MatmulReduceScatter,
    ReduceScatter,
    ResidualNorm,
)
from tpkernels.partition import Layout, array_split_sizes, offsets

__all__ = ["Way", "check"]

# Of a product: for tensor descriptors, and more columns than the small tiles take.
K, N = 192, 264
# Of K, in each row of x: sums over K and 64 ranks are at most 256, which bf16 has exactly.
NONZEROS = 4
EXPERTS = 3  # of which each token has two: sums over 32 ranks are at most 256
# Of the operations of a norm, each by at most half an eps of fp32; the result's own comes on top.
_ROUNDINGS = 6


@dataclass(frozen=True)
class Way:
    """One of the ways through the backend, and the fewest rows of a shard, or of the whole, that take it.

    norm: also with a residual and a norm behind the sum, for which it has a kernel of its own.
    """

    name: str
    shard_rows: int = 1
    whole_rows: int = 1
    norm: bool = False


def check(work: Callable[[Context, Any], Any], group: Group, call: int, problem: Problem, way: Way) -> None:
    """Run ``work``, an op's implementation, on the small problem, unless it was done for calls like ``problem``.

    Collective: called on every rank for the same problems in the same order, not in graph capture.

    Raises:
        UnsupportedProblem: a rank got a wrong result, now or when this was first asked; nothing of the call was sent.
        TransportFailure: a wait failed.
    """
    channels = channels_of(group)
    kind = (problem.op, problem.dtype, problem.out_dtype, way.name)
    if not channels.checks_first_use or channels.device.kind != problem.device:
        return
    if kind not in channels.first_uses:
        if channels.device.capturing():
            raise UnsupportedProblem(
                f"symmetric: the first {problem.op} of its kind cannot be captured in a CUDA graph: make it once "
                "before the capture, with the same shapes, on every rank"
            )
        said = _verdict_of(work, group, problem, way)
        name = f"first use of symmetric, {problem.op} {dtype_text(problem.dtype, problem.out_dtype)}, {way.name}"
        records = agreement.exchange_records(group, call, agreement.Record(name, {"wrong": said}), part="first use")
        wrong = {rank: record.facts["wrong"] for rank, record in enumerate(records) if record.facts["wrong"]}
        channels.first_uses[kind] = (
            None if not wrong else f"{name}: " + "; ".join(f"rank {rank}: {text}" for rank, text in wrong.items())
        )
    verdict = channels.first_uses[kind]
    if verdict is not None:
        raise UnsupportedProblem(
            f"{verdict}. This was a problem whose answer is known, tried before the first call of its kind on this "
            "group; nothing of the call itself was sent, and the group goes on. Use another implementation: "
            "implementation='chunked' (or 'unfused') in the call or the layer"
        )


def _verdict_of(work: Callable[[Context, Any], Any], group: Group, problem: Problem, way: Way) -> str | None:
    """What is wrong on this rank, or None."""
    channels = channels_of(group)
    device = channels.device
    small = _Small(group, problem, way)
    text = f"the check at the first use of {problem.op}, {problem.dtype}, {way.name}"
    shrunk = replace(problem, m=sum(small.sizes), n=N, k=K, activation=None)
    if problem.facts.grouped:
        shrunk = replace(shrunk, experts=EXPERTS, top_k=2)
    context = Context(
        group, 0, 2, text, zlib.crc32(text.encode()), shrunk, Costs(), forced_chunks=True,
    )  # fmt: skip
    try:
        pairs = small.run(partial(work, context))
        device.synchronize()
        channels.check()
    except TransportFailure as failure:
        raise TransportFailure(f"{text}: {failure}", failure.peer, failure.verdict, failure.ranks) from failure
    return next((said for found, expected in pairs if (said := _difference(found, expected)) is not None), None)


def _difference(found: Tensor, expected: Tensor) -> str | None:
    """Where two matrices differ, and if the second one is of fp64, by more than roundings; NaN is a difference."""
    if found.shape != expected.shape:
        return f"a result of shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    is_rounded = expected.dtype == torch.float64
    relative = torch.finfo(found.dtype).eps + _ROUNDINGS * torch.finfo(torch.float32).eps if is_rounded else 0.0
    near = (found.to(expected.dtype) - expected).abs() <= relative * expected.abs()
    wrong = (~near).nonzero()
    if not len(wrong):
        return None
    row, column = wrong[0].tolist()
    return (
        f"{len(wrong)} of {expected.numel()} elements are wrong, the first at [{row}, {column}]: "
        f"{float(found[row, column])} instead of {float(expected[row, column])}"
    )


class _Small:
    """The small problem of a group: operands of every rank, and what should come of them."""

    def __init__(self, group: Group, problem: Problem, way: Way) -> None:
        self._problem, self._rank, self._size, self._norm = problem, group.rank, group.size, way.norm
        least = max(way.shard_rows, -(-way.whole_rows // group.size))
        self.sizes = tuple(least + 16 * (rank % 2) for rank in range(group.size))
        self._layout = Layout(1, self.sizes, 1)
        self._device = torch.device(channels_of(group).device.empty((1,), torch.uint8).device)

    def run(self, work: Callable[[Any], Any]) -> list[tuple[Tensor, Tensor]]:
        """(found, expected) of the op's results."""
        layout, rank, size = self._layout, self._rank, self._size
        whole, out_dtype = sum(self.sizes), self._problem.out_dtype
        own = slice(offsets(self.sizes)[rank], offsets(self.sizes)[rank] + self.sizes[rank])
        if self._problem.facts.grouped:
            return [self._with_experts(work, own)]
        match self._problem.op:
            case "all_gather":
                shards = [self._x(r, self.sizes[r]) for r in range(size)]
                return [(work(AllGather(self._stored(shards[rank]), layout))(), torch.cat(shards))]
            case "all_gather_matmul":
                shards = [self._x(r, self.sizes[r]) for r in range(size)]
                x, packed = self._travelling(shards[rank])
                call = AllGatherMatmul(x, layout, [self._matrix(rank)], [None], out_dtype=out_dtype, packed=packed)
                return [(work(call).outs[0], torch.cat(shards) @ self._weight(rank).t())]
        if self._problem.facts.multiplies:
            partials = [self._x(r, whole) @ self._weight(r).t() for r in range(size)]
            xs, matrices = [self._operand(self._x(rank, whole))], [self._matrix(rank)]
            if self._problem.facts.everywhere:
                total = sum(partials, self._zero())
                pairs = [(work(MatmulAllReduce(xs, matrices, out_dtype=out_dtype)), total)]
                return pairs + (self._normed(work, xs, matrices, total) if self._norm else [])
            call_ = MatmulReduceScatter(xs, matrices, layout, out_dtype=out_dtype)
            return [(work(call_), sum(partials, self._zero())[own])]
        addends = [self._x(r, whole) for r in range(size)]
        mine = self._stored(addends[rank])
        if self._problem.facts.everywhere:
            return [(work(AllReduce(mine)), sum(addends, self._zero()))]
        return [(work(ReduceScatter(mine, layout)), sum(addends, self._zero())[own])]

    def _with_experts(self, work: Callable[[Any], Any], own: slice) -> tuple[Tensor, Tensor]:
        """Each token has two of the experts; the weights of the routing are -1 and 1."""
        whole, first = sum(self.sizes), torch.arange(sum(self.sizes), device=self._device) % EXPERTS
        experts = torch.stack([first, (first + 2) % EXPERTS], 1)
        if self._problem.facts.dealt:
            return self._dealt_out(work, experts, own)
        rows = TokenRows(experts, EXPERTS)
        of_row = rows.of_slots(experts)

        def products(x: Tensor, rank: int) -> Tensor:
            every = torch.stack([x @ self._weight(rank + 7 * e).t() for e in range(EXPERTS)])
            return every[of_row, torch.arange(len(of_row), device=self._device)]

        matrices = self._matrices(torch.stack([self._weight(self._rank + 7 * e) for e in range(EXPERTS)]))
        out_dtype = self._problem.out_dtype
        if self._problem.facts.gathers:
            shards = [self._x(r, size) for r, size in enumerate(self.sizes)]
            x, packed = self._travelling(shards[self._rank])
            call = AllGatherGroupedMatmul(
                x, self._layout, lambda: rows, matrices, [None], out_dtype=out_dtype, packed=packed
            )
            return work(call).outs[0], products(torch.cat(shards)[rows.tokens], self._rank)
        signs = 1.0 - 2.0 * (rows.slots % 2)
        total = torch.zeros(whole, N, device=self._device)
        for r in range(self._size):
            total.index_add_(0, rows.tokens, products(self._x(r, rows.count), r) * signs[:, None])
        xs = [self._operand(self._x(self._rank, rows.count))]
        if self._problem.facts.everywhere:
            return work(GroupedMatmulAllReduce(xs, matrices, rows, signs, out_dtype=out_dtype)), total
        scatter = GroupedMatmulReduceScatter(xs, matrices, rows, signs, out_dtype=out_dtype, layout=self._layout)
        return work(scatter), total[own]

    def _dealt_out(self, work: Callable[[Any], Any], experts: Tensor, own: slice) -> tuple[Tensor, Tensor]:
        """The same, where each expert is on one rank; fewer experts than ranks leave some without."""
        dealt = array_split_sizes(EXPERTS, self._size)
        rows = DealtRows(experts, dealt, self.sizes, self._rank)
        of_experts, flat = torch.stack([self._weight(7 * e) for e in range(EXPERTS)]), experts.flatten()

        def products(x: Tensor, slots: Tensor) -> Tensor:
            return torch.einsum("sk,enk->esn", x, of_experts)[flat[slots], torch.arange(len(x), device=x.device)]

        here = slice(offsets(dealt)[self._rank], offsets(dealt)[self._rank] + dealt[self._rank])
        matrices, out_dtype = self._matrices(of_experts[here]), self._problem.out_dtype
        if self._problem.facts.gathers:
            x = torch.cat([self._x(r, size) for r, size in enumerate(self.sizes)])
            sent, packed = self._travelling(x[own])
            call = DispatchGroupedMatmul(
                sent, self._layout, lambda: rows, matrices, [None], out_dtype=out_dtype, packed=packed
            )
            return work(call).outs[0], products(x[rows.slots // 2], rows.slots)
        slots = torch.arange(experts.numel(), device=self._device)
        x, signs = self._x(0, len(slots)), 1.0 - 2.0 * (slots % 2)
        combine = GroupedMatmulCombine(
            [self._operand(x[rows.slots])], matrices, rows, signs[rows.slots], out_dtype=out_dtype, layout=self._layout
        )  # fmt: skip
        return work(combine), (products(x, slots) * signs[:, None]).view(len(experts), 2, N).sum(1)[own]

    def _normed(
        self, work: Callable[[Any], Any], xs: list[Operand], matrices: list[Operand], total: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """The residual and the norm along: sums of integers and their squares are exact, and a few operations follow,
        which libraries and compilers round otherwise (a division by N becomes a product, say)."""
        dtype, eps = self._problem.out_dtype or self._problem.dtype, 1.0
        i, j = torch.arange(len(total), device=self._device)[:, None], torch.arange(N, device=self._device)[None, :]
        residual, weight = ((i + 2 * j) % 5 - 2.0).to(dtype), (j[0] % 3 + 1.0).to(dtype)
        tail = ResidualNorm(residual, weight, eps)
        sums = work(MatmulAllReduce(xs, matrices, out_dtype=self._problem.out_dtype, tail=tail))
        wide = total + residual.float()
        exact = wide.double()
        scales = 1 / (exact.square().sum(1, keepdim=True) / N + eps).sqrt()
        return [(sums, wide), (tail.normed, exact * scales * weight.double())]

    def _x(self, rank: int, rows: int) -> Tensor:
        """[rows, K] of -1, 0 and 1; a row tells its number and its rank."""
        i, j = self._places(rows)
        return ((5 * i + 3 * j + rank) % 7 % 3 - 1.0) * ((i + j + 11 * rank) % (K // NONZEROS) == 0)

    def _weight(self, rank: int) -> Tensor:
        """[N, K], likewise."""
        i, j = self._places(N)
        return (2 * i + 7 * j + i * j + 3 * rank) % 5 % 3 - 1.0

    def _places(self, rows: int) -> tuple[Tensor, Tensor]:
        return torch.arange(rows, device=self._device)[:, None], torch.arange(K, device=self._device)[None, :]

    def _stored(self, values: Tensor) -> Tensor:
        return values.to(self._problem.dtype)

    def _travelling(self, values: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Rows that are sent, and the ``packed`` of their call."""
        x = self._stored(values)
        return (x, ()) if self._problem.out_dtype is None else (fp8.pack(x, self._ones(len(x))), (K,))

    def _matrices(self, weights: Tensor) -> list[ExpertMatrices]:
        """Of experts, [E, N, K]."""
        stored = self._stored(weights)
        scaled = self._problem.out_dtype is not None
        return [ScaledExperts(stored, self._ones(1)) if scaled else stored.transpose(1, 2)]

    def _operand(self, values: Tensor) -> Operand:
        x = self._stored(values)
        return x if self._problem.out_dtype is None else Scaled(x, self._ones(len(x)))

    def _matrix(self, rank: int) -> Operand:
        """The weight, transposed."""
        weight = self._stored(self._weight(rank)).t()
        return weight if self._problem.out_dtype is None else Scaled(weight, self._ones(N).t())

    def _ones(self, rows: int) -> Tensor:
        return torch.ones(rows, 1, device=self._device)

    def _zero(self) -> Tensor:
        return torch.zeros((), device=self._device)
