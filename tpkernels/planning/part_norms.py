"""Norms over all heads or features at once, which a column layer has cut: which modules they are.

It owns the candidates.  One is a module with a single parameter, a vector, that is called with one tensor and nothing
else: with queries or keys (OLMo 2), or with what goes into a row layer (BitNet).  Where the replay meets it with a
part, it must be RMS norm by what its own code computes on numbers (:func:`rms_epsilon`); the call is then one step, and
the sum of squares is reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

__all__ = ["NormCall", "find_norms", "may_be_norm", "numbers_in", "rms_epsilon"]

_PROBES = (1.0, 1e-3, 30.0)
"""Scales of the numbers that a norm is tried on: an epsilon is seen where they are small."""


@dataclass(frozen=True)
class NormCall:
    """One call of a candidate in a recording, by the event that it begins with."""

    name: str
    stop: int
    """The first event behind it."""
    source: Any
    result: Any
    shape: tuple[int, ...]
    numbers: tuple[float, ...]
    """Among which the epsilon is."""


def may_be_norm(module: nn.Module) -> bool:
    """Whether it has one vector for a parameter, of which each rank could have a part."""
    own = dict(module.named_parameters())
    alone = list(own) == ["weight"] and "weight" in module._parameters and own["weight"].dim() == 1
    return alone and not any(True for _ in module.children()) and not any(True for _ in module.buffers())


def find_norms(modules: Mapping[str, nn.Module], calls: Iterable[NormCall]) -> dict[str, float]:
    """The epsilons of those that are RMS norm."""
    numbers: dict[str, set[float]] = {}
    for call in calls:
        numbers.setdefault(call.name, set()).update(call.numbers)
    known: dict[Any, float | str] = {}
    for name, candidates in numbers.items():
        key = _alike(modules[name], candidates)
        if key not in known:
            known[key] = rms_epsilon(modules[name], sorted(candidates))
    found = {name: known[_alike(modules[name], candidates)] for name, candidates in numbers.items()}
    return {name: epsilon for name, epsilon in found.items() if not isinstance(epsilon, str)}


def _alike(module: nn.Module, candidates: set[float]) -> Any:
    weight = module._parameters["weight"]
    assert weight is not None
    plain = tuple(sorted((k, v) for k, v in vars(module).items() if isinstance(v, int | float | str)))
    return type(module), plain, tuple(weight.shape), weight.dtype, frozenset(candidates)


def numbers_in(events: Sequence[Any]) -> list[float]:
    """Numbers among the arguments of ops that could be an epsilon."""
    leaves = tree_leaves([(event.whole, event.kwargs) for event in events])
    return sorted({leaf for leaf in leaves if isinstance(leaf, float) and 0 < leaf < 1})


def rms_epsilon(module: nn.Module, candidates: Sequence[float]) -> float | str:
    """The epsilon with which ``module``, which has one vector ``weight``, is RMS norm, or why it is not one."""
    held = module._parameters["weight"]
    assert held is not None
    # An attribute first: in the recording torch's own op has the number rounded to fp32.
    own = [value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1]
    every: list[float | None] = [*own, *candidates]
    if getattr(module, "eps", 0.0) is None:
        every = [None]  # torch's own default, which depends on the dtype
    if not every:
        return "has no epsilon that could be found"
    try:
        right = [epsilon for epsilon in every if _is_rms_norm(module, held, epsilon)]
    except Exception as error:  # noqa: BLE001 - the model's own code, on numbers it may not take
        return f"could not be tried: {type(error).__name__}"
    finally:
        module._parameters["weight"] = held
    if not right:
        return f"does not compute RMS norm, or not in {held.dtype}"
    return torch.finfo(held.dtype).eps if right[0] is None else right[0]


def _is_rms_norm(module: nn.Module, held: nn.Parameter, epsilon: float | None) -> bool:
    """Whether the module's own code gives what the formula gives, in value and in gradient, up to roundings.

    In fp32, where roundings hide nothing, and in the dtype that the model computes in.
    """
    generator = torch.Generator().manual_seed(0)
    for dtype in dict.fromkeys((torch.float32, held.dtype)):
        tiny = torch.finfo(dtype).eps
        for scale in _PROBES:
            # Features with a mean tell RMS norm from layer norm.
            x = ((torch.randn(2, 3, held.shape[0], generator=generator) + 0.7) * scale).to(dtype).requires_grad_()
            weight = torch.randn(held.shape, generator=generator).to(dtype).requires_grad_()
            dy = torch.randn(x.shape, generator=generator).to(dtype)
            module._parameters["weight"] = weight  # type: ignore[assignment]
            with torch.enable_grad():
                y = module.forward(x)
                if y.shape != x.shape or y.dtype != dtype:
                    return False
                own = (y, *torch.autograd.grad(y, (x, weight), dy))
                x64, w64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
                scales = torch.rsqrt(x64.square().mean(-1, keepdim=True) + (tiny if epsilon is None else epsilon))
                z = x64 * scales * w64
                exact = (z, *torch.autograd.grad(z, (x64, w64), dy.double()))
            for mine, its in zip(own, exact, strict=True):
                if not bool(((mine.double() - its).abs() <= 32 * tiny * (its.abs() + its.abs().mean())).all()):
                    return False
    return True
