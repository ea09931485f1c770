"""One architecture, unsharded: built small, called, and run in fp64 and fp32; what the parallelized one is held to.

It runs in a process of its own, before any rank: what a forward leaves behind in a module's caches could otherwise hide
what tracing leaves there.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.models.architectures.catalogue import Architecture, architectures, config_class
from tests.models.architectures.inputs import calls, cast
from tests.models.architectures.shrink import small_config
from tests.models.architectures.special import REMEMBERS, SEEDED
from tpkernels.verification.bounds import allowed

__all__ = [
    "CannotBuild",
    "Reference",
    "Run",
    "backward",
    "build",
    "computing",
    "nudged_runs",
    "reference_of",
    "settled",
]

SEED, NOISE = 3, 0.1
ULP = {torch.float32: 6e-8, torch.float64: 1.1e-16}
LARGEST = 10_000_000
"""Parameters: what is larger was not made small."""
HUGE = 1e30
"""Masks are filled with such values."""


class CannotBuild(Exception):
    """There is no small model of this architecture that runs here; ``stage`` is "class", "build" or "unsharded"."""

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(stage, reason)
        self.stage, self.reason = stage, reason


@dataclass
class Run:
    """What one forward and backward gave."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


@dataclass
class Reference:
    """The unsharded model, and what the parallelized one may differ by."""

    name: str
    kind: str
    inputs: str
    arguments: dict[str, Any]
    training: bool
    exact: Run
    """In fp64; where the model cannot compute in fp64, in fp32."""
    plain: dict[str, Tensor]
    """Outputs in fp32."""
    evaluated: dict[str, Tensor]
    """Outputs in evaluation."""
    weights: dict[str, Tensor]
    """What outputs are multiplied with in the loss."""
    bound: Run
    """The unit of the fp32 model's errors, element by element."""
    loose: Run
    """The same, of a model whose weights are off by one rounding as well: larger where a decision hangs on it."""
    has_fp64: bool
    why_not: str
    """Why it has not."""
    default_double: bool
    """fp64 needs torch's default dtype to be it."""
    doubles: bool
    """fp64 is asked for where the model asks for fp32 inside."""
    single: bool
    """Computes in fp32 inside, whatever its parameters are."""
    parameters: int

    def computing(self, dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
        """As the model was run in this dtype."""
        exact = dtype == torch.float64
        return computing(dtype, exact and self.default_double, exact and self.doubles)


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The small model, the same at every call.

    Raises:
        CannotBuild: there is none.
    """
    known = architectures()[name]
    if not known.kind:
        raise CannotBuild("class", "a part of other architectures, without a model of its own")
    with _quiet():
        try:
            model = _build(known)
        except Exception as error:
            raise CannotBuild("build", _first_line(error)) from error
    count = sum(parameter.numel() for parameter in model.parameters())
    if not 0 < count <= LARGEST:
        raise CannotBuild("build", f"{count:,} parameters")
    if name in SEEDED:
        model.register_forward_pre_hook(_seed)
    if name in REMEMBERS:
        model.register_forward_pre_hook(partial(_forget, REMEMBERS[name]))
    return model.to(dtype)


def _seed(module: nn.Module, arguments: Any) -> None:
    torch.manual_seed(SEED)


def _forget(caches: tuple[str, ...], module: nn.Module, arguments: Any) -> None:
    for name in caches:
        cache = getattr(module, name)
        cache.cache.clear()
        cache.current_load = 0


def _build(known: Architecture) -> nn.Module:
    import transformers

    config = small_config(config_class(known.model_type), known.options)
    config = getattr(config, known.part) if known.part else config
    torch.manual_seed(SEED)
    model: nn.Module = getattr(transformers, known.kind)(config)
    random = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():  # also those that begin as zeros or ones, and would hide others' errors
            parameter.add_(NOISE * torch.randn(parameter.shape, generator=random))
    for module in model.modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in key or (isinstance(module, nn.modules.dropout._DropoutNd))):
                setattr(module, key, 0.0)
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    import transformers

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Doubles(TorchFunctionMode):
    """Code that asks for fp32 of what is in fp64 gets fp64; else norms and softmaxes of most would round."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(one, Tensor) and one.dtype == torch.float64 for one in tree_leaves((args, kwargs))):
            func = Tensor.double if func is Tensor.float else func
            args, kwargs = tree_map_only(torch.dtype, _doubled, (args, kwargs))
        return func(*args, **kwargs)


def _doubled(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float32 else dtype


@contextlib.contextmanager
def computing(dtype: torch.dtype, default: bool = False, doubles: bool = False) -> Iterator[None]:
    """Run models in ``dtype``, which is torch's default then, too, if ``default``; with ``doubles`` also inside.

    torch multiplies the matrices of experts in fp64 one by one, since its grouped kernel does not know fp64.
    """
    from transformers.integrations import moe

    before, usable = torch.get_default_dtype(), moe._can_use_grouped_mm
    torch.set_default_dtype(dtype if default else torch.float32)
    if dtype == torch.float64:
        moe._can_use_grouped_mm = lambda input, weight, offs: False
    try:
        with _quiet(), _Doubles() if doubles else contextlib.nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)
        moe._can_use_grouped_mm = usable


# ---------------------------------------------------------------- one run


def settled(out: Any, name: str = "") -> dict[str, Tensor]:
    """All floating and complex tensors of a nested result by name; caches are not outputs to compare."""
    if isinstance(out, FakeTensor):
        raise RuntimeError(f"output {name!r} is a fake tensor, left behind by a trace")
    if isinstance(out, Tensor):
        return {name: out} if out.is_floating_point() or out.is_complex() else {}
    if isinstance(out, Mapping):
        items = [(str(key), value) for key, value in out.items() if "past" not in str(key) and "cache" not in str(key)]
    elif isinstance(out, list | tuple):
        items = [(str(index), value) for index, value in enumerate(out)]
    else:
        return {}
    found: dict[str, Tensor] = {}
    for key, value in items:
        found |= settled(value, f"{name}.{key}" if name else key)
    return found


def backward(model: nn.Module, found: Run, weights: Mapping[str, Tensor]) -> None:
    """From the weighted sum of the outputs, which are plain tensors afterwards; gradients stay at the parameters."""
    for parameter in model.parameters():
        parameter.grad = None
    loss_of(found.outputs, weights).backward()
    found.outputs = {name: output.detach() for name, output in found.outputs.items()}


def loss_of(outputs: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor:
    loss = torch.zeros(())
    for name, output in outputs.items():
        if output.requires_grad and name in weights:
            real = torch.view_as_real(output) if output.is_complex() else output
            used = weights[name] != 0
            loss = loss + (torch.where(used, real, 0.0) * weights[name].to(real.dtype)).sum()
    return loss


def weights_for(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Random ones; none for masks and infinities."""
    random, made = torch.Generator().manual_seed(5), {}
    for name, output in outputs.items():
        real = torch.view_as_real(output) if output.is_complex() else output
        weights = torch.randn(real.shape, generator=random, dtype=torch.float64)
        made[name] = torch.where(real.isfinite() & (real.abs() < HUGE), weights, 0.0)
    return made


class _FindsSingle(TorchDispatchMode):
    """Whether an op makes fp32 of fp64."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        after = {leaf.dtype for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
        if torch.float64 in before and after & {torch.float32, torch.complex64}:
            self.found = True
        return out


# ---------------------------------------------------------------- the reference


def reference_of(name: str) -> Reference:
    """Find a call that the model runs with, and run it.

    Raises:
        CannotBuild: no model, or none of the calls.
    """
    model = build(name)
    inputs, arguments, training = _find_call(name, model)
    with computing(torch.float32):
        # A new one: the search for a call moved the statistics of batch norms.
        plain, weights = _measured(build(name), arguments, training)
        others = [_measured(_nudged(name, seed), arguments, training, weights)[0] for seed in (1, 2)]
    if not _finite(plain):
        raise CannotBuild("unsharded", "its gradients are not finite")
    exact, double, doubles, single, why = _exact(name, arguments, training, weights)
    has_fp64 = exact is not None
    exact = exact or plain
    firsts = [plain] if has_fp64 else others
    bound, loose = _bounds(firsts, exact), _bounds([plain, *others], exact)
    dtype = torch.float64 if has_fp64 else torch.float32
    evaluating = build(name, dtype).eval()  # before fp64 is the default, which would draw other weights
    with computing(dtype, double, doubles), torch.no_grad():
        evaluated = settled(evaluating(**cast(arguments, dtype)))
    return Reference(
        name=name,
        kind=type(model).__name__,
        inputs=inputs,
        arguments=arguments,
        training=training,
        exact=exact,
        plain=plain.outputs,
        evaluated=evaluated,
        weights=weights,
        bound=bound,
        loose=loose,
        has_fp64=has_fp64,
        why_not=why,
        default_double=double,
        doubles=doubles,
        single=single,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _find_call(name: str, model: nn.Module) -> tuple[str, dict[str, Any], bool]:
    """The first call that runs and whose outputs depend on the parameters, and whether in training."""
    problems: list[str] = []
    known = architectures()[name]
    with computing(torch.float32):
        for kind, arguments in calls(name if known.part else known.model_type, model):
            for training in (True, False):
                model.train(training)
                try:
                    outputs = [settled(model(**arguments)) for _ in range(2)]
                    if not any(output.requires_grad for output in outputs[0].values()):
                        problems.append("no output depends on the parameters")
                        continue
                except Exception as error:  # noqa: BLE001 - a guess that does not fit can raise anything
                    problems.append(_first_line(error))
                    continue
                if all(
                    torch.equal(first.nan_to_num(), outputs[1][key].nan_to_num()) for key, first in outputs[0].items()
                ):
                    finite = [output.isfinite().any() for output in outputs[0].values()]
                    if all(finite):
                        return kind, arguments, training
                    problems.append("outputs are not finite")
                else:
                    problems.append("two runs give different outputs")
    raise CannotBuild("unsharded", " | ".join(dict.fromkeys(problems[:6])) or "no inputs are known for it")


def _measured(
    model: nn.Module, arguments: Mapping[str, Any], training: bool, weights: Mapping[str, Tensor] | None = None
) -> tuple[Run, dict[str, Tensor]]:
    model.train(training)
    if weights is None:
        with torch.no_grad():
            weights = weights_for(settled(model(**arguments)))
    found = Run(settled(model(**arguments)))
    backward(model, found, weights)
    found.gradients = {key: parameter.grad for key, parameter in model.named_parameters(remove_duplicate=False)}
    return found, dict(weights)


def _nudged(name: str, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model with weights that are off by a rounding."""
    model, random = build(name, dtype), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + ULP[dtype] * torch.randn(parameter.shape, generator=random, dtype=dtype))
    return model


def nudged_runs(reference: Reference) -> list[Run]:
    """What the unsharded model gives in fp64, and then twice with weights that are off by a rounding of fp64."""
    arguments = cast(reference.arguments, torch.float64)
    models = [build(reference.name, torch.float64), *(_nudged(reference.name, s, torch.float64) for s in (1, 2))]
    with reference.computing(torch.float64):
        return [_measured(model, arguments, reference.training, reference.weights)[0] for model in models]


def _exact(
    name: str, arguments: Mapping[str, Any], training: bool, weights: Mapping[str, Tensor]
) -> tuple[Run | None, bool, bool, bool, str]:
    """In fp64, whether that takes fp64 as default, and in the place of fp32; whether it is fp32 inside.

    None where it raises, and why.
    """
    why = ""
    for doubles, double in itertools.product((True, False), (False, True)):
        model, finder = build(name, torch.float64), _FindsSingle()
        try:
            with computing(torch.float64, double, doubles):
                found, _ = _measured(model, cast(arguments, torch.float64), training, weights)
                with finder, torch.no_grad():
                    model(**cast(arguments, torch.float64))
            if _finite(found):
                return found, double, doubles, finder.found, ""
            why = why or "its gradients are not finite"
        except Exception as error:  # noqa: BLE001 - a model that fixes dtypes raises anything
            why = why or _first_line(error)
    return None, False, False, True, why


def _finite(found: Run) -> bool:
    return all(gradient is None or bool(gradient.isfinite().all()) for gradient in found.gradients.values())


def _bounds(plain: list[Run], exact: Run) -> Run:
    made = Run({})
    for name, value in exact.outputs.items():
        made.outputs[name] = _bound([run.outputs[name] for run in plain], value)
    for name, gradient in exact.gradients.items():
        if gradient is not None:
            made.gradients[name] = _bound([run.gradients[name] for run in plain], gradient)
    return made


def _bound(plain: list[Tensor | None], exact: Tensor) -> Tensor:
    """Of masks and infinities, nothing."""
    real = _real(exact)
    clean = torch.where(real.isfinite() & (real.abs() < HUGE), real, 0.0).double()
    found = torch.zeros_like(clean)
    for one in plain:
        value = torch.zeros_like(real) if one is None else _real(one)
        value = torch.where(value.isfinite() & (value.abs() < HUGE), value, 0.0).float()
        found = torch.maximum(found, allowed(value, clean) if clean.numel() else found)
    return found


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if not line.startswith("Class validation error")]
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"
