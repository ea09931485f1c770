"""One architecture on the ranks: planned and parallelized as a new user does, run, and compared with the unsharded one.

Owns: the verdict.  fp64 decides: an output, a gradient or a parameter that differs there by more than rounding is
wrong.  In fp32 errors are counted in units of the unsharded model's own, as in :mod:`tpkernels.verification.bounds`.
What is over the bound there, and right in fp64, is a decision that hangs on a rounding (a router's choice, a ReLU)
if a model whose weights are off by one rounding is as far off, and is reported as "fp32" otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpkernels as tpk
from tests.models.architectures.inputs import cast
from tests.models.architectures.reference import (
    HUGE,
    Reference,
    Run,
    _real,
    backward,
    build,
    computing,
    nudged_runs,
    settled,
)
from tests.models.compare import pieces_of
from tests.nn.reference import tp_mesh
from tpkernels.planning.styles import Replicate, Row
from tpkernels.verification.bounds import FACTOR, worst_ratio

__all__ = ["LIMIT", "Failed", "examine"]

LIMIT = {False: 1e-9, True: 1e-6}
"""Of fp64, relative to the largest value; for models that are fp32 inside."""
FURTHEST = 1e-6
"""Relative to the largest value: the most that a rounding of fp64 which the model amplifies may explain."""
LIMIT_FP32 = 1e-4
"""Where the reference cannot be fp64."""
SAME = 1e-6
"""For the unsharded model in fp32 before and after it was planned."""
SHARE = 0.1
"""Of the model's largest gradient, which stands beside a tensor's own largest: sums that cancel leave its rounding."""


class Failed(Exception):
    """A step raised; ``found`` is what was known until then."""

    def __init__(self, stage: str, reason: str, found: dict[str, Any]) -> None:
        super().__init__(stage, reason, found)
        self.stage, self.reason, self.found = stage, reason, found


@dataclass
class Verdict:
    """What differs: names and sizes, each in units of what is allowed."""

    wrong: dict[str, float] = field(default_factory=dict)
    fp32: dict[str, float] = field(default_factory=dict)
    """Over the bound in fp32 alone."""
    worst: float = 0.0
    """The largest error in fp32, in units of the unsharded model's own."""


def examine(reference: Reference, sequence_parallel: bool, with_inputs: bool) -> dict[str, Any]:
    """What this rank finds.

    Raises:
        Failed: planning, cutting or running it raised.
    """
    found: dict[str, Any] = {}
    verdict = Verdict()
    plan = _planned(reference, sequence_parallel, with_inputs, found, verdict)
    for dtype in (torch.float64, torch.float32):
        if dtype == torch.float32 or reference.has_fp64:
            _run(reference, plan, dtype, found, verdict)
    found |= {"wrong": verdict.wrong, "fp32": verdict.fp32, "worst": verdict.worst}
    return found


def _planned(
    reference: Reference, sequence_parallel: bool, with_inputs: bool, found: dict[str, Any], verdict: Verdict
) -> tpk.ShardingPlan:
    """The plan, made before anything ran in this process; the model it is for computes afterwards what it should."""
    model = build(reference.name).train(reference.training)
    options: dict[str, Any] = {"example_inputs": reference.arguments} if with_inputs else {}
    with computing(torch.float32):
        plan = _step(
            "plan", found, lambda: tpk.make_plan(model, tp_mesh(), sequence_parallel=sequence_parallel, **options)
        )
        found |= _about(plan)
        # With gradients, as the reference: torch takes other kernels without, and some models amplify a rounding.
        outputs = _step("original after the plan", found, lambda: settled(model(**reference.arguments)))
    outputs = {name: output.detach() for name, output in outputs.items()}
    for name, size in _apart(outputs, reference.plain, SAME).items():
        verdict.wrong[f"original after the plan: {name}"] = size
    return plan


