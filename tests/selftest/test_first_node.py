"""The suite for a node that nobody has tried: its steps on CPU ranks, and what becomes of one that fails or hangs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tpkernels as tpk
from tpkernels.cli import main
from tpkernels.dispatch import OPS
from tpkernels.selftest import first_node
from tpkernels.selftest import first_node_steps as steps
from tpkernels.selftest.first_node import Step
from tpkernels.selftest.first_node_steps import Setting

pytestmark = pytest.mark.gloo


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and what the file says of each step."""
    code = main(["bench", "--suite", "first-node", "--quick", "--repeats", "1", "--device", "cpu", "--out", str(folder),
                 *arguments])  # fmt: skip
    content = json.loads((folder / "first-node.json").read_text(encoding="utf-8"))
    assert content["complete"] and content["hardware"] and content["versions"]["torch"] and content["command"]
    return code, {step["step"]: step for step in content["steps"]}


def test_there_is_a_step_for_each_op_size_and_hazard() -> None:
    names = [step.name for step in first_node.steps_of(Setting("cpu", 1, 1, 0))]
    assert [f"first use of {op}" for op in OPS] == names[: len(OPS)]
    for part in ("all-reduce of 600 KiB", "all-reduce of 8 MiB", "all-reduce of 128 MiB", "FSDP x TP"):
        assert part in names
    assert sum("another stream" in name for name in names) == 1 and sum("speed of" in name for name in names) == 3


@pytest.mark.full("the steps of a node of GPUs, without one")
def test_steps_run_on_ranks_of_this_host(monkeypatch: pytest.MonkeyPatch, forked: None, tmp_path: Path) -> None:
    every = {step.name: step for step in first_node.steps_of(Setting("cpu", 1, 1, 0))}
    chosen = ["first use of all_reduce", "all-reduce of 600 KiB", "FSDP x TP", "speed of matmul_all_reduce"]
    monkeypatch.setattr(first_node, "steps_of", lambda setting: [every[name] for name in chosen])
    code, found = run(tmp_path, "--nproc", "4")
    assert code == 0 and {step["status"] for step in found.values()} == {"right"}, found
    assert found[chosen[0]]["numbers"]["rows"], "every implementation has a row"
    assert {"auto", "unfused", "torch"} <= found[chosen[1]]["numbers"]["median_us"].keys()
    assert "symmetric" in found[chosen[1]]["numbers"]["left_out"], "whoever cannot run is named"
    assert len(found["FSDP x TP"]["numbers"]["losses"]) == 3
    assert len(found[chosen[-1]]["numbers"]["cases"]) == len(steps.SHAPES["matmul_all_reduce"])


def hangs(setting: Setting) -> dict[str, Any]:
    time.sleep(600)
    return {}


def raises(setting: Setting) -> dict[str, Any]:
    raise RuntimeError("an illegal memory access")


def is_wrong(setting: Setting) -> dict[str, Any]:
    return {"wrong": ["rank 1 is off by 3"], "more": 1}


def sums_a_rank_twice(setting: Setting) -> dict[str, Any]:
    ours = steps._ours
    steps._ours = lambda x, group, name: lambda: ours(x, group, name)() + (group.rank() == 1)
    try:
        return steps.all_reduce(setting, 600 * 1024)
    finally:
        steps._ours = ours


def diverges(setting: Setting) -> dict[str, Any]:
    data_parallel = steps.tpk.data_parallel
    steps.tpk.data_parallel = lambda model, mesh, shard: model  # nobody averages the gradients of the replicas
    try:
        return steps.fsdp_times_tp(setting)
    finally:
        steps.tpk.data_parallel = data_parallel
        dist.barrier()


