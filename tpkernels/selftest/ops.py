"""The public ops, forward and backward, against the unfused equations in fp64.

Every rank makes the operands of all ranks from their names, and its own expectation from them; nothing is sent for it.
The shards are even, uneven and empty, and, except in a quick run, large enough to travel in several chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels as tpk
from tpkernels.partition import array_split_sizes, offsets
from tpkernels.selftest.compare import Subject, Trial, implementations_of
from tpkernels.testing.expected import (
    expected_all_gather_matmul,
    expected_bias_gradient,
    expected_input_gradient,
    expected_matmul_all_reduce,
    expected_weight_gradient,
)
from tpkernels.testing.numeric import Bounded
from tpkernels.testing.payload import exact_limit, integer_payload, payload

__all__ = ["Place", "Problem", "op_subjects", "problems"]


@dataclass(frozen=True)
class Place:
    """Where a rank compares: its group, device, the dtypes asked for, and whether little is enough."""

    group: dist.ProcessGroup
    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    quick: bool = False

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def world_size(self) -> int:
        return self.group.size()


@dataclass(frozen=True)
class Problem:
    """Sizes and data of one trial: `rows` and `inner` by rank, of what is gathered or scattered and of what is summed.

    Every rank has `n` output features of its own where it gathers, the same ones where it reduces.
    """

    place: Place
    dtype: torch.dtype
    name: str
    rows: tuple[int, ...]
    inner: tuple[int, ...]
    n: int
    integers: bool = False

    @property
    def where(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}, {self.name} shards" + (", integers" if self.integers else "")

    @property
    def m(self) -> int:
        return sum(self.rows)

    @property
    def k(self) -> int:
        return sum(self.inner)

    def make(self, name: str, rank: int, *shape: int) -> Tensor:
        """An operand of a rank.  Integers are few enough for every sum over ranks to be exact in the dtype."""
        if not self.integers:
            return payload(shape, self.dtype, rank=rank, name=name)
        few = max(1, min(16, exact_limit(self.dtype) // (2 * self.place.world_size)))
        nonzeros = None if name.startswith("w") else few
        return integer_payload(shape, self.dtype, rank=rank, name=name, nonzeros=nonzeros or shape[-1])

    def each(self, name: str, shape: Callable[[int], Sequence[int]]) -> list[Tensor]:
        return [self.make(name, rank, *shape(rank)) for rank in range(self.place.world_size)]

    def mine(self, whole: Bounded) -> Bounded:
        """This rank's rows."""
        rank = self.place.rank
        return whole.narrow(0, offsets(self.rows)[rank], self.rows[rank])

    def trial(
        self, inputs: dict[str, Tensor], dy: Tensor, call: Callable[..., Tensor], expected: dict[str, Bounded]
    ) -> Trial:
        """`call(implementation=..., **inputs)` forward, and back from `dy`: y, and d of each input."""

        def run(implementation: str) -> dict[str, Tensor]:
            leaves = {name: tensor.to(self.place.device, copy=True).requires_grad_() for name, tensor in inputs.items()}
            y = call(**leaves, implementation=implementation)
            y.backward(dy.to(self.place.device))
            gradients = {f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
            return {"y": y.detach(), **gradients}

        return Trial(self.where, run, expected, self.integers)


def problems(place: Place) -> Iterator[Problem]:
    """Every dtype, with every kind of shards, in real numbers and in integers."""
    world = place.world_size
    kinds: list[tuple[str, tuple[int, ...], tuple[int, ...], int]] = [
        ("even", (24,) * world, (16,) * world, 20),
        ("uneven", array_split_sizes(9 * world + 1, world), array_split_sizes(11 * world + 1, world), 13),
        ("empty", (0, *(5,) * (world - 1)), (7,) * (world - 1) + (0,), 9) if world > 1 else ("one row", (1,), (7,), 9),
    ]
    if not place.quick:
        kinds.append(("large", (*(560,) * (world - 1), 521), (264,) * world, 520))
    for dtype in place.dtypes:
        for name, rows, inner, n in kinds:
            for integers in (False, True):
                yield Problem(place, dtype, name, rows, inner, n, integers)


def op_subjects(place: Place) -> list[Subject]:
    """All public ops."""
    made: list[tuple[str, str, Callable[[Problem], Trial]]] = [
        ("all_gather_matmul", "all_gather_matmul", _all_gather_matmul),
        ("matmul_reduce_scatter", "matmul_reduce_scatter", _matmul_reduce_scatter),
        ("matmul_all_reduce", "matmul_all_reduce", _matmul_all_reduce),
        ("copy_matmul", "matmul_all_reduce", _copy_matmul),
        ("all_gather", "all_gather", _all_gather),
        ("reduce_scatter", "reduce_scatter", _reduce_scatter),
        ("all_reduce", "all_reduce", _all_reduce),
    ]

    def subject(what: str, op: str, trial: Callable[[Problem], Trial]) -> Subject:
        return Subject(what, implementations_of(op), lambda: map(trial, problems(place)))

    return [subject(*one) for one in made]


# --- one op each: operands of all ranks, the call, what must come out -------------------------------------------------


def _all_gather_matmul(problem: Problem) -> Trial:
    return _column(problem, gathers=True)


def _copy_matmul(problem: Problem) -> Trial:
    return _column(problem, gathers=False)


def _column(problem: Problem, *, gathers: bool) -> Trial:
    """y = act(x w_r^T + b_r), where x is gathered or a replica."""
    rank, dtype, (m, n, k) = problem.place.rank, problem.dtype, (problem.m, problem.n, problem.k)
    activation = None if problem.integers else "gelu"
    shards = problem.each("x", lambda r: (problem.rows[r], k))
    whole = torch.cat(shards)
    ws, bs = problem.each("w", lambda r: (n, k)), problem.each("b", lambda r: (n,))
    dys = problem.each("dy", lambda r: (m, n))
    dzs = [
        Bounded.sum_of_products([whole], [w], bias=b, dtype=dtype)
        .activation_gradient(activation, dy, dtype=dtype)
        .rounded(dtype)
        if activation
        else dy
        for w, b, dy in zip(ws, bs, dys, strict=True)
    ]
    dx = expected_input_gradient(dzs, ws, dtype=dtype)
    expected = {
        "y": expected_all_gather_matmul(whole, ws[rank], dtype=dtype, bias=bs[rank], activation=activation),
        "dx": problem.mine(dx) if gathers else dx,
        "dweight": expected_weight_gradient(dzs[rank], whole, dtype=dtype),
        "dbias": expected_bias_gradient(dzs[rank], dtype=dtype),
    }
    group = problem.place.group

    def call(x: Tensor, weight: Tensor, bias: Tensor, implementation: str) -> Tensor:
        options: dict[str, Any] = {"bias": bias, "activation": activation, "implementation": implementation}
        if gathers:
            options["shard_sizes"] = problem.rows
        y: Tensor = (tpk.all_gather_matmul if gathers else tpk.copy_matmul)(x, weight, group, **options)
        return y

    inputs = {"x": shards[rank] if gathers else whole, "weight": ws[rank], "bias": bs[rank]}
    return problem.trial(inputs, dys[rank], call, expected)


def _matmul_reduce_scatter(problem: Problem) -> Trial:
    return _row(problem, scatters=True)


def _matmul_all_reduce(problem: Problem) -> Trial:
    return _row(problem, scatters=False)


def _row(problem: Problem, *, scatters: bool) -> Trial:
    """y = sum_r x_r w_r^T + b, whole on every rank, or its rows."""
    rank, dtype, (m, n) = problem.place.rank, problem.dtype, (problem.m, problem.n)
    xs, ws = problem.each("x", lambda r: (m, problem.inner[r])), problem.each("w", lambda r: (n, problem.inner[r]))
    bias = problem.make("b", 0, n)
    dys = problem.each("dy", lambda r: (problem.rows[r], n))
    dy = torch.cat(dys)
    y = expected_matmul_all_reduce(xs, ws, dtype=dtype, bias=bias)
    expected = {
        "y": problem.mine(y) if scatters else y,
        "dx": Bounded.sum_of_products([dy], [ws[rank].T], dtype=dtype).rounded(dtype),
        "dweight": expected_weight_gradient(dy, xs[rank], dtype=dtype),
        "dbias": expected_bias_gradient(dy, dtype=dtype),
    }
    group = problem.place.group

    def call(x: Tensor, weight: Tensor, bias: Tensor, implementation: str) -> Tensor:
        if scatters:
            return tpk.matmul_reduce_scatter(
                x, weight, group, bias=bias, shard_sizes=problem.rows, implementation=implementation
            )
        return tpk.matmul_all_reduce(x, weight, group, bias=bias, implementation=implementation)

    return problem.trial(
        {"x": xs[rank], "weight": ws[rank], "bias": bias}, dys[rank] if scatters else dy, call, expected
    )


def _all_gather(problem: Problem) -> Trial:
    rank, n, group = problem.place.rank, problem.n, problem.place.group
    shards, dys = problem.each("x", lambda r: (problem.rows[r], n)), problem.each("dy", lambda r: (problem.m, n))

    def call(x: Tensor, implementation: str) -> Tensor:
        return tpk.all_gather(x, group, shard_sizes=problem.rows, implementation=implementation)

    expected = {"y": Bounded.exact(torch.cat(shards)), "dx": problem.mine(_sum(dys, problem.dtype))}
    return problem.trial({"x": shards[rank]}, dys[rank], call, expected)


def _reduce_scatter(problem: Problem) -> Trial:
    rank, n, group = problem.place.rank, problem.n, problem.place.group
    xs, dys = problem.each("x", lambda r: (problem.m, n)), problem.each("dy", lambda r: (problem.rows[r], n))

    def call(x: Tensor, implementation: str) -> Tensor:
        return tpk.reduce_scatter(x, group, shard_sizes=problem.rows, implementation=implementation)

    expected = {"y": problem.mine(_sum(xs, problem.dtype)), "dx": Bounded.exact(torch.cat(dys))}
    return problem.trial({"x": xs[rank]}, dys[rank], call, expected)


def _all_reduce(problem: Problem) -> Trial:
    rank, group = problem.place.rank, problem.place.group
    xs, dy = problem.each("x", lambda r: (problem.m, problem.n)), problem.make("dy", 0, problem.m, problem.n)

    def call(x: Tensor, implementation: str) -> Tensor:
        return tpk.all_reduce(x, group, implementation=implementation)

    return problem.trial({"x": xs[rank]}, dy, call, {"y": _sum(xs, problem.dtype), "dx": Bounded.exact(dy)})


def _sum(parts: Sequence[Tensor], dtype: torch.dtype) -> Bounded:
    """Over ranks, in the accumulation dtype, with one rounding."""
    ones = torch.ones(len(parts), 1, dtype=torch.float64)
    columns = torch.stack([part.double().flatten() for part in parts])
    total = Bounded.sum_of_products([columns.T], [ones.T], dtype=dtype).rounded(dtype)
    return Bounded(total.value.view(parts[0].shape), total.error.view(parts[0].shape))
