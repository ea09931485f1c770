"""The proof that a module computes what :class:`~tpkernels.nn.cut_experts.CutExperts` computes in its place.

It owns :class:`Trial`: a copy of the module with small random parameters runs its own forward on samples, and the same
is computed from slices of the experts, as by the ranks.  Values and all gradients must agree, in training and in
evaluation, for numbers small and large (a clamp shows in large ones only).

It assumes that what a class computes depends on its sizes only through its plain integer attributes, which the copy has
small as well.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.nn.cut_experts import (
    ExpertsLayout,
    gated,
    held_parts,
    identity_weights,
    matrices_of,
    routed,
    sorted_rows,
)

__all__ = ["DoesNotRun", "KnownExperts", "Trial"]

TOKENS, TOP_K, EXPERTS, HIDDEN, FEATURES = 6, 2, 4, 24, 16
IDLE = 3
"""Experts that give what they take, where there are some."""
SCALES = (1.0, 1e-2, 1e3, 1e6)
"""Of the samples."""
CUT = (0, 6, FEATURES)
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Relative to the largest value.  fp32 where the forward does not run in fp64, and for code that computes in it: a gate
of the module's own, what is behind the experts, and a sum of all of them."""
OWN_GRADIENTS = 1e-4
"""Where such a gate is clamped, few elements have all of the gradient: 3e-5 was seen."""


@dataclass(frozen=True)
class KnownExperts:
    """Recognised experts, and their sizes."""

    layout: ExpertsLayout
    num_experts: int
    d_model: int
    d_ff: int
    all_experts: int
    """With those that give what they take."""
    home: str = ""
    """The module inside that has the parameters, where it is not the one that is called."""


@contextmanager
def _plainly() -> Iterator[None]:
    """Within it, code computes as it stands, whatever the caller has switched on."""
    cpu = torch.device("cpu")
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False), cpu:
        yield


class DoesNotRun(Exception):
    """The module does not run on samples, or gives something else than a tensor like the tokens."""


@dataclass
class _Sample:
    """A call, and what came out: the result and the gradients of the inputs and all parameters."""

    inputs: list[Any]
    dy: Tensor
    training: bool
    results: list[Tensor | None]


class Trial:
    """What a small copy of a module computes, for comparison with layouts of its parameters."""

    def __init__(self, module: nn.Module, found: KnownExperts) -> None:
        self.found = found
        error: Exception | None = None
        for dtype in LIMITS:
            self.dtype = dtype
            try:
                with _plainly(), torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)
                    self.small, self.experts, self.hidden = _small(module, found, dtype)
                    self.samples = [self._sample(index, scale) for index, scale in enumerate(SCALES)]
                return
            except Exception as raised:  # noqa: BLE001 - a module's own code may raise anything
                error = error or raised
        text = str(error).splitlines()[0][:120] if str(error) else ""
        raise DoesNotRun(f"does not run on samples ({type(error).__name__}: {text})")

    def _sample(self, index: int, scale: float) -> _Sample:
        rows = self.experts * TOKENS if self.found.layout.call == "blocks" else TOKENS
        inputs: list[Any] = [(scale * torch.randn(rows, self.hidden, dtype=self.dtype)).requires_grad_()]
        if self.found.layout.call == "all" or self.found.layout.rows:
            inputs[0] = inputs[0].detach().unflatten(0, (2, -1)).requires_grad_()
        if self.found.layout.call == "all":
            inputs += [torch.rand(TOKENS, self.experts, dtype=self.dtype).requires_grad_()]
        if self.found.layout.call == "routed":
            order = torch.rand(TOKENS, self.experts + IDLE * self.found.layout.identity).argsort(1)[:, :TOP_K]
            inputs += [order, torch.rand(TOKENS, TOP_K, dtype=self.dtype).requires_grad_()]
        if self.found.layout.call == "sorted":  # some experts have no rows
            inputs += [torch.rand(TOKENS, self.experts).argmax(1).bincount(minlength=self.experts).tolist()]
        in_order = self.found.layout.call == "sorted"
        dy = torch.randn((rows, FEATURES) if in_order else inputs[0].shape, dtype=self.dtype)
        sample = _Sample(inputs, dy, index % 2 == 0, [])
        self.small.train(sample.training)
        y = self.small(*inputs)
        if not isinstance(y, Tensor) or y.shape != dy.shape or y.dtype != self.dtype:
            raise ValueError("it gives something else than one tensor like the tokens")
        sample.results = self._with_gradients(y, sample)
        with torch.no_grad():
            if not _same(self.small(*inputs), y.detach(), LIMITS[self.dtype]):
                raise ValueError("two calls give different results")
        return sample

    def _with_gradients(self, y: Tensor, sample: _Sample) -> list[Tensor | None]:
        tensors = [one for one in sample.inputs if isinstance(one, Tensor)]
        wanted = [one for one in tensors if one.is_floating_point()] + list(self.small.parameters())
        return [y.detach(), *torch.autograd.grad(y, wanted, sample.dy, allow_unused=True)]

    def agrees(self, layout: ExpertsLayout) -> bool:
        """Whether slices of the experts give what the module gives."""
        limit = of_gradients = LIMITS[self.dtype]
        if layout.activation.endswith("()") or layout.behind or layout.call == "all":  # they may compute in fp32
            limit, of_gradients = LIMITS[torch.float32], OWN_GRADIENTS
        for sample in self.samples:
            self.small.train(sample.training)
            try:
                with _plainly():
                    y = self._in_slices(layout, sample)
                    found = self._with_gradients(y, sample)
            except (RuntimeError, ValueError, TypeError, AttributeError):  # a gate that takes other tensors
                return False
            gradients = zip(found[1:], sample.results[1:], strict=True)
            right = _same(found[0], sample.results[0], limit)
            if not right or not all(_same(a, b, of_gradients) for a, b in gradients):
                return False
        return True

    def _in_slices(self, layout: ExpertsLayout, sample: _Sample) -> Tensor:
        """The sum of what ranks with slices of other sizes would give, in plain torch."""
        owner = self.small.get_submodule(self.found.home)
        parameters = dict(owner.named_parameters(recurse=False))
        layout = replace(layout, rows=FEATURES) if layout.rows else layout
        if layout.call == "sorted":
            return torch.cat([self._rows(held, layout, sample) for held in self._slices(layout, parameters)], 1)
        call = routed(layout, sample.inputs, self.experts)
        assert call is not None
        x, (chosen, weights) = call
        idle = identity_weights(call[1], self.experts)
        chosen, weights = chosen % self.experts, weights * (chosen < self.experts)
        y: Any = 0
        for held in self._slices(layout, parameters):
            products = []
            for matrix, bias in zip(*matrices_of(layout, held), strict=True):
                product = torch.einsum("th,tkfh->tkf", x, matrix[chosen])
                products.append((product if bias is None else product + bias[chosen]).flatten(0, 1))
            h = gated(owner, layout, products).unflatten(0, chosen.shape)
            down = held[layout.last]
            assert down is not None
            down = down.transpose(1, 2) if layout.transposed else down
            y = y + torch.einsum("tkf,tkhf->tkh", h, down[chosen])
        last_bias = parameters.get(f"{layout.last}_bias")
        if last_bias is not None:
            y = y + last_bias[chosen]
        if layout.behind:
            y = getattr(self.small, layout.behind)(y.flatten(0, 1)).unflatten(0, chosen.shape)
        total: Tensor = (y * weights[..., None]).sum(1)
        return (total + idle * x if layout.identity else total).view(sample.inputs[0].shape)

    def _slices(self, layout: ExpertsLayout, parameters: dict[str, nn.Parameter]) -> Iterator[dict[str, Tensor | None]]:
        for start, stop in itertools.pairwise(CUT):
            held: dict[str, Tensor | None] = {}
            for name, parameter in parameters.items():
                for part, tensor, dim in held_parts(layout, name, parameter):
                    held[part] = tensor if dim is None else tensor.narrow(dim, start, stop - start)
            yield held

    def _rows(self, held: dict[str, Tensor | None], layout: ExpertsLayout, sample: _Sample) -> Tensor:
        """What a slice of one matrix per expert gives."""
        found = sorted_rows(sample.inputs, self.experts)
        assert found is not None
        x, counts = found
        chosen = torch.arange(self.experts).repeat_interleave(torch.tensor(counts))
        (matrix,), _ = matrices_of(layout, held)
        return torch.einsum("th,tfh->tf", x, matrix[chosen])


