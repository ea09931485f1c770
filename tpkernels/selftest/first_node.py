"""``tpkernels bench --suite first-node``: is everything right, does anything hang, and what is fast, on several GPUs?

For whoever is the first to run a release on a kind of node.  Every step runs in rank processes of its own with a time
limit, so that one that hangs or dies is a line of the result and the next ones run; first the checks, then the speed.
``first-node.json`` is complete after every step: attach it to a report.

Owns the order of the steps, their limits and the file.  The steps themselves are in :mod:`.first_node_steps`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tpkernels import config
from tpkernels.launching.local_ranks import LaunchError, launch
from tpkernels.launching.rank_process import RankStuck
from tpkernels.measure import report
from tpkernels.measure.fitting import USUAL_LIMIT_S
from tpkernels.measure.suites import FIRST_NODE
from tpkernels.selftest import first_node_steps as steps
from tpkernels.selftest.first_node_steps import Setting

__all__ = ["main"]

START_S = 60.0
"""What starting the ranks and their GPUs may take, beside the step itself."""
_DEFAULT_OUT = "bench-first-node"
_QUICK_DIVISOR = 32


@dataclass(frozen=True)
class Step:
    """``work(setting)`` runs on every rank; rank 0 returns what is written down, with "wrong" if anything was."""

    name: str
    work: Callable[..., dict[str, Any]]
    given: tuple[Any, ...] = ()
    limit_s: float = 120.0
    ranks: int | None = None
    """If not all."""


@dataclass
class Outcome:
    """``status``: right, wrong, raised, hung or skipped."""

    step: str
    status: str
    seconds: float = 0.0
    detail: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


def steps_of(setting: Setting) -> list[Step]:
    found = [Step(f"first use of {op}", steps.first_use, (op,), steps.FIRST_USE_S) for op in steps.OPS]
    found += [Step(f"all-reduce of {steps.in_words(size)}", steps.all_reduce, (size,)) for size in steps.SUM_BYTES]
    found.append(Step("GEMM + reduce-scatter beside an all-gather on another stream", steps.beside_a_collective))
    found.append(Step("FSDP x TP", steps.fsdp_times_tp, ranks=4))
    return found + [Step(f"speed of {op}", steps.speed, (op,), 300.0) for op in steps.FUSED_OPS]


def main(args: argparse.Namespace) -> int:
    """Run all steps; 1 if any result was wrong, raised or hung.

    Raises: ValueError for arguments that this suite does not take, or a machine with fewer than two devices.
    """
    device = args.device
    nproc = _ranks(args, device)
    setting = Setting(
        device, _QUICK_DIVISOR if args.quick else 1, args.repeats or (3 if args.quick else 9), args.warmup
    )
    folder = Path(args.out or _DEFAULT_OUT)
    folder.mkdir(parents=True, exist_ok=True)
    file = Path(args.json) if args.json else folder / "first-node.json"
    environment = report.describe_environment({"nproc": nproc, **asdict(setting)}) | {"topology": _topology(device)}
    outcomes: list[Outcome] = []
    for step in steps_of(setting):
        outcomes.append(_run(step, setting, nproc, args.case_timeout or USUAL_LIMIT_S))
        _write(file, environment, outcomes, complete=False)
        print(_line(outcomes[-1]), flush=True)
    _write(file, environment, outcomes, complete=True)
    bad = [outcome.step for outcome in outcomes if outcome.status not in ("right", "skipped")]
    print(f"{len(outcomes)} steps, {len(bad)} not right{': ' + '; '.join(bad) if bad else ''}\nattach: {file}")
    return 1 if bad else 0


def _ranks(args: argparse.Namespace, device: str) -> int:
    taken = {"--netlab": args.netlab, "--delay": args.delay, "--op": args.op, "--shape": args.shape,
             "--trace": args.trace, "--compare": args.compare}  # fmt: skip
    refused = [name for name, value in taken.items() if value]
    if refused:
        raise ValueError(f"--suite {FIRST_NODE} has steps of its own and does not take {', '.join(refused)}")
    if config.job_environment() is not None:
        raise ValueError(f"--suite {FIRST_NODE} starts ranks anew for every step: run it without torchrun")
    found = torch.cuda.device_count() if device == "cuda" else 2
    nproc = max(args.tp or [found]) if args.nproc is None else args.nproc
    if nproc < 2 or (device == "cuda" and nproc > found):
        have = f"{found} GPU(s) were found" if device == "cuda" else "ranks of one host"
        raise ValueError(
            f"--suite {FIRST_NODE} takes at least two ranks, each with a device of its own; {have}, got {nproc}"
        )
    return int(nproc)


def _run(step: Step, setting: Setting, nproc: int, most_s: float) -> Outcome:
    if step.ranks is not None and nproc < step.ranks:
        return Outcome(step.name, "skipped", detail=f"takes {step.ranks} ranks, there are {nproc}")
    limit, start = min(step.limit_s, most_s), time.monotonic()
    try:
        numbers = launch(step.work, step.ranks or nproc, setting, *step.given, timeout=START_S + limit)[0]
    except LaunchError as error:
        stuck = any(isinstance(failure.exception, RankStuck) for failure in error.failures)
        detail = str(error) if stuck else "; ".join(failure.summary for failure in error.failures)
        return Outcome(step.name, "hung" if stuck else "raised", time.monotonic() - start, detail)
    wrong = "; ".join(numbers.pop("wrong", ()))
    return Outcome(step.name, "wrong" if wrong else "right", time.monotonic() - start, wrong, numbers)


def _line(outcome: Outcome) -> str:
    said = outcome.detail.splitlines()[0][:200] if outcome.detail else steps.summary(outcome.numbers)
    return f"{outcome.status:<8}{outcome.seconds:>6.1f} s  {outcome.step}{': ' + said if said else ''}"


def _write(file: Path, environment: dict[str, Any], outcomes: list[Outcome], *, complete: bool) -> None:
    content = {**environment, "complete": complete, "steps": [asdict(outcome) for outcome in outcomes]}
    new = file.with_name(file.name + ".new")
    new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    new.replace(file)


def _topology(device: str) -> dict[str, Any]:
    """How the GPUs are connected, as the driver says it."""
    if device != "cuda":
        return {}
    count = torch.cuda.device_count()
    found: dict[str, Any] = {
        "peer_access": [
            [one == other or torch.cuda.can_device_access_peer(one, other) for other in range(count)]
            for one in range(count)
        ]
    }
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=True)
        found["nvidia_smi_topo"] = done.stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        print(f"nvidia-smi topo -m: {error}", file=sys.stderr)
        found["nvidia_smi_topo"] = f"not known: {error}"
    return found