def captured_on_cpu(setting: Setting, faulty: bool) -> dict[str, Any]:
    """A step with replays, for which calls stand. Of `faulty` ones two cannot be made, one refuses, one is wrong."""
    kinds = {"auto": "refuses", "torch": "fails", "unfused": "fails", "shared_memory": "wrong"} if faulty else {}
    ours, torch_sum, seeded = steps._ours, steps._torch_sum, dict[Any, str]()

    def noted(name: str, call: Any) -> Any:
        seeded[call] = kinds.get(name, "")
        return call

    def captured(call: Any) -> Any:
        match seeded.get(call):
            case "refuses":
                raise tpk.errors.UnsupportedProblem("symmetric: the first call of its kind cannot be captured")
            case "fails":
                raise RuntimeError("operation not permitted when stream is capturing")
            case "wrong":
                return lambda: call() + 1
            case _:
                return call

    steps._ours = lambda x, group, name: noted(name, ours(x, group, name))
    steps._torch_sum = lambda x, group: noted("torch", torch_sum(x, group))
    steps._can_capture, steps._captured = lambda device: True, captured
    if faulty:
        return steps.all_reduce(setting, 4096)
    steps.SHAPES["matmul_all_reduce"] = ("256x14336x4096",)
    return steps.speed(setting, "matmul_all_reduce")


@pytest.mark.slow("4 s: rehearses a node of GPUs")
def test_what_is_captured_is_judged_and_what_cannot_be_is_named(
    monkeypatch: pytest.MonkeyPatch, forked: None, tmp_path: Path
) -> None:
    """On CPUs; what a GPU does with these graphs, a GPU will show."""
    both = [Step("right", captured_on_cpu, (False,)), Step("faulty", captured_on_cpu, (True,))]
    monkeypatch.setattr(first_node, "steps_of", lambda setting: both)
    _, found = run(tmp_path, "--nproc", "2")
    (case,) = found["right"]["numbers"]["cases"]
    captured = {name for name in case["times"] if name.endswith(", captured")}
    assert found["right"]["status"] == "right" and captured >= {"torch, captured", "unfused, captured"}
    numbers, detail = found["faulty"]["numbers"], found["faulty"]["detail"]
    assert {"auto", "torch", "unfused", "shared_memory"} == numbers["median_us"].keys(), (
        "what was measured before stays"
    )
    assert "cannot be captured" in numbers["left_out"]["auto, captured"]
    assert "torch, captured: operation not permitted" in numbers["left_out"]["torch, captured"]
    assert found["faulty"]["status"] == "wrong" and "torch" not in detail and "auto" not in detail
    for rank in range(2):
        assert f"rank {rank}: unfused, captured: operation not permitted" in detail
        assert f"rank {rank}: shared_memory, captured is wrong" in detail


@pytest.mark.slow("5 s: rehearses a node of GPUs")
def test_a_step_that_fails_is_a_line_and_the_next_ones_run(
    monkeypatch: pytest.MonkeyPatch, forked: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], full: bool
) -> None:
    monkeypatch.setattr(first_node, "START_S", 10.0)  # beside other tests ranks have started in 6
    seeded = [Step("hangs", hangs, limit_s=1.0), Step("raises", raises), Step("is wrong", is_wrong),
              Step("adds one", sums_a_rank_twice), Step("all is well", steps.all_reduce, (4096,))]  # fmt: skip
    if full:
        seeded.insert(-1, Step("diverges", diverges, ranks=4))
    monkeypatch.setattr(first_node, "steps_of", lambda setting: seeded)
    code, found = run(tmp_path, "--nproc", "4" if full else "2")
    assert code == 1
    expected = {"hangs": "hung", "raises": "raised", "all is well": "right"}
    assert {name: step["status"] for name, step in found.items()} == {
        step.name: expected.get(step.name, "wrong") for step in seeded
    }
    assert "hangs" in found["hangs"]["detail"], "the stack says where"
    assert "an illegal memory access" in found["raises"]["detail"]
    assert found["is wrong"]["detail"] == "rank 1 is off by 3" and found["is wrong"]["numbers"] == {"more": 1}
    assert "unfused is wrong" in found["adds one"]["detail"] and "torch" not in found["adds one"]["detail"]
    assert not full or found["diverges"]["detail"].startswith("losses")
    named = "; ".join(step.name for step in seeded[:-1])
    assert f"{len(seeded)} steps, {len(seeded) - 1} not right: {named}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nproc", "1"), "takes at least two ranks"),
        (("--shape", "8x8x8"), "does not take --shape"),
        (("--netlab", "1gbit"), "does not take --netlab"),
    ],
)
def test_what_the_suite_does_not_take_is_refused(
    arguments: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--suite", "first-node", "--device", "cpu", "--out", str(tmp_path / "out"), *arguments]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()
