"""The benchmark refuses wrong results, runs under its own launcher, under torchrun and in the network lab, and its
timeline proves overlap by bytes on the wire."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tpkernels.comm.native import native
from tpkernels.comm.timeline import Event
from tpkernels.measure import bench, netlab
from tpkernels.measure.cases import FUSED_OPS, Case, Shape
from tpkernels.measure.trace import RankTrace, trace_overlap


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
        _arguments("--op", "matmul_all_reduce", "--shape", "1x2x3", "--dtype", "fp32", "--device", "cpu")
    )
    assert plan.problems == (("matmul_all_reduce", Shape(1, 2, 3)),)
    assert (plan.dtype, plan.device, plan.trace) == ("fp32", "cpu", False)
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


def _verify_right_and_wrong(op: str) -> list[str]:
    mesh = tpk.init(device="cpu", timeout=60)
    case = Case(op, Shape(37, 24, 20), torch.bfloat16, mesh["tp"].get_group(), torch.device("cpu"))
    caught = []
    for name in [*case.implementations(), "auto"]:
        result = case.ours(name)()
        case.verify(name, result)
        try:
            case.verify(name, _corrupt(result, case.rank))
        except AssertionError:
            caught.append(name)
    return caught


@pytest.mark.gloo
@pytest.mark.parametrize("op", FUSED_OPS)
def test_a_wrong_element_is_refused_before_anything_is_timed(op: str) -> None:
    for caught in tpk.launch(_verify_right_and_wrong, 2, op, timeout=120):
        assert caught == ["unfused", "chunked", *(["shared_memory"] if native() is not None else []), "auto"]


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
    assert "GEMM-only" in printed and "vs unfused" in printed


@pytest.mark.gloo
def test_bench_measures_uneven_shapes_and_says_that_torch_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    args = _arguments("--nproc", "3", "--shape", "10x17x19", "--repeats", "2", "--device", "cpu", "--timeout", "200")
    assert bench.main(args) == 0
    assert "torch left out: M (10) is not a multiple of the world size (3)" in capsys.readouterr().out


@pytest.mark.gloo
def test_bench_runs_as_a_rank_of_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
               "-m", "tpkernels", "bench", "--shape", "16x32x32", "--op", "all_gather_matmul", "--repeats", "2",
               "--device", "cpu", "--json", str(path)]  # fmt: skip
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("samples: ") == 1, "rank 0 alone prints"
    assert json.loads(path.read_text())["results"][0]["world_size"] == 2


def test_bench_in_the_lab_says_why_it_skips(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tpkernels.measure.links.missing_capability", lambda: "needs root (CAP_NET_ADMIN missing)")
    assert bench.main(_arguments("--netlab", "1gbit", "--device", "cpu")) == 1
    assert "skipped: the network lab needs root" in capsys.readouterr().err


@pytest.mark.netns
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
    case = Case(op, shape, torch.bfloat16, mesh["tp"].get_group(), torch.device("cpu"))
    with torch.no_grad():
        return [bench.record_call(case, name) for _ in range(RECORDED) for name in ("unfused", "chunked")]


@pytest.mark.netns
@pytest.mark.parametrize(
    ("op", "shape"),
    [("all_gather_matmul", Shape(1024, 2048, 8192)), ("matmul_reduce_scatter", Shape(1024, 8192, 2048))],
)
def test_chunked_moves_its_bytes_while_gemms_run_and_unfused_does_not(
    lab_possible: None, op: str, shape: Shape
) -> None:
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
