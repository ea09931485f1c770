"""Which modules are the experts of a mixture, and how their parameters are laid out.

It owns which layouts the shapes of the parameters allow.  Names prove nothing: each is tried on numbers
(:mod:`tpkernels.planning.modules.experts_trial`).  So a subclass, or code from elsewhere, that computes something else
is not taken for what it is called.

It refuses modules with further parameters or buffers, but for those of one module behind the experts, and classes that
change what a module is.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from tpkernels.nn.cut_experts import ExpertsLayout
from tpkernels.ops.checks import DTYPES
from tpkernels.planning.modules.experts_trial import DoesNotRun, KnownExperts, Trial
from tpkernels.planning.modules.layers import HARMLESS

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
        if not _may_be_experts(module):
            continue
        counts = Counter(matrix.shape[0] for matrix in matrices_of_experts(module))
        most = max(counts.values(), default=0)
        key = _key(module)
        if key not in known:
            try:
                known[key] = layout_of(module)
            except Refused as error:
                known[key] = error
        answer = known[key]
        if isinstance(answer, KnownExperts):
            found[".".join(filter(None, (name, answer.home)))] = answer
        elif most > 1:  # other modules have such parameters, too
            refused[name] = str(answer)
    return found, refused


def _may_be_experts(module: nn.Module) -> bool:
    """Whether its parameters and its arguments could be those of experts."""
    if _needs_more_than_experts(module):
        return False
    counts = Counter(matrix.shape[0] for matrix in matrices_of_experts(module))
    most, routed = max(counts.values(), default=0), len(takes(module)) == 3
    some = most > 1 or (most == 1 and (_may_be_sorted(module) or routed))
    return some or (routed and _may_be_one_expert(module)) or _home_of_rows(module) != ""


def _needs_more_than_experts(module: nn.Module) -> bool:
    """Whether it cannot be called with tokens, experts and weights alone: attention may have a matrix per head."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(one.default is one.empty and one.kind not in kinds for one in parameters) > 3


def _may_be_one_expert(module: nn.Module) -> bool:
    """Whether it has matrices in three dimensions, of a single expert (the defaults of HunYuan's mixture)."""
    own: list[Any] = list(module.parameters(recurse=False))
    matrices = [one for one in own if not is_lazy(one) and one.dim() == 3]
    return len(matrices) > 1 and all(one.shape[0] == 1 and min(one.shape[1:]) > 1 for one in matrices)


def _home_of_rows(module: nn.Module) -> str:
    """The module inside of ``module`` that may have the experts in the rows of two-dimensional matrices, "" if none."""
    inner = _with_parameters(module)
    if len(inner) != 1 or len(takes(module)) != 3 or any(True for _ in module.parameters(recurse=False)):
        return ""
    owner = module.get_submodule(inner[0])
    parameters: list[Any] = list(owner.parameters(recurse=False))
    if any(True for _ in module.buffers()) or _with_parameters(owner):
        return ""
    alike = {tuple(one.shape) for one in parameters if not is_lazy(one)}
    return inner[0] if len(parameters) in (2, 3) and len(alike) == 1 and len(next(iter(alike))) == 2 else ""


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
            trial = Trial(module, found)
        except DoesNotRun as error:
            problem = str(error)
            continue
        for layout in _activations(module.get_submodule(found.home), found.layout):
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
                agrees = Trial(module, found).agrees(layout)
            except DoesNotRun as error:
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
    home = _home_of_rows(module)
    if home:
        return _unswappable(module.get_submodule(home))
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
    home = _home_of_rows(module)
    if home:
        yield from _in_rows(module, home)
        return
    if len(matrices) == 1:
        if _may_be_sorted(module) and not _with_parameters(module):
            for transposed in (False, True):
                experts, *matrix = shapes[matrices[0]]
                features, hidden = matrix[::-1] if transposed else matrix
                layout = ExpertsLayout(matrices[0], "", "", "", transposed, "", "sorted")
                yield KnownExperts(layout, experts, hidden, features, experts)
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
                    all_experts = shapes[firsts[0]][0]
                    identity = all_experts > experts and call == "routed"
                    wide = (all_experts if identity else experts, width * features, hidden)
                    expected = dict.fromkeys(firsts, (wide[0], wide[2], wide[1]) if transposed else wide)
                    known = {f"{name}_bias": (experts, width * features) for name in firsts}
                    known[f"{last}_bias"] = (experts, hidden)
                    if all(shapes[name] == shape for name, shape in expected.items()) and all(
                        name in known and shapes[name] == known[name] for name in biases
                    ):
                        second = firsts[1] if len(firsts) == 2 else ""
                        layout = ExpertsLayout(firsts[0], second, last, gate, transposed, "", call, behind, identity)
                        yield KnownExperts(layout, experts, hidden, features, all_experts)


def _in_rows(module: nn.Module, home: str) -> Iterator[KnownExperts]:
    """Layouts of experts in the rows of matrices: how many there are is a number of the module's."""
    parameters = dict(module.get_submodule(home).named_parameters())
    rows, hidden = next(iter(parameters.values())).shape
    numbers = {value for value in vars(module).values() if type(value) is int and 1 < value < rows}
    for experts in sorted(value for value in numbers if rows % value == 0):
        for *firsts, last in itertools.permutations(parameters):
            gate, second = ("separate", firsts[1]) if len(firsts) == 2 else ("", "")
            layout = ExpertsLayout(firsts[0], second, last, gate, rows=rows // experts, activation="")
            yield KnownExperts(layout, experts, hidden, rows // experts, experts, home)


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
