"""Cases: one call of an op in terms of the whole tensors, its operands on every rank, and the call itself.

Owns: `Case`, which tests, trials, `tpkernels test` and `tpkernels bench` select what they run from; the operands of all
ranks, which every rank can make by itself, so that nothing is sent for them; the call. What must come out is in
`references.py`.

Assumes: operands are made on the CPU; whoever computes elsewhere moves his own ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels as tpk
from tpkernels.partition import array_split_sizes
from tpkernels.testing.numeric import GATED
from tpkernels.testing.payload import exact_limit, integer_payload, payload

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "COLLECTIVES",
    "COPY",
    "DTYPES",
    "FUSED",
    "GATHER",
    "OPS",
    "REDUCE",
    "REDUCE_SCATTER",
    "SCATTER",
    "Case",
    "Operands",
    "Own",
    "call",
    "operands",
    "strided",
    "upstream",
]

GATHER, SCATTER, REDUCE, COPY = FUSED = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "copy_matmul"
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = COLLECTIVES = "all_gather", "reduce_scatter", "all_reduce"
OPS = FUSED + COLLECTIVES
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Own = tuple[Tensor, list[Tensor], list[Tensor | None]]
"""One rank's x, weights and biases."""


@dataclass(frozen=True)
class Case:
    """One call of an op. `shape` is that of the whole x ([..., K]), `ns` the rows of each weight of one rank.

    sizes: shards along `dim` (of x when gathering, of y when scattering); None is the default cut.
    k_sizes: slices of K by rank (ops that sum products); None cuts evenly. own_ns: rank r has r more rows in every
    weight. integers: every order of summation gives the same bits. call: another one gives other values.
    """

    op: str
    shape: tuple[int, ...]
    ns: tuple[int, ...] = (6,)
    dim: int = 0
    sizes: tuple[int, ...] | None = None
    k_sizes: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    bias: bool | tuple[bool, ...] = False
    activation: str | None = None
    implementation: str = "chunked"
    return_gathered: bool = False
    save_gathered: bool = False
    integers: bool = False
    strided: bool = False
    own_ns: bool = False
    call: int = 0

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @property
    def axis(self) -> int:
        return self.dim % len(self.shape)

    @property
    def gathers(self) -> bool:
        return self.op in (GATHER, ALL_GATHER)

    @property
    def scatters(self) -> bool:
        return self.op in (SCATTER, REDUCE_SCATTER)

    @property
    def sums_products(self) -> bool:
        """One output of partials that all ranks have, and one bias."""
        return self.op in (SCATTER, REDUCE)

    def cut(self, world: int) -> tuple[int, ...]:
        """Sizes along `dim` of every rank's shard."""
        if self.sizes is not None:
            return self.sizes
        whole = self.ns[0] if self.op == SCATTER and self.axis == len(self.shape) - 1 else self.shape[self.axis]
        return array_split_sizes(whole, world)

    @property
    def num_outputs(self) -> int:
        return 1 if self.activation in GATED or self.op in COLLECTIVES else len(self.ns)

    def has_bias(self, i: int) -> bool:
        return self.bias[i] if isinstance(self.bias, tuple) else self.bias

    def x_shape(self, rank: int, world: int) -> tuple[int, ...]:
        """Of one rank's x."""
        shape = list(self.shape)
        if self.gathers:
            shape[self.axis] = self.cut(world)[rank]
        elif self.sums_products:
            shape[-1] = (self.k_sizes or array_split_sizes(shape[-1], world))[rank]
        return tuple(shape)

    def weight_shapes(self, rank: int, world: int) -> list[tuple[int, int]]:
        """Of one rank's weights; a collective has none."""
        k = self.x_shape(rank, world)[-1] if self.sums_products else self.shape[-1]
        return [] if self.op in COLLECTIVES else [(n + (rank if self.own_ns else 0), k) for n in self.ns]

    def y_shape(self, rank: int, world: int) -> tuple[int, ...]:
        """Of one rank's (first) output."""
        shape = list(self.shape)
        shape[-1:] = [rows for rows, _ in self.weight_shapes(rank, world)[:1]] or shape[-1:]
        if self.scatters:
            shape[self.axis] = self.cut(world)[rank]
        return tuple(shape)


