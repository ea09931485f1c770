"""The benchmark's problems: inputs, the ways of doing one fused op that are compared, and the judge of their results.

Owns: for each fused op, the GEMM alone, its ideal transfer alone, what a user would write with torch, and ours.
Assumes: every rank builds the same `TimedCase` in the same order; inputs come from a seed, so each rank can form any
other's and check its own result without communication.
Refuses: timing anything whose result is not within the elementwise fp64 bound. Up to `_FULL_CHECK_FLOP` every row is
checked, above it `_SAMPLED_ROWS` rows spread over all shards and chunks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import tpkernels as tpk
from tpkernels import dispatch, partition
from tpkernels.comm import gloo_threads
from tpkernels.testing.cases import COPY, REDUCE, Case, Operands
from tpkernels.testing.numeric import Bounded
from tpkernels.testing.references import expected_outputs

FUSED_OPS = tuple(op for op, facts in dispatch.FACTS.items() if facts.multiplies and not facts.grouped)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}

_FULL_CHECK_FLOP = 4e9
_SAMPLED_ROWS = 192
_MAX_WORLD_SIZE = 1024


@dataclass(frozen=True)
class Shape:
    """Global sizes: x is [M, K], the weight [N, K]; the op decides which of them is cut over the ranks."""

    m: int
    k: int
    n: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text.strip().lower())
        if match is None or 0 in (sizes := tuple(int(size) for size in match.groups())):
            raise ValueError(f"a shape is MxKxN with positive sizes, for example 4096x2048x8192; got {text!r}")
        return cls(*sizes)

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"


@dataclass
class TimedCase:
    """One op on one shape, on this rank: a `tpkernels.testing.cases.Case`. Tensors are made when first asked for."""

    op: str
    shape: Shape
    dtype: torch.dtype
    group: dist.ProcessGroup
    device: torch.device
    seed: int = 0

    def __post_init__(self) -> None:
        if self.op not in FUSED_OPS:
            raise ValueError(f"op must be one of {FUSED_OPS}, got {self.op!r}")
        self.rank, self.world_size = self.group.rank(), self.group.size()
        self.row_sizes = partition.array_split_sizes(self.shape.m, self.world_size)
        facts = dispatch.FACTS[self.op]
        self.gathers, self.sums_everywhere = facts.gathers, facts.everywhere
        n = self.shape.n
        if self.gathers:  # every rank has columns of its own
            n = partition.array_split_sizes(n, self.world_size)[self.rank]
        self.whole = Case(self.op, (self.shape.m, self.shape.k), ns=(n,), dtype=self.dtype)

    @cached_property
    def explanation(self) -> dispatch.Explanation:
        """What the ranks agree on for this problem; collective the first time."""
        shape = self.shape
        return tpk.explain(self.op, m=shape.m, n=shape.n, k=shape.k, dtype=self.dtype, group=self.group)

    @property
    def problem(self) -> dispatch.Problem:
        return self.explanation.problem

    def _x_of(self, rank: int) -> Tensor:
        return self._random(0, rank, *self.whole.x_shape(rank, self.world_size))

    def _weight_of(self, rank: int) -> Tensor:
        return self._random(1, rank, *self.whole.weight_shapes(rank, self.world_size)[0])

    def _random(self, what: int, rank: int, rows: int, columns: int) -> Tensor:
        """Drawn where it is used: the largest weights take a CPU half a minute. GPUs of one model draw alike."""
        generator = torch.Generator(self.device).manual_seed((2 * self.seed + what) * _MAX_WORLD_SIZE + rank)
        return torch.randn(rows, columns, generator=generator, device=self.device).to(self.dtype)

    @cached_property
    def x(self) -> Tensor:
        return self._x_of(self.rank)

    @cached_property
    def weight(self) -> Tensor:
        return self._weight_of(self.rank)

    @cached_property
    def _whole_x(self) -> Tensor:
        return self._gathered_x() if self.gathers else self.x

    def _gathered_x(self) -> Tensor:
        return torch.cat([self._x_of(rank) for rank in range(self.world_size)])

    # -- the ways of doing it --------------------------------------------------------------------------------------

    def gemm_only(self) -> Tensor:
        """The roof: the same arithmetic with everything already here."""
        return F.linear(self._whole_x, self.weight)

    def comm_only(self) -> None:
        """The other roof: the payload crosses the wire once, point to point, all transfers posted at once.

        An all-reduce needs two such rounds (every rank's partials to their owner, every owner's sum back).
        """
        for sends, received in self._rounds:
            works = []
            for peer in partition.peers_after(self.rank, self.world_size):
                works += [(dist.irecv, received[peer], peer), (dist.isend, sends[peer], peer)]
            operations = [
                dist.P2POp(operation, tensor, group=self.group, group_peer=peer)
                for operation, tensor, peer in works
                if tensor.numel()
            ]
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()

    @cached_property
    def _rounds(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        width = self.shape.k if self.gathers else self.shape.n
        shards = [torch.ones(rows, width, dtype=self.dtype, device=self.device) for rows in self.row_sizes]
        mine = [shards[self.rank]] * self.world_size
        spread = [torch.empty_like(shard) for shard in shards]
        if self.gathers:
            return [(mine, spread)]
        collect = [torch.empty_like(shards[self.rank]) for _ in shards]
        return [(shards, collect)] + ([(mine, spread)] if self.sums_everywhere else [])

    @property
    def torch_refusal(self) -> str | None:
        """Why plain torch collectives cannot do this without padding, or None."""
        if not self.sums_everywhere and self.shape.m % self.world_size:
            return f"M ({self.shape.m}) is not a multiple of the world size ({self.world_size})"
        return None

    def torch_baseline(self) -> Tensor:
        """What a user writes without us, with gloo's threads as they are without us."""
        with gloo_threads.as_torch_made_them():
            if self.gathers:
                return F.linear(torch_all_gather(self.x, self.group), self.weight)
            partial = F.linear(self.x, self.weight)
            if not self.sums_everywhere:
                return torch_reduce_scatter(partial, self.group)
            dist.all_reduce(partial, group=self.group)
            return partial

    def ours(self, implementation: str) -> Callable[[], Tensor]:
        """The op alone: what a harness does before it calls the op would be timed, too."""
        group: Any = self.group
        if self.gathers:
            sizes = self.row_sizes
            return lambda: tpk.all_gather_matmul(
                self.x, self.weight, group, shard_sizes=sizes, implementation=implementation
            )
        fused = getattr(tpk, self.op)
        return lambda: fused(self.x, self.weight, group, implementation=implementation)

    def implementations(self) -> list[str]:
        """Names that can run this problem, `unfused` first."""
        able = [candidate.name for candidate in self.explanation.candidates if candidate.refusal is None]
        return sorted(able, key=lambda name: name != "unfused")

    def refusals(self) -> dict[str, str]:
        """Why each of our other implementations cannot."""
        return {candidate.name: candidate.refusal for candidate in self.explanation.candidates if candidate.refusal}

    @cached_property
    def _our_names(self) -> frozenset[str]:
        return frozenset(candidate.name for candidate in self.explanation.candidates)

    # -- the judge -------------------------------------------------------------------------------------------------

    def verify(self, name: str, result: object) -> None:
        """Raise `BoundExceeded` (an AssertionError) unless `result` is this rank's correct output."""
        if name in ("gemm", "comm"):
            return  # no output of the op
        assert isinstance(result, Tensor)
        bound = self._bound if name == "auto" or name in self._our_names else self._bound_of_torch
        expected = (len(self._output_rows), bound.value.shape[1])
        if tuple(result.shape) != expected:
            raise AssertionError(f"{name}: shape {tuple(result.shape)}, expected {expected}")
        bound.check(result[self._checked_rows], f"{self.op} {self.shape} {name}")

    @cached_property
    def _output_rows(self) -> range:
        """Which rows of the global result this rank returns."""
        if self.gathers or self.sums_everywhere:
            return range(self.shape.m)
        start = partition.offsets(self.row_sizes)[self.rank]
        return range(start, start + self.row_sizes[self.rank])

    @cached_property
    def _checked_rows(self) -> Tensor:
        count = len(self._output_rows)
        flop = 2.0 * count * self.shape.n * self.shape.k / (self.world_size if self.gathers else 1)
        if flop <= _FULL_CHECK_FLOP or count <= _SAMPLED_ROWS:
            return torch.arange(count, device=self.device)
        return torch.linspace(0, count - 1, _SAMPLED_ROWS, device=self.device, dtype=torch.float64).long()

    @cached_property
    def _bound(self) -> Bounded:
        """Of the checked rows, by the op that gives them without a cut."""
        return expected_outputs(self.whole.but(op=COPY if self.gathers else REDUCE), self._partials(), 0)[0]

    @cached_property
    def _bound_of_torch(self) -> Bounded:
        """torch and other libraries may add partials in the output's dtype, one rounding per rank, in any order."""
        if self.gathers or self.world_size <= 2:
            return self._bound
        unit, parts = torch.finfo(self.dtype).eps / 2, self._partials()
        magnitude = sum((a.double() @ w[0].double().T).abs() for a, w in zip(parts.xs, parts.ws, strict=True))
        return Bounded(self._bound.value, self._bound.error + (self.world_size - 2) * unit * magnitude)

    def _partials(self) -> Operands:
        """The checked rows of all ranks' operands; of a gathering op this rank's alone, with all rows of x."""
        rows = self._checked_rows + (self._output_rows.start if len(self._output_rows) else 0)
        if self.gathers:
            return Operands([self._gathered_x()[rows]], [[self.weight]], [[None]])
        ranks = range(self.world_size)
        xs, ws = [self._x_of(rank)[rows] for rank in ranks], [[self._weight_of(rank)] for rank in ranks]
        return Operands(xs, ws, [[None] for _ in ranks])


def torch_all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """torch's all-gather along dim 0, under its name of the day (2.13 renames it)."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    gather(whole, x, group=group)
    return whole


def torch_reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """torch's reduce-scatter along dim 0, under its name of the day."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    mine = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    scatter(mine, x, group=group)
    return mine
