"""`benchmarks/one_gpu.py` without a GPU: its arguments, steps that hang or die, its report, and its code on an emulated
GPU. What it measures has not been run on a GPU by any test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import tpkernels as tpk
from tests.cuda import emulator
from tpkernels.measure.timing import Measurement

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import one_gpu
from gpu_steps import environment, programs, rivals
from gpu_steps.outcome import Outcome, Recorder, Row, markdown, times_of

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"date": "a synthetic example", "command": "one_gpu.py --out DIR", "hardware": {"gpus": ["no such GPU"]}}


def example() -> list[Outcome]:
    """Made up, by the types that steps use; no figure in it was measured."""
    times = times_of(
        {name: Measurement(name, (1e-3 * scale,) * 3) for name, scale in (("cublas", 1.0), ("preset", 1.25))}
    )
    return [
        Outcome("environment", "done", 3.0, facts={"torch": "0.0", "NCCL, 2 ranks on this GPU": "no: Duplicate | GPU"}),
        Outcome("gemm", "done", 9.0, rows=[
            Row("G1", "synthetic 8x8x8", "cuBLAS / ours", 0.8, "flags preset", ">= 0.92", 3, times),
            Row("G2", "synthetic 8x8x8", "with waits / without", 1.01, "flags preset", "<= 1.02", 3),
            Row("-", "synthetic", "unfused / fused", 1.5, "PCIe link", "", 3),
        ]),
        Outcome("rivals", "out of time", 90.0, "had not ended after 90 s"),
    ]  # fmt: skip


@pytest.mark.cpu
def test_the_report_shows_verdicts_kinds_spreads_and_what_was_left_out() -> None:
    text = markdown(ENVIRONMENT, example())
    for words in ("| rivals | out of time | 90 | had not ended after 90 s |", "flags preset", "PCIe link",
                  "| 0.800 | >= 0.92 | no | flags preset | 3 | cublas 1,000.0 ±0.0<br>preset 1,250.0 ±0.0 |",
                  "| 1.010 | <= 1.02 | yes |", "| 1.500 |  |  | PCIe link |", "no: Duplicate / GPU",
                  "a synthetic example", "*PCIe link*: the peers' shards are in pinned memory"):  # fmt: skip
        assert words in text, text
    assert "arrival clock" not in text, "explains only the kinds that it shows"


@pytest.mark.cpu
def test_outcomes_survive_their_file_and_a_number_must_say_what_it_is(tmp_path: Path) -> None:
    for outcome in example():
        assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome
    assert example()[1].to_json()["rows"][0]["met"] is False
    with pytest.raises(ValueError, match=r"label \('NVLink'\) must be one of 'flags preset'"):
        Row("G1", "p", "w", 1.0, "NVLink")
    one_gpu.file(tmp_path, ENVIRONMENT, example(), complete=True)
    content = json.loads((tmp_path / "one-gpu.json").read_text())
    assert [step["step"] for step in content["steps"]] == ["environment", "gemm", "rivals"] and content["complete"]


# --- steps that hang, die, or have no time ----------------------------------------------------------------------------

WRITES_ONE_ROW = """
import sys, time
sys.path[:0] = {path!r}
from pathlib import Path
from gpu_steps.outcome import Outcome, Recorder, Row
recorder = Recorder(Outcome({name!r}, "running"), Path({out!r}) / "step-{name}.json")
recorder.row(Row("G1", "p", "w", 1.0, "device", ">= 0.5", 1))
{then}
"""


def as_step(monkeypatch: pytest.MonkeyPatch, then: dict[str, str]) -> None:
    def command(step: one_gpu.Step, out: Path) -> list[str]:
        code = WRITES_ONE_ROW.format(
            path=[str(ROOT / "benchmarks"), str(ROOT)], name=step.name, out=str(out), then=then[step.name]
        )
        return [sys.executable, "-c", code]

    monkeypatch.setattr(one_gpu, "command_of", command)


@pytest.mark.cpu
def test_a_step_that_hangs_loses_its_rest_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = "recorder.outcome.status = 'done'; recorder.save()"
    as_step(monkeypatch, {"hangs": "time.sleep(600)", "dies": "import os; os._exit(9)", "ends": ends, "late": ends})
    limits = {"hangs": 6.0, "dies": 60.0, "ends": 60.0}
    steps = [one_gpu.Step(name, name, limit_s, "none") for name, limit_s in limits.items()]
    assert one_gpu.run_all(steps, tmp_path, 200.0, ENVIRONMENT) == 1
    content = json.loads((tmp_path / "one-gpu.json").read_text())
    found = {step["step"]: step for step in content["steps"]}
    assert {name: step["status"] for name, step in found.items()} == {
        "hangs": "out of time", "dies": "failed", "ends": "done"
    }  # fmt: skip
    assert all(step["rows"][0]["value"] == 1.0 for step in found.values()), "what was found before stays"
    assert "not ended after 6 s" in found["hangs"]["reason"] and "status 9" in found["dies"]["reason"]
    assert "| hangs | out of time |" in capsys.readouterr().out
    late = one_gpu.supervise(one_gpu.Step("late", "", 3.0, "none"), tmp_path, limit_s=-3.0)
    assert (late.status, late.reason) == ("out of time", "the budget was spent before its turn")


# --- the command line -------------------------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "one_gpu.py"), *arguments]
    environment_ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment_, capture_output=True, text=True, timeout=120)


@pytest.mark.cpu
def test_without_a_cuda_device_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "results"))
    assert done.returncode == one_gpu.NO_GPU == 3
    assert "CUDA" in done.stderr and "Nothing was measured" in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.cpu
def test_the_plan_names_every_step_and_fits_into_nine_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    assert one_gpu.main(["--plan"]) == 0
    printed = capsys.readouterr().out
    assert all(step.name in printed for step in one_gpu.STEPS) and one_gpu.BUDGET_S <= 540
    for target in ("G1", "G2", "G3", "G4", "G5", "R21", "R22", "tests/gpu", "memcheck"):
        assert target in printed
    assert one_gpu.main(["--plan", "--only", "link"]) == 0
    assert "gemm" not in capsys.readouterr().out
    for wrong in (["--only", "nothing", "--plan"], [], ["--out", "d", "--budget", "0"]):
        with pytest.raises(SystemExit, match="2"):
            one_gpu.main(wrong)


@pytest.mark.cpu
def test_every_step_exists_and_what_it_lacks_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in one_gpu.STEPS:
        assert callable(step.load())
    monkeypatch.setenv("PATH", str(tmp_path))
    sanitizer = next(step for step in one_gpu.STEPS if step.name == "sanitizer")
    assert one_gpu.run_step(sanitizer, tmp_path) == 0
    filed = json.loads((tmp_path / "step-sanitizer.json").read_text())
    assert filed["status"] == "skipped" and "compute-sanitizer is not on the PATH" in filed["reason"]


# --- what the steps are made of ---------------------------------------------------------------------------------------


@pytest.mark.cpu
def test_programs_are_bounded_by_their_logs_and_reports_are_read(tmp_path: Path) -> None:
    recorder = Recorder(Outcome("tests", "running"), tmp_path / "step-tests.json")
    done = programs.run_program([sys.executable, "-c", "print('a'); print('=== 3 passed ===')"], recorder.log("x"))
    assert (done.status, done.last_line) == (0, "3 passed") and (tmp_path / "tests-x.log").read_text().startswith("a")
    junit = (
        '<testsuites><testsuite><testcase name="right"/><testcase name="wrong"><failure message="off by 1&#10;more"/>'
        '</testcase><testcase name="absent"><skipped message="needs NCCL 2.30"/></testcase></testsuite></testsuites>'
    )
    assert programs.read_junit(junit) == {"failed": ["wrong: off by 1"], "skipped": ["absent: needs NCCL 2.30"]}
    assert environment.versions()["torch"] == torch.__version__
    files = {path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert set(programs.TEST_FILES) == files - {"test_on_cpu_ranks"}


@pytest.mark.gloo
def test_the_comparison_with_rivals_verifies_both_and_times_them_on_cpu_ranks() -> None:
    measured = tpk.launch(rivals.on_rank, 2, "matmul_reduce_scatter", "24x16x8", "cpu", timeout=120)[0]
    assert {name: len(one.seconds) for name, one in measured.items()} == {
        "gemm": rivals.REPEATS, "symmetric": rivals.REPEATS, rivals.RIVAL: rivals.REPEATS
    }  # fmt: skip


@pytest.mark.cpu
def test_the_measuring_code_is_right_on_an_emulated_gpu(request: pytest.FixtureRequest) -> None:
    """Kernels, copies, flags and reductions of G1 to G4, R21 and R22, verified before they are timed, as on a GPU.

    `--full`: and what compute-sanitizer looks at, whose tensors are larger.
    """
    everything = ["everything"] * bool(request.config.getoption("--full"))
    command = [sys.executable, "-m", "tests.measure.one_gpu_on_cpu", str(emulator.library()), *everything]
    environment_ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment_, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    rows = found["rows"]
    assert {row["target"] for row in rows} == {"G1", "G2", "G3", "G4", "R21", "R22", "-"}
    assert {row["label"] for row in rows} >= {"flags preset", "arrival clock", "PCIe link", "count"}
    for what in ("trials without the right record", "stale results"):
        assert next(row["value"] for row in rows if row["what"].startswith(what)) == 0.0
    facts = found["facts"]
    assert set(facts["bandwidths, GB/s"]) == {"host to device", "device to host", "both ways", "within the device"}
    assert facts["NCCL, 2 ranks on this GPU"].startswith("no: "), "no GPU: and the reason is told, not raised"
