"""The table of `tpkernels bench`: widths, units, marks of noise, and who was left out."""

from __future__ import annotations

import io

import pytest

from tpkernels.measure import bench_table
from tpkernels.measure.bench_table import duration
from tpkernels.measure.report import NOISE, CaseResult, Ratio
from tpkernels.measure.timing import Measurement

pytestmark = pytest.mark.cpu


def result(**samples_ms: tuple[float, ...]) -> CaseResult:
    times = {name: Measurement(name, tuple(value / 1e3 for value in values)) for name, values in samples_ms.items()}
    return CaseResult("matmul_reduce_scatter", "4096x14336x4096", "bf16", 2, times, 2**20, "shared_memory", 4)


def steady(median: float) -> tuple[float, ...]:
    return (median * 0.99, median, median * 1.01)


def whole_run() -> CaseResult:
    found = result(
        gemm=steady(100), comm=steady(60), torch=steady(180), unfused=steady(160), chunked=steady(110),
        shared_memory=steady(1050), auto=steady(0.111), torch_symm_mem=steady(150),
    )  # fmt: skip
    found.notes["transformer_engine"] = "not installed"
    found.failures["symmetric"] = "AssertionError: row 3"
    return found


def test_every_way_is_a_row_and_no_line_is_wider_than_100_columns() -> None:
    output = io.StringIO()
    bench_table.print_results([whole_run(), whole_run()], "2 ranks, cpu, no lab, n=3", output)
    text = output.getvalue()
    lines = text.splitlines()
    assert max(len(line.rstrip()) for line in lines if "left out" not in line and "WRONG" not in line) < 100
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    chunked = next(line.split() for line in lines if line.strip().startswith("chunked"))
    assert chunked == ["chunked", "110", "ms", "550", "us", "1.64x", "1.45x", "83%", "10.0", "ms"]
    autos = [line.split() for line in lines if line.strip().startswith("auto: shared_memory")]
    assert len(autos) == 2 and autos[0][-1] == "0", "faster than the GEMM alone: nothing is exposed"
    gemm = next(line for line in lines if "GEMM only" in line and "±" not in line)
    assert "2.41 TFLOP/s" in gemm, "2 x M x K x N / ranks / seconds"
    assert "17.5 MB/s" in next(line for line in lines if "comm only" in line and "±" not in line)
    assert lines[-2].startswith("symmetric WRONG: AssertionError: row 3 (everywhere)")
    assert lines[-1].startswith("transformer_engine left out: not installed (everywhere)")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.0, "2.00 s"), (0.9996, "1.00 s"), (0.0314, "31.4 ms"), (0.000812, "812 us"), (3.2e-7, "0.32 us"),
     (0, "0.00 us"), (-0.0021, "-2.10 ms")],
)  # fmt: skip
def test_times_are_in_the_unit_in_which_they_are_read(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_ratio_within_noise_is_marked_and_a_machine_that_slows_down_does_not_make_noise() -> None:
    def of(*milliseconds: float) -> Measurement:
        return Measurement("x", tuple(one / 1e3 for one in milliseconds))

    noisy = Ratio.of(of(100, 140, 110, 90), of(120, 100, 130, 80))
    assert noisy is not None and noisy.is_noise and str(noisy).endswith(NOISE)
    slowing = Ratio.of(of(100, 200, 300, 400), of(80, 160, 240, 320))
    assert slowing is not None and not slowing.is_noise and str(slowing).strip() == "1.25x"
    assert Ratio.of(None, of(1)) is None and Ratio.of(of(1), of(0)) is None
