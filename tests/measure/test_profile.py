"""`tpkernels profile` trains alike in all three ways, says what it measured, and refuses times of another training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tpkernels as tpk
from tpkernels import cli
from tpkernels.comm.timeline import Event
from tpkernels.measure import gpt, profile
from tpkernels.measure.curves import Curve
from tpkernels.measure.gpt import Sizes
from tpkernels.measure.netlab import Sample
from tpkernels.measure.profile_report import Profile
from tpkernels.measure.trace import RankTrace
from tpkernels.measure.training import METHODS, RankResult, Training, affordable_steps
from tpkernels.testing.spawn import Pools

LIMIT_S = 180.0


@pytest.fixture
def on_pool(monkeypatch: pytest.MonkeyPatch, ranks: Pools) -> None:
    """Ranks that are there already."""
    monkeypatch.setattr(
        tpk, "launch", lambda fn, nproc, *args, timeout: ranks(nproc).run(fn, *args, timeout=min(timeout, LIMIT_S))
    )


@pytest.mark.gloo
@pytest.mark.slow("7 s")
def test_three_ways_of_training_are_the_same_and_everything_is_written(
    on_pool: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", "--quick", "--steps", "2", "--warmup", "1", "--dtype", "fp32", "--out", str(tmp_path / "new")]
    assert cli.main(words) == 0
    content = json.loads((tmp_path / "new" / "profile.json").read_text())
    assert content["same_training"] and not content["failures"] and set(content["methods"]) == set(METHODS)
    for method in content["methods"].values():
        assert len(method["losses"]) == len(method["norms"]) == 3 and len(method["step"]["samples_ms"]) == 2
        assert method["losses"][-1] < method["losses"][0], "it learns"
    alone, _, fused = (content["methods"][name] for name in METHODS)
    assert len(alone["peak_bytes_per_rank"]) == 1 and len(fused["peak_bytes_per_rank"]) == 2
    assert max(fused["peak_bytes_per_rank"]) < 0.75 * alone["peak_bytes_per_rank"][0], "weights are cut in two"
    assert 0 < content["bounds"]["losses"] < 1e-3 * alone["losses"][0]
    picture = (tmp_path / "new" / "profile.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
    page = (tmp_path / "new" / "profile.html").read_text()
    assert page.count("<svg") == 2 and "bytes that crossed under a GEMM" in page and "Timeline of one step" in page
    assert "Machine, versions, settings" in page and "src=" not in page and "<link" not in page, "it loads nothing"
    labels = {
        event["name"] for event in json.loads((tmp_path / "new" / "profile.trace.json").read_text())["traceEvents"]
    }
    assert {f"{name}, step 0" for name in METHODS} <= labels
    printed = capsys.readouterr().out
    assert "step, ms" in printed and "over one process" in printed and "counted with --netlab only" in printed


def run_with_a_gradient_that_is_not_summed(training: Training, timeout_s: float) -> RankResult:
    original = gpt.LayerNorm.from_norm
    with mock.patch.object(gpt.LayerNorm, "from_norm", lambda norm, mesh, **_: original(norm, mesh)):
        return run_rank(training, timeout_s)


run_rank = profile.run_rank


@pytest.mark.gloo
@pytest.mark.slow("4 s")
def test_a_gradient_that_is_not_summed_ends_in_exit_code_1_and_without_times(
    on_pool: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "run_rank", run_with_a_gradient_that_is_not_summed)
    assert cli.main(["profile", "--quick", "--steps", "1", "--warmup", "0", "--dtype", "fp32"]) == 1
    printed = capsys.readouterr().out
    assert "NOT THE SAME TRAINING" in printed and "TP: norms differ" in printed and "TP + overlap: norms" in printed
    assert "step, ms" not in printed and "over one process" not in printed


def found(fused: Curve, samples: list[Sample]) -> Profile:
    alone, shifted = Curve([2.0, 1.0], [3.0, 3.0], [0.5, 0.25]), Curve([2.0, 1.0001], [3.0, 3.0], [1, 1])
    other = Curve([2.0, 1.0002], [3.0, 3.0], [0.3, 0.2])
    events = [Event("gemm", "gemm", 0, 500), Event("wait recv", "wait", 500, 750)]
    traces = [RankTrace(0, f"{name}, step 0", 0, 1000, events, samples) for name in METHODS]
    first = RankResult(dict(zip([*METHODS, "shifted"], [alone, other, fused, shifted], strict=True)), traces)
    second = RankResult(dict(zip(METHODS, [Curve(), other, fused], strict=True)), [])
    return Profile(Training(Sizes(), steps=1, warmup=1), [first, second])


@pytest.mark.cpu
def test_what_follows_from_the_samples() -> None:
    fused = Curve([2.0, 1.0], [3.0, 3.0], [0.2, 0.125], peak_bytes=7)
    it = found(fused, [Sample(0, 0, 0), Sample(1000, 100, 100)])
    assert it.same and it.difference("TP", "losses") == pytest.approx(2e-4)
    assert it.bound("losses") == pytest.approx(8 * (1e-4 + 2 * torch.finfo(torch.float32).eps), rel=1e-3)
    assert it.step("no TP").seconds == (0.25,) and it.step("TP + overlap").seconds == (0.125,), "without warm-up"
    assert it.overlaps("TP + overlap") == [0.5] and it.overlaps("no TP") == [] and it.waiting("TP") == 0.25
    assert it.peak_bytes("TP + overlap") == [7, 7]


@pytest.mark.cpu
@pytest.mark.parametrize("losses", [[2.0, 1.01], [float("nan"), 1.0]])
def test_curves_that_part_or_are_no_numbers_are_not_the_same(losses: list[float]) -> None:
    it = found(Curve(losses, [3.0, 3.0], [1.0, 1.0]), [])
    assert not it.same and it.failures[0].startswith("TP + overlap: losses differ")
    assert "step" not in it.to_json()["methods"]["TP"]


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--heads", "7"], "width (512) must be heads (7)"),
        (["--delay", "1ms"], "give --netlab RATE too"),
        (["--netlab", "1gbit", "--device", "cuda"], "--netlab joins CPU ranks; got device cuda"),
    ],
)
def test_contradicting_arguments_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert cli.main(["profile", *words]) == 2
    assert said in capsys.readouterr().err


def options(*words: str) -> Any:
    return cli.parse(["profile", *words])


@pytest.mark.cpu
def test_sizes_given_replace_those_of_a_quick_run() -> None:
    training = profile.make_training(options("--quick", "--width", "32", "--seed", "3", "--dtype", "fp32"))
    assert (training.sizes.width, training.sizes.layers, training.seed) == (32, 1, 3)
    assert training.dtype == torch.float32 and profile.make_training(options()).sizes == Sizes()


@pytest.mark.cpu
@pytest.mark.parametrize(("first_s", "steps"), [(0.5, 10), (40.0, 6), (400.0, 3)])
def test_slow_ranks_train_fewer_steps(first_s: float, steps: int) -> None:
    training = Training(Sizes(), steps=10, warmup=2)
    assert affordable_steps(training, first_s, 600.0) == 2 + steps
