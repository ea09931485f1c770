"""The compiled tree sums against torch's additions, bit for bit, on every instruction set that this CPU has, and
tree_sum_exercise.cpp under the sanitizers."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.csrc.exercises import DTYPES, run
from tpkernels.gemm import tree_sum
from tpkernels.gemm.native import native, why_not

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(native() is None, reason=why_not())]

SHAPES = ((0, 3), (1, 1), (3, 17), (2, 1100))
GUARD = 7.0


def numbers(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normal ones, and any pattern: NaNs, infinities, denormals, terms that are absorbed."""
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.2, raw.view(dtype).reshape(shape), values)


def padded(values: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """The same in rows that are ``padding`` elements apart, and what lies between them."""
    rows, columns = values.shape
    memory = torch.full((rows, columns + padding), GUARD, dtype=values.dtype)
    memory[:, :columns] = values
    return memory[:, :columns], memory[:, columns:]


def added(parts: list[Tensor], terms: int, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """By torch, one addition at a time."""
    wide = tree_sum.wide(parts[0].dtype)
    sums = []
    for first in range(0, len(parts), terms):
        total = parts[first].to(wide)
        for part in parts[first + 1 : first + terms]:
            total = total + part.to(wide)
        sums.append(total)
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return (sums[0] if bias is None else sums[0] + bias.to(wide)).to(dtype)


def assert_same(actual: Tensor, expected: Tensor, case: object) -> None:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.itemsize]
    actual = actual.contiguous()
    assert ((actual.view(bits) == expected.view(bits)) | (actual.isnan() & expected.isnan())).all(), case


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neighbours_are_added_first_and_the_sum_is_rounded_once(isa: str, dtype: torch.dtype) -> None:
    generator, choose = torch.Generator().manual_seed(3), random.Random(3)
    for shape, blocks, terms in itertools.product(SHAPES, (1, 2, 4, 8, 32), (1, 3)):
        of_products = [numbers(shape, dtype, generator) for _ in range(blocks * terms)]
        of_sums = [numbers(shape, tree_sum.wide(dtype), generator) for _ in range(blocks)]
        bias = numbers((1, shape[1]), dtype, generator)[0] if choose.random() < 0.5 else None
        for parts, count, added_last, to in (
            (of_products, terms, None, tree_sum.wide(dtype)),
            (of_sums, 1, bias, dtype),
        ):
            out, between = padded(torch.zeros(shape, dtype=to), choose.choice((0, 5)))
            placed = [padded(part, choose.choice((0, 0, 3)))[0] for part in parts]
            if parts is of_products:
                tree_sum.of_products(placed, out, terms)
            else:
                tree_sum.of_sums(placed, out, bias)
            case = (shape, blocks, count, added_last is not None, to)
            assert_same(out, added(parts, count, added_last, to), case)
            assert (between == GUARD).all(), case


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_the_compiled_core_the_bits_are_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_sum, "native", lambda: None)
    generator = torch.Generator().manual_seed(5)
    products = [numbers((3, 40), dtype, generator) for _ in range(12)]
    sums = [numbers((3, 40), tree_sum.wide(dtype), generator) for _ in range(4)]
    out, bias = torch.empty(3, 40, dtype=tree_sum.wide(dtype)), numbers((1, 40), dtype, generator)[0]
    tree_sum.of_products(products, out, 3)
    assert_same(out, added(products, 3, None, out.dtype), "products")
    rounded = torch.empty(3, 40, dtype=dtype)
    tree_sum.of_sums(sums, rounded, bias)
    assert_same(rounded, added(sums, 1, bias, dtype), "sums")


def test_a_number_of_parts_without_a_tree_is_refused() -> None:
    module: Any = native()
    for parts, terms in ((3, 1), (4, 3), (0, 1), (2, 0)):
        with pytest.raises(ValueError, match="power of two of blocks"):
            module.tree_of_products(module.Dtype.float32, [(0, 0)] * parts, terms, 0, 0, 1, 1)
    with pytest.raises(ValueError, match="at least 0, got -1 x 1"):
        module.tree_of_sums(module.Dtype.float32, [(0, 0)], 0, 0, 0, -1, 1)


@pytest.mark.slow("25 s: compiles the kernels with sanitizers")
def test_random_cases_are_clean_under_address_and_undefined_behaviour_sanitizers(exercise: Path, full: bool) -> None:
    """Each instruction set's bits are the portable one's, too."""
    done = run([str(exercise), "20000" if full else "500", "tree_sum"], ASAN_OPTIONS="detect_leaks=0")
    assert done.returncode == 0, done.stdout + done.stderr
