"""Layers that this machine cannot run are skipped with a reason, never failed and never silently passed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import LAYERS, missing_for, wants_gpus
from tpkernels.measure import netlab

pytestmark = pytest.mark.cpu


def test_every_layer_is_a_registered_mark(pytestconfig: pytest.Config) -> None:
    registered = {line.partition(":")[0] for line in pytestconfig.getini("markers")}
    assert {"cpu", "gloo", "netns", "gpu", "multi_gpu"} == set(LAYERS) <= registered


def test_the_network_lab_itself_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netlab, "unavailable_reason", lambda: "needs root (CAP_NET_ADMIN missing)")
    assert missing_for("netns") == "needs root (CAP_NET_ADMIN missing)"
    monkeypatch.setattr(netlab, "unavailable_reason", lambda: None)
    assert missing_for("netns") is None


@pytest.mark.parametrize(("devices", "missing"), [(0, ["gpu", "multi_gpu"]), (1, ["multi_gpu"]), (2, [])])
def test_gpu_layers_need_devices(monkeypatch: pytest.MonkeyPatch, devices: int, missing: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    assert [layer for layer in ("cpu", "gloo", "gpu", "multi_gpu") if missing_for(layer)] == missing
    if "multi_gpu" in missing:
        said = f"needs 2 CUDA device(s), found {devices}"
        assert missing_for("multi_gpu") == f"{said}; `pytest tests/gpu` looks for them"
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        assert missing_for("multi_gpu") == said


def test_gpus_are_for_the_tests_of_tests_gpu_alone() -> None:
    gpu = Path(__file__).parents[1] / "gpu"
    assert wants_gpus([str(gpu)]) and wants_gpus([f"{gpu / 'test_nccl.py'}::test_x", str(gpu)])
    assert not wants_gpus([]) and not wants_gpus([str(gpu), str(gpu.parent)]) and not wants_gpus([f"{gpu}s"])


def test_a_marked_test_is_skipped_with_the_reason(pytester: pytest.Pytester) -> None:
    conftest = Path(__file__).parents[1] / "conftest.py"
    pytester.makeconftest(
        conftest.read_text() + "\n\ndef missing_for(layer):\n    return 'no such device' if layer == 'gpu' else None\n"
    )
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpu
        def test_on_a_device():
            assert False

        @pytest.mark.cpu
        def test_counts(full):
            assert full
        """
    )
    result = pytester.runpytest_inprocess("-rs", "--full", "--strict-markers", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*no such device*"])
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(failed=1, skipped=1)


def test_a_sample_of_the_cases_runs_unless_all_are_asked_for_or_one_is_named(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(Path(__file__).parents[1].joinpath("conftest.py").read_text())
    pytester.makepyfile(
        test_cases="""
        import pytest

        @pytest.mark.sample(2)
        @pytest.mark.parametrize("number", range(5))
        def test_of_five(number):
            assert number in (0, 2, 4)

        def test_of_one():
            pass

        @pytest.mark.full("takes long")
        def test_of_none():
            assert False

        @pytest.mark.slow("is left to CI")
        def test_of_ci():
            assert False
        """
    )
    quiet = ("-p", "no:cacheprovider")
    pytester.runpytest_inprocess(*quiet).assert_outcomes(passed=3, deselected=3, skipped=2)
    pytester.runpytest_inprocess("--slow", *quiet).assert_outcomes(passed=3, failed=1, deselected=3, skipped=1)
    pytester.runpytest_inprocess("--full", *quiet).assert_outcomes(passed=4, failed=4)
    pytester.runpytest_inprocess("test_cases.py::test_of_none", *quiet).assert_outcomes(failed=1)
    named = pytester.runpytest_inprocess("test_cases.py::test_of_five[3]", *quiet)
    named.assert_outcomes(failed=1)
