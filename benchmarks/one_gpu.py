"""What one GPU can show, in named sets of steps that fit their time.

    python benchmarks/one_gpu.py --plan                          the sets, their steps and budgets; needs no GPU
    python benchmarks/one_gpu.py --out DIR                       smoke, and if it is right core
    python benchmarks/one_gpu.py smoke link ranks --out DIR      these sets, in this order
    python benchmarks/one_gpu.py smoke --out DIR --library FILE  with CUDA kernels that were built elsewhere
    python benchmarks/one_gpu.py --out DIR --only gemm           steps by themselves, repeatable

Writes DIR/one-gpu.json (all samples and predictions, hardware, versions, command, date) and DIR/one-gpu.md (the table,
which is also printed) after every step. A step is a process of its own with a budget of its own: one that hangs is
ended, what it had found stays, and the next one runs. If smoke is not done, nothing after it runs.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from gpu_steps.outcome import Outcome, Recorder, markdown, write_json  # noqa: E402
from gpu_steps.sets import DEFAULT, SETS, STEPS, Step, StepSet  # noqa: E402

NO_GPU = 3
LIBRARY = "TPKERNELS_CUDA_LIBRARY"


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    if args.library:
        os.environ[LIBRARY] = str(args.library)  # for all processes that this one starts
    sets = chosen(args.sets, args.only)
    if args.plan:
        print(plan(sets if args.sets or args.only else SETS))
        return 0
    if args.step:
        return run_step(STEPS[args.step], args.out)
    refusal = why_no_gpu()
    if refusal is not None:
        print(f"one_gpu: {refusal}. Nothing was measured; --plan shows what would run.", file=sys.stderr)
        return NO_GPU
    from tpkernels.measure.report import describe_environment

    return run_all(sets, args.out, describe_environment({"sets": [one.name for one in sets]}))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [one.name for one in SETS]
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"of {', '.join(names)}; default: {' '.join(DEFAULT)}")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where the results go")
    parser.add_argument("--only", action="append", choices=list(STEPS), help="steps instead of sets; repeatable")
    parser.add_argument("--library", metavar="FILE", type=Path, help="of the CUDA kernels, instead of building them")
    parser.add_argument("--plan", action="store_true", help="print sets, steps and budgets, and run nothing")
    parser.add_argument("--step", choices=list(STEPS), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    unknown = [name for name in args.sets if name not in names]
    if unknown:
        parser.error(f"there is no set {', '.join(unknown)}; there are {', '.join(names)}")
    if args.sets and args.only:
        parser.error("sets or --only, not both")
    if not args.plan and not args.out:
        parser.error("--out DIR is needed")
    if args.library is not None:
        args.library = args.library.resolve()
        if not args.library.is_file():
            parser.error(f"--library {args.library} is no file")
    return args


def chosen(sets: Sequence[str], only: Sequence[str] | None) -> tuple[StepSet, ...]:
    if only:
        steps = tuple(STEPS[name] for name in dict.fromkeys(only))
        return (StepSet("only", sum(step.budget_s for step in steps), steps),)
    by_name = {one.name: one for one in SETS}
    return tuple(by_name[name] for name in dict.fromkeys(sets or DEFAULT))


def plan(sets: Sequence[StepSet]) -> str:
    lines = []
    for one in sets:
        gate = "; if it fails, nothing after it runs" if one.gate else ""
        lines += [f"{one.name}: at most {one.limit_s:g} s{gate}"]
        lines += [f"  {step.name:<20} {step.budget_s:>4g} s  {step.what}" for step in one.steps]
    return "\n".join(lines)


def why_no_gpu() -> str | None:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "this process sees no CUDA device"


# --- all steps --------------------------------------------------------------------------------------------------------


def run_all(sets: Sequence[StepSet], out: Path, environment: dict[str, Any]) -> int:
    out.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    closed = ""  # why nothing runs any more
    for one in sets:
        end = time.monotonic() + one.limit_s
        for step in one.steps:
            if closed:
                outcomes.append(Outcome(step.name, "not run", reason=closed))
                continue
            print(f"--- {one.name}, {step.name}: {step.what}", flush=True)
            outcomes.append(supervise(step, out, min(step.budget_s, end - time.monotonic())))
            file(out, environment, outcomes, complete=False)
            if one.gate and outcomes[-1].status != "done":
                closed = f"{step.name}, which comes first, is not done"
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
        return Outcome(step.name, "out of time", reason="the set's limit was reached before its turn")
    filed = out / f"step-{step.name}.json"
    filed.unlink(missing_ok=True)
    start = time.monotonic()
    environment = {**os.environ, **dict(step.environment)}
    process = subprocess.Popen(command_of(step, out), start_new_session=True, env=environment)
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
