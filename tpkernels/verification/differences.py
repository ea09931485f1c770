"""What the unsharded model gives, with bounds, and how far off a parallel one is: outputs, loss, gradients, buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpkernels.nn.gathering import gathered
from tpkernels.state.originals import originals_of
from tpkernels.verification.bounds import Bound, bounds_of
from tpkernels.verification.model_passes import Pass, is_state
from tpkernels.verification.verdict import Row

__all__ = ["Expected", "compare", "expect", "worst_first"]


Bounds = Mapping[str, Bound]


@dataclass(frozen=True)
class Expected:
    """Bounds by name; a parameter that gets no gradient has none."""

    outputs: Bounds
    loss: Bound | None
    gradients: Bounds
    inputs: Bounds
    buffers: Bounds
    trained: tuple[str, ...]
    """All parameters that could have a gradient."""

    def widened(self, other: Expected) -> Expected:
        """Bounds that allow what either does; both are of the same exact pass."""

        def both(mine: Bounds, others: Bounds) -> Bounds:
            return {name: bound.widened(others[name]) if name in others else bound for name, bound in mine.items()}

        loss = self.loss if self.loss is None or other.loss is None else self.loss.widened(other.loss)
        outputs, gradients = both(self.outputs, other.outputs), both(self.gradients, other.gradients)
        inputs, buffers = both(self.inputs, other.inputs), both(self.buffers, other.buffers)
        return Expected(outputs, loss, gradients, inputs, buffers, self.trained)


def expect(exact: tuple[nn.Module, Pass], plain: tuple[nn.Module, Pass], dtype: torch.dtype | None) -> Expected:
    """From a pass in fp64 and one in a dtype of which the bound is taken; ``dtype``: that of the model, if it is
    another.

    Raises:
        ValueError: the loss is not finite, or other outputs in fp64.
    """
    (exact_model, exact_pass), (plain_model, plain_pass) = exact, plain
    if exact_pass.outputs.keys() != plain_pass.outputs.keys():
        raise ValueError("the unsharded model has other outputs in fp64 than in its own dtype")
    pairs = {path: (tensor, plain_pass.outputs[path]) for path, tensor in exact_pass.outputs.items()}
    outputs = _bounds({path: pair for path, pair in pairs.items() if not _is_parted(path, pair[0])}, dtype)
    parameters = dict(plain_model.named_parameters())
    gradients = {
        name: (parameter.grad, parameters[name].grad) for name, parameter in exact_model.named_parameters()
        if parameter.grad is not None and parameters[name].grad is not None
    }  # fmt: skip
    inputs = {
        path: (leaf.grad, plain_pass.inputs[path].grad) for path, leaf in exact_pass.inputs.items()
        if leaf.grad is not None and path in plain_pass.inputs and plain_pass.inputs[path].grad is not None
    }  # fmt: skip
    held = dict(plain_model.named_buffers())
    buffers = {name: (buffer, held[name]) for name, buffer in exact_model.named_buffers()}
    return Expected(
        outputs,
        _loss_bound(exact_pass, plain_pass, outputs),
        _bounds(gradients, dtype),  # type: ignore[arg-type]  # None was left out
        _bounds(inputs, dtype),  # type: ignore[arg-type]
        _bounds(buffers, dtype),
        tuple(name for name, parameter in exact_model.named_parameters() if parameter.requires_grad),
    )


def _bounds(pairs: Mapping[str, tuple[Tensor, Tensor]], dtype: torch.dtype | None) -> dict[str, Bound]:
    floats = {name: dtype for name, (exact, _) in pairs.items() if dtype is not None and exact.dtype == torch.float64}
    return bounds_of(pairs, floats)


def _is_parted(path: str, tensor: Tensor) -> bool:
    """A rank may keep a part of this: a cache, from which its next call goes on."""
    return is_state(path) or isinstance(tensor, DTensor)


def _loss_bound(exact: Pass, plain: Pass, outputs: Mapping[str, Bound]) -> Bound | None:
    """The bound of the loss also counts what the outputs' errors make of it, to first order: one error is luck."""
    if exact.loss is None or plain.loss is None:
        return None
    value = exact.loss.double().reshape(())
    if not bool(value.isfinite()):
        raise ValueError(f"the loss of the unsharded model is {float(value)}: give other inputs")
    size = (plain.loss.double().reshape(()) - value).abs() + torch.finfo(plain.loss.dtype).eps * value.abs()
    for path, slope in exact.slopes.items():
        spread = outputs[path].size if path in outputs else None
        if spread is not None:
            size = size + (slope.double().abs() * spread).sum()
    if not exact.slopes:
        relative = [_relative(bound) for bound in outputs.values() if bound.size is not None]
        size = size + value.abs() * max(relative, default=0.0)
    return Bound(value, size, plain.loss.dtype)


