"""What a rank does with random models: plan, cut, run, and compare with the unsharded model in fp64.

Runs in rank processes.  A model is right if its outputs, loss, buffers and every gradient are the unsharded model's;
a refusal (``ValueError`` from ``make_plan`` or ``parallelize``) is right, too, and so is a plan that gathers.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpkernels as tpk
from tests.fuzz.model import build_model, inputs_of
from tests.fuzz.vocabulary import Spec
from tests.kept_mesh import KeptMesh
from tests.models.compare import differs, pieces_of, planned
from tpkernels.comm.groups import resolve
from tpkernels.errors import UnprovenCallWarning
from tpkernels.planning.modules.layers import layer_of
from tpkernels.planning.runs.tensors import tensors_in

__all__ = ["LIMIT", "Verdict", "check_all", "merged"]

LIMIT = 1e-9
"""Relative to the largest value; a missing sum is off by the size of the values themselves."""
ROUNDINGS = 8
"""How often the weights of a model that seems wrong are rounded otherwise, to see whether it decides by a rounding."""
PATIENCE_S = 20.0


@dataclass
class Verdict:
    """``kind``: "right", "refused", "wrong", "raises", "invalid" (the unsharded model does not run) or "a tie".

    At a tie the unsharded model decides by a rounding: where its weights are off by one, it is as far off in all that
    the sharded model has wrong.
    """

    kind: str
    detail: str = ""
    styles: dict[str, int] = field(default_factory=dict)
    """Of the plan: how many modules are what."""
    proven: int = 0
    """Columns and rows that depend on each other, which only a proof allows."""
    untraced: bool = False
    sequence_parallel: bool = False
    """A residual travels cut along the sequence."""
    followed: bool = True
    """What every row took was known to be cut as its weight is."""
    seconds: float = 0.0


@dataclass
class Run:
    """What a model gave."""

    outputs: list[Tensor]
    gradient: Tensor | None


def run(model: nn.Module, x: Tensor) -> Run:
    """Forward and backward; the loss weighs every element of every output that has a gradient.

    Outputs are also those of training and of evaluation without gradients.
    """
    training, x = model.training, x.detach().clone().requires_grad_(x.requires_grad)
    outputs = _outputs(model, x)
    generator = torch.Generator().manual_seed(3)
    losses = [(y * torch.randn(y.shape, dtype=y.dtype, generator=generator)).sum() for y in outputs if y.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    with torch.no_grad():
        for mode in (not training, training):
            outputs += _outputs(model.train(mode), x)
    return Run([y.detach() for y in outputs], x.grad)


def _outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [y.to_local() if isinstance(y, DTensor) else y for y in tensors_in(model(x))]


def _finite(model: nn.Module, result: Run) -> bool:
    tensors = [p.grad for p in model.parameters() if p.grad is not None] + result.outputs
    return all(bool(torch.isfinite(t).all()) and (not t.numel() or float(t.abs().max()) < 1e8) for t in tensors)


def plan_for(model: nn.Module, mesh: Any, spec: Spec) -> tuple[tpk.ShardingPlan, bool]:
    """A plan, and whether it had to do without data flow."""
    options: dict[str, Any] = {"sequence_parallel": bool(spec.get("sequence_parallel"))}
    if "override" in spec:
        names = sorted({name for name, module in model.named_modules() if layer_of(module) is not None})
        where, style = spec["override"]
        if names:
            options["overrides"] = {names[int(where * len(names))]: style}
    if spec.get("untraced"):
        return tpk.make_plan(model, mesh, strategy="rules"), True
    try:
        plan = tpk.make_plan(model, mesh, example_inputs=(inputs_of(spec),), **options)
        if any("not proven" in entry.reason for entry in plan.entries):  # the user is taken at his word
            options.pop("overrides", None)
            plan = tpk.make_plan(model, mesh, example_inputs=(inputs_of(spec),), **options)
        if not any(note.startswith("no data flow") for note in plan.notes):
            return plan, False
    except ValueError as error:
        if "does not run with the example_inputs" not in str(error):
            raise
    # Without data flow a user who asks for a column without its row is taken at his word.
    own = {name: style for name, style in options.get("overrides", {}).items() if style not in ("column", "row")}
    return tpk.make_plan(model, mesh, strategy="rules", overrides=own), True


def attempt(spec: Spec, mesh: Any) -> Any:
    """A plan, or the verdict that there is none."""
    try:
        return plan_for(build_model(spec), mesh, spec)
    except ValueError as error:
        return Verdict("refused", str(error)[:200])
    except Exception as error:  # noqa: BLE001 - a verdict on whatever planning raises
        return Verdict("raises", f"make_plan: {_told(error)}")


def _told(error: BaseException) -> str:
    """The error, and the lines that led to it."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    at = " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__}: {str(error)[:300]} [{at}]"


