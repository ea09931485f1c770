"""With `same_bits`, weights with a `main_grad` are refused on every rank, and the group goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels as tpk
from tests.ops.same_bits import SAME_BITS
from tests.ops.support import new_group
from tpkernels.comm.groups import resolve
from tpkernels.errors import UnsupportedProblem
from tpkernels.testing.spawn import Pools


@pytest.mark.gloo
def test_a_main_grad_is_refused_by_every_op(ranks: Pools) -> None:
    ranks(2).run(check_refused)


def check_refused() -> None:
    whole = tpk.Routing(torch.zeros(4, 1).long(), torch.ones(4, 1))
    own = tpk.Routing(*(tpk.array_split(one, 2)[dist.get_rank()] for one in whole))
    ops: dict[Callable[..., Any], tuple[Any, ...]] = {
        tpk.all_gather_matmul: (), tpk.copy_matmul: (), tpk.matmul_reduce_scatter: (), tpk.matmul_all_reduce: (),
        tpk.all_gather_grouped_matmul: (own,), tpk.copy_grouped_matmul: (whole,),
        tpk.grouped_matmul_reduce_scatter: (whole,), tpk.grouped_matmul_all_reduce: (whole,),
        tpk.dispatch_grouped_matmul: (own,),
    }  # fmt: skip
    with new_group() as group:
        resolve(group).keep_same_bits(SAME_BITS)
        for op, routing in ops.items():
            rows = 2 if op in (tpk.all_gather_matmul, tpk.all_gather_grouped_matmul, tpk.dispatch_grouped_matmul) else 4
            x = torch.ones(rows, 16, requires_grad=True)
            weight: Any = torch.ones(*((experts_of(op),) if routing else ()), 16, 16, requires_grad=True)
            weight.main_grad = torch.zeros_like(weight)
            with pytest.raises(UnsupportedProblem, match=f"main_grad does not go with same_bits={SAME_BITS}"):
                op(x, weight, *routing, group)
            with torch.no_grad():
                op(x, weight, *routing, group)
            del weight.main_grad
            total(op(x, weight, *routing, group)).backward()
            assert weight.grad is not None


def experts_of(op: Callable[..., Any]) -> int:
    """Of two, one stands on each rank where they are dealt out."""
    return 1 if op is tpk.dispatch_grouped_matmul else 2


def total(y: Any) -> Tensor:
    first: Tensor = y[0] if isinstance(y, tuple) else y
    return first.sum()