def _about(plan: tpk.ShardingPlan) -> dict[str, Any]:
    why = [note for note in plan.notes if note.startswith("no data flow")]
    proven = [
        e for e in plan.entries if isinstance(e.style, Row) and not e.style.split_input and "not proven" not in e.reason
    ]
    unproven = [e.path for e in plan.entries if "not proven" in e.reason and not isinstance(e.style, Replicate)]
    return {
        "traced": not why,
        "why": why[0].removeprefix("no data flow: ").removesuffix("; layers are taken one by one") if why else "",
        "cut": round(1 - plan.replicated_bytes / max(1, plan.full_bytes), 4),
        "proven": len(proven),
        "unproven": len(unproven),
        "sequence": len(plan.sequence_blocks),
    }


def _run(
    reference: Reference, plan: tpk.ShardingPlan, dtype: torch.dtype, found: dict[str, Any], verdict: Verdict
) -> None:
    model = build(reference.name, dtype).train(reference.training)
    before = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
    arguments = cast(reference.arguments, dtype)
    with reference.computing(dtype):
        _step("parallelize", found, lambda: tpk.parallelize(model, tp_mesh(), plan))
        with torch.no_grad():  # first: training moves the statistics of batch norms
            evaluated = _step("evaluation", found, lambda: settled(model.eval()(**arguments)))
        model.train(reference.training)
        result = Run(_step("forward", found, lambda: settled(model(**arguments))))
        _step("backward", found, lambda: backward(model, result, reference.weights))
        gradients = _gradients(model, reference.exact, before)
    if dtype == torch.float32:
        _judge(verdict, reference, result, gradients)
        if reference.has_fp64:
            return
    limit = _limit(reference)
    wrong = _apart(result.outputs, reference.exact.outputs, limit)
    wrong |= {f"evaluation: {n}": s for n, s in _apart(evaluated, reference.evaluated, limit).items()}
    wrong |= _gradients_apart(gradients, limit)
    if wrong and reference.has_fp64 and max(wrong.values()) < FURTHEST:
        found["shaken"] = shaken = _shaken(reference)
        wrong = {name: size for name, size in wrong.items() if size > FACTOR * shaken}
    verdict.wrong |= wrong
    for name, value in before.items():
        if not all(torch.equal(p.to_local(), cut(value)) for p, cut in pieces_of(model, name, value)):
            verdict.wrong[f"parameter {name}"] = float("inf")


def _limit(reference: Reference) -> float:
    return LIMIT[reference.single] if reference.has_fp64 else LIMIT_FP32


def _shaken(reference: Reference) -> float:
    """How far from itself the unsharded model is in fp64 when its weights are off by a rounding."""
    exact, *others = nudged_runs(reference)
    sizes = [0.0]
    for other in others:
        gradients: Pieces = {name: [(other.gradients[name], value, None)] for name, value in exact.gradients.items()}
        sizes += [*_apart(other.outputs, exact.outputs, 0.0).values(), *_gradients_apart(gradients, 0.0).values()]
    return max(sizes)


Pieces = dict[str, list[tuple[Tensor | None, Tensor | None, Any]]]
"""By parameter: this rank's gradient, the unsharded model's of that piece, and what cuts pieces."""


def _gradients(model: nn.Module, exact: Run, before: dict[str, Tensor]) -> Pieces:
    found: Pieces = {}
    for name, expected in exact.gradients.items():
        pieces = pieces_of(model, name, before[name])
        found[name] = []
        for part, cut in pieces:
            grad: Any = part.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            found[name].append((local, None if expected is None else cut(expected), cut))
    return found


def _gradients_apart(gradients: Pieces, limit: float) -> dict[str, float]:
    every = [e for pieces in gradients.values() for _, e, _ in pieces if e is not None and e.numel()]
    scale = max((float(e.abs().max()) for e in every), default=0.0)
    wrong: dict[str, float] = {}
    for name, pieces in gradients.items():
        if not pieces:
            wrong[f"{name} is gone"] = float("inf")
        for actual, expected, _ in pieces:
            size = _gradient_apart(actual, expected, scale)
            if size > limit:
                wrong[f"gradient of {name}"] = max(wrong.get(f"gradient of {name}", 0.0), size)
    return wrong


