"""Calls of every op on integer data, whose right result every rank knows: what trials keep a group busy with.

`CALLS[name](group, rank, size, salt, implementation)` makes one call with values that depend on rank and salt, and
raises `WrongOutput` unless every element of the result is exactly right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch

from tpkernels.testing.cases import (
    ALL_GATHER,
    ALL_REDUCE,
    COLLECTIVES,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    Case,
    Operands,
    call,
    operands,
)
from tpkernels.testing.references import exact_outputs

SHARED = "shared_memory"
SALTS = 7
"""So many different values: more than slots and buffers that an earlier call could have left something in."""


ROWS = {
    "all_reduce": (ALL_REDUCE, 0, 4),
    "large_all_reduce": (ALL_REDUCE, 0, 4096),
    "all_gather": (ALL_GATHER, 3, 0),
    "reduce_scatter": (REDUCE_SCATTER, 4, 1),
    "all_gather_matmul": (GATHER, 64, 0),
    "matmul_reduce_scatter": (SCATTER, 32, 3),
    "matmul_all_reduce": (REDUCE, 0, 2),
    "large_matmul_all_reduce": (REDUCE, 0, 2048),
}
"""Op, rows for each rank, and further ones. Large sums are beyond one shot: reduce-scatter and all-gather in place."""


class WrongOutput(AssertionError):
    """An op returned something else than the right result."""


@lru_cache(maxsize=16 * SALTS)
def _known(name: str, rank: int, size: int, salt: int) -> tuple[Case, Operands, torch.Tensor]:
    """Kept, because a trial is to spend its time in calls."""
    op, each, more = ROWS[name]
    case = Case(op, (each * size + more, 16 * size), ns=(40,), integers=True, call=salt)
    parts = operands(case, size)
    exact = exact_outputs(case, parts, rank)
    assert exact is not None
    return case, parts, exact[0]


def prepared(
    name: str, rank: int, size: int, salt: int, implementation: str
) -> tuple[Callable[[Any], torch.Tensor], torch.Tensor]:
    """The call on a group, with nothing else to do but to make it, and the right result."""
    case, parts, expected = _known(name, rank, size, salt % SALTS)
    if case.op in COLLECTIVES and implementation == "chunked":  # nothing to overlap with
        implementation = "unfused"
    case, mine = case.but(implementation=implementation), parts.of(rank)
    return lambda group: call(case, mine, group)[0][0], expected


def _make(name: str, group: Any, rank: int, size: int, salt: int, implementation: str) -> None:
    make, expected = prepared(name, rank, size, salt, implementation)
    result = make(group)
    if result.shape != expected.shape or not torch.equal(result, expected):
        raise WrongOutput(
            f"{name} on rank {rank}, salt {salt}: got {result.flatten()[:4].tolist()}..., "
            f"expected {expected.flatten()[:4].tolist()}"
        )


CALLS: dict[str, Callable[[Any, int, int, int, str], None]] = {name: partial(_make, name) for name in ROWS}


def make_all(group: Any, rank: int, size: int, salt: int, implementation: str = SHARED) -> None:
    """Every call once."""
    for one in CALLS.values():
        one(group, rank, size, salt, implementation)
