"""The `tpkernels` command: demo, test, train-demo, bench, profile, explain, plan, verify, run, doctor.

Owns the command line's shape, its exit codes and how errors look: 0 done, 1 something failed, 2 bad arguments, 130
Ctrl-C. Every subcommand starts its own local ranks, or joins a job that `torchrun` started. Assumes nothing about the
machine; what a subcommand needs is imported when that subcommand runs, so that `--help` and a missing optional package
cost and break nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpkernels import flags
from tpkernels.errors import TpKernelsError
from tpkernels.packages import MissingPackage, how_to_install, needed

if TYPE_CHECKING:
    import torch

__all__ = ["main", "parse"]

DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "fp64": "float64"}
FUSED_OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
RANK_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Command:
    """One subcommand; `load` imports it and returns how to declare its arguments and how to run it.

    `needs`: packages that are looked for before it runs, not when it shows what it found.
    """

    name: str
    help: str
    load: Callable[[], tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]]
    needs: tuple[str, ...] = ()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = parse(arguments)
    except ModuleNotFoundError as error:
        return _missing_module(error)
    if options.traceback:
        return _run(options)
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("tpkernels: interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        return _missing_module(error)
    except (TpKernelsError, ValueError, OSError) as error:
        message, code = _explain_error(error)
        print(f"tpkernels {options.command}: {message}\n(--traceback shows where)", file=sys.stderr)
        return code


def _run(options: argparse.Namespace) -> int:
    for package in options.needs:
        with needed(package, f"`tpkernels {options.command}`"):
            importlib.import_module(package)
    return int(options.run(options))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line, loading only the subcommand that it names; exits with code 2 where it is wrong."""
    from tpkernels import __version__

    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser = argparse.ArgumentParser(
        prog="tpkernels", description="Tensor-parallel linear layers whose communication hides behind the GEMM."
    )
    parser.add_argument("--version", action="version", version=f"tpkernels {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in COMMANDS:
        sub = subparsers.add_parser(command.name, help=command.help, description=command.help)
        sub.add_argument("--traceback", action="store_true", help="show Python tracebacks of errors")
        if command.name == chosen:
            add_arguments, run = command.load()
            add_arguments(sub)
            sub.set_defaults(run=run, needs=command.needs)
    return parser.parse_args(arguments)


def _explain_error(error: Exception) -> tuple[str, int]:
    """What to tell the user about an error, and the exit code. Of a failed rank, its own message counts."""
    from tpkernels.launching.local_ranks import LaunchError

    if isinstance(error, LaunchError) and error.failures:
        first = error.failures[0]
        known = isinstance(first.exception, TpKernelsError | ValueError)
        message = f"rank {first.rank}: {first.exception}" if known else str(error)
        return message, 2 if isinstance(first.exception, ValueError) else 1
    return str(error), 2 if isinstance(error, ValueError) else 1


def _missing_module(error: ModuleNotFoundError) -> int:
    known = isinstance(error, MissingPackage)
    said = str(error) if known else f"the package {error.name!r} is missing. {how_to_install(error.name or '')}"
    print(f"tpkernels: {said}", file=sys.stderr)
    return 1


# --- demo, test, bench, profile ---------------------------------------------------------------------------------------


def _load_demo() -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
    from tpkernels.demo import add_arguments, main

    return add_arguments, main


def _load_test() -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
    from tpkernels import selftest

    return selftest.add_arguments, selftest.main


def _load_train_demo() -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
    from tpkernels.demo import train

    return train.add_arguments, train.main


def _load_bench() -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
    from tpkernels.measure import bench, suites

    def run(options: argparse.Namespace) -> int:
        if options.suite != suites.FIRST_NODE:
            return bench.main(options)
        from tpkernels.selftest import first_node

        return first_node.main(options)

    return bench.add_arguments, run


def _load_profile() -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
    from tpkernels.measure import profile

    return profile.add_arguments, profile.main


# --- explain ----------------------------------------------------------------------------------------------------------


def _load_explain() -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
    return _add_explain_arguments, _run_explain


def _add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", nargs="?", choices=FUSED_OPS, help="one op (default: all three)")
    for name, meaning in (("m", "rows"), ("k", "input features"), ("n", "output features")):
        parser.add_argument(
            f"--{name}", type=flags.at_least(0), default=4096, metavar=name.upper(),
            help=f"{meaning} over the whole group (default 4096)",
        )  # fmt: skip
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="default bf16")
    parser.add_argument(
        "--experts", type=flags.at_least(1), metavar="E", help="the ops' grouped GEMMs, of M tokens and E experts"
    )
    parser.add_argument("--top-k", type=flags.at_least(1), metavar="T", help="experts of a token (default 1)")
    flags.add_tp(parser, 2, "local ranks to start (default 2); under torchrun those that it has started")
    parser.add_argument(
        "--same-bits", type=flags.power_of_two(1), metavar="LARGEST",
        help="say which calls change, and what it costs, to give the same bits at each degree up to LARGEST",
    )  # fmt: skip


