"""Six steps of training, and whether they are as exact as the unsharded ones: losses, norms, gradients, weights.

The reference trains the same model twice in one process, in fp64 and in fp32; what the second is off by is the unit in
which errors are counted, and :data:`tpkernels.verification.bounds.FACTOR` of it is allowed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.nn.reference import whole
from tpkernels.nn.parallel_linear import ParallelLinear
from tpkernels.verification.bounds import FACTOR, Bound, bounds_of

STEPS = 6
CLIP = 0.5
"""Less than the norms of the small models: clipping is active in each step."""
VOCABULARY = 67
Batch = Tensor


@dataclass
class Curve:
    """What a run of training shows, by name: ``loss 0``, ``norm 0``, ``evaluation 0``, ``gradient x``, ``weight x``."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step, before clipping."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """After the last."""
    evaluations: list[float] = field(default_factory=list)

    def numbers(self) -> dict[str, Tensor]:
        kinds = {"loss": self.losses, "norm": self.norms, "evaluation": self.evaluations}
        pairs = [(f"{what} {i}", value) for what, values in kinds.items() for i, value in enumerate(values)]
        return {name: torch.tensor([value], dtype=torch.float64) for name, value in pairs}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return _whole(model, lambda parameter: parameter.grad)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return _whole(model, lambda parameter: parameter)


