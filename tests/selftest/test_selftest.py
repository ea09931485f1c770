"""`tpkernels test` passes what is right, and a fault that is seeded is found, named, and the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import tpkernels as tpk
from tpkernels import cli, ops, selftest
from tpkernels.comm.groups import resolve
from tpkernels.comm.transport import Transfer
from tpkernels.dispatch import Costs
from tpkernels.gemm import canonical
from tpkernels.gemm.native import native
from tpkernels.ops import agreed_call
from tpkernels.selftest.compare import Row, implementations_of, merge
from tpkernels.selftest.same_bits import Verdict, run_rank
from tpkernels.testing.faults import corrupt_receives
from tpkernels.testing.numeric import Bounded
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

LIMIT_S = 180.0
ABLE = ["unfused", "chunked", *(["shared_memory"] if native() is not None else [])]


@pytest.fixture
def on_pool(monkeypatch: pytest.MonkeyPatch, ranks: Pools) -> None:
    """Ranks that are there already; the command's own start is that of the other commands."""
    monkeypatch.setattr(
        tpk, "launch", lambda fn, nproc, *args, timeout: ranks(nproc).run(fn, *args, timeout=min(timeout, LIMIT_S))
    )


def test_what_the_ranks_found_becomes_one_row() -> None:
    good = Row("op", "chunked", ran=["chunked"], compared=3, bitwise=1, worst=0.5, where="y")
    bad = Row("op", "chunked", ran=["unfused"], compared=3, worst=float("inf"), where="dx", failures=["wrong"])
    (row,) = merge([[good], [bad]])
    assert (row.compared, row.bitwise, row.where, row.ran) == (6, 1, "dx", ["chunked", "unfused"])
    assert row.failures == ["rank 1: wrong"] and row.verdict == "FAILED" and row.to_json()["worst"] is None
    assert Row("op", "symmetric", refused=["no GPU"]).verdict == "refused"


