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

from tests.cuda import emulator
from tpkernels.backends.symmetric import cuda_native
from tpkernels.measure.timing import Measurement

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import one_gpu
from gpu_steps import environment, programs
from gpu_steps.outcome import Outcome, Prediction, Recorder, Row, markdown, times_of
from gpu_steps.sets import SETS, STEPS, Step, StepSet

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
            Row("G1", "synthetic 8x8x8", "cuBLAS / ours", 0.8, "flags preset", ">= 0.92", 3, times, predicted=0.875),
            Row("G2", "synthetic 8x8x8", "with waits / without", 1.01, "flags preset", "<= 1.02", 3),
            Row("-", "synthetic", "unfused / fused", 1.5, "PCIe link", "", 3),
        ]),
        Outcome("rivals", "out of time", 90.0, "had not ended after 90 s",
                predictions=[Prediction("G5", "synthetic 4x4x4", "ours / theirs", 1.25)]),
    ]  # fmt: skip


@pytest.mark.cpu
def test_the_report_shows_verdicts_kinds_spreads_and_what_was_left_out() -> None:
    text = markdown(ENVIRONMENT, example())
    for words in ("| rivals | out of time | 90 | had not ended after 90 s |", "flags preset", "PCIe link",
                  "| 0.800 | 0.875 | >= 0.92 | no | flags preset | 3 | cublas 1,000.0 ±0.0<br>preset 1,250.0 ±0.0 |",
                  "| 1.010 |  | <= 1.02 | yes |", "| 1.500 |  |  |  | PCIe link |", "no: Duplicate / GPU",
                  "Predicted and not measured:", "- rivals: G5 synthetic 4x4x4: ours / theirs: 1.250",
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


@pytest.mark.cpu
def test_a_number_is_refused_unless_it_was_predicted_under_the_same_name(tmp_path: Path) -> None:
    recorder = Recorder(Outcome("gemm", "running"), tmp_path / "step-gemm.json")
    recorder.predict("G1", "8x8x8", "cuBLAS / ours", 0.9)
    (filed,) = json.loads((tmp_path / "step-gemm.json").read_text())["predictions"]
    assert filed["value"] == 0.9, "it is on file before anything is measured"
    with pytest.raises(ValueError, match="'cuBLAS / ours' was measured, and nothing was predicted of it"):
        recorder.row(Row("G1", "9x9x9", "cuBLAS / ours", 1.0, "device"))
    recorder.row(Row("G1", "8x8x8", "cuBLAS / ours", 1.0, "device"))
    assert recorder.outcome.predictions == [] and recorder.outcome.rows[0].predicted == 0.9
    with pytest.raises(ValueError, match="nothing was predicted"):
        recorder.row(Row("G1", "8x8x8", "cuBLAS / ours", 1.0, "device"))
    with pytest.raises(ValueError, match="is inf"):
        recorder.predict("G1", "8x8x8", "cuBLAS / ours", float("inf"))


# --- steps that hang, die, or must not run ----------------------------------------------------------------------------

WRITES_ONE_ROW = """
import os, sys, time
sys.path[:0] = {path!r}
from pathlib import Path
from gpu_steps.outcome import Outcome, Recorder, Row
recorder = Recorder(Outcome({name!r}, "running"), Path({out!r}) / "step-{name}.json")
recorder.predict("G1", "p", "w", 0.5)
recorder.row(Row("G1", "p", "w", 1.0, "device", ">= 0.5", 1))
recorder.predict("G1", "p", "not measured", 0.5)
{then}
"""
ENDS = "recorder.outcome.status = 'done'; recorder.save()"


def as_step(monkeypatch: pytest.MonkeyPatch, then: dict[str, str]) -> None:
    def command(step: Step, out: Path) -> list[str]:
        code = WRITES_ONE_ROW.format(
            path=[str(ROOT / "benchmarks"), str(ROOT)], name=step.name, out=str(out), then=then[step.name]
        )
        return [sys.executable, "-c", code]

    monkeypatch.setattr(one_gpu, "command_of", command)


def set_of(name: str, *steps: str, limit_s: float = 200.0, gate: bool = False) -> StepSet:
    return StepSet(name, limit_s, tuple(Step(step, step, 60.0, "none") for step in steps), gate)


def statuses(out: Path) -> dict[str, str]:
    content = json.loads((out / "one-gpu.json").read_text())
    return {step["step"]: step["status"] for step in content["steps"]}


@pytest.mark.cpu
def test_a_step_that_hangs_loses_its_rest_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_step(monkeypatch, {"hangs": "time.sleep(600)", "dies": "os._exit(9)", "ends": ENDS})
    sets = [set_of("short", "hangs", "late", limit_s=6.0), set_of("long", "dies", "ends")]
    assert one_gpu.run_all(sets, tmp_path, ENVIRONMENT) == 1
    content = json.loads((tmp_path / "one-gpu.json").read_text())
    found = {step["step"]: step for step in content["steps"]}
    late = found.pop("late")
    assert (late["status"], late["reason"]) == ("out of time", "the set's limit was reached before its turn")
    assert {name: step["status"] for name, step in found.items()} == {
        "hangs": "out of time", "dies": "failed", "ends": "done"
    }  # fmt: skip
    assert all(step["rows"][0]["value"] == 1.0 for step in found.values()), "what was found before stays"
    assert found["hangs"]["predictions"][0]["what"] == "not measured"
    assert "not ended after 6 s" in found["hangs"]["reason"] and "status 9" in found["dies"]["reason"]
    assert "| hangs | out of time |" in capsys.readouterr().out


@pytest.mark.cpu
@pytest.mark.parametrize(("gate", "last"), [(True, "not run"), (False, "done")])
def test_nothing_runs_after_a_smoke_that_is_not_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gate: bool, last: str
) -> None:
    as_step(monkeypatch, {"first": "raise SystemExit(1)", "second": ENDS, "third": ENDS})
    sets = [set_of("smoke", "first", "second", gate=gate), set_of("core", "third")]
    assert one_gpu.run_all(sets, tmp_path, ENVIRONMENT) == 1
    assert statuses(tmp_path) == {"first": "failed", "second": last, "third": last}
    assert (tmp_path / "step-third.json").exists() is not gate


