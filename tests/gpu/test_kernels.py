"""The Triton kernels on a GPU: the scenarios of the interpreter, with the tiles that users get and without interpreter.

Whole problems and bits across launches; waits that end, within the time that the scorecard allows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import activations, scenarios
from tests.kernels.scenarios import Case
from tests.kernels.test_interpreted import GATHER, SCATTER
from tpkernels.kernels.config import LOOPS, configure
from tpkernels.testing.numeric import assert_bitwise_equal

pytestmark = pytest.mark.gpu

NANOSECONDS = 10**9
ABORT_S = 0.1  # over the time-out (R21)


def on_gpu(options: dict[str, Any]) -> Case:
    """A case of the interpreter, some tiles large, with the configuration of this GPU."""
    case = Case(**{**options, "device": "cuda", "patience": 20 * NANOSECONDS})
    case = replace(case, shards=tuple(9 * rows for rows in case.shards), n=5 * case.n, k=4 * case.k)
    properties = torch.cuda.get_device_properties(0)
    capability = 10 * properties.major + properties.minor
    if case.dtype == torch.float8_e4m3fn and capability < 89:
        pytest.skip(f"fp8 needs a CUDA device of capability 8.9, this is {capability}")
    tiles = configure(
        capability=capability, num_sms=properties.multi_processor_count, m=case.rows, n=case.n, k=case.k,
        dtype=str(case.dtype).removeprefix("torch."), world_size=len(case.shards), moved_row_bytes=2 * case.k,
        dual=case.activation == "swiglu", pointers=not case.descriptors, reserved_sms=8,
    )  # fmt: skip
    return replace(case, tiles=tiles)


@pytest.mark.parametrize("name", GATHER)
def test_gathered_products_are_right_when_chunks_come_late_and_shuffled(name: str) -> None:
    scenarios.gather(on_gpu(GATHER[name]))


@pytest.mark.parametrize("name", SCATTER)
def test_a_flagged_chunk_is_complete_and_partials_are_right(name: str) -> None:
    scenarios.scatter(on_gpu(SCATTER[name]))


@pytest.mark.parametrize("transposed", [False, True], ids=["along K", "along N"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_operands_through_descriptors_have_the_values_of_pointers(dtype: torch.dtype, transposed: bool) -> None:
    """TMA reads what was acquired before: nothing but a GPU shows whether the proxy fence does its work."""
    options: dict[str, Any] = {"dtype": dtype, "descriptors": True, "transposed": transposed}
    for seed in range(2):
        case = on_gpu({**options, "shards": (97, 61), "k": 128, "seed": seed, "calls": 3})
        if not case.tiles.descriptors:
            pytest.skip("tensor descriptors need a CUDA device of capability 9.0")
        scenarios.gather(case)
        scenarios.scatter(case)


@pytest.mark.parametrize("descriptors", [False, True], ids=["pointers", "descriptors"])
def test_operands_and_results_may_have_more_than_two_to_the_31_elements(descriptors: bool) -> None:
    """Up to 60 GiB, of which most is never touched: rows lie far apart."""
    options: dict[str, Any] = {"stride": 2**23 + 64, "shards": (20, 0, 9), "n": 60, "descriptors": descriptors}
    case = on_gpu(options)
    assert min(case.rows, case.n) * case.stride > 2**31
    if descriptors and not case.tiles.descriptors:
        pytest.skip("tensor descriptors need a CUDA device of capability 9.0")
    scenarios.gather(case)
    scenarios.scatter(case)


def test_gelu_is_right_to_the_last_digits_of_fp32() -> None:
    """The hardware's 2^x may be wrong by two of the last digits."""
    for errors in activations.gelu_errors(device="cuda"):
        assert errors["absolute"] < 8e-7 and errors["relative"] < 5e-7, errors
        assert errors["tail"] < 6e-6 and errors["far"] < 1e-12, errors


@pytest.mark.parametrize("descriptors", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("scenario", ["gather", "scatter"])
def test_loops_differ_in_no_bit(scenario: str, descriptors: bool) -> None:
    case = on_gpu({"descriptors": descriptors, "shards": (97, 61), "k": 128, "delay": 0.0})
    loops = [getattr(scenarios, scenario)(replace(case, tiles=replace(case.tiles, loop=one)))[0] for one in LOOPS]
    for first, other in zip(*loops, strict=True):  # with the NaN around results of a scatter
        assert_bitwise_equal(first, other, scenario)


def test_bits_do_not_depend_on_arrival_chunks_or_ctas() -> None:
    case = on_gpu({"dtype": torch.bfloat16, "delay": 0.0})
    (first,) = scenarios.gather(case)
    few = replace(case.tiles, num_programs=3)
    for other in (replace(case, num_chunks=3), replace(case, rank=2, tiles=few), replace(case, delay=0.01)):
        assert torch.equal(scenarios.gather(other)[0], first)


def test_a_chunk_that_never_comes_is_reported_the_kernel_ends_and_the_context_survives(full: bool) -> None:
    timeout_s = 0.05
    for trial in range(100 if full else 10):
        case = replace(
            on_gpu({"shards": (20, 30, 20), "rank": 1}), patience=int(timeout_s * NANOSECONDS), first_epoch=trial + 1
        )
        told, poisoned, seconds, _, announced = scenarios.missing_chunk(case, None)
        assert (told["state"], told["kind"], told["rank"], told["peer"], told["epoch"]) == (1, 1, 1, 2, trial + 1)
        assert poisoned == [2, 2, 2] and not any(announced)
        assert timeout_s <= seconds <= timeout_s + ABORT_S
        assert torch.ones(4, device="cuda").sum().item() == 4.0
