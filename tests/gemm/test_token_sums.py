"""Sums of rows by token: values, and that a token's bits are those of its own rows."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import Tensor

from tpkernels.backends import grouped_gemms
from tpkernels.backends.grouped_gemms import partial_tokens
from tpkernels.gemm import token_sums
from tpkernels.gemm.dealt import DealtRows
from tpkernels.gemm.grouped import Run, TokenRows
from tpkernels.gemm.token_sums import TokenSums, serves
from tpkernels.ops.contract import GroupedMatmulAllReduce
from tpkernels.testing.numeric import assert_bitwise_equal

pytestmark = pytest.mark.cpu

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
TOKENS, EXPERTS, TOP_K = 13, 6, 3


def rows_of(kind: str) -> TokenRows:
    """Of dealt experts a token has some of its rows, or none."""
    generator = torch.Generator().manual_seed(3)
    experts = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices
    return TokenRows(experts, EXPERTS) if kind == "all" else DealtRows(experts, [2, 4], [8, 5], 0)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("kind", ["all", "some"])
@pytest.mark.parametrize("weighted", [True, False])
def test_rows_are_weighted_in_fp32_and_rounded_once(dtype: torch.dtype, kind: str, weighted: bool) -> None:
    rows, columns = rows_of(kind), 21
    products, weights = numbers(rows.count, columns).to(dtype), numbers(rows.count, seed=1) if weighted else None
    found = TokenSums(rows.tokens, weights, rows.num_tokens, dtype)(products)
    terms = products.double() if weights is None else products.double() * weights.double()[:, None]
    exact = torch.zeros(rows.num_tokens, columns, dtype=FP64).index_add_(0, rows.tokens, terms)
    of_sums = torch.zeros_like(exact).index_add_(0, rows.tokens, terms.abs()) * 3 * TOP_K * torch.finfo(FP32).eps
    rounding = exact.abs() * torch.finfo(dtype).eps / 2
    assert found.dtype == dtype and bool(((found.double() - exact).abs() <= of_sums + rounding).all())


def test_three_parts_make_up_a_weight_exactly() -> None:
    weights = torch.cat([numbers(1000), numbers(1000).softmax(0), torch.tensor([0.0, 1.0, -0.1, 1e-20, 3e30])])
    parts = token_sums._split(weights, 3, BF16).view(-1, 3).double()
    assert torch.equal(parts.sum(1), weights.double())


def test_a_token_without_rows_is_zero_and_nothing_makes_nothing() -> None:
    sums = TokenSums(torch.tensor([2, 0, 2]), torch.tensor([1.0, 2.0, 3.0]), 4, BF16)
    assert sums(torch.ones(3, 2, dtype=BF16)).tolist() == [[2, 2], [0, 0], [4, 4], [0, 0]]
    none = torch.empty(0, dtype=torch.int64)
    assert TokenSums(none, torch.empty(0), 2, BF16)(torch.empty(0, 5, dtype=BF16)).tolist() == [[0.0] * 5] * 2
    assert TokenSums(none, None, 0, FP32)(torch.empty(0, 5)).shape == (0, 5)


def test_it_serves_what_three_parts_are_enough_for() -> None:
    assert [serves(torch.empty(1, dtype=dtype)) for dtype in (BF16, FP32, torch.float16, FP64)] == [True] * 2 + [
        False
    ] * 2
    assert not serves(torch.empty(1, dtype=BF16, device="meta"))


def call_of(rows: TokenRows, dtype: torch.dtype, *, weighted: bool, xs: int) -> GroupedMatmulAllReduce:
    """Products are of integers, exact however many rows a GEMM has; weights are not."""
    generator = torch.Generator().manual_seed(5)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)

    given, matrices = (
        [integers(rows.count, 8) for _ in range(xs)],
        [integers(rows.num_experts, 8, 150) for _ in range(xs)],
    )
    weights = torch.rand(rows.count, generator=generator) if weighted else None
    return GroupedMatmulAllReduce(
        given, matrices, rows, weights, expert_biases=integers(rows.num_experts, 150) if xs == 1 else None
    )


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("kind", "weighted", "xs"), [("all", True, 1), ("some", True, 1), ("all", False, 2)])
def test_a_partial_has_the_bits_of_its_chunks_and_turns(dtype: torch.dtype, kind: str, weighted: bool, xs: int) -> None:
    rows = rows_of(kind)
    call, last = call_of(rows, dtype, weighted=weighted, xs=xs), rows.num_tokens
    whole, chunks, in_turns, by_expert = (torch.empty(last, 150, dtype=dtype) for _ in range(4))
    partial_tokens(call, 0, last, whole)
    for start, stop in pairwise((0, 1, 4, 4, last)):
        partial_tokens(call, start, stop, chunks[start:stop])
    assert_bitwise_equal(chunks, whole, "chunks")
    with mock.patch.multiple(grouped_gemms, WAITING_BYTES=rows.count * 64 * dtype.itemsize, LEAST_COLUMNS=64):
        assert grouped_gemms._turns(call) == [(0, 64), (64, 128), (128, 150)]
        partial_tokens(call, 0, last, in_turns)
    assert_bitwise_equal(in_turns, whole, "turns")
    grouped_gemms._add_expert_by_expert(call, 0, last, by_expert)
    torch.testing.assert_close(by_expert, whole, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_runs_are_activated_together_where_they_lie_together() -> None:
    runs = [Run(0, 0, 4), Run(2, 4, 6), Run(3, 8, 9), Run(4, 9, 30), Run(5, 30, 31), Run(6, 31, 32)]
    parts = [[run.expert for run in part] for part in grouped_gemms._lying_together(runs, 6)]
    assert parts == [[0, 2], [3], [4], [5, 6]]
    assert list(grouped_gemms._lying_together([], 6)) == []
