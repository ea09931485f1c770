"""The benchmark refuses wrong results, runs under its own launcher, under torchrun and in the network lab, and its
timeline proves overlap by bytes on the wire."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tpkernels.comm.timeline import Event
from tpkernels.gemm.native import native
from tpkernels.launching import local_ranks
from tpkernels.launching.local_ranks import LaunchError
from tpkernels.measure import bench, bench_rank, bench_table, fitting, netlab, suites, usual_dtype
from tpkernels.measure.cases import FUSED_OPS, Shape, TimedCase
from tpkernels.measure.report import CaseResult
from tpkernels.measure.rivals import RIVALS, Problem, Rival
from tpkernels.measure.timing import Measurement
from tpkernels.measure.trace import RankTrace, trace_overlap
from tpkernels.testing.spawn import Pools, fork_server


def _arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args([*words])


def test_shapes_are_parsed_and_bad_ones_name_the_value() -> None:
    assert Shape.parse("4096x2048X8192") == Shape(4096, 2048, 8192)
    for bad in ("4096x2048", "4096x0x3", "axbxc", "1x2x3x4"):
        with pytest.raises(ValueError, match=f"MxKxN.*{bad}"):
            Shape.parse(bad)


def test_every_suite_names_shapes_for_every_op() -> None:
    for suite in bench.SUITES.values():
        assert set(suite) == set(FUSED_OPS)
        assert all(Shape.parse(text) for shapes in suite.values() for text in shapes)


def test_arguments_become_a_plan_and_contradictions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bench.make_plan(
        _arguments("--op", "matmul_all_reduce", "--shape", "1x2x3", "--dtype", "fp32", "--device", "cpu"), 2
    )
    assert plan.problems == (("matmul_all_reduce", Shape(1, 2, 3)),)
    assert (plan.dtype, plan.device, plan.trace, plan.tp) == ("fp32", "cpu", False, (2,))
    with pytest.raises(ValueError, match=r"--tp 5 must be between 1 and .* \(4\)"):
        bench.make_plan(_arguments("--tp", "5", "--tp", "2"), 4)
    with pytest.raises(ValueError, match="--delay"):
        bench.main(_arguments("--delay", "1ms"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="under torchrun"):
        bench.main(_arguments("--nproc", "2"))


def _corrupt(result: torch.Tensor, rank: int) -> torch.Tensor:
    wrong = result.clone()
    wrong[-1, 0] += 4.0
    return wrong


def _verify_right_and_wrong() -> dict[str, list[str]]:
    mesh = tpk.init(device="cpu", timeout=60)
    caught: dict[str, list[str]] = {op: [] for op in FUSED_OPS}
    for op in FUSED_OPS:
        case = TimedCase(op, Shape(37, 24, 20), torch.bfloat16, mesh["tp"].get_group(), torch.device("cpu"))
        for name in [*case.implementations(), "auto"]:
            result = case.ours(name)()
            case.verify(name, result)
            try:
                case.verify(name, _corrupt(result, case.rank))
            except AssertionError:
                caught[op].append(name)
    return caught


def _rival_shapes() -> dict[str, tuple[int, ...]]:
    """Results of torch's fused ops for tensors without data: the calls are right, as far as that shows."""
    import torch.distributed._symmetric_memory

    rival = next(rival for rival in RIVALS if rival.name == "torch_symm_mem")
    found = {}
    for op, x, weight in (("all_gather_matmul", (4, 6), (5, 6)), ("matmul_reduce_scatter", (8, 3), (10, 3))):
        case: Any = SimpleNamespace(
            op=op, shape=Shape(8, 6, 10), group=dist.group.WORLD, world_size=2, device=torch.device("meta"),
            x=torch.empty(x, device="meta"), weight=torch.empty(weight, device="meta"),
        )  # fmt: skip
        found[op] = tuple(rival.make(case)().shape)
    return found


def _on_two_ranks() -> tuple[dict[str, list[str]], dict[str, tuple[int, ...]]]:
    return _verify_right_and_wrong(), _rival_shapes()


