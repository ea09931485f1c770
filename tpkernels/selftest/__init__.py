"""`tpkernels test`: tensor parallelism against none, and fused against unfused, value by value, on the user's devices.
With `--same-bits`, training at every tensor-parallel degree instead, bit by bit.

Owns the subcommand's arguments, the order of things and the table.  Starts its own local ranks, or joins a job that
torchrun started; rank 0 prints.  Exit code 0 if every row is right or refused with its reason, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tpkernels import flags

if TYPE_CHECKING:
    from rich.console import Console

    from tpkernels.launchers import Job
    from tpkernels.selftest.compare import Row

__all__ = ["Options", "add_arguments", "main", "run_rank"]

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
PARTS = ("ops", "modules")
SAME_BITS = 8
WAIT_S = 120.0
"""How long a rank waits for the others."""


@dataclass(frozen=True)
class Options:
    """What the ranks need to know."""

    device: str = "cpu"
    dtypes: tuple[str, ...] = tuple(DTYPES)
    parts: tuple[str, ...] = PARTS
    quick: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_tp(parser, None, "ranks to start (default: 2, all GPUs on CUDA; leave it out under torchrun)")
    flags.add_device(parser, "cpu")
    parser.add_argument("--dtype", action="append", choices=tuple(DTYPES), help="repeatable; default: all four")
    parser.add_argument("--only", choices=PARTS, help="check only these")
    parser.add_argument("--quick", action="store_true", help="small shards only, which travel in one chunk; few steps")
    parser.add_argument(
        "--same-bits", type=flags.power_of_two(2), nargs="?", const=SAME_BITS, metavar="LARGEST",
        help="train at each tensor-parallel degree up to LARGEST (default 8), and compare bit by bit: fp32 and bf16",
    )  # fmt: skip
    flags.add_json(parser, "write every row with its failures, versions and hardware")
    parser.add_argument(
        "--timeout", type=flags.positive, default=1200.0, metavar="SECONDS", help="limit of the whole test"
    )


def main(args: argparse.Namespace) -> int:
    """Run the comparisons and return the exit code.

    Raises: ValueError for arguments that contradict each other; what the ranks raise.
    """
    from rich.console import Console

    from tpkernels import config, launch
    from tpkernels.measure import report

    job = config.job_environment()
    if job is not None and args.tp is not None:
        raise ValueError("--tp starts ranks itself; leave it out under torchrun")
    if args.same_bits is not None:
        return _same_bits(args, job)
    options = Options(args.device, tuple(args.dtype or DTYPES), (args.only,) if args.only else PARTS, args.quick)
    world = job.world_size if job else args.tp or _default_world(args.device)
    rows = run_rank(options) if job else launch(run_rank, world, options, timeout=args.timeout)[0]
    right = all(row.verdict != "FAILED" for row in rows)
    if job is not None and job.rank != 0:
        return 0 if right else 1
    show(Console(), rows, f"{world} ranks, {args.device}, {', '.join(options.dtypes)}")
    if args.json:
        setup = {"world_size": world, "device": args.device, "dtypes": options.dtypes, "quick": args.quick}
        content = {**report.describe_environment(setup), "passed": right, "rows": [row.to_json() for row in rows]}
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"rows: {args.json}")
    return 0 if right else 1


def _same_bits(args: argparse.Namespace, job: Job | None) -> int:
    from tpkernels import launch
    from tpkernels.gemm.canonical import check_job
    from tpkernels.measure import report
    from tpkernels.selftest.same_bits import run_rank

    if args.only:
        raise ValueError("--only chooses what is compared without --same-bits")
    world = job.world_size if job else args.tp or args.same_bits
    check_job(args.same_bits, 1, world, args.device)
    if world < 2:
        raise ValueError("--same-bits compares several degrees: give it at least two ranks")
    dtypes = [DTYPES[name] for name in args.dtype or ("fp32", "bf16")]
    question = (args.same_bits, dtypes, args.quick)
    verdict = run_rank(*question) if job else launch(run_rank, world, *question, timeout=args.timeout)[0]
    if job is None or job.rank == 0:
        print(verdict)
        if args.json:
            setup = {"world_size": world, "same_bits": args.same_bits, "dtypes": dtypes, "quick": args.quick}
            content = {**report.describe_environment(setup), **verdict.to_json()}
            Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if verdict.same else 1


def _default_world(device: str) -> int:
    if device == "cpu":
        return 2
    import torch

    return torch.cuda.device_count()


def run_rank(options: Options) -> list[Row]:
    """One rank's part; the merged rows, equal on all ranks.  A default group that exists is used and kept."""
    import torch
    import torch.distributed as dist

    import tpkernels as tpk
    from tpkernels.measure.gathered import from_all_ranks
    from tpkernels.measure.progress import remaining
    from tpkernels.selftest.compare import Row, compare, merge
    from tpkernels.selftest.grouped_ops import grouped_subjects
    from tpkernels.selftest.modules import module_subjects
    from tpkernels.selftest.ops import Place, op_subjects
    from tpkernels.testing.library_sums import summed_in_fp32

    joined = dist.is_initialized()
    mesh = tpk.init(device=options.device, timeout=WAIT_S)["tp"]
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    results = dist.new_group(backend="gloo")  # apart from the groups that are tested, one of which may be lost
    try:
        dtypes = tuple(getattr(torch, DTYPES[name]) for name in options.dtypes)
        place = Place(mesh.get_group(), device, dtypes, options.quick)
        subjects = [*op_subjects(place), *grouped_subjects(place)] if "ops" in options.parts else []
        subjects += module_subjects(place, mesh) if "modules" in options.parts else []
        rows: list[Row] = []
        started = time.monotonic()
        for number, subject in enumerate(subjects):
            if place.rank == 0:
                left = remaining(number, len(subjects), time.monotonic() - started)
                print(f"[{number + 1}/{len(subjects)}] {subject.what}{left}", file=sys.stderr, flush=True)
            with summed_in_fp32():
                rows += compare(subject, place.group)
        return merge(from_all_ranks(rows, list[Row], results))
    finally:
        dist.destroy_process_group(results if joined else None)


