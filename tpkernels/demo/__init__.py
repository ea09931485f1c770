"""`tpkernels demo`: a pretrained model made tensor-parallel and checked, a small one trained and checked.

Owns the subcommand's arguments and the order of things.  Starts its own local ranks, or joins a job that torchrun
started; rank 0 prints.  Exit code 1 when a bound does not hold, or when a part cannot run.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tpkernels import flags

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Options", "add_arguments", "main", "run_on_rank", "show_what_is_next"]

PARTS = ("swap", "train")
HEADS = 12  # of both models
WAIT_S = 300.0
"""How long a rank waits for the others: rank 0 computes the references alone."""
JOB_S = 1800.0


@dataclass(frozen=True)
class Options:
    """What the ranks need to know."""

    parts: tuple[str, ...]
    steps: int
    repeats: int
    seed: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_tp(parser, 2, "local ranks to start (default 2); under torchrun those that it has started")
    parser.add_argument("--steps", type=flags.at_least(1), default=36, metavar="N", help="training steps (default 36)")
    parser.add_argument("--quick", action="store_true", help="12 steps and fewer repeats")
    parser.add_argument(
        "--only", choices=PARTS, help="show one part only: swap a pretrained model, or train a small one"
    )
    parser.add_argument(
        "--seed", type=flags.at_least(0), default=0, metavar="N", help="seed of initial weights and batches (default 0)"
    )


def main(args: argparse.Namespace) -> int:
    """Run the demo and return the exit code.

    Raises:
        ValueError: bad arguments.
    """
    from rich.console import Console

    from tpkernels import config, launch
    from tpkernels.demo.minilm import Missing, weights_folder

    console = Console()
    job = config.job_environment()
    world_size = job.world_size if job else args.tp
    if HEADS % world_size:
        raise ValueError(f"{world_size} ranks cannot share the {HEADS} attention heads of the models: use a divisor")
    parts: tuple[str, ...] = (args.only,) if args.only else PARTS
    missing = ""
    if "swap" in parts:
        try:
            weights_folder()
        except Missing as error:
            missing = str(error)
            parts = tuple(part for part in parts if part != "swap")
    options = Options(parts, min(args.steps, 12) if args.quick else args.steps, 3 if args.quick else 7, args.seed)
    holds = True
    if parts:
        on_rank = [run_on_rank(options)] if job else launch(run_on_rank, world_size, options, timeout=JOB_S)
        holds = all(on_rank)
    if missing and (job is None or job.rank == 0):
        console.print(f"\n[bold red]NOT RUN[/bold red]  the swap of a pretrained model: {missing}", soft_wrap=True)
    if holds and not missing and (job is None or job.rank == 0):
        show_what_is_next(console)
    return 0 if holds and not missing else 1


def show_what_is_next(console: Console) -> None:
    """Commands that work as printed: where the environment is not activated by their full path, and without root."""
    from tpkernels.demo.minilm import Missing, weights_folder

    beside = Path(sys.executable).with_name("tpkernels")
    found = shutil.which("tpkernels")
    if found and beside.exists() and Path(found).samefile(beside):
        program = "tpkernels"
    else:
        program = shlex.quote(str(beside)) if beside.exists() else f"{shlex.quote(sys.executable)} -m tpkernels"
    commands = [
        ("what overlap buys on this machine, op by op", f"{program} bench"),
        ("train a GPT on text, with the ranks and sizes that you name", f"{program} train-demo --tp 2 --steps 40"),
    ]
    with contextlib.suppress(Missing):
        model = shlex.quote(str(weights_folder()))
        commands.insert(0, ("how a model would be cut over four ranks", f"{program} plan {model} --tp 4"))
    console.print("\nWhat to try next:\n")
    for meaning, command in commands:
        console.print(f"  {meaning}\n    {command}", soft_wrap=True, markup=False, highlight=False)


def run_on_rank(options: Options) -> bool:
    """One rank's part; whether everything held, equal on all ranks.  Public because ranks import it."""
    import torch.distributed as dist
    from rich.console import Console

    import tpkernels as tpk
    from tpkernels.demo import minilm, show, training

    begin = time.perf_counter()
    mesh = tpk.init(device="cpu", timeout=WAIT_S)["tp"]
    console = Console(quiet=mesh.get_local_rank() != 0, highlight=False)
    holds = True
    try:
        if "swap" in options.parts:
            console.rule("[bold]1  A pretrained model, its linears swapped")
            with console.status("starting") as status:
                encoder = minilm.run_minilm(mesh, options.repeats, status.update)
            show.show_minilm(console, encoder)
            holds &= encoder.holds
        if "train" in options.parts:
            console.rule("[bold]2  A small GPT, trained on the text of this Python installation")
            with _Bars(console, options.steps) as bars:
                trained = training.run_training(mesh, options.steps, options.seed, bars.add)
            console.print()
            show.show_training(console, trained)
            holds &= trained.holds and trained.has_learnt
        console.print(f"\n[dim]The demo took {time.perf_counter() - begin:.0f} s.[/dim]")
    finally:
        dist.destroy_process_group()
    return holds


class _Bars:
    """A progress bar per training run, with the loss."""

    def __init__(self, console: Console, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("  {task.description:<30}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._steps = steps

    def add(self, name: str) -> Callable[[int, float], None]:
        bar = self._progress.add_task(name, total=self._steps, loss="     ")
        return lambda step, loss: self._progress.update(bar, completed=step + 1, loss=f"{loss:.3f}")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
