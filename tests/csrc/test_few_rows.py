"""The native GEMM of few rows, against fp64, on every instruction set that this CPU has.

csrc/cpu/few_rows*.cpp are driven by few_rows_exercise.cpp: a library for ctypes, and a program under the sanitizers,
which must also find faults that are seeded into copies of the source.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.csrc.exercises import CPU, DTYPES, SANITIZED, Rows, as_bytes, compile_one, link, run
from tpkernels.testing.numeric import Bounded

pytestmark = pytest.mark.cpu

ISAS = ("portable", "avx2", "avx512", "amx")
SERVED = (torch.float32, torch.bfloat16, torch.float16)
KERNELS = [(isa, dtype) for isa in ISAS for dtype in SERVED if (isa, dtype) != ("portable", torch.float16)]
"""What multiplies which dtype; without vector instructions fp16 is left to torch."""
HALVES = [kernel for kernel in KERNELS if kernel[1].itemsize == 2]
ROWS = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 50, 128)
Kernel = tuple[ctypes.CDLL, torch.dtype]
"""The library with the instruction set forced, and a dtype that it has kernels for."""
ENVIRONMENT = {"ASAN_OPTIONS": "detect_leaks=0", "LC_ALL": "C"}


@pytest.fixture(scope="module")
def library(built: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(built))
    int64, pointer = ctypes.c_int64, ctypes.c_void_p
    loaded.few_rows_test_multiply.argtypes = [
        ctypes.c_uint, pointer, int64, pointer, int64, pointer, pointer, int64, int64, int64, int64
    ]  # fmt: skip
    loaded.few_rows_test_error.restype = loaded.few_rows_test_isa_of.restype = ctypes.c_char_p
    return loaded


def named(kernel: tuple[str, torch.dtype]) -> str:
    return f"{kernel[0]}-{kernel[1]}"


@pytest.fixture(params=KERNELS, ids=named)
def kernel(library: ctypes.CDLL, request: pytest.FixtureRequest) -> Iterator[Kernel]:
    name, dtype = request.param
    isa, best = ISAS.index(name), library.few_rows_test_best_isa()
    if isa > best:
        pytest.skip(f"{name} kernels: cores would need it, these have {ISAS[best]}")
    check(library, library.few_rows_test_force_isa(isa))
    yield library, dtype
    check(library, library.few_rows_test_force_isa(best))


def check(library: ctypes.CDLL, status: int) -> None:
    if status != 0:
        raise ValueError(library.few_rows_test_error().decode())


def isa_of(native: ctypes.CDLL, dtype: torch.dtype) -> str:
    return native.few_rows_test_isa_of(DTYPES.index(dtype)).decode()


def call(native: ctypes.CDLL, x: Rows, w: Rows, y: Rows, bias: Rows | None = None) -> None:
    check(
        native,
        native.few_rows_test_multiply(
            DTYPES.index(x.dtype), x.address, x.stride, w.address, w.stride, bias.address if bias else None,
            y.address, y.stride, x.rows, w.rows, x.columns,
        ),
    )  # fmt: skip


def multiply(native: ctypes.CDLL, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    y = Rows(torch.zeros(x.shape[0], w.shape[0], dtype=x.dtype))
    call(native, Rows(x), Rows(w), y, None if bias is None else Rows(bias[None]))
    return y.values()


def integers(generator: torch.Generator, dtype: torch.dtype, *shape: int, largest: int = 7) -> Tensor:
    return torch.randint(-largest, largest + 1, shape, generator=generator).to(dtype)


def normal(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


# ---------------------------------------------------------------- values


def test_integers_are_exact_for_every_shape_and_placement(kernel: Kernel) -> None:
    """Up to the one rounding of the sum with its bias; what lies around y and between its rows stays."""
    native, dtype = kernel
    generator, choose = torch.Generator().manual_seed(3), random.Random(3)
    shapes = [*itertools.product(ROWS, (1, 9, 33), (0, 1, 31, 65)), *itertools.product((0, 1, 6, 20), (0, 40), (2100,))]
    for rows, columns, contraction in shapes:
        x, w = (integers(generator, dtype, count, contraction) for count in (rows, columns))
        bias = integers(generator, dtype, 1, columns) if choose.random() < 0.5 else None
        padded = [Rows(t, padding=choose.choice((0, 0, 5)), offset=choose.choice((0, 0, 2, 1, 63))) for t in (x, w)]
        y = Rows(torch.zeros(rows, columns, dtype=dtype), padding=choose.choice((0, 3)), offset=choose.choice((0, 1)))
        call(native, padded[0], padded[1], y, None if bias is None else Rows(bias, offset=choose.choice((0, 1))))
        exact = x.double() @ w.double().t() + (0 if bias is None else bias.double())
        case = f"{rows=} {columns=} {contraction=} bias={bias is not None}"
        assert torch.equal(y.values(), exact.to(dtype)), case
        assert y.guards_are_intact(), case
        for placed, values in zip(padded, (x, w), strict=True):
            assert torch.equal(as_bytes(placed.values()), as_bytes(values)), f"{case}: an operand was written to"


def test_real_numbers_are_within_the_bound_and_rows_do_not_depend_on_each_other(kernel: Kernel) -> None:
    native, dtype = kernel
    generator = torch.Generator().manual_seed(5)
    for columns, contraction in ((40, 1500), (17, 2049), (33, 64)):
        x, w, bias = (
            normal(generator, dtype, *shape) for shape in ((ROWS[-1], contraction), (columns, contraction), (columns,))
        )
        together = multiply(native, x, w, bias)
        Bounded.sum_of_products([x], [w], bias=bias, dtype=dtype).rounded(dtype).check(together, f"{contraction=}")
        for rows in ROWS:
            assert torch.equal(multiply(native, x[-rows:], w, bias), together[-rows:]), f"{rows=} {contraction=}"


def test_nan_and_infinity_come_where_fp64_has_them(kernel: Kernel) -> None:
    native, dtype = kernel
    generator = torch.Generator().manual_seed(7)
    for rows, contraction in itertools.product((1, 6, 18), (5, 96, 131)):
        x, w = integers(generator, dtype, rows, contraction), integers(generator, dtype, 21, contraction)
        for where, special in itertools.product((x, w), (torch.nan, torch.inf, -torch.inf)):
            for _ in range(2):
                place = torch.randint(where.numel(), (1,), generator=generator)
                where.view(-1)[place] = special
        bias = integers(generator, dtype, 21)
        bias[3], bias[4] = torch.inf, torch.nan
        exact = (x.double()[:, None] * w.double()).sum(-1) + bias.double()
        y = multiply(native, x, w, bias)
        assert torch.equal(y.isnan(), exact.isnan())
        assert torch.equal(y.nan_to_num(0.0), exact.to(dtype).nan_to_num(0.0))


def test_denormals_count_unless_it_is_amx_that_multiplies(kernel: Kernel) -> None:
    """The bound of what AMX loses: each product of a denormal, as if it were zero."""
    native, dtype = kernel
    tiny = torch.finfo(dtype).smallest_normal
    x, w = torch.full((3, 70), tiny / 4, dtype=dtype), torch.full((19, 70), 2.0**10, dtype=dtype)
    x[:, 1] = tiny
    flushes = isa_of(native, dtype) == "amx"
    expected = 2.0**10 * (tiny + (0 if flushes else 69 * tiny / 4))
    assert (multiply(native, x, w).double() == torch.tensor(expected).to(dtype).double()).all()
    small = torch.full((1, 64), tiny, dtype=dtype), torch.full((16, 64), 2.0**-9, dtype=dtype)
    sums = 64 * tiny * 2.0**-9
    assert (multiply(native, *small).double() == (0.0 if flushes else torch.tensor(sums).to(dtype).double())).all()


@pytest.mark.parametrize("kernel", HALVES, ids=named, indirect=True)
def test_a_sum_and_its_bias_are_rounded_once_and_ties_go_to_even(kernel: Kernel) -> None:
    native, dtype = kernel
    half_place = torch.finfo(dtype).eps / 2
    steps = torch.arange(1, 65, dtype=torch.float64)
    x = torch.tensor([[1.0, half_place]], dtype=dtype)
    w = torch.stack([1 + 2 * half_place * steps, torch.ones(64)], 1).to(dtype)
    exact = x.double() @ w.double().t()
    assert torch.equal(multiply(native, x, w), exact.to(dtype))
    more = torch.full((64,), half_place / 64, dtype=dtype)
    assert torch.equal(multiply(native, x, w, more), (exact + more.double()).to(dtype))
    large = torch.full((1, 8), torch.finfo(dtype).max, dtype=dtype)
    assert multiply(native, large, torch.ones(3, 8, dtype=dtype)).isinf().all()


def test_bad_arguments_are_refused_with_their_names_and_values(library: ctypes.CDLL) -> None:
    data = Rows(torch.zeros(1, 4))

    def attempt(dtype: int = 0, rows: int = 1, columns: int = 1, contraction: int = 4) -> None:
        at = data.address
        sizes = (rows, columns, contraction)
        check(library, library.few_rows_test_multiply(dtype, at, 4, at, 4, None, at, 4, *sizes))

    for arguments, message in (
        ({"dtype": 9}, r"dtype: 9 is none of 0 \(float32\), 1"),
        ({"dtype": 3}, "dtype: no kernel for few rows of 3"),
        ({"rows": 129}, "rows must be from 0 to 128, got 129"),
        ({"rows": -1}, "rows must be from 0 to 128, got -1"),
        ({"columns": -1}, "columns must be from 0"),
        ({"contraction": -2}, "contraction must be from 0"),
    ):
        with pytest.raises(ValueError, match=message):
            attempt(**arguments)
    check(library, library.few_rows_test_force_isa(ISAS.index("portable")))
    with pytest.raises(ValueError, match="dtype: no kernel for few rows of 2"):
        attempt(dtype=DTYPES.index(torch.float16))
    check(library, library.few_rows_test_force_isa(library.few_rows_test_best_isa()))
    with pytest.raises(ValueError, match="isa: 4 is none of 0 to 3"):
        check(library, library.few_rows_test_force_isa(4))


# ---------------------------------------------------------------- the binary, and its bounds


def test_isa_files_export_only_their_table_and_run_nothing_at_load(built: Path) -> None:
    """As those of the sums: see test_reduce.py."""
    nm, objdump = shutil.which("nm"), shutil.which("objdump")
    if nm is None or objdump is None:
        pytest.skip("needs nm and objdump (binutils)")
    for isa in ISAS[1:]:
        path = str(built.parent / f"few_rows_{isa}.o")
        symbols = run([nm, "--defined-only", "--extern-only", "--demangle", path]).stdout.splitlines()
        assert [line.split(" ", 2)[1:] for line in symbols] == [["T", f"tpk::{isa}_few_rows()"]]
        sections = run([objdump, "-h", path]).stdout
        assert ".text" in sections and ".init_array" not in sections and ".ctors" not in sections


@pytest.mark.slow("10 s: compiles the kernels with sanitizers")
def test_random_cases_are_clean_under_address_and_undefined_behaviour_sanitizers(exercise: Path, full: bool) -> None:
    done = run([str(exercise), "5000" if full else "200", "few_rows"], **ENVIRONMENT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("cases") >= 1


FAULTS = {
    "what follows a row of the weight is read": (
        "few_rows_portable.cpp", "few_rows_loops.h", "T::load_first(w + c * stride + at, rest)", "T::load(w + at)"
    ),
    "what follows a row of x is read": (
        "few_rows_portable.cpp", "few_rows_loops.h", "T::load_first(from + k * T::kElementBytes, call.contraction - k)",
        "T::load(from + k * T::kElementBytes)",
    ),
    "the rest of the columns is left out": (
        "few_rows_portable.cpp", "few_rows_loops.h", "whole_blocks<T, 1>(call,", "if (false) whole_blocks<T, 1>(call,"
    ),
    "AMX reads what follows a row of the weight": (
        "few_rows_amx.cpp", "few_rows_amx.cpp", "i < rest * 2 ? w[", "i < rest * 2 + 64 ? w["
    ),
    "AMX takes a whole last block": (
        "few_rows_amx.cpp", "few_rows_amx.cpp", "lesser(column, call.columns - block)", "column"
    ),
    "AMX mixes up the second group of rows": (
        "few_rows_amx.cpp", "few_rows_amx.cpp", "_tile_dpbf16ps(3, 5, 7)", "_tile_dpbf16ps(3, 4, 7)"
    ),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow("15 s of compiling: that the tests of this file can fail")
def test_a_seeded_fault_is_found(fault: str, exercise: Path, library: ctypes.CDLL, tmp_path: Path) -> None:
    unit, file, old, new = FAULTS[fault]
    if "amx" in unit and ISAS[library.few_rows_test_best_isa()] != "amx":
        pytest.skip("amx kernels: cores would need it")
    shutil.copytree(CPU, tmp_path / "cpu")
    edited = tmp_path / "cpu" / file
    text = edited.read_text()
    assert text.count(old) == 1, f"{file} has no {old!r} any more: seed this fault anew"
    edited.write_text(text.replace(old, new))
    faulty = compile_one(tmp_path / "cpu" / unit, tmp_path, SANITIZED)
    others = [path for path in exercise.parent.glob("*.o") if path.name != faulty.name]
    program = link(tmp_path / "faulty", [*others, faulty], SANITIZED)
    done = run([str(program), "200", "few_rows"], **ENVIRONMENT)
    assert done.returncode != 0, done.stdout
