"""The model behind the predictions of `benchmarks/one_gpu.py`: which card it is of, and what it may never say."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from gpu_steps import roofline
from gpu_steps.roofline import card_of, efficiency, loop_share, overlapped_s

pytestmark = pytest.mark.cpu

# What drivers call them.
NAMES = {
    "NVIDIA A100-SXM4-80GB": "A100 SXM", "NVIDIA A100-SXM4-40GB": "A100 SXM, 40 GB",
    "NVIDIA A100 80GB PCIe": "A100 PCIe", "NVIDIA A40": "A40",
    "NVIDIA L40S": "L40S", "NVIDIA GeForce RTX 4090": "RTX 4090", "NVIDIA H20": "H20",
    "NVIDIA H100 PCIe": "H100 PCIe", "NVIDIA H100 80GB HBM3": "H100 SXM", "NVIDIA H200": "H200", "NVIDIA B200": "B200",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_card_is_known_by_the_name_that_the_driver_gives_it(name: str) -> None:
    assert card_of(name, 0, 0).name == NAMES[name]


def test_an_unknown_card_is_scaled_from_its_generation_and_says_so() -> None:
    whole, half = card_of("NVIDIA H100 80GB HBM3", 90, 132), card_of("NVIDIA H999", 90, 66)
    assert half.name == "NVIDIA H999, taken for 0.50 times H100 SXM" and half.sms == 66
    assert half.tflops == whole.tflops / 2 and half.memory_gbps == whole.memory_gbps / 2
    assert "times B200" in card_of("NVIDIA X1", 120, 100).name and "times A100 SXM" in card_of("NVIDIA X2", 86, 50).name


@pytest.mark.parametrize("name", NAMES)
def test_no_prediction_is_beyond_the_data_sheet(name: str) -> None:
    card = card_of(name, 0, 0)
    for itemsize, peak in ((2, card.tflops), (1, card.fp8_tflops or card.tflops)):
        for m, n, k in ((8192, 8192, 8192), (8192, 1792, 4096), (16, 8192, 8192)):
            ours, library = card.our_gemm_s(m, n, k, itemsize), card.library_gemm_s(m, n, k, itemsize)
            assert ours > library > 2e-12 * m * n * k / peak and library > itemsize * n * k / (1e9 * card.memory_gbps)
    num_bytes = 1 << 26
    assert 2 * num_bytes / card.copy_s(num_bytes) < 1e9 * card.memory_gbps
    assert 9 * num_bytes / card.reduce_s(8, num_bytes) < 1e9 * card.memory_gbps
    assert num_bytes / card.pcie_s(num_bytes) < 1e9 * card.pcie_gbps


def test_a_longer_k_hides_more_of_the_drained_pipeline_and_fp8_less() -> None:
    shares = [loop_share(k) for k in (1376, 1792, 4096, 8192, 16384)]
    assert all(less < more for less, more in pairwise(shares)) and shares[-1] < roofline.LOOP_SHARE
    assert loop_share(4096, itemsize=1) == loop_share(2048)
    assert loop_share(1792, drains=True) < loop_share(1792)


def test_overlap_wins_everything_at_best_and_nothing_at_worst() -> None:
    assert overlapped_s(3.0, 1.0, chunks=4) == 3.25 and overlapped_s(1.0, 3.0, chunks=1) == 4.0
    assert efficiency(4.0, 3.0, gemm_s=3.0, transfer_s=1.0) == 1.0 and efficiency(4.0, 4.0, 3.0, 1.0) == 0.0
    assert efficiency(3.0, 3.0, gemm_s=3.0, transfer_s=0.0) == 0.0, "there was nothing to win"