def _run_explain(options: argparse.Namespace) -> int:
    from tpkernels import config
    from tpkernels.launching.local_ranks import launch

    ops: tuple[str, ...] = (options.op,) if options.op else FUSED_OPS
    experts: tuple[int, int] | None = None
    if options.experts is not None:
        ops = tuple(op.replace("matmul", "grouped_matmul") for op in ops)
        experts = options.experts, options.top_k or 1
    elif options.top_k is not None:
        raise ValueError("--top-k goes with --experts")
    question = (ops, options.m, options.n, options.k, DTYPES[options.dtype], options.same_bits, experts)
    job = config.job_environment()
    if job is None:
        text = launch(explain_on_rank, options.tp, *question, timeout=RANK_TIMEOUT_S)[0]
    else:
        text = explain_on_rank(*question)
    if job is None or job.rank == 0:
        print(text)
    return 0


def explain_on_rank(
    ops: Sequence[str],
    m: int,
    n: int,
    k: int,
    dtype_name: str,
    same_bits: int | None = None,
    experts: tuple[int, int] | None = None,
) -> str:
    """One rank's part of `tpkernels explain`; public because ranks import it.

    ``experts``: of grouped ops, how many there are, and how many a token has.
    """
    import torch
    import torch.distributed as dist

    import tpkernels as tpk

    dtype: torch.dtype = getattr(torch, dtype_name)
    mesh = tpk.init(timeout=RANK_TIMEOUT_S, same_bits=same_bits)
    num_experts, top_k = experts or (None, None)
    try:
        return "\n\n".join(
            str(tpk.explain(op, m=m, n=n, k=k, dtype=dtype, group=mesh["tp"], experts=num_experts, top_k=top_k))
            for op in ops
        )
    finally:
        dist.destroy_process_group()


# --- plan -------------------------------------------------------------------------------------------------------------


def _load_plan() -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
    return _add_plan_arguments, _run_plan


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    from tpkernels.integrations import named_models

    parser.add_argument("model", type=named_models.source, metavar="MODEL", help=named_models.HELP)
    flags.add_tp(parser, 2, "ranks that share every layer (default 2); none is started")
    parser.add_argument("--sequence-parallel", action="store_true", help="cut the residual stream along the sequence")
    parser.add_argument(
        "--tokens",
        type=flags.tokens,
        metavar="BATCHxLENGTH",
        help="size of the step whose bytes are shown (default 3x7)",
    )
    flags.add_override(parser)
    parser.add_argument(
        "--strategy",
        choices=("auto", "rules"),
        default="auto",
        help="rules: cut layer by layer, without tracing the model",
    )
    flags.add_json(parser, "write the plan to a file, too")


def _run_plan(options: argparse.Namespace) -> int:
    from pathlib import Path

    from tpkernels.integrations import named_models
    from tpkernels.planning.runs.guessed_inputs import Tokens
    from tpkernels.sharding import make_plan

    plan = make_plan(
        named_models.meta_model(options.model),
        options.tp,
        example_inputs=None if options.tokens is None else Tokens(*options.tokens),
        strategy=options.strategy,
        sequence_parallel=options.sequence_parallel,
        overrides=dict(options.override),
    )
    print(plan)
    if options.json:
        Path(options.json).write_text(plan.to_json(), encoding="utf-8")
    return 0


# --- verify -----------------------------------------------------------------------------------------------------------


def _load_verify() -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
    from tpkernels.selftest import verify

    return verify.add_arguments, verify.main


# --- run --------------------------------------------------------------------------------------------------------------


def _load_run() -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
    from tpkernels.launching import scripts

    return scripts.add_arguments, scripts.main


# --- doctor -----------------------------------------------------------------------------------------------------------


def _load_doctor() -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
    from tpkernels import doctor

    return doctor.add_arguments, doctor.main


RICH = ("rich",)
COMMANDS = (
    Command(
        "demo", "swap a pretrained model's linears for tensor-parallel ones, then train a small model", _load_demo, RICH
    ),
    Command(
        "test",
        "check the results on this machine: with and without tensor parallelism, fused and unfused",
        _load_test,
        RICH,
    ),
    Command("train-demo", "train a GPT on text: TP, SP, DP, snapshots, resumed on any ranks", _load_train_demo, RICH),
    Command("bench", "time GEMM only, communication only, unfused and fused for each op", _load_bench, RICH),
    Command(
        "profile", "train a small GPT without TP, with TP and with overlap: values, times, memory", _load_profile, RICH
    ),
    Command("explain", "say which implementation would run a problem, and why the others would not", _load_explain),
    Command("plan", "show how a model would be cut over the ranks, module by module, without its weights", _load_plan),
    Command("verify", "check that a parallelized model computes what it did: outputs and every gradient", _load_verify),
    Command("run", "run a script on several local ranks, each as its main program", _load_run),
    Command("doctor", "show what this machine offers, what is missing, and what to install", _load_doctor),
)
