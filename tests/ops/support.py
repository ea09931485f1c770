"""Cases of the fused ops, run on real ranks and judged there: every rank can rebuild the operands of all others.

Owns: `Case` (one call in terms of the whole tensors), its operands, the call itself, and the unfused reference in plain
torch. Values are judged with the elementwise bound of `tpkernels.testing`, integer payloads bit for bit.

Operands are made on the CPU and judged there; a rank computes where `PLACE` says (tests/gpu moves it to a GPU).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import tpkernels as tpk
from tpkernels.gemm.native import native
from tpkernels.ops.contract import GATED
from tpkernels.partition import array_split_sizes
from tpkernels.testing.expected import (
    expected_all_gather_matmul,
    expected_gated_matmul,
    expected_matmul_all_reduce,
    expected_matmul_reduce_scatter,
)
from tpkernels.testing.numeric import assert_bitwise_equal
from tpkernels.testing.payload import exact_matmul, integer_payload, payload

GATHER, SCATTER, REDUCE, COPY = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "copy_matmul"
FUSED = (GATHER, SCATTER, REDUCE, COPY)
# Without the compiled core tests/backends says, as skips, what is not tested.
IMPLEMENTATIONS = ("unfused", "chunked", *(("shared_memory",) if native() is not None else ()))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass
class Place:
    """Where this process's ranks compute, over which backend (None: the default group's) with which options, and what
    is done with a new group before it is used."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str | None = None
    options: Callable[[], Any] = lambda: None
    prepare: Callable[[Any], None] = lambda group: None


PLACE = Place()


@dataclass(frozen=True)
class Case:
    """One call of a fused op. `shape` is that of the whole x ([..., K]), `ns` the rows of each weight of one rank.

    sizes: shards along `dim` (of x when gathering, of y when scattering); None is the default cut.
    k_sizes: slices of K by rank (reducing ops); None cuts evenly. own_ns: rank r has r more rows in every weight.
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

    def cut(self, world: int) -> tuple[int, ...]:
        """Sizes along `dim` of every rank's shard."""
        if self.sizes is not None:
            return self.sizes
        whole = self.ns[0] if self.op == SCATTER and self.axis == len(self.shape) - 1 else self.shape[self.axis]
        return array_split_sizes(whole, world)

    @property
    def num_outputs(self) -> int:
        return 1 if self.activation in GATED else len(self.ns)

    def has_bias(self, i: int) -> bool:
        return self.bias[i] if isinstance(self.bias, tuple) else self.bias


@dataclass
class Operands:
    """Of all ranks: `xs[rank]`, `ws[rank][i]`, `bs[rank][i]` (None without a bias)."""

    xs: list[Tensor]
    ws: list[list[Tensor]]
    bs: list[list[Tensor | None]] = field(default_factory=list)


def operands(case: Case, world: int) -> Operands:
    k_sizes = case.k_sizes or array_split_sizes(case.shape[-1], world)
    xs, ws, bs = [], [], []
    for rank in range(world):
        shape = list(case.shape)
        if case.op == GATHER:
            shape[case.axis] = case.cut(world)[rank]
        elif case.op in (SCATTER, REDUCE):
            shape[-1] = k_sizes[rank]
        k = shape[-1] if case.op in (SCATTER, REDUCE) else case.shape[-1]
        extra = rank if case.own_ns else 0
        same = case.op in (SCATTER, REDUCE)  # one output, one bias for all ranks
        xs.append(_tensor(case, shape, "x", 0 if case.op == COPY else rank))
        ws.append([_tensor(case, (n + extra, k), f"w{i}", rank) for i, n in enumerate(case.ns)])
        bs.append(
            [
                _tensor(case, (n + extra,), f"b{i}", 0 if same else rank) if case.has_bias(i) else None
                for i, n in enumerate(case.ns)
            ]
        )
    return Operands(xs, ws, bs)


def _tensor(case: Case, shape: Sequence[int], name: str, rank: int) -> Tensor:
    if not case.integers:
        made = payload(shape, case.dtype, rank=rank, call=case.call, name=name)
    else:
        dense = name != "x"
        made = integer_payload(
            shape, case.dtype, rank=rank, call=case.call, name=name, nonzeros=shape[-1] if dense else None
        )
    return strided(made) if case.strided else made


def strided(x: Tensor) -> Tensor:
    """The same values in memory that is not contiguous: reversed dims for matrices, every other element otherwise."""
    if x.dim() >= 2:
        return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    return torch.stack([x, torch.full_like(x, float("nan"))], -1)[..., 0]


def call(case: Case, own: tuple[Tensor, list[Tensor], list[Tensor | None]], group: Any) -> tuple[list[Tensor], Any]:
    """The op on this rank's operands: its outputs as a list, and the gathered x if it was asked for."""
    x, ws, bs = own
    single = len(ws) == 1
    weight = ws[0] if single else ws
    bias = (bs[0] if single else bs) if case.bias else None
    common = {"bias": bias, "implementation": case.implementation}
    if case.op == GATHER:
        result = tpk.all_gather_matmul(
            x,
            weight,
            group,
            activation=case.activation,
            gather_dim=case.dim,
            shard_sizes=case.sizes,
            return_gathered=case.return_gathered,
            save_gathered=case.save_gathered,
            **common,
        )
        y, gathered = result if case.return_gathered else (result, None)
        return ([y] if isinstance(y, Tensor) else y), gathered
    if case.op == COPY:
        y = tpk.copy_matmul(x, weight, group, activation=case.activation, **common)
        return ([y] if isinstance(y, Tensor) else y), None
    if case.op == SCATTER:
        y = tpk.matmul_reduce_scatter(x, weight, group, scatter_dim=case.dim, shard_sizes=case.sizes, **common)
        return [y], None
    return [tpk.matmul_all_reduce(x, weight, group, **common)], None


