"""Which modules are the experts of a mixture, and how their parameters are laid out.

It owns the proof that a module computes what :class:`~tpkernels.nn.cut_experts.CutExperts` computes in its place.
Names prove nothing.  Every layout that the shapes of the parameters allow is tried: a copy of the module with small
random parameters runs its own forward on samples, and the same is computed from slices of the experts, as by the ranks.
Values and all gradients must agree, in training and in evaluation, for numbers small and large (a clamp shows in large
ones only).  So a subclass, or code from elsewhere, that computes something else is not taken for what it is called.

It assumes that what a class computes depends on its sizes only through its plain integer attributes, which the copy has
small as well.  It refuses modules with further parameters or buffers, but for those of one module behind the experts,
and classes that change what a module is.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tpkernels.nn.cut_experts import ExpertsLayout, gated, held_parts, matrices_of, routed, sorted_rows
from tpkernels.ops.checks import DTYPES
from tpkernels.planning.layers import HARMLESS

__all__ = [
    "CalledOtherwise",
    "KnownExperts",
    "Refused",
    "check_layout",
    "find_experts",
    "layout_of",
    "matrices_of_experts",
    "takes",
]

TOKENS, TOP_K, EXPERTS, HIDDEN, FEATURES = 6, 2, 4, 24, 16
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


class Refused(Exception):
    """A module looks like experts, and is none that can be cut."""


class CalledOtherwise(Exception):
    """The model calls the experts ``name`` with other things than the layout knows."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is called with other things than two-dimensional tokens, experts and weights")
        self.name = name


def find_experts(
    model: nn.Module, known: dict[Any, KnownExperts | Refused] | None = None
) -> tuple[dict[str, KnownExperts], dict[str, str]]:
    """The experts among the modules of ``model``, and of those that look like some why they are not cut.

    ``known``: what earlier calls found of modules that are alike; filled here.
    """
    found: dict[str, KnownExperts] = {}
    refused: dict[str, str] = {}
    known = {} if known is None else known
    for name, module in model.named_modules():
        counts = Counter(matrix.shape[0] for matrix in matrices_of_experts(module))
        most = max(counts.values(), default=0)
        if most == 0 or (most == 1 and not _may_be_sorted(module)):
            continue
        key = _key(module)
        if key not in known:
            try:
                known[key] = layout_of(module)
            except Refused as error:
                known[key] = error
        answer = known[key]
        if isinstance(answer, KnownExperts):
            found[name] = answer
        elif most > 1:  # many other modules have one such parameter
            refused[name] = str(answer)
    return found, refused


def _may_be_sorted(module: nn.Module) -> bool:
    return len(module._parameters) == 1 and len(takes(module)) == 2


def matrices_of_experts(module: nn.Module) -> list[nn.Parameter]:
    """Parameters of which each of several experts could have a matrix: no class token, position or scale, which have a
    dimension of one."""
    own: list[Any] = list(module.parameters(recurse=False))
    return [one for one in own if not is_lazy(one) and one.dim() == 3 and min(one.shape) > 1]


def _key(module: nn.Module) -> Any:
    """What the outcome depends on, for modules of one model."""
    plain = tuple((k, v) for k, v in vars(module).items() if isinstance(v, bool | int | float | str | None))
    shapes = tuple((k, tuple(p.shape), p.dtype) for k, p in module.named_parameters())
    children = tuple((k, type(child), repr(child)) for k, child in module.named_children())
    return type(module), plain, shapes, children, id(getattr(module, "config", None)), _unswappable(module)


def layout_of(module: nn.Module) -> KnownExperts:
    """The layout of a module of experts, proven on samples.

    Raises:
        Refused: it is none, with the reason.
    """
    why = _unswappable(module)
    if why is not None:
        raise Refused(why)
    problem = "no layout of experts fits the shapes of its parameters"
    for found in _candidates(module):
        try:
            trial = _Trial(module, found)
        except _DoesNotRun as error:
            problem = str(error)
            continue
        for layout in _activations(module, found.layout):
            if trial.agrees(layout):
                return replace(found, layout=layout)
        problem = "its forward computes something else than experts with a known gate"
    raise Refused(problem)


