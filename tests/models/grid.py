"""The grid: every way to use every family, and how far off the parallelized model is then.

A cell is a family x residual whole or cut along the sequence x fp32 or bf16 x a mode: compiled, with activation
checkpointing, 20 steps of AdamW with clipping, with dropout.  Each runs on 2, 3 and 4 ranks.  The unsharded model in
fp64 and in the cell's dtype is a `Reference`, which depends neither on the ranks nor on the mode and is computed once;
cells that differ in their mode alone are one `group`, whose model is planned and cut once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tpkernels as tpk
from tests.models import zoo
from tests.models.compare import NothingTravelsUnplanned, held_bytes, pieces_of
from tests.models.switches import switch_alike
from tests.nn.reference import plan_once, tp_mesh, whole
from tpkernels.verification.bounds import allowed, worst_ratio

STEPS = 20
WORLDS = (2, 3, 4)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MODES = ("compile", "checkpoint", "train", "dropout")
"""In the order in which one model is used: training changes its parameters."""
HAS_BLOCKS = (*zoo.FAMILIES, *zoo.UNEVEN, "transformer", "transformer 10")
"""Models with a residual that can be cut along the sequence."""
RESIDUAL_DROPOUT: dict[str, dict[str, float]] = {
    "bert": {"attention_probs_dropout_prob": 0.0},
    "roberta": {"attention_probs_dropout_prob": 0.0},
    "gpt2": {"attn_pdrop": 0.0},
    "opt": {"attention_dropout": 0.0, "layerdrop": 0.0},
}
"""Families that drop nothing that is cut, given this: their random numbers are the unsharded model's.

Nor layers: a model that does can be recorded in evaluation only, which does not show what drops nothing."""


@dataclass(frozen=True)
class Cell:
    """One way to use one model."""

    name: str
    sequence: bool
    dtype: str
    mode: str
    """"compile"; "checkpoint"; "train": 20 steps; "dropout": that of whole activations; "eager": once, as it is."""


def grid() -> list[Cell]:
    cells = []
    for name, sequence, dtype, mode in product((*zoo.FAMILIES, *zoo.UNEVEN, *zoo.PLAIN), (False, True), DTYPES, MODES):
        drops = mode == "dropout"
        if (not sequence or name in HAS_BLOCKS) and (not drops or (name in RESIDUAL_DROPOUT and not sequence)):
            cells.append(Cell(name, sequence, dtype, mode))
    return cells


def groups(cells: Iterable[Cell]) -> list[list[Cell]]:
    """The cells that one model can be used for, each in the order of `MODES`; dropout is another model's."""
    found: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.name, cell.dtype, cell.mode == "dropout", cell.sequence), []).append(cell)
    return [sorted(group, key=lambda cell: (*MODES, "eager").index(cell.mode)) for group in found.values()]


# ---------------------------------------------------------------- the unsharded model

Bound = tuple[Tensor, Tensor]
"""The exact value, and what each element's error is counted in."""


@dataclass
class Step:
    """One forward, and what let through what in it; the norm of the gradients where it was clipped."""

    output: Bound
    loss: Bound
    passes: dict[str, Tensor]
    norm: Bound | None = None


@dataclass
class Reference:
    """The unsharded model: fp64, and how far its own dtype is off; for one step, or for all that training takes."""

    steps: list[Step] = field(default_factory=list)
    gradients: dict[str, Bound] = field(default_factory=dict)
    """Of the first step."""
    parameters: dict[str, Bound] = field(default_factory=dict)
    """After the last one, by all their names."""
    switches: int = 0


def reference_of(cells: Sequence[Cell]) -> Reference:
    """For cells that differ in nothing but the residual and the mode."""
    modes = {cell.mode for cell in cells}
    return _reference(cells[0].name, cells[0].dtype, "dropout" in modes, STEPS if "train" in modes else 1)


@functools.lru_cache(maxsize=4)
def _reference(name: str, dtype: str, drops: bool, steps: int) -> Reference:
    exact, plain = (_build(name, dtype, drops) for _ in range(2))
    exact.double()
    given = zoo.inputs(name, DTYPES[dtype])
    given64 = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()}
    found, passes = Reference(), dict[str, Tensor]()
    if dtype == "bf16":
        found.switches = switch_alike(exact, passes, notes=True)
        assert switch_alike(plain, passes) == found.switches
    nets = ((exact, given64), (plain, given))
    optimizers = [_optimizer(net) for net, _ in nets]
    for index in range(steps):
        outputs, losses = zip(*(_forward_backward(name, net, net, inputs, drops) for net, inputs in nets), strict=True)
        bounds = [_bound(*outputs), _bound(losses[0], losses[1].to(DTYPES[dtype]))]
        found.steps.append(Step(bounds[0], bounds[1], dict(passes)))
        if index == 0:
            found.gradients = _bounds(exact, plain, lambda parameter: parameter.grad)
        if steps > 1:
            found.steps[-1].norm = _bound(*(_clip(net) for net, _ in nets))
            for optimizer in optimizers:
                optimizer.step()
    found.parameters = _bounds(exact, plain, lambda parameter: parameter)
    return found


def _build(name: str, dtype: str, drops: bool) -> nn.Module:
    options = {"dropout": 0.3, **RESIDUAL_DROPOUT[name]} if drops else {"dropout": 0.0}
    return zoo.build(name, DTYPES[dtype], **options)


def _bound(exact: Tensor, plain: Tensor) -> Bound:
    return exact.detach().clone(), allowed(plain, exact)


