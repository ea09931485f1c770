"""`tpkernels train-demo`: trains a GPT of a chosen size on text, on a chosen mesh, and goes on with it on any other.

Owns the subcommand: its arguments, its snapshots, what it prints.  Model, text and loop are those of `tpkernels demo`.
Starts tp x dp local ranks, or joins a job that torchrun started; rank 0 prints.

A snapshot holds model, optimizer, learning-rate schedule and the number of the next batch, of which batches are a
function (with seed and text): the loss curve of a resumed run is that of one that was not interrupted, up to rounding.
Refuses, on every rank: a mesh that does not fit model or batch, a snapshot of another model or run, a text too short.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpkernels import flags

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from tpkernels.demo.loop import Step, Trainer

__all__ = ["Options", "Outcome", "add_arguments", "main", "run_on_rank", "train"]

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}
WAIT_S = 300.0
"""How long a rank waits for the others."""


@dataclass(frozen=True)
class Options:
    """What the ranks need to know."""

    steps: int = 100
    layers: int = 2
    width: int = 288
    heads: int = 12
    length: int = 128
    batch: int = 12
    tp: int = 2
    dp: int = 1
    sequence_parallel: bool = False
    fsdp: bool = False
    dtype: str = "fp32"
    shard_replicas: bool = False
    accumulate: int = 1
    learning_rate: float = 2e-3
    seed: int = 0
    text: str | None = None
    folder: str | None = None
    checkpoint_every: int | None = None
    resume: str | None = None
    json: str | None = None


@dataclass
class Outcome:
    """What a run found, equal on all ranks but for the bytes."""

    start: int
    steps: list[Step] = field(default_factory=list)
    parameter_bytes: int = 0
    optimizer_bytes: int = 0
    saved: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Options()
    for name, meaning in (
        ("steps", "number of the last training step; a resumed run counts on"),
        ("layers", "blocks of the model"),
        ("width", "features of the model, a multiple of --heads"),
        ("heads", "attention heads, a multiple of --tp"),
        ("length", "tokens (bytes of text) of a sequence"),
        ("batch", "sequences of a step, over all replicas"),
        ("tp", "ranks that share every layer"),
        ("dp", "replicas; the command starts tp x dp ranks, unless torchrun has"),
        ("accumulate", "micro-batches of a step"),
        ("seed", "seed of initial weights and batches"),
    ):
        value = getattr(default, name)
        kind = flags.at_least(0 if name == "seed" else 1)
        parser.add_argument(f"--{name}", type=kind, default=value, metavar="N", help=f"{meaning} (default {value})")
    parser.add_argument("--sequence-parallel", action="store_true", help="cut activations along the sequence, too")
    replicas = parser.add_mutually_exclusive_group()
    replicas.add_argument("--ddp", dest="fsdp", action="store_false", help="replicas hold all parameters (default)")
    replicas.add_argument("--fsdp", dest="fsdp", action="store_true", help="replicas share the parameters (FSDP2)")
    parser.set_defaults(fsdp=False)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32", help="bf16 has fp32 masters (default fp32)")
    parser.add_argument(
        "--shard-replicas", action="store_true", help="cut the optimizer state of replicated parameters over tp"
    )
    parser.add_argument(
        "--learning-rate", type=flags.positive, default=default.learning_rate, metavar="X", help="default 0.002"
    )
    parser.add_argument(
        "--text",
        type=flags.existing_file,
        metavar="FILE",
        help="what to train on (default: this Python's documentation)",
    )
    parser.add_argument(
        "--folder", type=flags.new_folder, metavar="DIR", help="where snapshots go, each to step-N in it"
    )
    parser.add_argument(
        "--checkpoint-every", type=flags.at_least(1), metavar="N", help="a snapshot every N steps; needs --folder"
    )
    parser.add_argument(
        "--resume", type=flags.existing_folder, metavar="DIR",
        help="go on from a snapshot, or from the last one in a --folder",
    )  # fmt: skip
    flags.add_json(parser, "write options, losses, gradient norms and times")


def main(args: argparse.Namespace) -> int:
    """Train and return the exit code.

    Raises:
        ValueError: bad arguments; what the ranks raise.
    """
    from tpkernels import config, launch

    options = Options(**{name: getattr(args, name) for name in Options.__dataclass_fields__})
    _check(options)
    job = config.job_environment()
    ranks = options.tp * options.dp
    if job is not None and job.world_size != ranks:
        raise ValueError(
            f"--tp {options.tp} x --dp {options.dp} needs {ranks} ranks, {job.launcher} started {job.world_size}"
        )
    if job is not None:
        run_on_rank(options)
    else:
        launch(run_on_rank, ranks, options)
    return 0


def _check(options: Options) -> None:
    """What can be known before ranks start."""
    if options.width % options.heads:
        raise ValueError(f"--width ({options.width}) must be a multiple of --heads ({options.heads})")
    if options.width // options.heads % 2:
        raise ValueError(
            f"--width ({options.width}) must give each of --heads ({options.heads}) an even number of features: "
            "positions turn them in pairs"
        )
    if options.heads % options.tp:
        raise ValueError(f"--heads ({options.heads}) must be a multiple of --tp ({options.tp}): heads stay whole")
    if options.batch < options.dp * options.accumulate:
        raise ValueError(
            f"--batch ({options.batch}) must be at least --dp x --accumulate ({options.dp * options.accumulate}): each "
            "micro-batch of each replica needs a sequence"
        )
    if options.fsdp and options.dp == 1:
        raise ValueError("--fsdp shares parameters between replicas: give --dp 2 or more")
    if options.checkpoint_every and not options.folder:
        raise ValueError("--checkpoint-every needs --folder DIR to write to")


def run_on_rank(options: Options) -> None:
    """One rank's part.  Public because ranks import it."""
    import torch.distributed as dist
    from rich.console import Console

    import tpkernels as tpk

    mesh = tpk.init(tp=options.tp, dp=options.dp, device="cpu", timeout=WAIT_S)
    console = Console(quiet=mesh.get_rank() != 0, highlight=False)
    try:
        outcome = train(mesh, options, console)
        _show(console, options, outcome)
        if options.json and mesh.get_rank() == 0:
            report = {"options": asdict(options), **asdict(outcome)}
            Path(options.json).write_text(json.dumps(report, indent=1), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def train(mesh: DeviceMesh, options: Options, console: Console) -> Outcome:
    """The run; a collective call.

    Raises:
        ValueError: see the module; on every rank.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    text = _text(options)
    trainer = _trainer(mesh, options, text)
    outcome = Outcome(_resume(trainer, options, text) if options.resume else 0)
    if outcome.start >= options.steps:
        raise ValueError(f"the snapshot is of step {outcome.start}: give --steps more than that, got {options.steps}")
    _check_folders(options, outcome.start)
    _introduce(console, options, trainer, outcome.start, len(text))
    columns = (TextColumn("  step"), MofNCompleteColumn(), BarColumn(bar_width=30), TextColumn("{task.fields[now]}"))
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("left"), console=console
    ) as progress:
        bar = progress.add_task("", total=options.steps, completed=outcome.start, now="")
        for number in range(outcome.start, options.steps):
            step = trainer.step(number)
            outcome.steps.append(step)
            progress.update(bar, completed=number + 1, now=f"loss {step.loss:.3f}  gradient {step.norm:.2f}")
            if options.checkpoint_every and (number + 1) % options.checkpoint_every == 0:
                outcome.saved.append(_save(trainer, options, text, number + 1))
    parameters = list(trainer.model.parameters())
    outcome.parameter_bytes = _bytes_of(parameters)
    outcome.optimizer_bytes = _bytes_of(v for state in trainer.optimizer.state.values() for v in state.values())
    return outcome


# --- what is trained --------------------------------------------------------------------------------------------------


def _text(options: Options) -> Tensor:
    import torch

    from tpkernels.demo.text import corpus

    if options.text is None:
        return corpus()
    content = bytearray(Path(options.text).read_bytes())
    if len(content) <= options.length:
        raise ValueError(
            f"--text {options.text} has {len(content)} bytes, too few: a sequence takes {options.length}, and one more"
        )
    return torch.frombuffer(content, dtype=torch.uint8)


def _trainer(mesh: DeviceMesh, options: Options, text: Tensor) -> Trainer:
    import torch

    import tpkernels as tpk
    from tpkernels.demo.loop import Recipe, Trainer
    from tpkernels.demo.text import VOCABULARY, Batches
    from tpkernels.measure.gpt import GPT, ParallelGPT, Sizes

    sizes = Sizes(
        options.layers, options.width, options.heads, 4 * options.width, VOCABULARY, options.length, options.batch
    )
    recipe = Recipe(options.learning_rate, accumulate=options.accumulate)
    torch.manual_seed(options.seed)
    model = ParallelGPT.from_plain(GPT(sizes), mesh["tp"], sequence_parallel=options.sequence_parallel)
    model.to(getattr(torch, DTYPES[options.dtype]))
    replicas = mesh["dp"] if options.dp > 1 else None
    if replicas is not None:
        low = options.dtype == "bf16"
        policy = torch.distributed.fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32) if low else None
        tpk.data_parallel(model, mesh, shard=options.fsdp, policy=policy)
    masters = torch.float32 if options.dtype == "bf16" else None

    def make(parameters: Any) -> torch.optim.Optimizer:
        if masters is None and not options.shard_replicas:
            return recipe.adamw(parameters)
        return tpk.optim.MasterWeights(parameters, recipe.adamw, dtype=masters, shard_replicas=options.shard_replicas)

    batches = Batches(text, options.batch, options.length, options.seed)
    return Trainer(model, batches, recipe, replicas=replicas, make=make)


def _run_facts(options: Options, text: Tensor) -> dict[str, Any]:
    """What must be equal for a loss curve to go on where it stopped."""
    names = ("batch", "length", "learning_rate", "seed", "dtype")
    return {name: getattr(options, name) for name in names} | {"text": zlib.crc32(text.numpy().tobytes())}


def _check_folders(options: Options, start: int) -> None:
    """Refuse before the first step what would be refused when hours of training are to be saved."""
    every = options.checkpoint_every or options.steps + 1
    planned = [_folder(options, step) for step in range(start + 1, options.steps + 1) if step % every == 0]
    used = [str(folder) for folder in planned if folder.exists()]
    if used:
        raise ValueError(f"--folder {options.folder} has snapshots that this run would write: {_listed(used)}")


def _folder(options: Options, step: int) -> Path:
    return Path(str(options.folder), f"step-{step}")


def _save(trainer: Trainer, options: Options, text: Tensor, step: int) -> str:
    import tpkernels as tpk

    folder = _folder(options, step)
    extra = {"step": step, "schedule": trainer.schedule.state_dict(), "run": _run_facts(options, text)}
    tpk.save_snapshot(trainer.model, trainer.optimizer, folder, extra=extra)
    return str(folder)


def _resume(trainer: Trainer, options: Options, text: Tensor) -> int:
    import tpkernels as tpk

    extra = tpk.load_snapshot(trainer.model, trainer.optimizer, _last_snapshot(Path(str(options.resume))))
    if not isinstance(extra, dict) or not {"step", "schedule", "run"} <= extra.keys():
        raise ValueError(f"--resume {options.resume}: train-demo did not write this snapshot (no run in it)")
    facts, run = _run_facts(options, text), extra["run"]
    other = [f"{name} {run.get(name)} (now {value})" for name, value in facts.items() if run.get(name) != value]
    if other:
        raise ValueError(f"--resume {options.resume}: the snapshot is of a run with {', '.join(other)}")
    trainer.schedule.load_state_dict(extra["schedule"])
    return int(extra["step"])


def _last_snapshot(folder: Path) -> Path:
    """The folder itself, or the one in it with the highest step."""
    steps = {
        int(path.name.removeprefix("step-")): path
        for path in folder.glob("step-*")
        if path.name.removeprefix("step-").isdigit()
    }
    return steps[max(steps)] if steps else folder


def _bytes_of(tensors: Any) -> int:
    from torch import Tensor
    from torch.distributed.tensor import DTensor

    held = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if isinstance(t, Tensor)]
    return sum(t.numel() * t.element_size() for t in held)


# --- what is shown ----------------------------------------------------------------------------------------------------


def _introduce(console: Console, options: Options, trainer: Trainer, start: int, text_bytes: int) -> None:
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    ranks = options.tp * options.dp
    mesh = f"{options.dp} replica{'s' if options.dp > 1 else ''} x {options.tp} tensor-parallel rank"
    ways = [
        *(["sequence parallel"] if options.sequence_parallel else []),
        *(["FSDP2" if options.fsdp else "DDP"] if options.dp > 1 else []),
        *(["fp32 masters"] if options.dtype == "bf16" else []),
        *([f"{options.accumulate} micro-batches"] if options.accumulate > 1 else []),
    ]
    console.print(
        f"GPT of {options.layers} blocks, width {options.width}, {options.heads} heads: {count:,} parameters in "
        f"{options.dtype}, on {text_bytes / 1e6:.1f} MB of text",
        soft_wrap=True,
    )
    console.print(f"{ranks} rank{'s' if ranks > 1 else ''}: {mesh}{'s' if options.tp > 1 else ''}" + "".join(
        f", {way}" for way in ways
    ))  # fmt: skip
    if start:
        console.print(f"resumed at step {start}")


def _show(console: Console, options: Options, outcome: Outcome) -> None:
    import statistics

    seconds = statistics.median(step.seconds for step in outcome.steps)
    tokens = options.batch * options.length / seconds
    console.print(
        f"\nloss {outcome.steps[0].loss:.4f} at step {outcome.start + 1}, {outcome.steps[-1].loss:.4f} at step "
        f"{options.steps}; {tokens:,.0f} tokens/s (median step, {seconds * 1e3:.0f} ms)"
    )
    console.print(
        f"rank 0 holds {outcome.parameter_bytes / 1e6:.2f} MB of parameters and {outcome.optimizer_bytes / 1e6:.2f} MB "
        "of optimizer state"
    )
    if outcome.saved:
        console.print(f"snapshots: {_listed(outcome.saved)}")
        console.print(f"  go on with any --tp and --dp:  --resume {outcome.saved[-1]}", style="dim")


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths) if len(paths) < 4 else f"{paths[0]}, ..., {paths[-1]}"