def own_part(all_of: Operands, rank: int) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """This rank's operands, where it computes."""
    biases = [None if b is None else b.to(PLACE.device) for b in all_of.bs[rank]]
    return all_of.xs[rank].to(PLACE.device), [w.to(PLACE.device) for w in all_of.ws[rank]], biases


def run_and_check(case: Case, group: Any) -> list[Tensor]:
    """Run the case on this rank and judge every output; the error of a wrong one names the case."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    parts = operands(case, world)
    own = own_part(parts, rank)
    kept = [part.clone() for part in (own[0], *own[1])]
    outs, gathered = call(case, own, group)
    check_values(case, parts, outs, gathered, rank)
    for before, now in zip(kept, (own[0], *own[1]), strict=True):
        assert_bitwise_equal(now, before, f"{case}: an input after the call")
    return outs


def check_values(case: Case, parts: Operands, outs: list[Tensor], gathered: Tensor | None, rank: int) -> None:
    what = f"rank {rank}, {case}"
    assert len(outs) == case.num_outputs, what
    assert all(out.is_contiguous() for out in outs), f"{what}: strides"
    if case.op in (GATHER, COPY):
        whole = torch.cat(parts.xs, case.axis) if case.op == GATHER else parts.xs[rank]
        if case.return_gathered:
            assert gathered is not None
            assert_bitwise_equal(gathered, whole, f"{what}: gathered")
        if case.activation in GATED:
            expected_gated_matmul(
                whole, parts.ws[rank], dtype=case.dtype, activation=case.activation, biases=parts.bs[rank]
            ).check(outs[0], what)
            return
        for i, out in enumerate(outs):
            w, b = parts.ws[rank][i], parts.bs[rank][i]
            if case.integers and case.activation in (None, "relu"):
                exact = exact_matmul([whole], [w], bias=b, dtype=case.dtype)
                assert_bitwise_equal(out, F.relu(exact) if case.activation else exact, what, either_zero=True)
            else:
                expected = expected_all_gather_matmul(whole, w, bias=b, dtype=case.dtype, activation=case.activation)
                expected.check(out, what)
        return
    ws, bias = [w[0] for w in parts.ws], parts.bs[rank][0]
    if case.integers:
        exact = exact_matmul(parts.xs, ws, bias=bias, dtype=case.dtype)
        if case.op == SCATTER:
            exact = exact.split(list(case.cut(len(ws))), case.axis)[rank]
        assert_bitwise_equal(outs[0], exact, what, either_zero=True)
    elif case.op == SCATTER:
        expected_matmul_reduce_scatter(
            parts.xs, ws, rank=rank, dtype=case.dtype, bias=bias, scatter_dim=case.dim, shard_sizes=case.sizes
        ).check(outs[0], what)
    else:
        expected_matmul_all_reduce(parts.xs, ws, dtype=case.dtype, bias=bias).check(outs[0], what)


@contextmanager
def new_group(num_chunks: int | None = None, *, calibrate: bool = False, timeout: float = 30.0) -> Iterator[Any]:
    """A group of all ranks on which nothing was agreed yet, with the environment that decides its chunk count."""
    from datetime import timedelta

    wanted = {
        "TPKERNELS_NUM_CHUNKS": None if num_chunks is None else str(num_chunks),
        "TPKERNELS_CALIBRATE": "1" if calibrate else "0",
    }
    before = {name: os.environ.get(name) for name in wanted}
    _write_environment(wanted)
    limit = timedelta(seconds=timeout)
    group = dist.new_group(timeout=limit, backend=PLACE.backend, pg_options=PLACE.options())
    try:
        PLACE.prepare(group)
        yield group
    finally:
        _write_environment(before)
        dist.destroy_process_group(group)


def _write_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def check_all(cases: Sequence[Case], num_chunks: int | None = None, calibrate: bool = False) -> int:
    """Run cases one after the other on one new group; how many were checked."""
    with new_group(num_chunks, calibrate=calibrate) as group:
        for case in cases:
            run_and_check(case, group)
    return len(cases)


def unfused_fp64(case: Case, parts: Operands) -> list[list[Tensor]]:
    """Outputs of all ranks by the unfused equations in differentiable torch: [rank][i], the gathered x appended."""
    world = len(parts.xs)
    act = {
        None: lambda z: z,
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
        "silu": F.silu,
    }[GATED.get(case.activation or "", case.activation)]
    if case.op in (GATHER, COPY):
        wholes = [torch.cat(parts.xs, case.axis)] * world if case.op == GATHER else [parts.xs[0]] * world
        results = []
        for rank in range(world):
            outs = [F.linear(wholes[rank], w, b) for w, b in zip(parts.ws[rank], parts.bs[rank], strict=True)]
            outs = [act(outs[0]) * outs[1]] if case.activation in GATED else [act(out) for out in outs]
            results.append([*outs, wholes[rank]] if case.return_gathered else outs)
        return results
    total = sum(F.linear(x, w[0]) for x, w in zip(parts.xs, parts.ws, strict=True))
    assert isinstance(total, Tensor)
    if parts.bs[0][0] is not None:
        total = total + parts.bs[0][0]
    if case.op == REDUCE:
        return [[total]] + [[total.detach()]] * (world - 1)  # one y that all ranks share: its gradient counts once
    return [[piece] for piece in total.split(list(case.cut(world)), case.axis)]
