"""Inputs for tests: reproducible, different on every rank and in every call, or integers whose sums are exact.

Equal payloads hide a shard delivered to the wrong place; payloads repeated between calls hide a stale chunk. So the
generator takes the rank and the call, and the operand's name. Integer payloads make every order of summation give the
same bits, whatever the chunk count: compare with `assert_bitwise_equal`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["exact_limit", "exact_matmul", "integer_payload", "payload"]


def payload(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    rank: int = 0,
    call: int = 0,
    name: str = "",
    scale: float = 1.0,
) -> Tensor:
    """Normal values of standard deviation `scale`, a function of all arguments."""
    values = torch.randn(tuple(shape), generator=_generator(rank, call, name), dtype=torch.float64)
    return (scale * values).to(dtype)


def integer_payload(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    rank: int = 0,
    call: int = 0,
    name: str = "",
    largest: int = 1,
    nonzeros: int | None = None,
) -> Tensor:
    """Integers in [-largest, largest], with at most `nonzeros` of each row (last dim) different from 0.

    An activation with the default (an eighth of half the dtype's exact range: 16 in bf16, 128 in fp16) times a
    dense weight of -1, 0 and 1 has exact sums over up to 8 ranks, and room for a bias. `exact_matmul` checks it.
    """
    generator = _generator(rank, call, name)
    values = torch.randint(-largest, largest + 1, tuple(shape), generator=generator)
    width = values.shape[-1] if values.dim() else 1
    budget = exact_limit(dtype) // (16 * largest) if nonzeros is None else nonzeros
    if budget < width:
        order = torch.rand(tuple(shape), generator=generator).argsort(-1)
        values = values * (order < budget)
    return values.to(dtype)


def exact_limit(dtype: torch.dtype) -> int:
    """Every integer up to this magnitude is a number of the dtype: 256 for bf16, 2048 for fp16."""
    return round(2 / torch.finfo(dtype).eps)


def exact_matmul(
    a_parts: Sequence[Tensor], b_parts: Sequence[Tensor], *, bias: Tensor | None = None, dtype: torch.dtype
) -> Tensor:
    """sum_r a_r b_r^T + bias, for integers whose every partial sum in any order is exact in `dtype`.

    Raises ValueError when that is not so: a bitwise test would then depend on the order of summation.
    """
    pairs = [(a.double(), b.double()) for a, b in zip(a_parts, b_parts, strict=True)]
    offset = 0.0 if bias is None else bias.double()
    total = sum((a @ b.T for a, b in pairs), start=torch.zeros((), dtype=torch.float64)) + offset
    reach = sum((a.abs() @ b.abs().T for a, b in pairs), start=torch.zeros((), dtype=torch.float64))
    reach = reach + (0.0 if bias is None else bias.double().abs())
    if reach.numel() and float(reach.max()) > exact_limit(dtype):
        raise ValueError(
            f"partial sums reach {float(reach.max()):g}, but {dtype} is exact only up to {exact_limit(dtype)}: "
            f"use fewer nonzeros or a smaller largest"
        )
    operands = [operand for pair in pairs for operand in pair] + ([] if bias is None else [bias.double()])
    if any(bool((operand != operand.round()).any()) for operand in operands):
        raise ValueError("operands must be integers")
    return total.to(dtype)


def _generator(rank: int, call: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{name}/rank {rank}/call {call}".encode()))