def show(console: Console, rows: Sequence[Row], title: str) -> None:
    """The table, what failed in full, and the verdict."""
    from rich.console import Console
    from rich.table import Table

    if not console.is_terminal:
        console = Console(width=150, file=console.file)  # a log or a file: wrapping would cut the columns
    grid = Table(title=title, title_justify="left", caption=_CAPTION, caption_justify="left")
    for name, justify in (("what", "left"), ("implementation", "left"), ("worst error / bound", "left"),
                          ("tensors", "right"), ("= unfused", "right"), ("", "left")):  # fmt: skip
        grid.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for before, row in zip([None, *rows], rows, strict=False):
        what = "" if before is not None and before.what == row.what else row.what
        if what and before is not None:
            grid.add_section()
        ran = ", ".join(name for name in row.ran if name != row.implementation)
        how = f"{row.implementation} ({ran})" if ran else row.implementation
        colour = {"ok": "green", "FAILED": "bold red", "refused": "dim"}[row.verdict]
        if row.verdict == "refused":
            grid.add_row(what, how, f"[dim]refused: {'; '.join(row.refused)}[/dim]", "", "", "")
            continue
        worst = f"{row.worst:.2f}  [dim]{row.where}[/dim]"
        bits = f"{row.bitwise} bit for bit" if row.bitwise else ""
        grid.add_row(what, how, worst, str(row.compared), bits, f"[{colour}]{row.verdict}[/{colour}]")
        for reason in row.refused:
            grid.add_row("", "", f"[dim]in part refused: {reason}[/dim]", "", "", "")
    console.print(grid)
    failed = [row for row in rows if row.verdict == "FAILED"]
    for row in failed:
        console.print(f"FAILED  {row.what}, {row.implementation}:", style="bold red", markup=False)
        for line in row.failures[:_SHOWN]:
            console.print(f"    {line}", markup=False, highlight=False, soft_wrap=True)
        if len(row.failures) > _SHOWN:
            console.print(f"    and {len(row.failures) - _SHOWN} more (--json FILE has them all)")
    compared = sum(row.compared + row.bitwise for row in rows)
    verdict = f"{len(failed)} of {len(rows)} rows FAILED" if failed else f"all right: {compared:,} tensors compared"
    console.print(verdict, style="bold red" if failed else "bold green")


_SHOWN = 4
_CAPTION = (
    "implementation: as asked for, and in brackets what else did the work (auto: its choices).\n"
    "worst error / bound: |result - fp64 reference| over its elementwise limit, the largest of all; right up to 1.\n"
    "= unfused: results of integer-valued data that equal those of unfused in every bit."
)