def check_layout(module: nn.Module, layout: ExpertsLayout) -> None:
    """Compare a layout that is known already, from a plan for this module or one like it.

    Raises:
        Refused: the module computes something else.
    """
    why = _unswappable(module)
    if why is not None:
        raise Refused(why)
    for found in _candidates(module):
        if replace(found.layout, activation=layout.activation) == layout:
            try:
                agrees = _Trial(module, found).agrees(layout)
            except _DoesNotRun as error:
                raise Refused(str(error)) from None
            if agrees:
                return
    raise Refused(f"it does not compute what the plan expects, {layout}")


def _unswappable(module: nn.Module) -> str | None:
    """What a swap would lose, or what it cannot express."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, kind, None) for kind in kinds) or getattr(module, "parametrizations", None):
        return "has hooks or parametrizations, which a swap would lose"
    if "forward" in vars(module):
        return "has a forward of its own, which a swap would lose"
    guarded = {*dir(nn.Module), "__getattribute__", "__getattr__"} - HARMLESS - {"forward"}
    for own in type(module).__mro__[: type(module).__mro__.index(nn.Module)]:
        taken = sorted(guarded & set(vars(own)))
        if taken:
            return f"its class {own.__name__} overrides {', '.join(taken)} of nn.Module"
    if any(True for _ in module.buffers()) or len(_with_parameters(module)) > 1:
        return "has buffers, or parameters in several modules of its own"
    if any(parameter is None or is_lazy(parameter) for parameter in module._parameters.values()):
        return "has parameters that are not there yet"
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        return f"has parameters of {', '.join(sorted(map(str, dtypes)))}"
    return None


def _with_parameters(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_children() if any(True for _ in child.parameters())]


# ---------------------------------------------------------------- what the shapes allow


def _candidates(module: nn.Module) -> Iterator[KnownExperts]:
    """Layouts without their activation."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
    matrices = [name for name, shape in shapes.items() if len(shape) == 3]
    biases = {name for name in shapes if name not in matrices}
    if len(matrices) == 1:
        if _may_be_sorted(module) and not _with_parameters(module):
            for transposed in (False, True):
                experts, *matrix = shapes[matrices[0]]
                features, hidden = matrix[::-1] if transposed else matrix
                layout = ExpertsLayout(matrices[0], "", "", "", transposed, "", "sorted")
                yield KnownExperts(layout, experts, hidden, features)
        return
    call = {1: "blocks", 2: "all"}.get(len(takes(module)), "routed")
    behind = next(iter(_with_parameters(module)), "")
    for last in reversed(matrices):
        others = [name for name in matrices if name != last]
        for firsts in (others, others[::-1]) if len(others) == 2 else (others,):
            for transposed in (False, True):
                experts, hidden, features = shapes[last]
                if transposed:
                    hidden, features = features, hidden
                for gate, width in (("halves", 2), ("pairs", 2), ("separate", 1), ("", 1)):
                    if (gate == "separate") != (len(firsts) == 2) or len(firsts) > 2:
                        continue
                    wide = (experts, width * features, hidden)
                    expected = dict.fromkeys(firsts, (wide[0], wide[2], wide[1]) if transposed else wide)
                    known = {f"{name}_bias": (experts, width * features) for name in firsts}
                    known[f"{last}_bias"] = (experts, hidden)
                    if all(shapes[name] == shape for name, shape in expected.items()) and all(
                        name in known and shapes[name] == known[name] for name in biases
                    ):
                        second = firsts[1] if len(firsts) == 2 else ""
                        layout = ExpertsLayout(firsts[0], second, last, gate, transposed, "", call, behind)
                        yield KnownExperts(layout, experts, hidden, features)