def rows_of(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    content = json.loads(path.read_text())
    assert content["passed"] == all(row["verdict"] != "FAILED" for row in content["rows"])
    return {(row["what"], row["implementation"]): row for row in content["rows"]}


@pytest.mark.slow("14 s: `tpkernels test --quick` on two ranks")
def test_every_op_and_module_is_compared_in_every_implementation(
    on_pool: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    assert cli.main(["test", "--quick", "--dtype", "bf16", "--json", str(path)]) == 0
    rows = rows_of(path)
    needs_no_row = {"copy_to_group", "shard", "explain", "Routing"}  # the duals of all_reduce and all_gather; no values
    duals = {"copy_matmul": "matmul_all_reduce", "copy_grouped_matmul": "grouped_matmul_all_reduce"}
    for op in set(ops.__all__) - needs_no_row:
        for name in implementations_of(duals.get(op, op)):
            row = rows[op, name]
            assert row["verdict"] == ("ok" if name in ABLE else "refused"), row
            assert name not in ABLE or (0 < row["worst"] <= 1 and name in row["ran"]), row
            assert name not in ABLE[1:] or row["bitwise"] == row["compared"] // 2, row
            assert name != "symmetric" or row["refused"] == ["symmetric memory serves CUDA tensors"], row
    for what in ("ColumnParallelLinear", "RowParallelLinear", "ParallelMLP", "GPT of parts", "GPT, parallelize"):
        for how in ("", ", sequence parallel"):
            row = rows[what + how, "auto"]
            assert row["verdict"] == "ok" and 0 < row["worst"] <= 1 and row["ran"], row
    printed = capsys.readouterr().out
    # Not more of it: how wide the column is depends on what "auto" chose, whose names stand in another one.
    assert "all right" in printed and "refused: " in printed


def run_with_fault(options: selftest.Options) -> list[Row]:
    """Of what rank 1 gets from its peer in messages, the first row of every matrix is lost."""

    def lose(transfer: Transfer) -> None:
        if transfer.tensor.is_floating_point() and transfer.tensor.dim() == 2 and len(transfer.tensor):
            transfer.tensor[0] = 0

    state = resolve(tpk.init(device="cpu", timeout=60)["tp"])
    # Whatever this machine measures: what the backward pass of "shared_memory" gathers by itself sends no messages.
    memory_wins = Costs(copy_gbytes=1e3, signal_us=0.01, link_gbytes=1e-3, link_latency_us=1e5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreed_call, "agreed_costs", lambda *args: memory_wins)
        patch.setattr(state, "agreed", OrderedDict())
        patch.setattr(state, "checked", {})
        with corrupt_receives(lose) if state.rank == 1 else nullcontext():
            return selftest.run_rank(options)


@pytest.mark.slow("4 s: that `tpkernels test` can fail")
def test_a_seeded_fault_ends_in_exit_code_1_and_its_rows_are_named(
    on_pool: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selftest, "run_rank", run_with_fault)
    path = tmp_path / "rows.json"
    words = ["test", "--quick", "--only", "ops", "--dtype", "fp32", "--json", str(path)]
    assert cli.main(words) == 1
    rows = rows_of(path)
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "copy_matmul"):
        row = rows[op, "chunked"]
        assert row["verdict"] == "FAILED", row
        assert any(one.startswith("rank 1: float32, ") and "exceed the bound" in one for one in row["failures"]), row
        assert native() is None or rows[op, "shared_memory"]["verdict"] == "ok", "no messages, no fault"
    printed = capsys.readouterr().out
    assert "FAILED  matmul_reduce_scatter, chunked:" in printed and "rows FAILED" in printed


def test_what_differs_from_unfused_in_one_bit_or_is_missing_fails() -> None:
    row = Row("op", "chunked")
    ones, exact = torch.ones(2), {"y": Bounded.exact(torch.ones(2))}
    assert row.judge("here", {"y": ones}, exact) and row.worst == 0
    row.judge_bits("here", {"y": ones}, {"y": ones})
    assert row.verdict == "ok"
    row.judge_bits("here", {"y": torch.nextafter(ones, ones + 1)}, {"y": ones})
    assert "y against unfused: 2 of 2 elements differ in their bits" in row.failures[0] and row.verdict == "FAILED"
    assert not row.judge("there", {}, exact) and row.failures[1] == "there, y: there is none"
    assert not row.judge("there", {"y": ones[:1]}, exact) and "shape (1,), expected (2,)" in row.failures[2]


def test_contradicting_arguments_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert cli.main(["test", "--tp", "2"]) == 2
    assert "under torchrun" in capsys.readouterr().err


def test_it_runs_under_torchrun_on_uneven_ranks(full: bool, tmp_path: Path) -> None:
    if not full:
        pytest.skip("--full: one more start of three ranks")
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--standalone",
               "-m", "tpkernels", "test", "--dtype", "fp32", "--json", str(tmp_path / "rows.json")]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all right: ") == 1, "rank 0 alone prints"
    assert {row["verdict"] for row in rows_of(tmp_path / "rows.json").values()} == {"ok", "refused"}


@pytest.mark.slow("3 s: `tpkernels test --same-bits` on two ranks")
def test_training_is_compared_bit_by_bit_at_every_degree(
    on_pool: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bits.json"
    command = ["test", "--same-bits", "--tp", "2", "--quick", "--dtype", "bf16", "--json", str(path)]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert "The same bits at tensor-parallel degrees 1 and 2 (same_bits=8) on every rank" in printed
    assert "of 3 steps of AdamW with clipping and dropout, of gpt and llama, in bfloat16" in printed
    content = json.loads(path.read_text())
    assert content["passed"] and content["compared"] > 200 and content["degrees"] == [1, 2]


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--same-bits", "4", "--tp", "8"], "multiple of the tensor-parallel degree"),
        (["--same-bits", "--tp", "1"], "at least two ranks"),
        (["--same-bits", "--only", "ops"], "--only"),
    ],
)
def test_what_compares_no_degrees_is_refused(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["test", *arguments]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.slow("3 s: that `tpkernels test --same-bits` can fail")
def test_another_tree_at_one_degree_is_named(ranks: Pools) -> None:
    for verdict in ranks(2).run(check_with_another_tree):
        assert not verdict.same and str(verdict).startswith("NOT the same bits (same_bits=8):\ngpt, float32: rank 0, ")
        assert {one.degree for one in verdict.differences} == {2}, verdict


def check_with_another_tree() -> Verdict:
    """Two ranks round what they send, as an all-reduce in bf16 would."""
    right = canonical.top_of_tree

    def wrong(parts: Any, *out: Any) -> None:
        right([part.bfloat16().to(part.dtype) for part in parts] if len(parts) == 2 else parts, *out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canonical, "top_of_tree", wrong)
        return run_rank(8, ["float32"], True)
