"""Values of the kernels, interpreted: late, shuffled chunks, buffers of NaN, every option, against the fp64 bound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.interpreter import Failed, Interpreter, mutant
from tests.kernels.scenarios import Case
from tpkernels.testing.numeric import assert_bitwise_equal

pytestmark = pytest.mark.cpu

FP8 = {"dtype": torch.float8_e4m3fn, "out_dtype": torch.bfloat16, "k": 80}

GATHER = {
    "bias and gelu": {"activation": "gelu", "bias": True},
    "bias, tanh gelu and preactivation": {"activation": "gelu_tanh", "bias": True, "preactivation": True},
    "fp16, silu": {"activation": "silu", "dtype": torch.float16, "rank": 2},
    "fp32, relu, transposed weight": {"activation": "relu", "dtype": torch.float32, "transposed": True, "rank": 1},
    "swiglu with halves": {"activation": "swiglu", "bias": True, "block": (16, 128, 16), "n": 150},
    "geglu and both preactivations": {"activation": "geglu", "bias": True, "preactivation": True, "rank": 1},
    "descriptors": {"descriptors": True, "bias": True, "shards": (20, 37)},
    "descriptors, transposed weight": {"descriptors": True, "transposed": True, "shards": (20, 37)},
    "fp8, a scale per row": {**FP8, "scale": "row", "bias": True},
    "fp8, a scale per tensor, swiglu": {**FP8, "scale": "tensor", "activation": "swiglu", "descriptors": True},
    "one CTA, one row": {"programs": 1, "shards": (0, 1, 0, 0), "rank": 3},
    "nothing to contract": {"k": 0, "bias": True},
    "nested": {"loop": "nested", "bias": True, "activation": "gelu"},
    "nested, nothing to contract": {"loop": "nested", "k": 0, "bias": True},
    "odd K": {"k": 41},
    "epochs that wrap": {"calls": 3, "first_epoch": 2**31 - 2, "shards": (9, 20), "num_chunks": 3},
}

SCATTER = {
    "fp32 staging": {},
    "fp16, halves, addend": {"dtype": torch.float16, "block": (16, 128, 16), "n": 150, "addend": 1, "rank": 1},
    "transposed weight, bf16 staging": {"transposed": True, "out_dtype": torch.bfloat16, "rank": 2},
    "descriptors, transposed weight": {"descriptors": True, "transposed": True, "dtype": torch.float16, "n": 70},
    "fp8 with descriptors": {**FP8, "out_dtype": None, "scale": "row", "descriptors": True},
    "epochs that wrap": {"calls": 3, "first_epoch": 2**31 - 2, "shards": (0, 20), "num_chunks": 3},
    "nothing to contract": {"k": 0, "dtype": torch.float32},
    "nested, addends": {"loop": "nested", "k": 80, "addend": 3},
}


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", GATHER)
def test_gathered_products_are_right_when_chunks_come_late_and_shuffled(interpreter: Interpreter, name: str) -> None:
    options: dict[str, Any] = GATHER[name]
    interpreter.run("scenarios.gather", Case(**options))


@pytest.mark.parametrize("name", SCATTER)
def test_a_flagged_chunk_is_complete_and_partials_are_right(interpreter: Interpreter, name: str) -> None:
    options: dict[str, Any] = SCATTER[name]
    interpreter.run("scenarios.scatter", Case(**options))


# The seventh of rows so far apart is past 2^31 elements; a step of 16 (BLOCK_K) is 2^33, in 32 bits nothing.
FAR: dict[str, Any] = {"stride": 2**29, "shards": (3, 0, 4), "n": 7, "delay": 0.0}
FAR_APART: dict[str, dict[str, Any]] = {
    "gather": {**FAR, "bias": True, "activation": "gelu", "preactivation": True},
    "gather, gated": {**FAR, "activation": "swiglu", "rank": 1, "preactivation": True},
    "gather, transposed weight": {**FAR, "transposed": True},
    "gather, fp8, a scale per row": {**FP8, **FAR, "scale": "row"},
    "scatter": {**FAR, "addend": 1},
    "scatter, transposed weight": {**FAR, "transposed": True},
}


@pytest.mark.parametrize("name", FAR_APART)
def test_operands_and_results_may_reach_past_two_to_the_31_elements(interpreter: Interpreter, name: str) -> None:
    interpreter.run(f"scenarios.{name.split(',')[0]}", Case(**FAR_APART[name]))


@pytest.mark.parametrize("shards", [(0, 0, 0), (1, 0, 0), (16, 32, 16)])
def test_shards_without_rows_are_no_special_case(interpreter: Interpreter, shards: tuple[int, ...]) -> None:
    case = Case(shards=shards, rank=2)
    interpreter.run("scenarios.gather", case)
    interpreter.run("scenarios.scatter", case)


def test_an_output_without_columns_is_no_special_case(interpreter: Interpreter) -> None:
    interpreter.run("scenarios.gather", Case(n=0))
    interpreter.run("scenarios.scatter", Case(n=0))


def test_bits_do_not_depend_on_arrival_chunks_or_ctas(interpreter: Interpreter) -> None:
    case = Case(dtype=torch.float32, delay=0.0)
    (first,) = interpreter.run("scenarios.gather", case)
    for other in (replace(case, num_chunks=3, programs=5), replace(case, rank=2, group_m=1), replace(case, delay=0.01)):
        assert torch.equal(interpreter.run("scenarios.gather", other)[0], first)


LOOPS = {
    "gather, gelu, odd ends": ("gather", {"activation": "gelu", "bias": True}),
    "gather, gated": ("gather", {"activation": "swiglu", "preactivation": True, "rank": 1}),
    "gather, descriptors": ("gather", {"descriptors": True, "shards": (20, 37), "dtype": torch.float16}),
    "gather, fp8": ("gather", {**FP8, "scale": "row", "descriptors": True}),
    "scatter, one CTA": ("scatter", {"programs": 1, "addend": 1}),
    "scatter, descriptors": ("scatter", {"descriptors": True, "transposed": True, "k": 96, "shards": (20, 37)}),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", LOOPS)
def test_loops_differ_in_no_bit(interpreter: Interpreter, name: str) -> None:
    scenario, options = LOOPS[name]
    case = Case(**{"delay": 0.0, **options})
    flat, nested = (
        interpreter.run(f"scenarios.{scenario}", replace(case, loop=loop))[0] for loop in ("flat", "nested")
    )
    for one, other in zip(flat, nested, strict=True):  # rows, or the parts of owners
        assert_bitwise_equal(one, other, name)


def test_gelu_is_right_to_the_last_digits_of_fp32(interpreter: Interpreter) -> None:
    """Relative errors are below torch's in fp32: below 0 its digits do not cancel as those of 1 + erf do.

    Absolute ones are the last rounding, of which torch's depends on the processor's vectors.
    """
    for errors in interpreter.run("activations.gelu_errors"):
        assert errors["absolute"] < 4e-7 and errors["relative"] < 2.4e-7, errors
        assert errors["tail"] < 4e-6 and errors["far"] < 1e-12, errors
        assert all(errors[name] <= errors[f"torch {name}"] for name in ("relative", "tail", "far")), errors


def test_gelu_of_what_is_no_number_is_none_and_of_the_largest_is_itself(interpreter: Interpreter) -> None:
    """-inf times 0 is NaN, as torch has it."""
    found = interpreter.run("activations.special_values")
    assert str(found) == "[0.0, -0.0, inf, nan, nan, 3.0000000054977558e+38, -0.0, -0.0]"


def test_a_coefficient_that_is_wrong_in_its_sixth_digit_is_found(interpreter: Interpreter, tmp_path: Path) -> None:
    package = mutant(tmp_path, "mutant_phi", {"tiles.py": ("1.15110683", "1.15111683")})
    errors, _ = interpreter.run("activations.gelu_errors", package, str(tmp_path))
    assert errors["tail"] > 4e-6 and errors["relative"] > 2.4e-7


def test_many_shapes_are_right(interpreter: Interpreter, full: bool) -> None:
    for seed in range(60 if full else 3):
        pick = torch.Generator().manual_seed(seed)

        def up_to(limit: int, pick: torch.Generator = pick) -> int:
            return int(torch.randint(0, limit, (), generator=pick))

        world_size = 1 + up_to(4)
        case = Case(
            shards=tuple(up_to(40) for _ in range(world_size)), rank=up_to(world_size), n=up_to(80), k=up_to(70),
            num_chunks=1 + up_to(4), group_m=1 + up_to(4), programs=1 + up_to(6), delay=0.002, seed=seed,
            bias=bool(up_to(2)), dtype=(torch.float32, torch.bfloat16, torch.float16)[up_to(3)],
        )  # fmt: skip
        interpreter.run("scenarios.gather", case)
        interpreter.run("scenarios.scatter", case)


# ---------------------------------------------------------------- waits that end


def test_a_chunk_that_never_comes_is_reported_and_the_kernel_ends(interpreter: Interpreter) -> None:
    case = Case(shards=(20, 30, 20), rank=1, num_chunks=2, patience=200, first_epoch=5, programs=1)
    told, poisoned, seconds, done, announced = interpreter.run("scenarios.missing_chunk", case, None)
    assert told == {
        "state": 1, "kind": 1, "rank": 1, "op": 7, "peer": 2, "chunk": 0, "epoch": 5, "expected": 5, "got": 4,
        "fingerprint": 0,
    }  # fmt: skip
    assert poisoned == [2, 2, 2]  # 1 + rank, at every rank
    assert seconds < 20
    assert any(done) and not all(done)
    assert not any(announced), "a rank that has failed announces nothing"


def test_a_wait_ends_when_a_peer_has_poisoned_the_group(interpreter: Interpreter) -> None:
    case = Case(shards=(20, 30, 20), rank=0, num_chunks=1, first_epoch=5)
    told, _, seconds, done, _ = interpreter.run("scenarios.missing_chunk", case, 1)
    assert (told["state"], told["kind"], told["peer"], told["chunk"]) == (1, 2, 1, 0)
    assert seconds < 20 and not all(done)


# ---------------------------------------------------------------- the tests can fail

FAULTS: dict[str, tuple[str, str, tuple[str, str], dict[str, Any]]] = {
    "no_wait": (
        "gather", "all_gather_matmul.py", ("(slot != ready)", "(slot == -5)"), {"shards": (3, 20), "delay": 0.1},
    ),
    "epochs_do_not_wrap": (
        "gather", "signals.py", ("seen - epoch < 0", "seen < epoch"),
        {"first_epoch": 2**31 - 1, "calls": 2, "shards": (3, 20)},
    ),
    "flag_of_the_first_tile": ("scatter", "signals.py", (" + 1 == num_tiles", " == 0"), {}),
    "a_descriptor_stores_rows_of_the_next_tile": (
        "gather", "tiles.py", ("if rows == BLOCK_M:", "if rows > 0:"),
        {**FP8, "scale": "row", "descriptors": True, "shards": (20, 37), "rank": 1},
    ),
    "the_next_tile_adds_to_the_sums_of_the_last": (
        "gather", "all_gather_matmul.py", ("                acc, acc_up = no_sums(BLOCK_M, BLOCK_N, DUAL)\n\n", "\n"),
        {"programs": 1},
    ),
    "a_step_of_the_next_tile_goes_to_this_one": (
        "scatter", "matmul_reduce_scatter.py", ("if step == num_steps - 1:", "if step == 0:"), {},
    ),
    "rows_of_the_next_tile": ("gather", "tiles.py", ("inside = (m_offsets[:, None] < rows) &", "inside ="), {}),
    "columns_past_k": ("gather", "tiles.py", ("< k - first_k", "< k - first_k + 8"), {}),
    "bf16_truncated": ("gather", "tiles.py", ("bits + 0x7FFF + ((bits >> 16) & 1)", "bits + 0"), {}),
    "gate_and_up_exchanged": (
        "gather", "all_gather_matmul.py", ("activate(acc, acc_up, ACTIVATION)", "activate(acc_up, acc, ACTIVATION)"),
        {"activation": "swiglu"},
    ),
    "scale_of_another_row": (
        "gather", "tiles.py", ("(row + m_offsets).to(tl.int64) * stride_scale", "m_offsets * stride_scale"),
        {**FP8, "scale": "row"},
    ),
    "rows_of_x_in_32_bits": (
        "gather", "tiles.py", ("(row + tl.where(m_offsets < rows, m_offsets, 0)).to(tl.int64)",
                               "(row + tl.where(m_offsets < rows, m_offsets, 0))"), FAR_APART["gather"],
    ),
    "rows_of_a_weight_in_32_bits": (
        "gather", "tiles.py", ("tl.where(n_offsets < n, n_offsets, 0).to(tl.int64)",
                               "tl.where(n_offsets < n, n_offsets, 0)"), FAR_APART["gather"],
    ),
    "columns_of_a_weight_in_32_bits": (
        "gather", "tiles.py", ("k_offsets[None, :].to(tl.int64)", "k_offsets[None, :]"),
        FAR_APART["gather, transposed weight"],
    ),
    "steps_through_a_weight_in_32_bits": (
        "gather", "tiles.py", ("tl.cast(stride_bk, tl.int64) * BLOCK_K", "stride_bk * BLOCK_K"),
        FAR_APART["gather, transposed weight"],
    ),
    "rows_of_scales_in_32_bits": (
        "gather", "tiles.py", ("(row + m_offsets).to(tl.int64) * stride_scale", "(row + m_offsets) * stride_scale"),
        FAR_APART["gather, fp8, a scale per row"],
    ),
    "rows_of_results_in_32_bits": (
        "gather", "tiles.py", ("(row + m_offsets).to(tl.int64)[:, None] * stride + n_offsets[None, :]\n    inside = "
                               "(m_offsets[:, None] < rows) & (n_offsets[None, :] < n)\n    tl.store",
                               "(row + m_offsets)[:, None] * stride + n_offsets[None, :]\n    inside = "
                               "(m_offsets[:, None] < rows) & (n_offsets[None, :] < n)\n    tl.store"),
        FAR_APART["gather"],
    ),
    "rows_of_an_addend_in_32_bits": (
        "scatter", "tiles.py", ("(row + m_offsets).to(tl.int64)[:, None] * stride + n_offsets[None, :]\n    inside = "
                                "(m_offsets[:, None] < rows) & (n_offsets[None, :] < n)\n    return",
                                "(row + m_offsets)[:, None] * stride + n_offsets[None, :]\n    inside = "
                                "(m_offsets[:, None] < rows) & (n_offsets[None, :] < n)\n    return"),
        FAR_APART["scatter"],
    ),
}  # fmt: skip


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.slow("3 s: that the tests of this file can fail")
def test_a_seeded_fault_is_caught(interpreter: Interpreter, tmp_path: Path, name: str) -> None:
    scenario, file, change, options = FAULTS[name]
    package = mutant(tmp_path, f"mutant_{name}", {file: change})
    case = Case(**{"patience": 3000, "delay": 0.03, **options, "package": package, "folder": str(tmp_path)})
    with pytest.raises(Failed, match=r"BoundExceeded|AssertionError"):
        interpreter.run(f"scenarios.{scenario}", case)
