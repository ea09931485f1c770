"""The native sums and copies, against torch bit for bit, on every instruction set that this CPU has.

csrc/cpu/reduce*.cpp are driven by reduce_exercise.cpp: a library for ctypes, and a program under the sanitizers.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.csrc.exercises import DTYPES, Rows, as_bytes, run

pytestmark = pytest.mark.cpu

ISAS = ("portable", "avx2", "avx512")
COLUMNS = (0, 1, 7, 15, 16, 17, 31, 33, 1000)
NEVER = 2**62


@pytest.fixture(scope="module")
def library(built: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(built))
    int64, pointer = ctypes.c_int64, ctypes.c_void_p
    loaded.reduce_test_sum.argtypes = [
        ctypes.c_uint, ctypes.POINTER(pointer), ctypes.POINTER(int64), ctypes.c_int, pointer, pointer, *[int64] * 3
    ]  # fmt: skip
    loaded.reduce_test_copy.argtypes = [pointer, int64, pointer, int64, int64, int64]
    loaded.reduce_test_force_streaming_threshold.argtypes = [int64]
    loaded.reduce_test_streaming_threshold.restype = int64
    loaded.reduce_test_error.restype = ctypes.c_char_p
    return loaded


@pytest.fixture(params=range(len(ISAS)), ids=ISAS)
def native(library: ctypes.CDLL, request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    best = library.reduce_test_best_isa()
    if request.param > best:
        pytest.skip(f"{ISAS[request.param]} kernels: cores would need it, these have {ISAS[best]}")
    threshold = library.reduce_test_streaming_threshold()
    check(library, library.reduce_test_force_isa(request.param))
    yield library
    check(library, library.reduce_test_force_isa(best))
    library.reduce_test_force_streaming_threshold(threshold)


def check(library: ctypes.CDLL, status: int) -> None:
    if status != 0:
        raise ValueError(library.reduce_test_error().decode())


def call_sum(native: ctypes.CDLL, parts: Sequence[Rows], out: Rows, bias: Rows | None = None) -> None:
    addresses = (ctypes.c_void_p * len(parts))(*(part.address for part in parts))
    strides = (ctypes.c_int64 * len(parts))(*(part.stride for part in parts))
    check(
        native,
        native.reduce_test_sum(
            DTYPES.index(out.dtype), addresses, strides, len(parts), bias.address if bias else None,
            out.address, out.stride, out.rows, out.columns,
        ),
    )  # fmt: skip


def sum_of(native: ctypes.CDLL, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> torch.Tensor:
    out = Rows(torch.zeros_like(parts[0]))
    call_sum(native, [Rows(part) for part in parts], out, None if bias is None else Rows(bias[None]))
    return out.values()


def reference(parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> torch.Tensor:
    wide_dtype = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    wide = parts[0].to(wide_dtype, copy=True)
    for part in parts[1:]:
        wide += part.to(wide_dtype)
    if bias is not None:
        wide += bias.to(wide_dtype)
    return torch.empty_like(parts[0]).copy_(wide)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, except that any NaN equals any other."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


def any_bits(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Every pattern is as likely: NaNs, infinities, denormals, and terms that are absorbed or cancel."""
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(tuple(shape))