@dataclass
class Operands:
    """Of all ranks: `xs[rank]`, `ws[rank][i]`, `bs[rank][i]` (None without a bias)."""

    xs: list[Tensor]
    ws: list[list[Tensor]]
    bs: list[list[Tensor | None]] = field(default_factory=list)

    def of(self, rank: int, device: torch.device | str = "cpu") -> Own:
        """One rank's operands, where it computes."""
        biases = [None if b is None else b.to(device) for b in self.bs[rank]]
        return self.xs[rank].to(device), [w.to(device) for w in self.ws[rank]], biases


def operands(case: Case, world: int) -> Operands:
    made = Operands([], [])
    for rank in range(world):
        shapes, source = case.weight_shapes(rank, world), 0 if case.sums_products else rank
        made.xs.append(_tensor(case, case.x_shape(rank, world), "x", 0 if case.op == COPY else rank, world))
        made.ws.append([_tensor(case, shape, f"w{i}", rank, world) for i, shape in enumerate(shapes)])
        made.bs.append(
            [
                _tensor(case, shape[:1], f"b{i}", source, world) if case.has_bias(i) else None
                for i, shape in enumerate(shapes)
            ]
        )
    return made


def upstream(case: Case, world: int) -> list[Tensor]:
    """A gradient for every rank's first output; where all ranks have one output the same, as the contract says."""
    same = case.op in (REDUCE, ALL_REDUCE)
    return [_tensor(case, case.y_shape(rank, world), "dy", 0 if same else rank, world) for rank in range(world)]


def _tensor(case: Case, shape: Sequence[int], name: str, rank: int, world: int) -> Tensor:
    if not case.integers:
        made = payload(shape, case.dtype, rank=rank, call=case.call, name=name)
    else:  # weights and biases are dense; of what they are multiplied with so little that sums over ranks are exact
        few = max(1, exact_limit(case.dtype) // max(16, 2 * world))
        dense, largest = name[0] in "wb" or case.op in COLLECTIVES, 3 if case.op in COLLECTIVES else 1
        made = integer_payload(
            shape, case.dtype, rank=rank, call=case.call, name=name, largest=largest,
            nonzeros=shape[-1] if dense else few,
        )  # fmt: skip
    return strided(made) if case.strided else made


def strided(x: Tensor) -> Tensor:
    """The same values in memory that is not contiguous: reversed dims for matrices, every other element otherwise."""
    if x.dim() >= 2:
        return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    return torch.stack([x, torch.full_like(x, float("nan"))], -1)[..., 0]


def call(case: Case, own: Own, group: Any) -> tuple[list[Tensor], Tensor | None]:
    """The op on this rank's operands: its outputs as a list, and the gathered x if it was asked for."""
    x, ws, bs = own
    where = {"implementation": case.implementation}
    if case.op == ALL_REDUCE:
        return [tpk.all_reduce(x, group, **where)], None
    if case.op in COLLECTIVES:
        move = tpk.all_gather if case.op == ALL_GATHER else tpk.reduce_scatter
        return [move(x, group, dim=case.dim, shard_sizes=case.cut(dist.get_world_size(group)), **where)], None
    single = len(ws) == 1
    weight: Any = ws[0] if single else ws
    options: dict[str, Any] = {"bias": (bs[0] if single else bs) if case.bias else None, **where}
    if case.op == SCATTER:
        return [
            tpk.matmul_reduce_scatter(x, weight, group, scatter_dim=case.dim, shard_sizes=case.sizes, **options)
        ], None
    if case.op == REDUCE:
        return [tpk.matmul_all_reduce(x, weight, group, **options)], None
    options["activation"] = case.activation
    if case.op == COPY:
        result, gathered = tpk.copy_matmul(x, weight, group, **options), None
    else:
        options |= {"return_gathered": case.return_gathered, "save_gathered": case.save_gathered}
        found: Any = tpk.all_gather_matmul(x, weight, group, gather_dim=case.dim, shard_sizes=case.sizes, **options)
        result, gathered = found if case.return_gathered else (found, None)
    return ([result] if isinstance(result, Tensor) else list(result)), gathered