@pytest.mark.cpu
def test_a_step_has_its_own_environment_and_the_library_that_was_handed_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shows = "recorder.fact('seen', [os.environ.get(name) for name in ('CUDA_DEVICE_MAX_CONNECTIONS', 'OTHER')])"
    as_step(monkeypatch, {"one-queue": f"{shows}; {ENDS}"})
    monkeypatch.setenv("OTHER", "kept")
    assert one_gpu.supervise(STEPS["one-queue"], tmp_path, 60.0).facts == {"seen": ["1", "kept"]}
    library = tmp_path / "_cuda.so"
    library.touch()
    monkeypatch.setenv(one_gpu.LIBRARY, "")
    monkeypatch.setattr(one_gpu, "why_no_gpu", lambda: None)
    handed = []
    monkeypatch.setattr(one_gpu, "run_all", lambda sets, *_: handed.append(os.environ[one_gpu.LIBRARY]) or 0)
    monkeypatch.chdir(tmp_path)
    assert one_gpu.main(["smoke", "--out", "results", "--library", "_cuda.so"]) == 0
    assert handed == [str(library)], "absolute: steps may run elsewhere"


# --- the command line -------------------------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "one_gpu.py"), *arguments]
    environment_ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment_, capture_output=True, text=True, timeout=120)


@pytest.mark.cpu
@pytest.mark.slow("2 s of a new interpreter")
def test_without_a_cuda_device_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "results"))
    assert done.returncode == one_gpu.NO_GPU == 3
    assert "CUDA" in done.stderr and "Nothing was measured" in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.cpu
def test_the_plan_names_every_set_step_and_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert one_gpu.main(["--plan"]) == 0
    printed = capsys.readouterr().out
    assert all(one.name in printed for one in SETS) and all(name in printed for name in STEPS)
    for target in ("G1", "G2", "G3", "G4", "G5", "R21", "R22", "tests/gpu", "memcheck", "60 s; if it fails, no"):
        assert target in printed
    assert one_gpu.main(["--plan", "link"]) == 0 and "gemm" not in (printed := capsys.readouterr().out)
    assert "one-queue" in printed
    assert [one.name for one in one_gpu.chosen([], None)] == ["smoke", "core"]
    assert [one.name for one in one_gpu.chosen(["ranks", "link", "ranks"], None)] == ["ranks", "link"]
    ((only,),) = ([one.steps for one in one_gpu.chosen([], ["gemm"])],)
    assert [step.name for step in only] == ["gemm"]


def too_long(sets: tuple[StepSet, ...]) -> list[str]:
    """Sets whose steps may take longer than they may, or which are longer than a device machine is lent for."""
    wrong = [one.name for one in sets if sum(step.budget_s for step in one.steps) > one.limit_s]
    return wrong + [one.name for one in sets if one.limit_s > 540]


