"""Calls of every op on integer data, whose right result every rank knows: what trials keep a group busy with.

`CALLS[name](group, rank, size, salt, implementation)` makes one call with values that depend on rank and salt, and
raises `WrongOutput` unless every element of the result is exactly right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tpkernels as tpk
from tpkernels.partition import array_split_sizes, offsets

SHARED = "shared_memory"


class WrongOutput(AssertionError):
    """An op returned something else than the right result."""


def _value(rank: int, salt: int) -> int:
    """Different for each rank and neighbouring salts; sums of 64 stay exact in fp32."""
    return 1 + 7 * rank + salt % 97


def _check(result: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if result.shape != expected.shape or not torch.equal(result, expected):
        raise WrongOutput(f"{what}: got {result.flatten()[:4].tolist()}..., expected {expected.flatten()[:4].tolist()}")


def all_reduce(group: Any, rank: int, size: int, salt: int, implementation: str, rows: int = 4) -> None:
    x = torch.full((rows, 32), float(_value(rank, salt)))
    result = tpk.all_reduce(x, group, implementation=_of_collectives(implementation))
    total = sum(_value(r, salt) for r in range(size))
    _check(result, torch.full((rows, 32), float(total)), f"all_reduce on rank {rank}, salt {salt}")


def large_all_reduce(group: Any, rank: int, size: int, salt: int, implementation: str) -> None:
    """Over the size of one shot: reduce-scatter and all-gather in place."""
    all_reduce(group, rank, size, salt, implementation, rows=4096)


def all_gather(group: Any, rank: int, size: int, salt: int, implementation: str) -> None:
    x = torch.full((3, 16), float(_value(rank, salt)))
    result = tpk.all_gather(x, group, implementation=_of_collectives(implementation))
    expected = torch.cat([torch.full((3, 16), float(_value(r, salt))) for r in range(size)])
    _check(result, expected, f"all_gather on rank {rank}, salt {salt}")


def reduce_scatter(group: Any, rank: int, size: int, salt: int, implementation: str) -> None:
    """Rows that do not divide: row i holds i more."""
    rows = 4 * size + 1
    base = torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, 8)
    result = tpk.reduce_scatter(base + _value(rank, salt), group, implementation=_of_collectives(implementation))
    whole = size * base + sum(_value(r, salt) for r in range(size))
    sizes = array_split_sizes(rows, size)
    start = offsets(sizes)[rank]
    _check(result, whole[start : start + sizes[rank]], f"reduce_scatter on rank {rank}, salt {salt}")


def all_gather_matmul(group: Any, rank: int, size: int, salt: int, implementation: str, rows: int = 64) -> None:
    x = torch.full((rows, 32), float(_value(rank, salt)))
    result = tpk.all_gather_matmul(x, torch.ones(16, 32), group, implementation=implementation)
    expected = torch.cat([torch.full((rows, 16), 32.0 * _value(r, salt)) for r in range(size)])
    _check(result, expected, f"all_gather_matmul on rank {rank}, salt {salt}")


def matmul_reduce_scatter(group: Any, rank: int, size: int, salt: int, implementation: str) -> None:
    rows = 32 * size + 3
    x = torch.full((rows, 16), float(_value(rank, salt)))
    result = tpk.matmul_reduce_scatter(x, torch.ones(24, 16), group, implementation=implementation)
    total = 16.0 * sum(_value(r, salt) for r in range(size))
    _check(result, torch.full((array_split_sizes(rows, size)[rank], 24), total), f"matmul_reduce_scatter, rank {rank}")


def matmul_all_reduce(group: Any, rank: int, size: int, salt: int, implementation: str, rows: int = 2) -> None:
    x = torch.full((rows, 16), float(_value(rank, salt)))
    result = tpk.matmul_all_reduce(x, torch.ones(40, 16), group, implementation=implementation)
    total = 16.0 * sum(_value(r, salt) for r in range(size))
    _check(result, torch.full((rows, 40), total), f"matmul_all_reduce on rank {rank}, salt {salt}")


def large_matmul_all_reduce(group: Any, rank: int, size: int, salt: int, implementation: str) -> None:
    matmul_all_reduce(group, rank, size, salt, implementation, rows=2048)


CALLS: dict[str, Callable[[Any, int, int, int, str], None]] = {
    call.__name__: call
    for call in (
        all_reduce,
        large_all_reduce,
        all_gather,
        reduce_scatter,
        all_gather_matmul,
        matmul_reduce_scatter,
        matmul_all_reduce,
        large_matmul_all_reduce,
    )
}


def _of_collectives(implementation: str) -> str:
    """Collectives have nothing to overlap with: where fused ops are chunked they are unfused."""
    return "unfused" if implementation == "chunked" else implementation


def make_all(group: Any, rank: int, size: int, salt: int, implementation: str = SHARED) -> None:
    """Every call once."""
    for call in CALLS.values():
        call(group, rank, size, salt, implementation)
