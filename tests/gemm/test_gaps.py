"""Products of matrices with gaps have the bits of dense ones, whatever the library makes of gaps."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.ops.same_bits import assert_same
from tpkernels.gemm import canonical, gaps

pytestmark = pytest.mark.cpu
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """What the library of one test answers is not that of the next."""
    gaps._keeps_bits.cache_clear()
    yield
    gaps._keeps_bits.cache_clear()


def part(rows: int, columns: int, dtype: torch.dtype, pick: random.Random) -> Tensor:
    """A block of rows or of columns of a larger matrix, or the transpose of one."""
    if pick.random() < 0.5:
        return part_of_rows(columns, rows, dtype, pick).t()
    return part_of_rows(rows, columns, dtype, pick)


def part_of_rows(rows: int, columns: int, dtype: torch.dtype, pick: random.Random) -> Tensor:
    blocks, block = pick.choice([(1, 0), (2, 1), (4, 0), (4, 3)])
    generator = torch.Generator().manual_seed(pick.randrange(1000))
    whole = torch.randn(rows, columns * blocks, generator=generator).to(dtype)
    return whole[:, columns * block : columns * (block + 1)]


def dense_product(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """One call with a dense copy of everything, in the order of dimensions that each has."""
    left, right = (one.t().clone(memory_format=torch.contiguous_format).t() if one.stride(0) == 1 else
                   one.clone(memory_format=torch.contiguous_format) for one in (x, matrix))  # fmt: skip
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def drawn(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    pick = random.Random(seed)
    m, n, k = (pick.choice([2, 3, 8, 17, 64, 100, 300]) for _ in range(3))
    dtype = DTYPES[seed % 3]
    x, matrix, out = part(m, k, dtype, pick), part(k, n, dtype, pick), part_of_rows(m, n, dtype, pick)
    return x, matrix, out, torch.randn(n).to(dtype) if pick.random() < 0.3 else None


def test_any_part_gives_the_bits_of_dense_matrices() -> None:
    direct = 0
    for seed in range(60):
        x, matrix, out, bias = drawn(seed)
        direct += gaps.keeps_bits(x, matrix, out, bias)
        canonical.multiply(x, matrix, out, bias)
        assert_same(out, dense_product(x, matrix, bias), f"draw {seed}")
    assert direct > 20  # on the CPUs that were tried, nearly all: elsewhere copies are made, and this may be lower


def test_a_library_that_gives_other_bits_for_gaps_gets_dense_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = gaps.call, list[bool]()

    def sensitive(x: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None) -> None:
        has_gaps = any(max(one.stride()) > min(one.shape) for one in (x, matrix, out) if one.shape[0] == one.shape[1])
        calls.append(has_gaps)
        right(x, matrix, out, bias)
        if has_gaps:
            out.copy_(torch.nextafter(out, out + 1))

    monkeypatch.setattr(gaps, "call", sensitive)
    square = torch.randn(3, 64, 128)
    for place in range(3):
        operands = [one if index == place else one[:, :64].clone() for index, one in enumerate(square)]
        x, matrix, out = (one[:, 64:] if index == place else one for index, one in enumerate(operands))
        canonical.multiply(x, matrix, out)
        assert_same(out, dense_product(x, matrix, None), f"gaps in operand {place}")
        assert calls == [True, False], calls  # asked once, and then copied
        canonical.multiply(x, matrix, out)
        assert calls == [True, False], "asked again"
        calls.clear()


def test_parts_are_multiplied_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr(gaps, "keeps_bits", lambda *_: True)
    monkeypatch.setattr(gaps, "call", lambda *operands: seen.extend(operands[:3]))
    given = [one[:, 64:] for one in torch.zeros(3, 64, 128)]
    canonical.multiply(*given)
    assert [one.data_ptr() for one in seen] == [one.data_ptr() for one in given]
