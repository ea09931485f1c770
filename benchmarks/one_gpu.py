"""Everything that one GPU can show, in one call of under nine minutes.

    python benchmarks/one_gpu.py --out DIR
    python benchmarks/one_gpu.py --plan                  what would run; needs no GPU
    python benchmarks/one_gpu.py --out DIR --only gemm   repeatable

Writes DIR/one-gpu.json (all samples, hardware, versions, command, date) and DIR/one-gpu.md (the table, which is also
printed) after every step. A step is a process of its own with a limit of its own: one that hangs is ended, what it had
found stays, and the next one runs. When --budget seconds are over, what is left is filed as out of time.

Exit status: 0 every step is done (or had nothing to run on, and says so); 1 a step failed or ran out of time;
2 wrong arguments; 3 this machine has no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from gpu_steps.outcome import Outcome, Recorder, markdown, write_json  # noqa: E402

NO_GPU = 3
BUDGET_S = 520.0


@dataclass(frozen=True)
class Step:
    name: str
    what: str
    limit_s: float
    module: str
    function: str = "run"

    def load(self) -> Callable[[Recorder], None]:
        run: Callable[[Recorder], None] = getattr(import_module(f"gpu_steps.{self.module}"), self.function)
        return run


STEPS = (
    Step("environment", "versions, clocks, bandwidths, how several ranks can share this GPU", 90, "environment"),
    Step("build", "the CUDA kernels, if they are not there", 150, "programs", "build"),
    Step("gemm", "G1 kernels with flags preset against cuBLAS, G2 waits and signals", 100, "gemm"),
    Step("reducer", "G4 the sum over ranks against copy bandwidth", 40, "reducer"),
    Step("link", "G3 overlap with PCIe as the link; arrival clock", 100, "link"),
    Step("faults", "R21 waits that end, R22 graphs with fresh data", 60, "faults"),
    Step("tests", "tests/gpu: every op, dtype and cut, gradients, graphs, time-outs", 200, "programs", "tests"),
    Step("rivals", "G5 against torch.ops.symm_mem, as processes on this GPU", 90, "rivals"),
    Step("sanitizer", "memcheck and synccheck over small cases", 90, "programs", "sanitizer"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    steps = [step for step in STEPS if not args.only or step.name in args.only]
    if args.plan:
        for step in steps:
            print(f"{step.name:<12} at most {step.limit_s:>4.0f} s  {step.what}")
        print(f"together at most {args.budget:g} s")
        return 0
    if args.step:
        return run_step(next(step for step in STEPS if step.name == args.step), Path(args.out))
    refusal = why_no_gpu()
    if refusal is not None:
        print(f"one_gpu: {refusal}. Nothing was measured; --plan shows what would run.", file=sys.stderr)
        return NO_GPU
    from tpkernels.measure.report import describe_environment

    environment = describe_environment({"budget_s": args.budget})
    return run_all(steps, Path(args.out), args.budget, environment)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.name for step in STEPS]
    parser.add_argument("--out", metavar="DIR", help="where the results go")
    parser.add_argument("--only", action="append", choices=names, help="repeatable; default: all steps")
    parser.add_argument("--plan", action="store_true", help="print the steps and their limits, and run nothing")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="for all steps together")
    parser.add_argument("--step", choices=names, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if not args.plan and not args.out:
        parser.error("--out DIR is needed")
    if args.budget <= 0:
        parser.error(f"--budget must be positive, got {args.budget:g}")
    return args


def why_no_gpu() -> str | None:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "this process sees no CUDA device"


# --- all steps --------------------------------------------------------------------------------------------------------


def run_all(steps: Sequence[Step], out: Path, budget_s: float, environment: dict[str, Any]) -> int:
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + budget_s
    outcomes: list[Outcome] = []
    for step in steps:
        print(f"--- {step.name}: {step.what}", flush=True)
        outcomes.append(supervise(step, out, min(step.limit_s, end - time.monotonic())))
        file(out, environment, outcomes, complete=False)
    file(out, environment, outcomes, complete=True)
    print(markdown(environment, outcomes))
    return 0 if all(outcome.status in ("done", "skipped") for outcome in outcomes) else 1


def file(out: Path, environment: dict[str, Any], outcomes: Sequence[Outcome], complete: bool) -> None:
    content = {**environment, "complete": complete, "steps": [outcome.to_json() for outcome in outcomes]}
    write_json(out / "one-gpu.json", content)
    (out / "one-gpu.md").write_text(markdown(environment, outcomes), encoding="utf-8")


def supervise(step: Step, out: Path, limit_s: float) -> Outcome:
    """Run a step in a process group of its own, for so long at most; what it has filed counts, however it ended."""
    if limit_s < 1:
        return Outcome(step.name, "out of time", reason="the budget was spent before its turn")
    filed = out / f"step-{step.name}.json"
    filed.unlink(missing_ok=True)
    start = time.monotonic()
    process = subprocess.Popen(command_of(step, out), start_new_session=True)
    try:
        process.wait(limit_s)
        late = False
    except subprocess.TimeoutExpired:
        late = True
    finally:
        _end_group(process)
    found = Outcome.from_json(json.loads(filed.read_text())) if filed.is_file() else Outcome(step.name, "failed")
    found.seconds = time.monotonic() - start
    if late:
        found.status, found.reason = "out of time", f"had not ended after {limit_s:.0f} s"
    elif found.status == "running" or not filed.is_file():
        found.status, found.reason = "failed", f"ended with status {process.returncode} before it had filed a result"
    return found


def command_of(step: Step, out: Path) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), "--step", step.name, "--out", str(out)]


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """The process and all that it started; none of them outlives its step."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all of them have ended
    process.wait(30)


# --- one step, in its process -----------------------------------------------------------------------------------------


def run_step(step: Step, out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    outcome = Outcome(step.name, "running")
    recorder = Recorder(outcome, out / f"step-{step.name}.json")
    recorder.save()
    try:
        step.load()(recorder)
        outcome.status = "done"
    except Exception as error:  # noqa: BLE001 - whatever it was, it is filed, and the other steps run
        outcome.status, outcome.reason = _verdict(error)
        traceback.print_exc()
    recorder.save()
    return 0 if outcome.status in ("done", "skipped") else 1


def _verdict(error: Exception) -> tuple[str, str]:
    reason = f"{type(error).__name__}: {error}".splitlines()[0][:400]
    return ("skipped" if type(error).__name__ == "Unavailable" else "failed"), reason


if __name__ == "__main__":
    sys.exit(main())