def _whole(model: nn.Module, of: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
    """What the parameters have, by the names that they had before they were cut, each gathered from all ranks."""
    held = {name: of(parameter) for name, parameter in model.named_parameters()}
    found = {name: whole(value).detach().clone() for name, value in held.items() if value is not None}
    for path, module in model.named_modules():
        if isinstance(module, ParallelLinear) and module.has_free_places:
            for key, dim in module.parameters_by_unit().items():
                if (name := f"{path}.{key}") in found:
                    found[name] = _units(found[name], dim, module.units_held())
    for path, module in model.named_modules():
        packed = module.packed_parameters() if hasattr(module, "packed_parameters") else {}  # type: ignore[operator]
        for name, (dim, keys) in packed.items():
            parts = [found.pop(f"{path}.{key}", None) for key in keys]
            if None not in parts:
                found[f"{path}.{name}"] = torch.cat(parts, dim)
    return found


def _units(value: Tensor, dim: int, of_ranks: Sequence[int]) -> Tensor:
    """Without the places that hold none: each rank has as many of them."""
    parts = value.chunk(len(of_ranks), dim)
    return torch.cat([part.narrow(dim, 0, units) for part, units in zip(parts, of_ranks, strict=True)], dim)


def adamw(parameters: Any, eps: float = 1e-4) -> torch.optim.Optimizer:
    """AdamW, whose ``eps`` is so large that the bound can judge what it makes of rounding.

    Its first step is lr g / (|g| + eps): an error d of g becomes lr d eps / (|g| + eps)^2, which is up to lr d / eps
    where g is almost 0, and next to nothing elsewhere.  With a smaller eps fewer weights hold all of the error, and the
    bound, which is eight times a root mean square, is missed by a right run.  Two gradients of this Llama, exact and
    rounded, clipped to a norm of 0.5 (21,344 numbers):

    * fp32 (rms of g 3e-3, of d 2e-9; no sign differs): the steps differ by at most 6e-5 lr with 1e-4, 8e-4 with 1e-6.
    * bf16 (rms of d 4e-5; 140 gradients are smaller than their error, 66 have the other sign): by at most 2 lr with
      1e-8 and 1 lr with 1e-4, 41 times the rms, but 0.03 lr with 1e-2, 14 times the rms.

    So runs in bf16 take 1e-2.  Megatron's small GPT takes it in fp32, too: stock Megatron with two ranks, whose bits
    ours has, is at 1.7 times the bound with 1e-4 (the largest difference of a first step is 18 to 30 times the rms in
    most weights, and 5 to 14 with 1e-2).
    """
    return torch.optim.AdamW(parameters, 3e-3, eps=eps)


def batches(steps: int = STEPS, rows: int = 2, length: int = 9) -> list[Batch]:
    generators = [torch.Generator().manual_seed(step) for step in range(steps)]
    return [torch.randint(VOCABULARY, (rows, length), generator=generator) for generator in generators]


def train(
    model: nn.Module,
    given: Sequence[Batch],
    *,
    loss_of: Callable[[nn.Module, Batch], Tensor] = lambda model, ids: model(input_ids=ids, labels=ids).loss,
    make: Callable[[Any], torch.optim.Optimizer] = adamw,
) -> Curve:
    """Train as a loop of one's own does."""
    optimizer, curve = make(model.parameters()), Curve()
    for ids in given:
        loss = loss_of(model, ids)
        loss.backward()
        curve.gradients = curve.gradients or gradients_of(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        curve.losses.append(float(loss.detach()))
        curve.norms.append(float(whole(norm)))
    curve.weights = weights_of(model)
    return curve


def step(model: nn.Module, ids: Batch) -> Curve:
    """Forward and backward alone."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return Curve([float(loss.detach())], [], gradients_of(model), weights_of(model))


class Reference(NamedTuple):
    """The unsharded run in fp64, with what each number may be off by."""

    numbers: dict[str, Bound]
    gradients: dict[str, Bound]
    weights: dict[str, Bound]

    @classmethod
    def of(cls, exact: Curve, *plain: Curve) -> Reference:
        """What any of the ``plain`` runs allows."""
        first, *others = (cls._of(exact, one) for one in plain)
        for other in others:
            first = cls(*map(_widened, first, other))
        return first

    @classmethod
    def _of(cls, exact: Curve, plain: Curve) -> Reference:
        def pairs(a: dict[str, Tensor], b: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Bound]:
            assert a.keys() == b.keys() and a
            return bounds_of({name: (a[name].double(), b[name].to(dtype)) for name in a}, {})

        return cls(
            pairs(exact.numbers(), plain.numbers(), torch.float32),
            pairs(exact.gradients, plain.gradients, torch.float32) if exact.gradients else {},
            pairs(exact.weights, plain.weights, torch.float32),
        )

    def worst(self, curve: Curve, *, first: int = 0) -> dict[str, float]:
        """The worst error of each kind in units of what is allowed.

        ``first``: the step that the curve begins with; evaluations are counted from 0 all the same.
        """
        found: dict[str, float] = {}
        numbers = curve.numbers()
        steps = {name: first * (not name.startswith("evaluation")) for name in numbers}
        shifted = {f"{name.split()[0]} {int(name.split()[1]) + steps[name]}": x for name, x in numbers.items()}
        groups = [(self.numbers, shifted), (self.weights, curve.weights)]
        if not first:
            groups.append((self.gradients, curve.gradients))
            assert shifted.keys() == self.numbers.keys()
        assert curve.weights.keys() == self.weights.keys(), set(curve.weights) ^ set(self.weights)
        for (bounds, values), kind in zip(groups, ("", "weight ", "gradient "), strict=False):
            if kind == "gradient ":
                assert values.keys() == bounds.keys(), set(values) ^ set(bounds)
            for name, value in values.items():
                exact = bounds[name].exact
                found[kind + name] = bounds[name].ratio(value.reshape(exact.shape)) / FACTOR  # heads may be a dimension
        return found

    def wrong(self, curve: Curve, *, first: int = 0) -> dict[str, float]:
        """What is off by more than is allowed, the worst first; empty where all is right."""
        found = sorted(self.worst(curve, first=first).items(), key=lambda item: -item[1])
        return {name: round(ratio, 2) for name, ratio in found if not ratio <= 1}

    def right(self, loss: float) -> bool:
        """Whether it is the first one."""
        return self.numbers["loss 0"].ratio(torch.tensor([loss])) <= FACTOR


def _widened(bounds: dict[str, Bound], other: dict[str, Bound]) -> dict[str, Bound]:
    return {name: bound.widened(other[name]) for name, bound in bounds.items()}


def in_parts(model: nn.Module, world: int, rows: Sequence[str]) -> nn.Module:
    """``model``, which in bf16 rounds what ``world`` ranks round, by torch alone in one process; returns it.

    A linear layer whose name ends in one of ``rows`` sums its features in as many parts, each of which is rounded; the
    gradient of any other layer's input is such a sum over its outputs.  How much that matters: of a Llama in bf16 one
    gradient, of the last layer that sums, is at 1.07 times the bound of a run that rounds each sum once (three parts).
    """
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            layer.forward = functools.partial(_sum_of_parts if name.endswith(tuple(rows)) else _parts, layer, world)
    return model


def _sum_of_parts(layer: nn.Linear, world: int, x: Tensor) -> Tensor:
    parts = [F.linear(*part) for part in zip(x.chunk(world, -1), layer.weight.chunk(world, 1), strict=True)]
    return torch.stack(parts).float().sum(0).to(parts[0].dtype)


def _parts(layer: nn.Linear, world: int, x: Tensor) -> Tensor:
    wide = x.float()  # the parts of its gradient are summed in fp32
    return torch.cat([F.linear(wide.bfloat16(), part) for part in layer.weight.chunk(world)], -1)


def reference(model: nn.Module, run: Callable[[nn.Module], Curve]) -> Reference:
    """``run`` trains what it is given, in one process; ``model`` stays as it is."""
    return Reference.of(run(copy.deepcopy(model).double()), run(copy.deepcopy(model)))