def check(spec: Spec, planned: Any, mesh: Any) -> Verdict:
    """The verdict of this rank."""
    if isinstance(planned, Verdict):
        return planned
    plan, untraced = planned
    plain, x = build_model(spec), inputs_of(spec)
    try:
        expected = run(plain, x)
    except Exception as error:  # noqa: BLE001 - the model's own fault
        return Verdict("invalid", _told(error))
    if not _finite(plain, expected):
        return Verdict("invalid", "not finite")
    model = build_model(spec)
    verdict = Verdict("right", untraced=untraced, sequence_parallel=bool(plan.sequence_blocks))
    verdict.styles = dict(Counter(_style(entry.style) for entry in plan.entries))
    verdict.proven = 0 if untraced else sum(verdict.styles.get(name, 0) for name in PROVEN)
    try:
        tpk.parallelize(model, mesh, plan, fused_norm=True)
    except ValueError as error:
        verdict.kind, verdict.detail = "refused", f"parallelize: {str(error)[:200]}"
        return verdict
    except Exception as error:  # noqa: BLE001
        verdict.kind, verdict.detail = "raises", f"parallelize: {_told(error)}"
        return verdict
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", UnprovenCallWarning)
            actual = run(model, x)
        verdict.followed = not any(issubclass(warning.category, UnprovenCallWarning) for warning in told)
    except Exception as error:  # noqa: BLE001
        verdict.kind, verdict.detail = "raises", _told(error)
        return verdict
    wrong = compare(model, plain, actual, expected)
    if wrong:
        verdict.kind = "a tie" if wrong.keys() <= _hangs_on_a_rounding(spec, plain, expected) else "wrong"
        verdict.detail = "; ".join(f"{name} {problem}" for name, problem in list(wrong.items())[:4])
    return verdict


def _hangs_on_a_rounding(spec: Spec, plain: nn.Module, expected: Run) -> set[str]:
    """What the unsharded model has wrong where its weights are off by a rounding."""
    found: set[str] = set()
    for seed in range(ROUNDINGS):
        off, generator = build_model(spec), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in off.parameters():
                signs = torch.randint(-1, 2, parameter.shape, generator=generator).to(parameter.dtype)
                parameter.mul_(1 + signs * torch.finfo(parameter.dtype).eps)
        found |= compare_runs(run(off, inputs_of(spec)), expected).keys()
        for name, parameter in plain.named_parameters():
            mine, theirs = off.get_parameter(name).grad, parameter.grad
            if (mine is None) != (theirs is None) or (mine is not None and differs(mine, theirs, LIMIT)):
                found.add(f"gradient of {name}")
        found |= {f"buffer {name}" for name, buffer in plain.named_buffers() if _is_off(off.get_buffer(name), buffer)}
    return found


def _is_off(mine: Tensor, theirs: Tensor) -> bool:
    return theirs.is_floating_point() and differs(mine, theirs, LIMIT) is not None


PROVEN = ("Column", "packed Column", "uneven Column", "Features", "CopiedHeads", "Row", "uneven Row")


def _style(style: Any) -> str:
    """Its kind, finer than its class."""
    name = type(style).__name__
    if getattr(style, "gather_output", False):
        return f"{name} gathered"
    if getattr(style, "split_input", False):
        return f"{name} of a split input"
    if getattr(style, "segments", ()):
        return f"packed {name}"
    if name == "Replicate" and style.sequence_parallel:
        return "Replicate, gradients summed"
    return f"uneven {name}" if getattr(style, "unit", 1) > 1 and name in ("Column", "Row") else name