@pytest.fixture(scope="module")
def on_two_ranks() -> list[tuple[dict[str, list[str]], dict[str, tuple[int, ...]]]]:
    with mock.patch.object(local_ranks, "new_interpreters", fork_server):
        return tpk.launch(_on_two_ranks, 2, timeout=120)


@pytest.mark.gloo
def test_a_wrong_element_is_refused_before_anything_is_timed(on_two_ranks: list[Any]) -> None:
    expected = ["unfused", "chunked", *(["shared_memory"] if native() is not None else []), "auto"]
    for caught, _ in on_two_ranks:
        assert caught == {op: expected for op in FUSED_OPS}


@pytest.mark.gloo
def test_torchs_fused_ops_are_called_with_what_they_take(on_two_ranks: list[Any]) -> None:
    for _, shapes in on_two_ranks:
        assert shapes == {"all_gather_matmul": (8, 5), "matmul_reduce_scatter": (4, 10)}


@pytest.mark.full("4 s of a core; groups of two and three ranks are measured below, and their samples counted")
@pytest.mark.usefixtures("forked")
@pytest.mark.gloo
def test_bench_runs_local_ranks_and_files_every_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    args = _arguments(
        "--shape", "48x64x96", "--repeats", "3", "--device", "cpu", "--json", str(path), "--timeout", "200"
    )
    assert bench.main(args) == 0
    content = json.loads(path.read_text())
    assert [row["op"] for row in content["results"]] == list(FUSED_OPS)
    for row in content["results"]:
        assert {"gemm", "comm", "torch", "unfused", "chunked", "auto"} <= set(row["times"])
        assert all(len(times["samples_ms"]) == 3 for times in row["times"].values())
        assert row["speedup_over_torch"] > 0
        assert row["speedup_over_unfused"] > 0
    printed = capsys.readouterr().out
    assert "GEMM only" in printed and "vs unfused" in printed


@pytest.mark.usefixtures("forked")
@pytest.mark.gloo
@pytest.mark.slow("5 s")
def test_bench_measures_groups_and_uneven_shapes_and_says_who_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    args = _arguments("--tp", "2", "--tp", "3", "--shape", "10x17x19", "--repeats", "2",
                      "--device", "cpu", "--timeout", "200", "--json", str(path))  # fmt: skip
    assert bench.main(args) == 0
    printed = capsys.readouterr().out
    assert "torch left out: M (10) is not a multiple of the world size (3)" in printed
    assert "torch_symm_mem left out: torch.ops.symm_mem has no fused ops for CPU tensors (everywhere)" in printed
    assert "transformer_engine left out: " in printed
    content = json.loads(path.read_text())
    assert content["complete"]
    assert [row["world_size"] for row in content["results"]] == [2] * 3 + [3] * 3
    assert ["torch" in row["times"] for row in content["results"]] == [True] * 3 + [False, False, True]
    for row in content["results"]:
        assert {"gemm", "comm", "unfused", "chunked", "auto"} <= set(row["times"])
        assert all(len(times["samples_ms"]) == 2 for times in row["times"].values())
        assert row["speedup_over_unfused"] > 0
    assert "GEMM only" in printed and "vs unfused" in printed