@pytest.mark.cpu
def test_the_budgets_of_a_set_add_up_to_no_more_than_its_limit() -> None:
    assert too_long(SETS) == []
    assert {one.name: one.limit_s for one in SETS if one.name in ("smoke", "core")} == {"smoke": 60, "core": 500}
    assert too_long((set_of("crowded", "a", "b", "c", "d"),)) == ["crowded"], "4 times 60 s in 200 s"
    assert [one.name for one in SETS if one.gate] == ["smoke"]
    assert len(STEPS) == sum(len(one.steps) for one in SETS), "names are steps'"


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["nothing", "--plan"],
            "there is no set nothing; there are smoke, core, link, ranks, sanitizer, tiles, rivals",
        ),
        (["--only", "nothing", "--plan"], "invalid choice: 'nothing'"),
        ([], "--out DIR is needed"),
        (["core", "--only", "gemm", "--plan"], "sets or --only, not both"),
        (["smoke", "--out", "d", "--library", "/nonexistent.so"], "--library /nonexistent.so is no file"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        one_gpu.main(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.cpu
def test_every_step_exists_and_what_it_lacks_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in STEPS.values():
        assert callable(step.load())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert one_gpu.run_step(STEPS["memcheck-alone"], tmp_path) == 0
    filed = json.loads((tmp_path / "step-memcheck-alone.json").read_text())
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


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("says", "status", "reason"),
    [
        ("echo '========= ERROR SUMMARY: 0 errors'", "done", ""),
        ("echo '========= ERROR SUMMARY: 3 errors'; exit 77", "failed", "RuntimeError: 3 errors: see synccheck-alone"),
        ("echo 'cannot start'; exit 1", "failed", "RuntimeError: exit 1: cannot start"),
        ("echo '========= ERROR SUMMARY: 0 errors'; exit 1", "failed", "RuntimeError: exit 1: ERROR SUMMARY: 0 errors"),
    ],
)
def test_what_the_sanitizer_says_is_the_step_s_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, status: str, reason: str
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\n{says}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    one_gpu.run_step(STEPS["synccheck-alone"], tmp_path)
    filed = json.loads((tmp_path / "step-synccheck-alone.json").read_text())
    assert filed["status"] == status and filed["reason"].startswith(reason)


@pytest.mark.cpu
def test_a_library_that_was_handed_in_is_never_replaced_by_a_built_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = tmp_path / "_cuda.so"
    wrong.write_bytes(b"not a library")
    monkeypatch.setenv(one_gpu.LIBRARY, str(wrong))
    monkeypatch.setattr(cuda_native, "_load", cuda_native._load.__wrapped__)
    assert one_gpu.run_step(STEPS["build"], tmp_path) == 1
    reason = json.loads((tmp_path / "step-build.json").read_text())["reason"]
    assert "the library that was handed in cannot be used: the CUDA kernels do not load" in reason


@pytest.mark.cpu
@pytest.mark.slow("3 s of new interpreters")
def test_a_library_that_is_missing_is_built_and_then_loaded_by_another_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, full: bool
) -> None:
    """Without nvcc: what was built before stands for what the build makes."""
    monkeypatch.setattr(cuda_native, "library", lambda: None)
    monkeypatch.setattr(cuda_native, "file", lambda: cuda_native.FILE)
    monkeypatch.setattr(programs, "BUILD", "print('error: no nvcc')")
    for library, status in ((tmp_path / "none.so", 1), (emulator.library(), 0))[: 2 if full else 1]:
        monkeypatch.setenv(one_gpu.LIBRARY, str(library))
        assert one_gpu.run_step(STEPS["build"], tmp_path) == status
        filed = json.loads((tmp_path / "step-build.json").read_text())
        assert filed["facts"] == ({} if status else {"CUDA kernels": "built"}), filed
        assert ("the CUDA kernels cannot be built: error: no nvcc / " in filed["reason"]) is bool(status)


# --- every set on an emulated GPU -------------------------------------------------------------------------------------

LABELS = {
    "smoke": {"count"},
    "core": {"device", "PCIe link", "flags preset", "count"},
    "link": {"PCIe link", "arrival clock", "host", "device"},
    "ranks": {"contention stress"},
    "sanitizer": {"count"},
    "tiles": {"flags preset"},
    "rivals": {"contention stress"},
}


