"""Every fault passes unseen through some check that is in use elsewhere; none passes through this one."""

from __future__ import annotations

import pytest
import torch

from tpkernels.testing.expected import check_matmul_all_reduce
from tpkernels.testing.faults import FAULTS, ReducedCall, poisoned_memory, seed_fault
from tpkernels.testing.numeric import BoundExceeded
from tpkernels.testing.payload import payload

pytestmark = pytest.mark.cpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
WORLD, M, N, K = 4, 96, 72, 256


def make_call(dtype: torch.dtype, scale: float = 1.0, call: int = 1) -> ReducedCall:
    x_parts = tuple(payload((M, K // WORLD), dtype, rank=r, call=call, name="x", scale=scale) for r in range(WORLD))
    w_parts = tuple(payload((N, K // WORLD), dtype, rank=r, name="w", scale=scale) for r in range(WORLD))
    bias = payload((N,), dtype, name="bias", scale=scale * scale * K**0.5)
    previous = torch.zeros(M, N, dtype=dtype) if call == 0 else make_call(dtype, scale, call - 1).output()
    return ReducedCall(x_parts, w_parts, bias, previous)


def judge(y: torch.Tensor, call: ReducedCall) -> None:
    check_matmul_all_reduce(y, call.x_parts, call.w_parts, bias=call.bias)


@pytest.mark.parametrize("scale", [1.0, 0.01], ids=["unit", "small"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_correct_output_passes(dtype: torch.dtype, scale: float) -> None:
    for number in range(1, 6):
        call = make_call(dtype, scale, call=number)
        judge(call.output(), call)


@pytest.mark.parametrize("scale", [1.0, 0.01], ids=["unit", "small"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_seeded_fault_is_caught_at_its_place(dtype: torch.dtype, fault: str, scale: float) -> None:
    call = make_call(dtype, scale)
    for seed in range(5):
        faulty, place = seed_fault(fault, call, seed=seed)
        with pytest.raises(BoundExceeded) as caught:
            judge(faulty, call)
        assert place.contains(caught.value.box), (caught.value.box, place)
        assert f"worst at {list(caught.value.index)}" in str(caught.value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_single_element_without_one_partial_is_caught(dtype: torch.dtype) -> None:
    call = make_call(dtype)
    y = call.output()
    y[3, 5] = call.output(missing=0)[3, 5]
    with pytest.raises(BoundExceeded, match=r"1 of 6912 elements .* worst at \[3, 5\]"):
        judge(y, call)


def test_summing_in_bf16_is_caught_as_a_loss_of_quality() -> None:
    call = make_call(torch.bfloat16)
    total = call.bias
    for x, w in zip(call.x_parts, call.w_parts, strict=True):
        total = total + x @ w.T
    with pytest.raises(BoundExceeded):
        judge(total, call)


def test_an_unknown_fault_names_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"missing_partial.*one_nan"):
        seed_fault("typo", make_call(torch.float32))


def test_an_element_that_is_never_written_is_nan_in_poisoned_memory() -> None:
    call = make_call(torch.bfloat16)
    correct = call.output()
    with poisoned_memory():
        y = torch.empty_like(correct)
        y[:90] = correct[:90]
        assert torch.empty(3, dtype=torch.int64).tolist() == [torch.iinfo(torch.int64).max] * 3
    with pytest.raises(BoundExceeded, match=r"432 of 6912 elements .* within \[90:96, 0:72\].*actual nan"):
        judge(y, call)
    assert not torch.are_deterministic_algorithms_enabled()
