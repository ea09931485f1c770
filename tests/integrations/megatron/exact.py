"""What a layer of Megatron's has to give on each rank, in fp64, with the bound of each element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.testing.numeric import Bounded

Results = tuple[Tensor | None, ...]
"""y, the bias that is given back, and the gradients of x, weight and bias."""
Expected = tuple[Bounded | None, ...]


class Given(NamedTuple):
    """What goes into a layer on a rank; x is whole, ``[sequence, batch, features]``."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dy: Tensor


def column(mine: Given, sequence_parallel: bool, options: dict[str, Any]) -> Expected:
    """y_r = x w_r^T + b_r, gathered or not; dx = sum_r dy_r w_r; dw_r = dy_r^T x; db_r = dy_r^T 1."""
    everyone, rank, world = _everyone(mine), dist.get_rank(), dist.get_world_size()
    gathers = options.get("gather_output", False) if options.get("runtime") is None else options["runtime"]
    outputs = [_product([one.x], [one.weight], None if _skips(options) else one.bias) for one in everyone]
    y = _cat(outputs, -1) if gathers else outputs[rank]
    parts = [one.dy.chunk(world, -1)[at] if gathers else one.dy for at, one in enumerate(everyone)]
    dx = _product(parts, [one.weight.t() for one in everyone])
    dx = _part(dx, 0) if sequence_parallel else dx
    return _rest(mine, options, y, dx, parts[rank], mine.x, parts[rank])


def row(mine: Given, sequence_parallel: bool, options: dict[str, Any]) -> Expected:
    """y = sum_r x_r w_r^T + b, or a part of the sequence; dx_r = dy w_r; dw_r = dy^T x_r; db = dy^T 1, of that part."""
    everyone, rank, world = _everyone(mine), dist.get_rank(), dist.get_world_size()
    inputs = mine.x.chunk(world, -1)
    y = _product(inputs, [one.weight for one in everyone], None if _skips(options) else mine.bias)
    y = _part(y, 0) if sequence_parallel else y
    dy = torch.cat([one.dy for one in everyone]) if sequence_parallel else mine.dy
    gradients = [_product([dy], [one.weight.t()]) for one in everyone]
    dx = gradients[rank] if options.get("input_is_parallel", True) else _cat(gradients, -1)
    return _rest(mine, options, y, dx, dy, inputs[rank], mine.dy)


def _rest(
    mine: Given, options: dict[str, Any], y: Bounded, dx: Bounded, dy: Tensor, x: Tensor, own: Tensor
) -> Expected:
    rows, own_rows = dy.flatten(0, 1), own.flatten(0, 1)
    dw = None if options.get("frozen") else _product([rows.t()], [x.flatten(0, 1).t()])
    bias = None if mine.bias is None or not _skips(options) else Bounded.exact(mine.bias)
    held = mine.bias is not None and not _skips(options)
    sums = _product([own_rows.t()], [torch.ones(1, len(own_rows))])
    db = Bounded(sums.value.flatten(), sums.error.flatten()) if held else None
    return y, bias, dx, dw, db


def _skips(options: dict[str, Any]) -> bool:
    return bool(options.get("skip_bias_add", False))


def _everyone(mine: Given) -> list[Given]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _product(a_parts: Sequence[Tensor], b_parts: Sequence[Tensor], bias: Tensor | None = None) -> Bounded:
    """sum_r a_r b_r^T + bias in fp32, whose ranks round what they add."""
    a, b = ([one.double() for one in parts] for parts in (a_parts, b_parts))
    dtype = torch.float32
    product = Bounded.sum_of_products(a, b, bias=bias, dtype=dtype, partials_rounded=len(a) > 1)
    return product.rounded(dtype)


def _cat(parts: Sequence[Bounded], dim: int) -> Bounded:
    return Bounded(torch.cat([one.value for one in parts], dim), torch.cat([one.error for one in parts], dim))


def _part(whole: Bounded, dim: int) -> Bounded:
    values, errors = (one.chunk(dist.get_world_size(), dim) for one in (whole.value, whole.error))
    return Bounded(values[dist.get_rank()], errors[dist.get_rank()])
