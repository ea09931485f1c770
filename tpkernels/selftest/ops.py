"""The public ops, forward and backward, against the unfused equations in fp64.

Every rank makes the operands of all ranks from their names, and its own expectation from them; nothing is sent for it.
The shards are even, uneven and empty, and, except in a quick run, large enough to travel in several chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.partition import array_split_sizes, offsets
from tpkernels.selftest.compare import Subject, Trial, implementations_of
from tpkernels.testing.cases import (
    ALL_REDUCE,
    COLLECTIVES,
    COPY,
    GATHER,
    OPS,
    REDUCE,
    Case,
    call,
    operands,
    upstream,
)
from tpkernels.testing.numeric import Bounded
from tpkernels.testing.payload import payload
from tpkernels.testing.references import expected_gradients, expected_outputs

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
        """An operand of a rank, in real numbers."""
        return payload(shape, self.dtype, rank=rank, name=name)

    def mine(self, whole: Bounded) -> Bounded:
        """This rank's rows."""
        rank = self.place.rank
        return whole.narrow(0, offsets(self.rows)[rank], self.rows[rank])


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

    def subject(op: str) -> Subject:
        named = "matmul_all_reduce" if op == COPY else op  # the op whose implementations it has
        return Subject(op, implementations_of(named), lambda: (_trial(op, problem) for problem in problems(place)))

    return [subject(op) for op in OPS]


def _case(op: str, problem: Problem) -> Case:
    """Gathering ops have `n` output features on every rank and an activation; collectives have `n` columns."""
    sizes = None if op in (COPY, REDUCE, ALL_REDUCE) else problem.rows
    common: dict[str, Any] = {"sizes": sizes, "dtype": problem.dtype, "integers": problem.integers}
    if op in COLLECTIVES:
        return Case(op, (problem.m, problem.n), **common)
    if op in (GATHER, COPY):
        common["activation"] = None if problem.integers else "gelu"
    else:
        common["k_sizes"] = problem.inner
    return Case(op, (problem.m, problem.k), ns=(problem.n,), bias=True, **common)


def _trial(op: str, problem: Problem) -> Trial:
    """Forward, and back from a gradient of y: y, and d of each input."""
    case, place = _case(op, problem), problem.place
    parts, dys = operands(case, place.world_size), upstream(case, place.world_size)
    (y,) = expected_outputs(case, parts, place.rank)
    gradients = expected_gradients(case, parts, dys, place.rank)

    def run(implementation: str) -> dict[str, Tensor]:
        x, ws, bs = parts.of(place.rank)
        inputs = dict(zip(("x", "weight", "bias"), (x, *ws, *bs), strict=False))
        leaves = {
            name: one.to(place.device, copy=True).requires_grad_() for name, one in inputs.items() if one is not None
        }
        own = leaves["x"], [leaves["weight"]] if ws else [], [leaves.get("bias")] if bs else []
        (out,), _ = call(case.but(implementation=implementation), own, place.group)
        out.backward(dys[place.rank].to(place.device))
        grads = {f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        return {"y": out.detach(), **grads}

    return Trial(problem.where, run, {"y": y} | {f"d{name}": one for name, one in gradients.items()}, problem.integers)
