"""`tpkernels profile`: no tensor parallelism, tensor parallelism, and the same with overlap, over N steps of training.

Owns: the command's arguments, starting ranks (local ones, or in the network lab; under torchrun it is a rank itself),
and what is written: a table, samples as JSON, a figure, a timeline.
Refuses: to show times of a training that is not the same: the losses and gradient norms are compared first, and where
they are not within their bound (`tpkernels.measure.training`), that is what the command says, with exit code 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tpkernels as tpk
from tpkernels import config, flags
from tpkernels.measure import links, profile_report, report
from tpkernels.measure.deadline import deadline
from tpkernels.measure.gathered import from_all_ranks
from tpkernels.measure.gpt import Sizes
from tpkernels.measure.netlab import Netlab, NetlabUnavailable
from tpkernels.measure.trace import write_chrome_trace
from tpkernels.measure.training import RankResult, Training, train_in_turns
from tpkernels.measure.usual_dtype import AUTO, usual_dtype

__all__ = ["add_arguments", "main", "run_rank"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MEANINGS = {
    "layers": "blocks of the model",
    "width": "features of the model",
    "heads": "attention heads",
    "d_ff": "hidden features of an MLP",
    "vocabulary": "different tokens",
    "length": "tokens of a sequence",
    "batch": "sequences of a step",
}
_SAMPLE_S = 0.002
_NO_SETTING = ("command", "needs", "run", "traceback")
"""What the command line holds beside the settings of this command."""
_QUICK = Sizes(layers=1, width=64, heads=4, d_ff=160, vocabulary=67, length=61)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps",
        type=flags.at_least(1),
        default=10,
        metavar="N",
        help="timed steps of each way of training (default 10)",
    )
    parser.add_argument(
        "--warmup", type=flags.at_least(0), default=2, metavar="N", help="steps before that are not timed (default 2)"
    )
    defaults = Sizes()
    for field in dataclasses.fields(Sizes):
        default = getattr(defaults, field.name)
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=flags.at_least(1),
            metavar="N",
            help=f"{MEANINGS[field.name]} (default {default})",
        )
    parser.add_argument("--quick", action="store_true", help="a tiny model: tries the command, measures nothing")
    parser.add_argument(
        "--dtype",
        choices=(AUTO, *DTYPES),
        default=AUTO,
        help="dtype of weights and data (default auto: bf16, or fp32 on cores that multiply that faster)",
    )
    flags.add_device(parser, "cpu")
    flags.add_tp(parser, None, "ranks to start (default: 2, all GPUs on CUDA)")
    links.add_arguments(parser)
    parser.add_argument(
        "--seed", type=flags.at_least(0), default=0, metavar="N", help="seed of weights and data (default 0)"
    )
    parser.add_argument(
        "--out",
        type=flags.new_folder,
        metavar="DIR",
        help="write profile.json, profile.txt, profile.png, the page profile.html and profile.trace.json",
    )
    parser.add_argument(
        "--timeout", type=flags.positive, default=1200.0, metavar="SECONDS", help="limit of the whole run"
    )


def main(args: argparse.Namespace) -> int:
    """Run the profile that `args` (see `add_arguments`) describe; returns the exit code, 1 if the curves differ.

    Raises: ValueError for arguments that contradict each other; what the ranks raise.
    """
    place = config.job_environment()
    if place is not None and (args.netlab or args.tp is not None):
        raise ValueError("--netlab and --tp start ranks themselves; leave them out under torchrun")
    if args.delay and not args.netlab:
        raise ValueError("--delay is a property of the network lab; give --netlab RATE too")
    if args.netlab and args.device != "cpu":
        raise ValueError(f"--netlab joins CPU ranks; got device {args.device}")
    training = make_training(args)
    usual = 2 if args.device == "cpu" else torch.cuda.device_count()
    nproc = place.world_size if place is not None else usual if args.tp is None else args.tp
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
    if place is not None:
        results = from_all_ranks(run_rank(training, args.timeout))
        if place.rank != 0:
            return 0 if profile_report.Profile(training, results).same else 1
    elif args.netlab:
        try:
            results = _run_in_netlab(training, nproc, args)
        except NetlabUnavailable as error:
            print(f"skipped: {error}", file=sys.stderr)
            return 1
    else:
        results = tpk.launch(run_rank, nproc, training, args.timeout, timeout=args.timeout)
    training = dataclasses.replace(training, dtype=results[0].dtype)
    return _report(args, profile_report.Profile(training, results, link=_link(args)), nproc)


def make_training(args: argparse.Namespace) -> Training:
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Sizes)}
    sizes = dataclasses.replace(
        _QUICK if args.quick else Sizes(), **{name: value for name, value in given.items() if value is not None}
    )
    return Training(sizes, args.steps, args.warmup, DTYPES.get(args.dtype), args.device, args.seed)


def run_rank(training: Training, timeout_s: float) -> RankResult:
    """What one rank does; the entry point of every way of starting ranks."""
    mesh = tpk.init(device=training.device, timeout=timeout_s)["tp"]
    control: Any = dist.new_group(backend="gloo")
    try:
        if training.dtype is None:
            name, why = usual_dtype(training.device, control)
            training = dataclasses.replace(training, dtype=DTYPES[name])
            if why and dist.get_rank() == 0:
                print(f"training {why}", file=sys.stderr, flush=True)
        with deadline(timeout_s, f"rank {dist.get_rank()}: training"):
            return train_in_turns(training, mesh, control, timeout_s / 2)
    finally:
        dist.destroy_process_group(control)


def _run_in_netlab(training: Training, nproc: int, args: argparse.Namespace) -> list[RankResult]:
    with Netlab(nproc, rate=args.netlab, delay=args.delay, sample_interval_s=_SAMPLE_S) as lab:
        results: list[RankResult] = lab.run(run_rank, training, args.timeout, timeout=args.timeout)
    for result in results:
        for trace in result.traces:
            trace.samples = lab.samples[trace.rank]
    return results


def _link(args: argparse.Namespace) -> str:
    if not args.netlab:
        job = config.job_environment()
        return "one host" if job is None else job.launcher
    return f"network lab at {args.netlab}" + (f", delay {args.delay}" if args.delay else "")


def _report(args: argparse.Namespace, profile: profile_report.Profile, nproc: int) -> int:
    title = f"{nproc} ranks, {profile.link}, {profile.description}"
    profile_report.print_profile(profile, title)
    if args.out:
        folder = Path(args.out)
        given = {name: value for name, value in vars(args).items() if name not in _NO_SETTING and value is not None}
        environment = report.describe_environment({"nproc": nproc, "link": profile.link, **given})
        for written in profile_report.write(folder, profile, title, environment):
            print(written)
        write_chrome_trace(folder / "profile.trace.json", [t for r in profile.results for t in r.traces])
        print(f"timeline: {folder / 'profile.trace.json'} (open in https://ui.perfetto.dev)")
    return 0 if profile.same else 1