def compare(model: nn.Module, plain: nn.Module, actual: Run, expected: Run) -> dict[str, str]:
    """What is wrong, and how."""
    wrong = compare_runs(actual, expected)
    for name, parameter in plain.named_parameters(remove_duplicate=False):
        pieces = pieces_of(model, name, parameter)
        if not pieces:
            wrong[name] = "is gone"
        for part, cut in pieces:
            mine = part.grad.to_local() if part.grad is not None else None  # type: ignore[attr-defined]
            theirs = cut(parameter.grad) if parameter.grad is not None else torch.zeros_like(cut(parameter))
            if mine is None:
                mine = torch.zeros_like(part.to_local())
                if parameter.grad is not None and bool(theirs.any()):
                    wrong[name] = "has no gradient"
                    continue
            problem = differs(mine, theirs, LIMIT)
            if problem:
                wrong[f"gradient of {name}"] = problem
    buffers = dict(model.named_buffers())
    for name, buffer in plain.named_buffers():
        mine = buffers.get(name)
        problem = "is gone" if mine is None else None
        if mine is not None and buffer.is_floating_point():
            problem = differs(mine, buffer, LIMIT)
        if problem:
            wrong[f"buffer {name}"] = problem
    return wrong


def compare_runs(actual: Run, expected: Run) -> dict[str, str]:
    wrong: dict[str, str] = {}
    if len(actual.outputs) != len(expected.outputs):
        wrong[f"{len(actual.outputs)} outputs"] = f"instead of {len(expected.outputs)}"
    for index, (mine, theirs) in enumerate(zip(actual.outputs, expected.outputs, strict=False)):
        exact = not theirs.is_floating_point()
        problem = differs(mine.double() if exact else mine, theirs.double() if exact else theirs, LIMIT)
        if problem:
            wrong[f"output {index}"] = problem
    if expected.gradient is not None:
        problem = "is missing" if actual.gradient is None else differs(actual.gradient, expected.gradient, LIMIT)
        if problem:
            wrong["gradient of the input"] = problem
    return wrong


_mesh = KeptMesh(lambda: tpk.init(timeout=PATIENCE_S)["tp"])  # ranks that fell out of step say so soon


def check_all(specs: list[Spec]) -> list[dict[str, Any]]:
    """Verdicts of this rank on all models, in one call of the ranks; shorter where ranks fell out of step."""
    warnings.simplefilter("ignore")
    mesh, world = _mesh(), dist.get_world_size()
    plan_of = planned(len(specs), mesh, lambda index, where: attempt(specs[index], where))
    verdicts = []
    for index, spec in enumerate(specs):
        start = time.monotonic()
        verdict = check(spec, plan_of(index), mesh)
        verdict.seconds = time.monotonic() - start
        verdicts.append(asdict(verdict))
        bad = torch.tensor([float(verdict.kind == "raises")])
        dist.all_reduce(bad)
        if 0 < float(bad) and (float(bad) < world or resolve(mesh).poison is not None):
            break
    return verdicts


ORDER = ("wrong", "raises", "a tie", "refused", "invalid", "right")


def merged(verdicts: list[dict[str, Any]]) -> dict[str, Any]:
    """Over ranks: the worst."""
    kinds = {verdict["kind"] for verdict in verdicts}
    if len(kinds & {"refused", "invalid", "right"}) > 1 and not kinds & {"wrong", "raises"}:
        told = {f"rank {rank}": f"{v['kind']} {v['detail']}" for rank, v in enumerate(verdicts)}
        return {**verdicts[0], "kind": "wrong", "detail": f"ranks disagree: {told}"}
    worst = min(verdicts, key=lambda verdict: ORDER.index(verdict["kind"]))
    worst = {**worst, "followed": all(verdict["followed"] for verdict in verdicts)}
    where = [rank for rank, verdict in enumerate(verdicts) if verdict["kind"] == worst["kind"]]
    if worst["kind"] in ("wrong", "raises"):
        return {**worst, "detail": f"on ranks {where}: {worst['detail']}"}
    return worst
