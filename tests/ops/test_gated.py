"""Gated activations (one output of gate and up): gradients in low precision, and that an exchange of the two is seen.

Values at every option are in test_values.py and test_fp8.py, gradients in fp64 in test_gradients.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ops.support import IMPLEMENTATIONS, new_group, own_part
from tpkernels.backends import row_gemms
from tpkernels.ops import activations, same_bits
from tpkernels.ops.activations import GATED
from tpkernels.testing.cases import GATHER, Case, call, operands
from tpkernels.testing.expected import check_bias_gradient, check_input_gradient, check_weight_gradient
from tpkernels.testing.numeric import Bounded, BoundExceeded, assert_bitwise_equal
from tpkernels.testing.payload import payload
from tpkernels.testing.references import check_values
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo


BASE = Case(GATHER, (48, 64), ns=(40, 40), bias=True)


def upstream(case: Case, rank: int) -> Tensor:
    return payload((case.shape[0], case.ns[0]), case.dtype, rank=rank, name="dy")


def judge(case: Case, group: Any) -> None:
    """Value and gradients against the bound of exact operands."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    parts = operands(case, world)
    x, ws, bs = own_part(parts, rank)
    leaves = [leaf.requires_grad_() for leaf in (x, *ws, *bs) if leaf is not None]
    (y,), _ = call(case, (x, ws, bs), group)
    check_values(case, operands(case, world), [y], None, rank)
    y.backward(upstream(case, rank).to(y.device))
    whole, act = torch.cat([p.detach() for p in parts.xs]), case.activation or ""
    by_rank: list[tuple[Bounded, Bounded]] = []
    for r in range(world):
        gate, up = (
            Bounded.sum_of_products([whole], [w.detach()], bias=None if b is None else b.detach(), dtype=case.dtype)
            for w, b in zip(parts.ws[r], parts.bs[r], strict=True)
        )
        by_rank.append(gate.gated_gradient(act, up, upstream(case, r), dtype=case.dtype))
    what = f"rank {rank}, {case}"
    grads = [leaf.grad.cpu() for leaf in leaves if leaf.grad is not None]
    assert len(grads) == len(leaves)
    dx, dws, dbs = grads[0], grads[1:3], grads[3:]
    # dx is one GEMM of gate and one of up, added up in the dtype: twice as many partials as there are ranks.
    dzs = [dz for pair in by_rank for dz in pair]
    check_input_gradient(
        dx, dzs, [w.detach() for p in parts.ws for w in p], start=rank * (case.shape[0] // world), what=what
    )
    for dz, dw in zip(by_rank[rank], dws, strict=True):
        check_weight_gradient(dw, dz, whole, what=what)
    for dz, db in zip(by_rank[rank], dbs, strict=bool(dbs)):
        check_bias_gradient(db, dz, what=what)


def judge_all(names: tuple[str, ...], dtype: torch.dtype, rows: int = 48) -> int:
    with new_group(3) as group:
        for name in names:
            for save, activation in ((False, "swiglu"), (True, "geglu")):
                case = BASE.but(shape=(rows, 64), dtype=dtype, activation=activation, save_gathered=save)
                judge(case.but(implementation=name), group)
    return len(names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_gradients_are_within_the_bound(ranks: Pools, world: int, dtype: torch.dtype) -> None:
    ranks(world).run(judge_all, IMPLEMENTATIONS, dtype)


def exchanged_value(good: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The activation goes to up."""

    def changed(name: str, gate: Tensor, up: Tensor, **options: Any) -> Tensor:
        return good(name, up, gate, **options)

    return changed


def exchanged_gradient(good: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def changed(*arguments: Any) -> tuple[Tensor, Tensor]:
        of_gate, of_up = good(*arguments)
        return of_up, of_gate

    return changed


FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "gate and up exchanged": (row_gemms, "gate_forward", exchanged_value),
    "their gradients exchanged": (same_bits, "gate_backward", exchanged_gradient),
}


def strike(fault: str, dtype: torch.dtype) -> list[str]:
    said = []
    owner, attribute, make = FAULTS[fault]
    with new_group(2) as group, mock.patch.object(owner, attribute, make(getattr(owner, attribute))):
        for name in IMPLEMENTATIONS:
            try:
                judge(BASE.but(implementation=name, dtype=dtype, activation="swiglu"), group)
            except BoundExceeded as error:
                said.append(str(error))
    return said


@pytest.mark.parametrize("fault", FAULTS)
def test_an_exchange_of_gate_and_up_is_seen(ranks: Pools, fault: str) -> None:
    for said in ranks(2).run(strike, fault, torch.bfloat16):
        assert len(said) == len(IMPLEMENTATIONS), said


@pytest.mark.cpu
@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gate_has_the_same_bits_in_its_own_place_and_in_another(activation: str, dtype: torch.dtype) -> None:
    gate, up = (5 * payload((7, 64), dtype, rank=0, name=name) for name in ("gate", "up"))
    expected = activations.gate_forward(activation, gate, up)
    for out in (torch.empty_like(gate), gate):
        assert activations.gate_forward(activation, gate, up, out=out) is out
        assert_bitwise_equal(out, expected, activation)


@pytest.mark.cpu
@pytest.mark.parametrize("own", [False, True])
def test_a_clamped_gate_in_blocks_has_the_bits_of_one_block(own: bool) -> None:
    """Also where the result takes the place of an operand; what is recorded is not cut."""
    gate, up = (5 * payload((37, 29), torch.float32, rank=0, name=name) for name in ("gate", "up"))
    whole = activations.gate_forward("clamped_swiglu", gate, up)
    with (
        mock.patch.object(activations, "BLOCK_ELEMENTS", 64),
        mock.patch.object(activations, "_clamped", wraps=activations._clamped) as block,
    ):
        found = activations.gate_forward("clamped_swiglu", gate, up, out=gate.clone() if own else None)
        assert block.call_count == -(-37 * 29 // 64)
        activations.gate_forward("clamped_swiglu", gate.clone().requires_grad_(), up).sum().backward()
        assert block.call_count == -(-37 * 29 // 64) + 1
    assert_bitwise_equal(found, whole, "in blocks")