def takes(module: nn.Module) -> list[str]:
    """The names of the parameters of its class's forward."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _activations(module: nn.Module, layout: ExpertsLayout) -> Iterator[ExpertsLayout]:
    """A gate that the class itself defines, the op's own, which is computed with the GEMM, then what else there is."""
    if layout.call == "sorted":
        yield layout
        return
    names = ["swiglu", "geglu"] if layout.gate else ["silu", "gelu", "relu", "gelu_tanh"]
    gate = getattr(type(module), "_apply_gate", None)
    if layout.gate in ("halves", "pairs") and callable(gate):
        own = getattr(gate, "__name__", "") == "_apply_gate"  # transformers gives others a function of another name
        names.insert(0 if own else len(names), "_apply_gate()")
    names += [f".{name}" for name in ("act_fn", "activation_fn", "act", "activation") if _is_function(module, name)]
    for name in names:
        yield replace(layout, activation=name)


def _is_function(module: nn.Module, name: str) -> bool:
    return callable(getattr(module, name, None))


# ---------------------------------------------------------------- the proof


@contextmanager
def _plainly() -> Iterator[None]:
    """Within it, code computes as it stands, whatever the caller has switched on."""
    cpu = torch.device("cpu")
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False), cpu:
        yield


class _DoesNotRun(Exception):
    """The module does not run on samples, or gives something else than a tensor like the tokens."""


@dataclass
class _Sample:
    """A call, and what came out: the result and the gradients of the inputs and all parameters."""

    inputs: list[Any]
    dy: Tensor
    training: bool
    results: list[Tensor | None]


class _Trial:
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
        raise _DoesNotRun(f"does not run on samples ({type(error).__name__}: {text})")

    def _sample(self, index: int, scale: float) -> _Sample:
        rows = self.experts * TOKENS if self.found.layout.call == "blocks" else TOKENS
        inputs: list[Any] = [(scale * torch.randn(rows, self.hidden, dtype=self.dtype)).requires_grad_()]
        if self.found.layout.call == "all":
            inputs[0] = inputs[0].detach().unflatten(0, (2, -1)).requires_grad_()
            inputs += [torch.rand(TOKENS, self.experts, dtype=self.dtype).requires_grad_()]
        if self.found.layout.call == "routed":
            order = torch.rand(TOKENS, self.experts).argsort(1)[:, :TOP_K]
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
        parameters = dict(self.small.named_parameters(recurse=False))
        if layout.call == "sorted":
            return torch.cat([self._rows(held, layout, sample) for held in self._slices(layout, parameters)], 1)
        call = routed(layout, sample.inputs, self.experts)
        assert call is not None
        x, (chosen, weights) = call
        y: Any = 0
        for held in self._slices(layout, parameters):
            products = []
            for matrix, bias in zip(*matrices_of(layout, held), strict=True):
                product = torch.einsum("th,tkfh->tkf", x, matrix[chosen])
                products.append((product if bias is None else product + bias[chosen]).flatten(0, 1))
            h = gated(self.small, layout, products).unflatten(0, chosen.shape)
            down = held[layout.last]
            assert down is not None
            down = down.transpose(1, 2) if layout.transposed else down
            y = y + torch.einsum("tkf,tkhf->tkh", h, down[chosen])
        last_bias = parameters.get(f"{layout.last}_bias")
        if last_bias is not None:
            y = y + last_bias[chosen]
        if layout.behind:
            y = getattr(self.small, layout.behind)(y.flatten(0, 1)).unflatten(0, chosen.shape)
        total: Tensor = (y * weights[..., None]).sum(1).view(sample.inputs[0].shape)
        return total

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
    small = copy.copy(module)
    small.__dict__ = _with_sizes(module, sizes)
    small._modules = {key: copy.deepcopy(child) for key, child in module._modules.items()}
    small._parameters = {}
    layout = found.layout
    for one in small._modules[layout.behind].modules() if layout.behind else ():
        one.__dict__ = _with_sizes(one, sizes)
        for name, parameter in one.named_parameters(recurse=False):
            shape = [sizes.get(size, size) for size in parameter.shape]
            one._parameters[name] = nn.Parameter(torch.randn(shape, dtype=dtype) / 4)
    wide = FEATURES * (2 if layout.gate in ("halves", "pairs") else 1)
    for name in module._parameters:
        is_last = name.removesuffix("_bias") == layout.last
        shape = [experts, *((hidden, FEATURES) if is_last else (wide, hidden))]
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