def _gradient_apart(actual: Tensor | None, expected: Tensor | None, scale: float) -> float:
    """Relative; one that is missing, or should be, is as good as zero."""
    if actual is None and expected is None:
        return 0.0
    actual = torch.zeros_like(expected) if actual is None and expected is not None else actual
    expected = torch.zeros_like(actual) if expected is None and actual is not None else expected
    assert actual is not None and expected is not None
    if actual.shape != expected.shape:
        return float("inf")
    if not actual.numel():
        return 0.0
    largest = float(expected.abs().max()) + SHARE * scale
    size = float((actual.double() - expected.double()).abs().max()) / (largest or 1.0)
    return float("inf") if size != size else size


def _apart(actual: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> dict[str, float]:
    """Outputs that differ, by how much relative to their largest value."""
    wrong = {f"output {name} is gone": float("inf") for name in expected if name not in actual}
    for name, output in actual.items():
        if name not in expected or output.shape != expected[name].shape:
            wrong[f"output {name}: {tuple(output.shape)}"] = float("inf")
            continue
        a, e = _real(output.detach()).double(), _real(expected[name]).double()
        usual = e.isfinite() & (e.abs() < HUGE)
        if not torch.equal(usual, a.isfinite() & (a.abs() < HUGE)):
            wrong[f"output {name}: other infinities"] = float("inf")
        elif usual.any():
            size = float((a - e)[usual].abs().max()) / (1e-3 + float(e[usual].abs().max()))
            if size > limit:
                wrong[f"output {name}"] = size
    return wrong


def _judge(verdict: Verdict, reference: Reference, result: Run, gradients: Pieces) -> None:
    """fp32, by the bound of the unsharded model's own errors."""

    def judge(what: str, actual: Tensor, exact: Tensor, bound: Tensor, loose: Tensor) -> None:
        ratio = worst_ratio(actual, exact.double(), bound)
        verdict.worst = max(verdict.worst, min(ratio, 1e9))
        if ratio > FACTOR and (ratio := worst_ratio(actual, exact.double(), loose)) > FACTOR:
            verdict.fp32[what] = max(verdict.fp32.get(what, 0.0), ratio)

    for name, exact in reference.exact.outputs.items():
        if name in result.outputs and result.outputs[name].shape == exact.shape:
            usual = _real(exact).isfinite() & (_real(exact).abs() < HUGE)
            a, e = (torch.where(usual, _real(t), 0.0) for t in (result.outputs[name], exact))
            judge(f"output {name}", a, e, reference.bound.outputs[name], reference.loose.outputs[name])
    for name, pieces in gradients.items():
        for actual, expected, cut in pieces:
            if actual is None or expected is None:
                if _gradient_apart(actual, expected, 1.0):
                    verdict.wrong[f"gradient of {name} is missing, or should be"] = float("inf")
                continue
            bound, loose = (cut(run.gradients[name]) for run in (reference.bound, reference.loose))
            judge(f"gradient of {name}", actual, expected, bound, loose)


def _step(stage: str, found: dict[str, Any], do: Any) -> Any:
    try:
        return do()
    except Exception as error:
        text = str(error).strip()
        line = text.splitlines()[0][:300] if text else "no message"
        raise Failed(stage, f"{type(error).__name__}: {line}{_place(error)}", found) from error


def _place(error: BaseException) -> str:
    """Where it was raised: the last line of code outside torch."""
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/torch/" not in file and "architectures" not in file and "<" not in file:
            place = f" ({'/'.join(file.split('/')[-2:])}:{trace.tb_lineno})"
        trace = trace.tb_next
    return place