def _same(actual: Tensor | None, expected: Tensor | None, limit: float) -> bool:
    if actual is None or expected is None:
        return actual is expected
    if actual.shape != expected.shape or not bool(expected.isfinite().all()):
        return False
    return bool(((actual - expected).abs() <= limit * expected.abs().max()).all())


def _small(module: nn.Module, found: KnownExperts, dtype: torch.dtype) -> tuple[nn.Module, int, int]:
    """A copy with few, small, random experts; their number, and the features of a token.

    Sizes that are equal in the module are equal in the copy.
    """
    sizes = {found.d_ff: FEATURES, 2 * found.d_ff: 2 * FEATURES}
    hidden = sizes.setdefault(found.d_model, HIDDEN)
    experts = sizes.setdefault(found.num_experts, EXPERTS)
    if found.layout.identity:
        sizes.setdefault(found.all_experts, experts + IDLE)
        sizes.setdefault(found.all_experts - found.num_experts, IDLE)
    small = copy.copy(module)
    small.__dict__ = _with_sizes(module, sizes)
    small._modules = {key: copy.deepcopy(child) for key, child in module._modules.items()}
    small._parameters = {}
    layout = found.layout
    for one in small.get_submodule(layout.behind).modules() if layout.behind else ():
        one.__dict__ = _with_sizes(one, sizes)
        for name, parameter in one.named_parameters(recurse=False):
            shape = [sizes.get(size, size) for size in parameter.shape]
            one._parameters[name] = nn.Parameter(torch.randn(shape, dtype=dtype) / 4)
    if found.home:
        owner = small.get_submodule(found.home)
        owner.__dict__ = _with_sizes(owner, sizes)
        for name in owner._parameters:
            owner._parameters[name] = nn.Parameter(torch.randn(experts * FEATURES, hidden, dtype=dtype) / 4)
        return small, experts, hidden
    wide = FEATURES * (2 if layout.gate in ("halves", "pairs") else 1)
    for name in module._parameters:
        is_last = name.removesuffix("_bias") == layout.last
        count = experts if is_last else experts + IDLE * layout.identity
        shape = [count, *((hidden, FEATURES) if is_last else (wide, hidden))]
        if name.endswith("_bias"):
            shape = shape[:2]
        elif layout.transposed:
            shape[1:] = shape[:0:-1]
        small._parameters[name] = nn.Parameter(torch.randn(shape, dtype=dtype) / 4)
    return small, experts, hidden


def _with_sizes(module: nn.Module, sizes: dict[int, int]) -> dict[str, Any]:
    """What is in the module, with other plain integers, and tuples of them."""

    def other(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(other, value))
        return sizes.get(value, value) if type(value) is int else value

    return {key: other(value) for key, value in vars(module).items()}
