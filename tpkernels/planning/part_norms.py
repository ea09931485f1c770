"""Norms over all heads or features at once, which a column layer has cut: which modules they are.

It owns the candidates.  One is a module with a single parameter, a vector, that is called with one tensor and nothing
else: with queries or keys (OLMo 2), or with what goes into a row layer (BitNet); or with that and a gate (Mamba 2).
Where the replay meets it with a part, it must be RMS norm by what its own code computes on numbers (:func:`find_rms`);
the call is then one step, and the sum of squares is reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tpkernels.nn.part_norm import rms_norm

__all__ = ["NormCall", "Rms", "find_norms", "find_rms", "may_be_norm", "numbers_in"]

_PROBES = (1.0, 1e-3, 30.0)
"""Scales of the numbers that a norm is tried on: an epsilon is seen where they are small."""


@dataclass(frozen=True)
class NormCall:
    """One call of a candidate in a recording, by the event that it begins with."""

    name: str
    stop: int
    """The first event behind it."""
    sources: tuple[Any, ...]
    """Of the tensor, and of the gate if there is one."""
    result: Any
    shape: tuple[int, ...]
    numbers: tuple[float, ...]
    """Among which the epsilon is."""


class Rms(NamedTuple):
    """RMS norm as a module computes it."""

    epsilon: float
    gate: str
    """Where the SiLU of the gate is multiplied: "before" the norm, "after" it, or "" where there is none."""


def may_be_norm(module: nn.Module) -> bool:
    """Whether it has one vector for a parameter, of which each rank could have a part."""
    own = dict(module.named_parameters())
    alone = list(own) == ["weight"] and "weight" in module._parameters and own["weight"].dim() == 1
    return alone and not any(True for _ in module.children()) and not any(True for _ in module.buffers())


def find_norms(modules: Mapping[str, nn.Module], calls: Iterable[NormCall]) -> dict[str, Rms]:
    """Those that are RMS norm, and are called in one way."""
    numbers: dict[str, set[float]] = {}
    given: dict[str, set[int]] = {}
    for call in calls:
        numbers.setdefault(call.name, set()).update(call.numbers)
        given.setdefault(call.name, set()).add(len(call.sources))
    known: dict[Any, Rms | str] = {}
    found: dict[str, Rms] = {}
    for name, candidates in numbers.items():
        if len(given[name]) > 1:
            continue
        gated = given[name] == {2}
        key = (*_alike(modules[name], candidates), gated)
        if key not in known:
            known[key] = find_rms(modules[name], sorted(candidates), gated=gated)
        if isinstance(known[key], Rms):
            found[name] = known[key]  # type: ignore[assignment]
    return found


def _alike(module: nn.Module, candidates: set[float]) -> tuple[Any, ...]:
    weight = module._parameters["weight"]
    assert weight is not None
    plain = tuple(sorted((k, v) for k, v in vars(module).items() if isinstance(v, int | float | str)))
    return type(module), plain, tuple(weight.shape), weight.dtype, frozenset(candidates)


def numbers_in(events: Sequence[Any]) -> list[float]:
    """Numbers among the arguments of ops that could be an epsilon."""
    leaves = tree_leaves([(event.whole, event.kwargs) for event in events])
    return sorted({leaf for leaf in leaves if isinstance(leaf, float) and 0 < leaf < 1})


def find_rms(module: nn.Module, candidates: Sequence[float], *, gated: bool = False) -> Rms | str:
    """The epsilon with which ``module``, which has one vector ``weight``, is RMS norm, or why it is not one.

    ``gated``: it takes a gate as well.
    """
    held = module._parameters["weight"]
    assert held is not None
    # An attribute first: in the recording torch's own op has the number rounded to fp32.
    own = [value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1]
    every: list[float | None] = [*own, *candidates]
    if getattr(module, "eps", 0.0) is None:
        every = [None]  # torch's own default, which depends on the dtype
    if not every:
        return "has no epsilon that could be found"
    ways = product(every, ("before", "after") if gated else ("",))
    try:
        right = next(((epsilon, gate) for epsilon, gate in ways if _is_rms_norm(module, held, epsilon, gate)), None)
    except Exception as error:  # noqa: BLE001 - the model's own code, on numbers it may not take
        return f"could not be tried: {type(error).__name__}"
    finally:
        module._parameters["weight"] = held
    if right is None:
        return f"does not compute RMS norm, or not in {held.dtype}"
    epsilon, gate = right
    return Rms(torch.finfo(held.dtype).eps if epsilon is None else epsilon, gate)


def _is_rms_norm(module: nn.Module, held: nn.Parameter, epsilon: float | None, gate: str) -> bool:
    """Whether the module's own code gives what the formula gives, in value and in gradient, up to roundings.

    In fp32, where roundings hide nothing, and in the dtype that the model computes in.
    """
    generator = torch.Generator().manual_seed(0)
    for dtype in dict.fromkeys((torch.float32, held.dtype)):
        tiny = torch.finfo(dtype).eps
        for scale in _PROBES:
            # Features with a mean tell RMS norm from layer norm.
            shape, features = (2, 3, held.shape[0]), held.shape[0]
            x = ((torch.randn(shape, generator=generator) + 0.7) * scale).to(dtype)
            weight = torch.randn(features, generator=generator).to(dtype)
            dy = torch.randn(shape, generator=generator).to(dtype)
            gates = [torch.randn(shape, generator=generator).to(dtype)] if gate else []
            leaves = [one.requires_grad_() for one in (weight, x, *gates)]
            module._parameters["weight"] = weight  # type: ignore[assignment]
            with torch.enable_grad():
                y = module.forward(*leaves[1:])
                if y.shape != x.shape or y.dtype != dtype:
                    return False
                own = (y, *torch.autograd.grad(y, leaves, dy))
                exactly = [one.detach().double().requires_grad_() for one in leaves]
                z = rms_norm(*exactly, epsilon=tiny if epsilon is None else epsilon, gate=gate)
                exact = (z, *torch.autograd.grad(z, exactly, dy.double()))
            for mine, its in zip(own, exact, strict=True):
                if not bool(((mine.double() - its).abs() <= 32 * tiny * (its.abs() + its.abs().mean())).all()):
                    return False
    return True