def rehearse(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.measure.one_gpu_on_cpu", str(folder), *arguments]
    settings = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", one_gpu.LIBRARY: str(emulator.library())}
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **settings, **environment}, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory, full: bool) -> dict[str, dict[str, Any]]:
    """What the steps of all sets have filed, by name, without --full of the first set; one process for all."""
    folder = tmp_path_factory.mktemp("rehearsed")
    sets = [one for one in SETS if full or one.name == "smoke"]
    done = rehearse(folder, *(one.name for one in sets))
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [step.name for one in sets for step in one.steps]
    return {name: json.loads((folder / f"step-{name}.json").read_text()) for name in steps}


@pytest.mark.sample(1)
@pytest.mark.gloo
@pytest.mark.parametrize("name", LABELS)
@pytest.mark.slow("5 s")
def test_every_step_of_a_set_is_done_on_an_emulated_gpu(rehearsed: dict[str, dict[str, Any]], name: str) -> None:
    """Kernels, copies, flags and reductions, verified before they are timed, as on a GPU; every number predicted."""
    (one,) = (one for one in SETS if one.name == name)
    steps = [rehearsed[step.name] for step in one.steps]
    assert {step["step"]: (step["status"], step["reason"]) for step in steps} == {
        step.name: ("done", "") for step in one.steps
    }
    rows = [row for step in steps for row in step["rows"]]
    assert {row["label"] for row in rows} == LABELS[name]
    assert all(isinstance(row["predicted"], float) for row in rows)
    assert not [left for step in steps for left in step["predictions"]], "what was predicted was measured"
    assert all(row["value"] == 0.0 for row in rows if row["bound"] == "<= 0"), "faults that were found"


@pytest.mark.full("rehearses all sets")
@pytest.mark.gloo
def test_the_rehearsal_has_seen_all_that_the_sets_promise(rehearsed: dict[str, dict[str, Any]]) -> None:
    rows = [row for step in rehearsed.values() for row in step["rows"]]
    assert {row["target"] for row in rows} == {"G1", "G2", "G3", "G4", "G5", "R21", "R22", "smoke", "-"}
    assert len(rehearsed["smoke"]["rows"]) == 7
    assert {row["problem"].rpartition(", ")[2] for row in rehearsed["experts"]["rows"]} == {"up", "down"}
    assert len(rehearsed["experts-ranks"]["rows"]) == 4, "two layers in two layouts"
    loops = {row["what"].rpartition(", ")[2] for row in rehearsed["gemm"]["rows"] if row["target"] == "G1"}
    assert loops == {"flat loop", "nested loop"}
    assert sum("GB/s" in row["what"] for row in rehearsed["environment"]["rows"]) == 4
    queues = {row["problem"].rpartition(", ")[2] for row in rehearsed["one-queue"]["rows"]}
    assert {"flags by KERNEL", "flags by COPY", "one queue"} <= queues
    for step in ("link", "one-queue"):
        both = [row["times"] for row in rehearsed[step]["rows"] if row["label"] == "host"]
        assert both and all(set(times) == {"host", "device"} for times in both), "the host's time beside the device's"
    assert {row["problem"].split()[0] for row in rehearsed["rivals"]["rows"]} == {
        "all_gather_matmul", "matmul_reduce_scatter"
    }  # fmt: skip
    assert rehearsed["tests"]["facts"]["test_right"].startswith("1 passed")
    assert rehearsed["sharing"]["facts"]["NCCL, 2 processes on this GPU"].startswith("no: "), "the reason is told"


@pytest.mark.full("7 s of a core: that each check of smoke, which the rehearsal passes, can fail")
@pytest.mark.cpu
def test_smoke_fails_at_the_check_that_a_fault_is_for(tmp_path: Path) -> None:
    done = rehearse(tmp_path, "--faults")
    assert done.returncode == 0, done.stderr[-3000:]
    said = (
        "no kernel image", "the reducer: ", "a one-shot kernel gave up: ", "exceed the bound",
        "flags of the others' chunks", "experts, up, ", "without the right record",
    )  # fmt: skip
    for number, words in enumerate(said):
        filed = json.loads((tmp_path / str(number) / "step-smoke.json").read_text())
        assert (filed["status"], len(filed["rows"])) == ("failed", number), filed
        assert words in filed["reason"] and len(filed["predictions"]) == 7 - number


@pytest.mark.cpu
def test_what_the_sanitizer_looks_at_is_right_on_an_emulated_gpu(full: bool, tmp_path: Path) -> None:
    if not full:
        pytest.skip("--full: its tensors are larger")
    done = rehearse(tmp_path, "--sanitized")
    assert done.returncode == 0, done.stderr[-3000:]
