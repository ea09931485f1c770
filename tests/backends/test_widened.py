"""bf16 and fp16 multiplied in fp32: values, one rounding, and that all ranks do the same and say so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels as tpk
from tests.ops.support import IMPLEMENTATIONS, new_group, run_and_check
from tpkernels.gemm import widened
from tpkernels.testing.cases import COPY, GATHER, REDUCE, SCATTER, Case
from tpkernels.testing.numeric import Bounded, assert_bitwise_equal
from tpkernels.testing.payload import integer_payload, payload
from tpkernels.testing.spawn import Pools

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@contextmanager
def small_blocks() -> Iterator[None]:
    """Blocks of three rows and of two columns, for a contraction of 20."""
    with ExitStack() as stack:
        for name, size in (("_BLOCK_OF_X", 60), ("_BLOCK_OF_MATRIX", 40), ("_BLOCK_OF_RESULT", 100)):
            stack.enter_context(mock.patch.object(widened, name, size))
        yield


# ---------------------------------------------------------------- the GEMM


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("transposed", [False, True])
def test_values_are_within_the_bound_of_one_rounding(dtype: torch.dtype, transposed: bool) -> None:
    x, weight = payload((7, 20), dtype), payload((5, 20), dtype, name="w")
    if transposed:  # as in the gradient of a weight
        x = x.t().contiguous().t()
    row, whole = payload((5,), dtype, name="b"), payload((7, 5), dtype, name="c")
    with small_blocks():
        for matrix in (weight.t(), weight.t().contiguous()):
            for bias in (None, row, whole):
                out = torch.full((7, 5), float("nan"), dtype=dtype)
                widened.multiply(x, matrix, out, bias)
                bound = Bounded.sum_of_products([x], [weight], dtype=dtype, partials_rounded=False)
                if bias is not None:
                    bound = bound.plus(bias)
                bound.rounded(dtype).check(out, f"{dtype} bias {None if bias is None else bias.dim()}")


@pytest.mark.cpu
def test_integers_are_exact_and_nothing_rounds_before_the_bias() -> None:
    x, weight = integer_payload((7, 20), BF16), integer_payload((5, 20), BF16, name="w")
    out = torch.empty(7, 5, dtype=BF16)
    with small_blocks():
        widened.multiply(x, weight.t(), out)
    assert_bitwise_equal(out, (x.double() @ weight.double().t()).to(BF16), "integers")
    # 257 is no number of bf16: a product that was rounded before the bias would give 0.
    ones, addend = torch.ones(1, 257, dtype=BF16), torch.full((1, 1), -256.0, dtype=BF16)
    widened.multiply(ones, ones.t(), addend, addend)
    assert addend.item() == 1.0


@pytest.mark.cpu
def test_sizes_of_nothing() -> None:
    for rows, contraction, columns in ((0, 3, 2), (2, 3, 0), (2, 0, 2)):
        out = torch.full((rows, columns), 5.0, dtype=BF16)
        widened.multiply(torch.ones(rows, contraction, dtype=BF16), torch.ones(contraction, columns, dtype=BF16), out)
        assert not out.any()


@pytest.mark.cpu
def test_rows_are_those_of_the_most_demanding_rank() -> None:
    assert widened.agreed_rows([1, 16, 128]) == 128
    assert widened.agreed_rows([1, None]) is None
    with mock.patch.object(widened, "least_rows", lambda *_: 1):
        assert widened.told(FP32, "cpu") is None and widened.told(BF16, "cuda") is None
        with mock.patch.dict(os.environ, TPKERNELS_CALIBRATE="0"):
            assert widened.told(BF16, "cpu") is None


def least_rows_of(library_s: list[float], widened_s: list[float]) -> int | None:
    times = iter(zip(library_s, widened_s, strict=True))
    with mock.patch.object(widened, "_least_seconds", lambda *_: list(next(times))):
        widened.least_rows.cache_clear()
        try:
            return widened.least_rows(BF16, 1)
        finally:
            widened.least_rows.cache_clear()


@pytest.mark.cpu
def test_the_measurement_decides_from_how_many_rows_it_wins() -> None:
    """128 rows are measured first, then 16, then one; a gain below three tenths is taken for noise."""
    assert least_rows_of([8.0, 8.0, 8.0], [1.0, 1.0, 1.0]) == 1
    assert least_rows_of([8.0, 8.0, 8.0], [1.0, 1.0, 7.0]) == 16
    assert least_rows_of([8.0, 8.0], [1.0, 9.0]) == 128
    assert least_rows_of([8.0], [6.0]) is None


AVX2 = """
import torch
from tpkernels.gemm import widened
torch.set_num_threads(1)
print(widened.least_rows(torch.bfloat16, 1))
"""


@pytest.mark.cpu
def test_a_core_without_units_for_bf16_widens(full: bool) -> None:
    """oneDNN held to AVX2 stands for such a core."""
    if not full:
        pytest.skip("--full: a measurement, 5 s of a core")
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "TPKERNELS_CALIBRATE": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", AVX2], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert int(ran.stdout) <= 128


# ---------------------------------------------------------------- the ops


@contextmanager
def widening_from(rows: int | None) -> Iterator[list[tuple[int, ...]]]:
    """This rank was measured to win from so many rows; what comes out is the rows of the GEMMs made in fp32."""
    made: list[tuple[int, ...]] = []
    multiply = widened.multiply

    def noted(x: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        made.append(tuple(out.shape))
        multiply(x, matrix, out, bias)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(widened, "least_rows", lambda *_: rows))
        stack.enter_context(mock.patch.object(widened, "multiply", noted))
        widened._own_rows.cache_clear()
        stack.callback(widened._own_rows.cache_clear)
        yield made


CASES = [
    Case(op, (9, 16), sizes=sizes, dtype=dtype, bias=True, activation=activation, implementation=name)
    for op, sizes, activation in (
        (GATHER, (5, 4), "gelu"),
        (SCATTER, (5, 4), None),
        (REDUCE, None, None),
        (COPY, None, None),
    )
    for name in IMPLEMENTATIONS
    for dtype in (BF16, FP16, FP32)
    if not (op == COPY and name != "chunked")
]


def every_op(integers: bool) -> list[tuple[str, torch.dtype, int]]:
    found = []
    with new_group(2, calibrate=True) as group, widening_from(1) as made:
        for case in CASES:
            for call in range(3):  # the third one may be repeated on the fast path
                del made[:]
                run_and_check(case.but(call=call, integers=integers), group)
                found.append((f"{case.op} {case.implementation} {call}", case.dtype, len(made)))
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("integers", [False, True])
def test_every_op_and_implementation_is_right_and_widens(ranks: Pools, integers: bool) -> None:
    for found in ranks(2).run(every_op, integers):
        assert len(found) == 3 * len(CASES)
        for what, dtype, count in found:
            assert (count == 0) == (dtype == FP32), f"{what} {dtype}: {count} GEMMs in fp32"


def gradients() -> list[bool]:
    """Whether the gradient of the weight is made in fp32, last of all."""
    counts = []
    rank = dist.get_rank()
    with new_group(calibrate=True) as group, widening_from(1) as made:
        for op in (tpk.all_gather_matmul, tpk.matmul_reduce_scatter, tpk.copy_matmul):
            x, w = (payload(shape, BF16, rank=rank).requires_grad_() for shape in ((8, 6), (4, 6)))
            op(x, w, group, implementation="chunked").sum().backward()
            assert x.grad is not None and w.grad is not None
            del made[:-1]
            counts.append(made == [(4, 6)])
    return counts


@pytest.mark.gloo
def test_gradients_of_weights_widen(ranks: Pools) -> None:
    assert ranks(2).run(gradients) == [[True] * 3] * 2


def who_widens(by_rank: list[int | None]) -> list[Any]:
    found = []
    with new_group(calibrate=True) as group, widening_from(by_rank[dist.get_rank()]) as made:
        for rows in (4, 64):
            del made[:]
            x, w = payload((rows, 8), BF16, rank=dist.get_rank()), payload((6, 8), BF16, rank=dist.get_rank())
            tpk.matmul_all_reduce(x, w, group, implementation="chunked")
            said = tpk.explain("matmul_all_reduce", m=rows, n=6, k=16, dtype=BF16, group=group)
            told = "bf16 is widened to fp32 in blocks" in str(said).replace("bfloat16", "bf16")
            assert said.costs.measured and said.costs.widens == told
            found.append((bool(made), told))
    return found


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("by_rank", "four", "many"),
    [([1, 1], True, True), ([1, 64], False, True), ([1, None], False, False), ([None, None], False, False)],
)
def test_all_ranks_widen_or_none_and_explain_says_which(
    ranks: Pools, by_rank: list[int | None], four: bool, many: bool
) -> None:
    assert ranks(2).run(who_widens, by_rank) == [[(four, four), (many, many)]] * 2