def _bounds(exact: nn.Module, plain: nn.Module, of: Callable[[Tensor], Tensor | None]) -> dict[str, Bound]:
    plains = dict(plain.named_parameters(remove_duplicate=False))
    pairs = {name: (of(p), of(plains[name])) for name, p in exact.named_parameters(remove_duplicate=False)}
    return {name: _bound(e, p) for name, (e, p) in pairs.items() if e is not None and p is not None}


def _forward_backward(
    name: str, called: Callable[..., Any], net: nn.Module, given: dict[str, Any], trains: bool
) -> tuple[Tensor, Tensor]:
    """Output and loss of ``called``, which is ``net`` or ends in it."""
    net.zero_grad()
    torch.manual_seed(5)
    net.train(trains)
    y = zoo.output(called(**given))
    loss = (y.double() - _target(name, y)).square().mean()
    loss.backward()
    return y.detach(), loss.detach()


def _target(name: str, y: Tensor) -> Tensor | float:
    """What the loss is the mean squared distance from: 0, but fixed numbers for what a norm returns.

    The mean of that one's squares hardly depends on what was normed.  Its gradient is what a cancellation leaves, a
    tenth, with all of the rounding of one token's deviation in it: a common cause, which the judge's rows and columns
    take for many.  In 40 runs of "roberta" with dropout in bf16 one rank's worst was 2.3 to 6.6, and is 2.2 to 4.3.
    """
    if name not in zoo.ENDS_IN_NORM:
        return 0.0
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _optimizer(net: nn.Module) -> torch.optim.Optimizer:
    # With the usual eps of 1e-8 AdamW makes the rounding of a gradient that is almost 0 a step of full size.
    return torch.optim.AdamW(net.parameters(), 3e-3, eps=1e-4)


def _clip(net: nn.Module) -> Tensor:
    return whole(nn.utils.clip_grad_norm_(net.parameters(), 0.3))


# ---------------------------------------------------------------- the parallelized model


class Runs:
    """One parallelized model, used in one mode after the other."""

    def __init__(self, cell: Cell, reference: Reference, spoil: Callable[[nn.Module], None] | None = None) -> None:
        self.reference, self.name = reference, cell.name
        self.model = _build(cell.name, cell.dtype, cell.mode == "dropout")
        self.given = zoo.inputs(cell.name, DTYPES[cell.dtype])
        plan = plan_once(self.model, tp_mesh(), sequence_parallel=cell.sequence)
        tpk.parallelize(self.model, tp_mesh(), plan, fused_norm=True)
        assert held_bytes(self.model) == plan.bytes_per_rank[dist.get_rank()]
        self.passes: dict[str, Tensor] = {}
        if cell.dtype == "bf16":
            assert switch_alike(self.model, self.passes) == reference.switches
        if spoil is not None:
            spoil(self.model)

    def run(self, mode: str) -> dict[str, float]:
        """How far off everything is, in units of what is allowed."""
        self.worst: dict[str, float] = {}
        self.model.zero_grad()
        optimizer = _optimizer(self.model)
        steps = self.reference.steps if mode == "train" else self.reference.steps[:1]
        for index, step in enumerate(steps):
            self.passes.update(step.passes)
            with NothingTravelsUnplanned() if mode == "train" and index == 0 else contextlib.nullcontext():
                output, loss = self._forward_backward(mode)
            self._judge("output", output, step.output)
            self._judge("loss", loss, step.loss)
            if index == 0:
                self._judge_all("gradient", self.reference.gradients, lambda parameter: parameter.grad)
            if mode == "train":
                assert step.norm is not None
                self._judge("norm", _clip(self.model), step.norm)
                optimizer.step()
        if mode == "train":
            self._judge_all("parameter", self.reference.parameters, lambda parameter: parameter)
        return self.worst

    def _forward_backward(self, mode: str) -> tuple[Tensor, Tensor]:
        model, name = self.model, self.name
        called: Any = model
        if mode == "compile":
            torch._dynamo.reset()
            called = torch.compile(model, backend="aot_eager")
        elif mode == "checkpoint" and name in zoo.PLAIN:
            called = lambda **given: checkpoint(model, *given.values(), use_reentrant=False)  # noqa: E731
        elif mode == "checkpoint":
            called.gradient_checkpointing_enable({"use_reentrant": False})
            try:
                return _forward_backward(name, model, model, self.given, True)  # only what trains makes checkpoints
            finally:
                called.gradient_checkpointing_disable()
        return _forward_backward(name, called, model, self.given, mode == "dropout")

    def _judge_all(self, what: str, bounds: dict[str, Bound], of: Callable[[Any], Any]) -> None:
        """This rank's parts of the values or gradients of all parameters."""
        for name, (exact, size) in bounds.items():
            pieces = pieces_of(self.model, name, exact)
            assert pieces, f"{name} is gone"
            for part, cut in pieces:
                tensor = of(part)
                assert tensor is not None, f"{name} has no {what}"
                self._judge(f"{what} {name}", tensor.to_local(), (cut(exact), cut(size)))

    def _judge(self, what: str, actual: Tensor, bound: Bound) -> None:
        self.worst[what] = max(self.worst.get(what, 0.0), worst_ratio(actual, *bound))


def run_group(group: list[Cell], reference: Reference) -> list[dict[str, float]]:
    """How far off everything is in each cell; larger than `tpkernels.verification.bounds.FACTOR` is wrong."""
    runs = Runs(group[0], reference)
    return [runs.run(cell.mode) for cell in group]


def worst_of(results: Iterable[dict[str, float]]) -> dict[str, float]:
    """Over ranks; the worst first."""
    merged: dict[str, float] = {}
    for result in results:
        for key, value in result.items():
            merged[key] = max(merged.get(key, 0.0), value)
    return dict(sorted(merged.items(), key=lambda item: -item[1]))