def _relative(bound: Bound) -> float:
    assert bound.size is not None
    norm = float(bound.exact.double().square().mean().sqrt()) if bound.exact.numel() else 0.0
    return float(bound.size.square().mean().sqrt()) / norm if norm else 0.0


def compare(expected: Expected, model: nn.Module, found: Pass) -> list[Row]:
    """This rank's rows."""
    rows = [_row("output", path, bound, found.outputs.get(path)) for path, bound in expected.outputs.items()]
    if expected.loss is not None:
        rows.append(_loss_row(expected.loss, found.loss))
    rows += _gradient_rows(expected, model)
    for path, bound in expected.inputs.items():
        leaf = found.inputs.get(path)
        rows.append(_row("gradient of input", path, bound, None if leaf is None else leaf.grad))
    buffers = dict(model.named_buffers())
    for name, bound in expected.buffers.items():
        held = buffers.get(name)
        if held is not None and held.shape == _shape(bound, held):
            rows.append(_row("buffer", name, bound, gathered(held)))
    return rows


def _shape(bound: Bound, like: Tensor) -> torch.Size:
    return bound.exact.shape[:-1] if like.is_complex() else bound.exact.shape


def _row(kind: str, name: str, bound: Bound, actual: Tensor | None) -> Row:
    if actual is None:
        return Row(kind, name, float("inf"), "there is none")
    if isinstance(actual, DTensor):
        return Row(kind, name, float("inf"), f"is a DTensor ({actual.placements}) instead of a tensor")
    if actual.shape != _shape(bound, actual) or actual.dtype != bound.dtype:
        said = f"is {actual.dtype} {tuple(actual.shape)} instead of {bound.dtype} {tuple(_shape(bound, actual))}"
        return Row(kind, name, float("inf"), said)
    return Row(kind, name, bound.ratio(actual))


def _loss_row(bound: Bound, loss: Tensor | None) -> Row:
    if loss is None:
        return Row("loss", "loss", float("inf"), "there is none")
    return Row("loss", "loss", bound.ratio(loss.reshape(())))


def _gradient_rows(expected: Expected, model: nn.Module) -> list[Row]:
    originals = originals_of(model)
    rows = []
    for name in expected.trained:
        bound, original = expected.gradients.get(name), originals.get(name)
        if original is None:
            rows.append(Row("gradient", name, float("inf"), "the parameter is gone"))
            continue
        ratio, problem = 0.0, ""
        for part in original.parts:
            gradient = part.tensor.grad
            if bound is None:
                if gradient is not None and bool((replace(part, tensor=gradient).local != 0).any()):
                    ratio, problem = float("inf"), "has a gradient, the unsharded model's has none"
                continue
            place = original.box(part).slices
            mine = part.local.new_zeros(part.local.shape) if gradient is None else replace(part, tensor=gradient).local
            worse = bound.ratio(mine, place)
            if gradient is None and not worse <= 1.0:
                worse, problem = float("inf"), "there is none"
            ratio = max(ratio, worse)
        rows.append(Row("gradient", name, ratio, problem))
    return rows


def worst_first(said: list[list[list[object]]]) -> tuple[Row, ...]:
    """The worst of every row over the ranks."""
    merged: dict[tuple[str, str], Row] = {}
    for rows in said:
        for values in rows:
            row = Row(*values)  # type: ignore[arg-type]
            before = merged.get((row.kind, row.name))
            if before is None or row.ratio > before.ratio:
                merged[row.kind, row.name] = row
    return tuple(sorted(merged.values(), key=lambda row: -row.ratio))
