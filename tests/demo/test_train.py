"""`tpkernels train-demo`: a run that is interrupted and goes on with other ranks, what it prints, what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from rich.console import Console

import tpkernels as tpk
from tests.forked_scripts import command_forked
from tests.nn.reference import LIMIT_S
from tpkernels import cli
from tpkernels.demo import train
from tpkernels.demo.train import Options
from tpkernels.testing.spawn import Pools

SMALL = Options(steps=5, layers=1, width=24, heads=4, length=13, batch=7, dtype="fp64", shard_replicas=True)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text"
    path.write_bytes(bytes(torch.randint(256, (5000,), generator=torch.Generator().manual_seed(1)).tolist()))
    return str(path)


def losses(options: Options, fault: str = "") -> list[tuple[float, float]]:
    """Losses and gradient norms of a run.  The fault: the schedule starts anew."""
    mesh = tpk.init(tp=options.tp, dp=options.dp)
    kept = torch.optim.lr_scheduler.LambdaLR.load_state_dict
    if fault:
        torch.optim.lr_scheduler.LambdaLR.load_state_dict = lambda self, state: None  # type: ignore[method-assign]
    try:
        outcome = train.train(mesh, options, Console(quiet=True))
    finally:
        torch.optim.lr_scheduler.LambdaLR.load_state_dict = kept  # type: ignore[method-assign]
    return [(step.loss, step.norm) for step in outcome.steps]


def largest_difference(run: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    return max(abs(a - b) for mine, theirs in zip(run, other, strict=True) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.gloo
@pytest.mark.slow("6 s")
def test_a_run_that_goes_on_with_other_ranks_has_the_losses_of_one_that_was_not_interrupted(
    ranks: Pools, tmp_path: Path, text: str, full: bool
) -> None:
    first = replace(SMALL, text=text, sequence_parallel=True, folder=str(tmp_path / "run"), checkpoint_every=2)
    whole = ranks(2).run(losses, first, timeout=LIMIT_S)[0]
    rest = replace(SMALL, text=text, resume=str(tmp_path / "run/step-2"))
    on_four = [
        replace(rest, tp=2, dp=2, fsdp=True, sequence_parallel=True, accumulate=3),
        replace(rest, tp=1, dp=4),
    ]
    for options in on_four if full else on_four[:1]:
        for found in ranks(4).run(losses, options, timeout=LIMIT_S):
            assert largest_difference(found, whole[2:]) < 1e-10, options
    for found in ranks(2).run(losses, replace(rest, tp=2), "schedule", timeout=LIMIT_S):
        assert largest_difference(found, whole[2:]) > 1e-6, "a schedule that starts anew was not noticed"


def bf16_and_refusals(folder: str, text: str) -> list[str]:
    low = replace(SMALL, text=text, dtype="bf16", folder=folder, checkpoint_every=2)
    whole = losses(low)
    assert losses(replace(low, folder=None, checkpoint_every=None, resume=f"{folder}/step-2")) == whole[2:]
    said = []
    for change in (
        {"layers": 2},
        {"seed": 5, "batch": 8},
        {"steps": 2},
        {"resume": f"{folder}/step-3"},
        {"length": 5000},
    ):
        resume = {"folder": None, "checkpoint_every": None, "resume": f"{folder}/step-2"}
        with pytest.raises(ValueError) as error:
            losses(replace(low, **{**resume, **change}))  # type: ignore[arg-type]
        said.append(str(error.value))
    with pytest.raises(ValueError) as error:
        losses(low)
    said.append(str(error.value))
    with mock.patch.object(tpk, "load_snapshot", return_value=None), pytest.raises(ValueError) as error:
        losses(replace(low, folder=None, checkpoint_every=None, resume=f"{folder}/step-2"))
    said.append(str(error.value))
    return said


@pytest.mark.gloo
@pytest.mark.slow("3 s")
def test_bf16_goes_on_bit_for_bit_and_what_does_not_fit_is_refused_on_every_rank(
    ranks: Pools, tmp_path: Path, text: str
) -> None:
    for said in ranks(2).run(bf16_and_refusals, str(tmp_path / "run"), text, timeout=LIMIT_S):
        assert "snapshot is of another model" in said[0]
        assert "the snapshot is of a run with batch 7 (now 8), seed 0 (now 5)" in said[1]
        assert "the snapshot is of step 2: give --steps more than that, got 2" in said[2]
        assert "step-3" in said[3]
        assert "has 5000 bytes, too few" in said[4]
        assert "has snapshots that this run would write" in said[5] and "step-2" in said[5]
        assert "train-demo did not write this snapshot" in said[6]


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--width", "25", "--heads", "4"], "--width (25) must be a multiple of --heads (4)"),
        (["--width", "36"], "--width (36) must give each of --heads (12) an even number of features"),
        (["--heads", "3", "--width", "24"], "--heads (3) must be a multiple of --tp (2)"),
        (["--dp", "2", "--accumulate", "7"], "--batch (12) must be at least --dp x --accumulate (14)"),
        (["--fsdp"], "give --dp 2 or more"),
        (["--checkpoint-every", "5"], "needs --folder"),
    ],
)
def test_bad_arguments_are_one_line_before_ranks_start(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train-demo", *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.gloo
@pytest.mark.slow("2 s")
def test_the_command_prints_where_it_is_and_what_to_do_next(tmp_path: Path, text: str) -> None:
    sizes = ["--layers", "1", "--width", "24", "--heads", "4", "--length", "13", "--text", text]
    folder, report = str(tmp_path / "run"), tmp_path / "run.json"
    more = ["--steps", "2", "--folder", folder, "--checkpoint-every", "2", "--json", str(report)]
    printed = " ".join(command_forked(tmp_path, "train-demo", *sizes, *more).split())
    assert "1 replica x 2 tensor-parallel ranks" in printed
    assert f"--resume {folder}/step-2".replace(" ", "") in printed.replace(" ", "")
    assert len(json.loads(report.read_text())["steps"]) == 2