@pytest.mark.full("every size of the suite")
@pytest.mark.gloo
def test_the_standard_suite_runs_end_to_end_under_torchrun(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
               "-m", "tpkernels", "bench", "--suite", "standard", "--quick", "--repeats", "1", "--warmup", "0",
               "--device", "cpu"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("samples: ") == 1, "rank 0 alone prints"
    assert "groups of 4, 8 left out: there are 2 rank(s)" in done.stderr
    content = json.loads((tmp_path / "bench-standard" / "bench.json").read_text())
    shapes = {op: [row["shape_MxKxN"] for row in content["results"] if row["op"] == op] for op in FUSED_OPS}
    assert {op: len(found) for op, found in shapes.items()} == {FUSED_OPS[0]: 6, FUSED_OPS[1]: 6, FUSED_OPS[2]: 3}
    assert content["complete"] and content["setup"]["sizes_divided_by"] > 1
    for row in content["results"]:
        assert {"gemm", "comm", "torch", "unfused", "chunked", "auto"} <= set(row["times"])
        assert {"symmetric", "torch_symm_mem", "transformer_engine"} >= set(row["left_out"]) >= {"torch_symm_mem"}
        assert not row["failures"]
    picture = (tmp_path / "bench-standard" / "bench.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
    assert "GEMM only" in (tmp_path / "bench-standard" / "bench.txt").read_text()
    page = (tmp_path / "bench-standard" / "bench.html").read_text()
    assert page.count("<svg") == 4 and "<h2>Timeline of one call: " in page
    assert not any(word in page for word in ("<script", "src=", "<link")), "the page loads nothing"


def _broken() -> Rival:
    def make(case: Problem) -> object:
        raise RuntimeError("no such thing\nas this")

    return Rival("broken", lambda case: None, make)  # type: ignore[arg-type]


def _wrong_on(rank: int) -> Rival:
    def make(case: Problem) -> object:
        assert isinstance(case, TimedCase)
        return lambda: case.torch_baseline() + (4.0 if case.rank == rank else 0.0)

    return Rival("wrong", lambda case: None, make)  # type: ignore[arg-type]


def _with_bad_company(path: str) -> bench_rank.RankOutput:
    bench_rank.RIVALS = (_broken(), _wrong_on(1))  # type: ignore[misc]
    ours = TimedCase.ours
    TimedCase.ours = lambda case, name: (  # type: ignore[method-assign]
        (lambda: _corrupt(ours(case, name)(), 0)) if name == "chunked" else ours(case, name)
    )
    plan = bench_rank.Plan((("matmul_all_reduce", Shape(8, 16, 24)),), repeats=1, json=path, environment={"setup": {}})
    return bench_rank.run_rank(plan)


@pytest.mark.usefixtures("forked")
@pytest.mark.gloo
def test_what_is_wrong_on_one_rank_is_timed_on_none_and_each_says_why(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    for output in tpk.launch(_with_bad_company, 2, str(path), timeout=120):
        (result,) = output.results
        assert set(result.failures) == {"chunked"} and "BoundExceeded" in result.failures["chunked"]
        assert result.notes["broken"] == "RuntimeError: no such thing"
        assert result.notes["wrong"].startswith("rank 1: BoundExceeded")
        assert {"torch", "unfused"} <= set(result.times) and not {"chunked", "broken", "wrong"} & set(result.times)
        assert bench_table.remarks([result])[0].startswith("chunked WRONG: BoundExceeded")
    content = json.loads(path.read_text())
    assert content["complete"] is False and len(content["results"]) == 1, "written after the case"


def _stuck(case: TimedCase, plan: bench_rank.Plan, control: object) -> None:
    threading.Event().wait()


def _never_ends() -> None:
    bench_rank.time_case = _stuck  # type: ignore[assignment]
    bench_rank.run_rank(bench_rank.Plan((("matmul_all_reduce", Shape(8, 16, 24)),), case_timeout_s=0.5))


@pytest.mark.gloo
@pytest.mark.slow("3 s")
def test_a_case_that_never_ends_ends_the_process_and_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError):
        tpk.launch(_never_ends, 1, timeout=60)
    said = capfd.readouterr().err
    assert "rank 0: [1/1] matmul_all_reduce 8x16x24, 1 ranks has not ended within 0.5 s" in said
    assert "in _stuck" in said, "the stack says where"


@pytest.mark.cpu
def test_calls_of_torch_symm_mem_fit_its_signatures() -> None:
    """The ops are declared in builds without CUDA, too."""
    import torch.distributed._symmetric_memory

    expected = {
        "fused_all_gather_matmul": ["A", "Bs", "gather_dim", "group_name", "return_A"],
        "fused_matmul_reduce_scatter": ["A", "B", "reduce_op", "scatter_dim", "group_name"],
        "one_shot_all_reduce": ["input", "reduce_op", "group_name"],
        "two_shot_all_reduce_": ["input", "reduce_op", "group_name"],
    }
    schemas = {name: getattr(torch.ops.symm_mem, name).default._schema for name in expected}
    assert {name: [argument.name for argument in schema.arguments] for name, schema in schemas.items()} == expected


@pytest.mark.cpu
def test_quick_sizes_are_small_and_decoding_stays_decoding() -> None:
    assert suites.scaled(Shape(8192, 4096, 11008), 32) == Shape(256, 128, 344)
    assert suites.scaled(Shape(1, 14336, 4096), 32) == Shape(1, 448, 128)
    assert suites.scaled(Shape(3, 5, 7), 1) == Shape(3, 5, 7)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        suites.scaled(Shape(3, 5, 7), 0)


def test_bench_in_the_lab_says_why_it_skips(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tpkernels.measure.links.missing_capability", lambda: "needs root (CAP_NET_ADMIN missing)")
    assert bench.main(_arguments("--netlab", "1gbit", "--device", "cpu")) == 1
    assert "skipped: the network lab needs root" in capsys.readouterr().err


@pytest.mark.usefixtures("forked")
@pytest.mark.netns
@pytest.mark.slow("3 s: hosts as network namespaces")
def test_bench_in_the_lab_writes_a_timeline_with_the_link_and_both_implementations(
    lab_possible: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    args = _arguments("--netlab", "500mbit", "--op", "all_gather_matmul", "--shape", "1024x512x1024", "--repeats", "2",
                      "--device", "cpu", "--trace", str(path), "--timeout", "200")  # fmt: skip
    assert bench.main(args) == 0
    assert "of the bytes crossed under a GEMM" in capsys.readouterr().out
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    rows = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert {(0, "compute"), (0, "from rank 1"), (0, "to rank 1"), (1, "from rank 0")} <= rows
    calls = {
        e["name"].rsplit(" ", 1)[1] for e in events if e["ph"] == "X" and e["name"].startswith("all_gather_matmul")
    }
    assert calls == {"unfused", "chunked"}
    assert max(e["args"]["in"] for e in events if e["ph"] == "C") > 0.2


RECORDED = 3


def _record_calls(op: str, shape: Shape) -> list[RankTrace]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = tpk.init(device="cpu")
    # fp32: with AMX a bf16 GEMM would be over before the link has moved its bytes, and would hide little.
    case = TimedCase(op, shape, torch.float32, mesh["tp"].get_group(), torch.device("cpu"))
    with torch.no_grad():
        return [bench_rank.record_call(case, name) for _ in range(RECORDED) for name in ("unfused", "chunked")]


@pytest.mark.sample(1)
@pytest.mark.usefixtures("forked")
@pytest.mark.netns
@pytest.mark.parametrize(
    ("op", "shape"),
    [("all_gather_matmul", Shape(1024, 2048, 8192)), ("matmul_reduce_scatter", Shape(1024, 8192, 2048))],
)
def test_chunked_moves_its_bytes_while_gemms_run_and_unfused_does_not(
    lab_possible: None, op: str, shape: Shape, full: bool
) -> None:
    if not full:
        pytest.skip("--full: test_layer_overlap.py measures both ops in a layer")
    with netlab.Netlab(2, rate="500mbit", sample_interval_s=0.002) as lab:
        per_rank = lab.run(_record_calls, op, shape, timeout=120)
    hidden: dict[str, list[float]] = {"unfused": [], "chunked": []}
    for traces in per_rank:
        for trace in traces:
            trace.samples = lab.samples[trace.rank]
            assert _is_complete(trace.events), trace.label
            hidden[trace.label.rsplit(" ", 1)[1]].append(trace_overlap(trace))
    assert len(hidden["chunked"]) == 2 * RECORDED
    assert median(hidden["chunked"]) > 0.7, hidden
    assert median(hidden["unfused"]) < 0.15, hidden


def _is_complete(events: list[Event]) -> bool:
    return {"gemm", "recv"} <= {event.kind for event in events}


@pytest.mark.cpu
@pytest.mark.parametrize(("counts", "said"), [((3, 3), "2 ranks, n=3"), ((9, 4), "2 ranks, n=4 to 9")])
def test_a_title_has_the_repeats_that_were_timed(counts: tuple[int, int], said: str) -> None:
    times = [{"torch": Measurement("torch", (1.0,) * count)} for count in counts]
    results = [CaseResult("all_gather_matmul", "8x16x32", "bf16", 2, one, 64, "chunked", 4) for one in times]
    assert bench_rank.titled(bench_rank.Plan((), title="2 ranks"), results) == said


def dtype_where(seconds: dict[str, float]) -> tuple[str, str | None, int]:
    calls = []

    def gemm_seconds(dtype: torch.dtype) -> float:
        calls.append(dtype)
        return seconds["bf16" if dtype == torch.bfloat16 else "fp32"]

    with mock.patch.object(usual_dtype, "_gemm_seconds", gemm_seconds):
        return *usual_dtype.usual_dtype("cpu", dist.group.WORLD), len(calls)  # type: ignore[arg-type]


@pytest.mark.gloo
def test_cores_without_units_for_bf16_are_measured_in_fp32_and_the_ranks_agree(ranks: Pools) -> None:
    slow = ranks(2).run(dtype_where, {"bf16": 4e-3, "fp32": 1e-3})
    assert [(name, calls) for name, _, calls in slow] == [("fp32", 2), ("fp32", 0)]  # the first rank alone looks
    assert "multiply bf16 at 67 GFLOP/s and fp32 at 268 GFLOP/s" in (slow[1][1] or "")
    assert ranks(2).run(dtype_where, {"bf16": 1e-3, "fp32": 1e-3}) == [("bf16", None, 2), ("bf16", None, 0)]
    assert usual_dtype.usual_dtype("cuda", None) == ("bf16", None)  # type: ignore[arg-type]


def fit_at(gflops: float, **options: Any) -> tuple[fitting.Fit, float]:
    """What is measured by ranks of this rate, with the seconds that it takes."""

    def seconds_of(op: str, shape: Shape) -> float:
        return 2e-9 * shape.m * shape.k * shape.n / gflops

    asked = suites.problems("scorecard", ("all_gather_matmul", "matmul_reduce_scatter"))
    given: dict[str, Any] = {
        "repeats": 9, "warmup": 2, "groups": 1, "timeout_s": 1800.0, "limit_s": None, "divides": True, **options
    }  # fmt: skip
    found = fitting.fit(asked, seconds_of, **given)
    return found, (found.repeats + 4) * sum(seconds_of(op, shape) for op, shape in found.problems)


@pytest.mark.cpu
def test_slow_ranks_measure_fewer_repeats_and_then_smaller_sizes_and_the_command_says_so() -> None:
    fast, _ = fit_at(100)
    assert (fast.divisor, fast.repeats, fast.limit_s, fast.says) == (1, 9, 300, ())
    slow, seconds = fit_at(5)
    assert (slow.divisor, slow.repeats) == (1, 7) and slow.limit_s > 300 and 800 < seconds <= 900
    assert "7 repeats instead of 9, in about 14 min: what was asked for would take about 16 min" in slow.says[0]
    assert slow.says[1] == f"a case may take {slow.limit_s / 60:.0f} min (--case-timeout)"
    slowest, seconds = fit_at(0.1)
    assert (
        (slowest.divisor, slowest.repeats) == (4, 9) and seconds <= 900 and "sizes of the suite / 4" in slowest.says[0]
    )
    assert slowest.environment == {"repeats": 9, "case_timeout_s": slowest.limit_s, "sizes_divided_by": 4}
    given, _ = fit_at(0.1, divides=False)
    assert (given.divisor, given.repeats) == (1, 3) and "longer than --timeout 1800 allows" in given.says[1]
    limited, _ = fit_at(5, limit_s=60.0)
    assert (limited.divisor, limited.limit_s) == (2, 60)


@pytest.mark.cpu
def test_cases_that_would_not_end_in_time_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter((0.0, 0.0, 20.0, 60.0, 75.0))  # cases of 20, 40 and 15
    monkeypatch.setattr(fitting, "time", mock.Mock(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(fitting, "resolve", lambda group: group)
    monkeypatch.setattr(fitting, "exchange", lambda group, name, said: [said])
    control = mock.Mock(**{"rank.return_value": 0})
    watch = fitting.Watch(100.0)
    assert [watch.allows_another(control, left=4) for _ in range(4)] == [True, True, False, False]
    assert "4 cases left out: they would not end within --timeout" in capsys.readouterr().err