def near_values(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


# ---------------------------------------------------------------- sums


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_equals_torch_for_every_shape_number_of_parts_and_placement(
    native: ctypes.CDLL, dtype: torch.dtype
) -> None:
    generator, choose = torch.Generator().manual_seed(3), random.Random(3)
    for columns, rows, num_parts in itertools.product(COLUMNS, (0, 1, 3), (1, 2, 3, 4, 5, 64)):
        draw = choose.choice((any_bits, near_values))
        parts = [draw((rows, columns), dtype, generator) for _ in range(num_parts)]
        bias = draw((columns,), dtype, generator) if choose.random() < 0.5 else None

        def place(values: torch.Tensor) -> Rows:
            return Rows(values, padding=choose.choice((0, 0, 5)), offset=choose.choice((0, 0, 2, 1, 63)))

        placed = [place(part) for part in parts]
        in_place = choose.random() < 0.3
        out = placed[0] if in_place else place(torch.zeros_like(parts[0]))
        native.reduce_test_force_streaming_threshold(choose.choice((0, NEVER)))
        call_sum(native, placed, out, None if bias is None else place(bias[None]))
        case = f"{columns=} {rows=} {num_parts=} bias={bias is not None} {in_place=}"
        assert same_bits(out.values(), reference(parts, bias)), case
        assert out.guards_are_intact(), case
        for part, values in zip(placed[in_place:], parts[in_place:], strict=True):
            assert torch.equal(as_bytes(part.values()), as_bytes(values)), f"{case}: a part was written to"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_of_two_parts_equals_torch_add(native: ctypes.CDLL, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    for draw in (any_bits, near_values):
        a, b = (draw((3, 40_001), dtype, generator) for _ in range(2))
        assert same_bits(sum_of(native, [a, b]), torch.add(a, b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_survives_widening_and_rounding(native: ctypes.CDLL, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)[None]
    assert same_bits(sum_of(native, [every]), every)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ties_go_to_even_and_sums_are_rounded_once(native: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Every value plus half of its last place (a tie), and plus a little more or less than that."""
    magnitudes = torch.arange(0x7F7F if dtype == torch.bfloat16 else 0x7BFF, dtype=torch.int32).to(torch.int16)
    values = torch.stack([magnitudes.view(dtype), -magnitudes.view(dtype)])
    half_place = (torch.nextafter(values.float().to(dtype), torch.tensor(torch.inf, dtype=dtype)).double()
                  - values.double()).div(2).to(dtype)  # fmt: skip
    tiny = (half_place.double() / 64).to(dtype)
    assert (half_place != 0).any()
    for parts in ([values, half_place], [values, half_place, tiny], [values, half_place, -tiny]):
        assert same_bits(sum_of(native, parts), reference(parts))
    wide = sum_of(native, [values, half_place, -half_place])
    assert torch.equal(wide, values), "adding and taking away half a place must cancel before the rounding"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_infinity_denormals_and_signed_zeros_follow_ieee(native: ctypes.CDLL, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    specials = [0.0, -0.0, torch.nan, torch.inf, -torch.inf, info.max, -info.max, info.tiny, -info.tiny, 1.0]
    specials += [info.smallest_normal / 2, -info.smallest_normal / 4, info.eps, 1 - info.eps]
    pairs = torch.tensor(list(itertools.product(specials, specials)), dtype=torch.float64).to(dtype)
    a, b = pairs[:, 0][None].contiguous(), pairs[:, 1][None].contiguous()
    assert same_bits(sum_of(native, [a, b]), reference([a, b]))
    assert same_bits(sum_of(native, [a], bias=b[0]), reference([a, b]))
    denormal = torch.full((1, 37), info.smallest_normal / 4, dtype=dtype)
    assert (sum_of(native, [denormal, denormal]) == info.smallest_normal / 2).all(), "denormals were flushed"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_are_added_in_order_and_the_bias_last(native: ctypes.CDLL, dtype: torch.dtype) -> None:
    """1 is absorbed by the large value or not, depending on when it is added."""
    large = {torch.float64: 2.0**60, torch.float16: 2.0**15, torch.float32: 2.0**30, torch.bfloat16: 2.0**30}[dtype]
    one = 2.0**-12 if dtype == torch.float16 else 1.0
    rows = [torch.full((1, 70), value, dtype=dtype) for value in (large, one, -large)]
    for order in itertools.permutations(range(3)):
        a, b, c = (rows[i] for i in order)
        expected = one if abs(order.index(0) - order.index(2)) == 1 and order.index(1) == 2 else 0.0
        assert (sum_of(native, [a, b, c]) == expected).all()
        assert (sum_of(native, [a, b], bias=c[0]) == expected).all()


def test_all_instruction_sets_give_the_same_bits(library: ctypes.CDLL) -> None:
    best = library.reduce_test_best_isa()
    generator = torch.Generator().manual_seed(7)
    for dtype in DTYPES:
        parts = [any_bits((2, 20_011), dtype, generator) for _ in range(4)]
        results = []
        for isa in range(best + 1):
            check(library, library.reduce_test_force_isa(isa))
            assert library.reduce_test_active_isa() == isa
            results.append(sum_of(library, parts))
        for isa, result in enumerate(results):
            assert same_bits(result, results[best]), f"{ISAS[isa]} differs from {ISAS[best]} for {dtype}"


# ---------------------------------------------------------------- copies and refusals


def test_a_copy_moves_exactly_its_rows(native: ctypes.CDLL) -> None:
    generator, choose = torch.Generator().manual_seed(11), random.Random(11)
    for row_bytes, rows in itertools.product((0, 1, 63, 64, 65, 129, 1000, 70_001), (0, 1, 3)):
        values = any_bits((rows, row_bytes), torch.uint8, generator)
        for threshold in (0, NEVER):
            native.reduce_test_force_streaming_threshold(threshold)
            src = Rows(values, padding=choose.choice((0, 9)), offset=choose.choice((0, 1, 40)))
            dst = Rows(torch.zeros_like(values), padding=choose.choice((0, 9)), offset=choose.choice((0, 1, 40)))
            check(
                native,
                native.reduce_test_copy(src.address, src.stride, dst.address, dst.stride, rows, row_bytes),
            )
            assert torch.equal(dst.values(), values) and dst.guards_are_intact()


def test_bad_arguments_are_refused_with_their_names_and_values(library: ctypes.CDLL) -> None:
    data = Rows(torch.zeros(1, 4))
    address, stride = (ctypes.c_void_p * 1)(data.address), (ctypes.c_int64 * 1)(4)
    for arguments, message in (
        ((9, address, stride, 1, None, data.address, 4, 1, 4), r"dtype: 9 is none of 0 \(float32\), 1"),
        ((0, address, stride, 0, None, data.address, 4, 1, 4), "num_parts must be at least 1, got 0"),
        ((0, address, stride, 1, None, data.address, 4, -1, 4), "rows must be at least 0, got -1"),
        ((0, address, stride, 1, None, data.address, 4, 1, -2), "columns must be at least 0, got -2"),
    ):
        with pytest.raises(ValueError, match=message):
            check(library, library.reduce_test_sum(*arguments))
    with pytest.raises(ValueError, match="isa: 7 is none of 0, 1, 2"):
        check(library, library.reduce_test_force_isa(7))


# ---------------------------------------------------------------- the binary


def test_isa_files_export_only_their_table_and_run_nothing_at_load(built: Path) -> None:
    """Anything else could be linked in place of a baseline copy, and stop an older CPU with SIGILL."""
    nm, objdump = shutil.which("nm"), shutil.which("objdump")
    if nm is None or objdump is None:
        pytest.skip("needs nm and objdump (binutils)")
    for isa in ("avx2", "avx512"):
        path = str(built.parent / f"reduce_{isa}.o")
        symbols = run([nm, "--defined-only", "--extern-only", "--demangle", path]).stdout.splitlines()
        assert [line.split(" ", 2)[1:] for line in symbols] == [["T", f"tpk::{isa}_kernels()"]]
        sections = run([objdump, "-h", path]).stdout
        assert ".text" in sections and ".init_array" not in sections and ".ctors" not in sections


@pytest.mark.slow("25 s: compiles the kernels with sanitizers")
def test_random_cases_are_clean_under_address_and_undefined_behaviour_sanitizers(exercise: Path, full: bool) -> None:
    done = run([str(exercise), "20000" if full else "1000"], ASAN_OPTIONS="detect_leaks=0", LC_ALL="C")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("cases") >= 1
