"""Norms over all heads or features at once, which a column layer has cut: which modules they are.

It owns the candidates.  One is a module with a single parameter, a vector, or two, that is called with one tensor and
nothing else: with queries or keys (OLMo 2), or with what goes into a row layer (BitNet, Kosmos-2.5); or with that and a
gate (Mamba 2).  Where the replay meets it with a part, it must be RMS norm (:func:`find_rms`), layer norm or, with two
parameters ``[1, 1, 1, features]``, global response norm (ConvNeXt V2) by what its own code computes on numbers; the
call is then one step, and sums over the features are made over the ranks.  Features are the last dimension, or, of a
layer norm, dimension 1 (the channels of images, in RF-DETR).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tpkernels.nn.part_norm import layer_norm, response_norm, rms_norm
from tpkernels.planning.splits import degrees

__all__ = ["KnownNorm", "NormCall", "find_norms", "find_rms", "may_be_norm", "numbers_in"]

_DEFAULT = -1.0
"""The epsilon of torch's RMS norm that is given none, which depends on the dtype."""
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


class KnownNorm(NamedTuple):
    """RMS norm, layer norm or global response norm, as a module computes it."""

    epsilon: float
    gate: str = ""
    """Where the SiLU of the gate is multiplied: "before" the norm, "after" it, or "" where there is none."""
    centred: bool = False
    """Layer norm."""
    response: bool = False
    """Global response norm."""
    channels_first: bool = False
    """Its features are dimension 1, and others follow: ``[N, features, ...]``."""

    def dim_in(self, shape: Sequence[int]) -> int:
        """Of the features, in a tensor of this shape."""
        return 1 if self.channels_first else len(shape) - 1

    def rows_in(self, shape: Sequence[int]) -> int:
        """How many sums there are in a tensor of this shape: one per row, or per image."""
        return shape[0] if self.response else prod(shape) // max(1, shape[self.dim_in(shape)])


def may_be_norm(module: nn.Module) -> bool:
    """Whether it has one vector for a parameter, or two alike, of which each rank could have a part.

    Two vectors may be seen as images of one place, ``[1, 1, 1, features]``.
    """
    own = dict(module.named_parameters())
    vectors = own.keys() in ({"weight"}, {"weight", "bias"}) and own.keys() <= module._parameters.keys()
    alone = not any(True for _ in module.children()) and not any(True for _ in module.buffers())
    if not vectors or not alone or len({one.shape for one in own.values()}) > 1:
        return False
    return own["weight"].dim() == 1 or (len(own) == 2 and _is_of_images(own["weight"]))


def _is_of_images(weight: Tensor) -> bool:
    return weight.dim() == 4 and weight.shape[:-1] == (1, 1, 1)


def find_norms(modules: Mapping[str, nn.Module], calls: Iterable[NormCall]) -> dict[str, KnownNorm]:
    """Those that are one of these norms, and are called in one way.

    With ``same_bits`` only RMS norms are: the sums of others are in no blocks.
    """
    numbers: dict[str, set[float]] = {}
    given: dict[str, set[int]] = {}
    lengths: dict[str, set[int]] = {}
    for call in calls:
        numbers.setdefault(call.name, set()).update(call.numbers)
        given.setdefault(call.name, set()).add(len(call.sources))
        lengths.setdefault(call.name, set()).add(len(call.shape))
    known: dict[Any, KnownNorm | str] = {}
    found: dict[str, KnownNorm] = {}
    for name, candidates in numbers.items():
        if len(given[name]) > 1:
            continue
        gated = given[name] == {2}
        key = (*_alike(modules[name], candidates), gated, frozenset(lengths[name]))
        if key not in known:
            known[key] = _find(modules[name], sorted(candidates), gated, sorted(lengths[name]))
        norm = known[key]
        if isinstance(norm, KnownNorm) and not ((norm.centred or norm.response) and degrees()):
            found[name] = norm
    return found


def _find(module: nn.Module, candidates: Sequence[float], gated: bool, lengths: Sequence[int]) -> KnownNorm | str:
    """``lengths``: how many dimensions the tensors have that it is given."""
    weight = module._parameters["weight"]
    if weight is not None and _is_of_images(weight):
        ways = [KnownNorm(epsilon, response=True) for epsilon in _epsilons(module, candidates)]
        return "takes a gate" if gated else _first_right(module, ways, "global response norm", (4,))
    found = find_rms(module, candidates, gated=gated, lengths=lengths)
    for first in (False, True) if min(lengths) > 2 else (False,):
        if not isinstance(found, KnownNorm) and not gated:
            ways = [KnownNorm(one, centred=True, channels_first=first) for one in _epsilons(module, candidates)]
            found = _first_right(module, ways, "layer norm", lengths)
    return found


def _alike(module: nn.Module, candidates: set[float]) -> tuple[Any, ...]:
    weight = module._parameters["weight"]
    assert weight is not None
    plain = tuple(sorted((k, v) for k, v in vars(module).items() if isinstance(v, int | float | str)))
    has_bias = module._parameters.get("bias") is not None
    return type(module), plain, tuple(weight.shape), weight.dtype, has_bias, frozenset(candidates)


def numbers_in(events: Sequence[Any]) -> list[float]:
    """Numbers among the arguments of ops that could be an epsilon."""
    leaves = tree_leaves([(event.whole, event.kwargs) for event in events])
    return sorted({leaf for leaf in leaves if isinstance(leaf, float) and 0 < leaf < 1})


def find_rms(
    module: nn.Module, candidates: Sequence[float], *, gated: bool = False, lengths: Sequence[int] = (3,)
) -> KnownNorm | str:
    """The epsilon with which ``module``, which has one vector ``weight``, is RMS norm, or why it is not one.

    ``gated``: it takes a gate as well; ``lengths``: it is given tensors of so many dimensions.
    """
    if module._parameters.get("bias") is not None:
        return "has a bias"
    ways = [KnownNorm(epsilon, gate) for epsilon in _epsilons(module, candidates)
            for gate in (("before", "after") if gated else ("",))]  # fmt: skip
    return _first_right(module, ways, "RMS norm", lengths)


def _epsilons(module: nn.Module, candidates: Sequence[float]) -> list[float]:
    """An attribute first: in the recording torch's own op has the number rounded to fp32."""
    own = [value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1]
    return [_DEFAULT] if getattr(module, "eps", 0.0) is None else [*own, *candidates]


def _first_right(module: nn.Module, ways: Sequence[KnownNorm], called: str, lengths: Sequence[int]) -> KnownNorm | str:
    """Which of ``ways`` it computes, of tensors of so many dimensions."""
    weight, before = module._parameters["weight"], dict(module._parameters)
    assert weight is not None
    if not ways:
        return "has no epsilon that could be found"
    try:
        right = next((way for way in ways if all(_computes(module, weight, way, n) for n in lengths)), None)
    except Exception as error:  # noqa: BLE001 - the model's own code, on numbers it may not take
        return f"could not be tried: {type(error).__name__}"
    finally:
        module._parameters.update(before)
    if right is None:
        return f"does not compute {called}, or not in {weight.dtype}"
    return right._replace(epsilon=torch.finfo(weight.dtype).eps) if right.epsilon == _DEFAULT else right


def _computes(module: nn.Module, held: nn.Parameter, norm: KnownNorm, length: int) -> bool:
    """Whether the module's own code gives what the formula gives, in value and in gradient, up to roundings.

    In fp32, where roundings hide nothing, and in the dtype that the model computes in.
    """
    generator = torch.Generator().manual_seed(0)
    keys = [key for key, parameter in module._parameters.items() if parameter is not None]
    for dtype in dict.fromkeys((torch.float32, held.dtype)):
        tiny = torch.finfo(dtype).eps
        for scale in _PROBES:
            # Features with a mean tell RMS norm from layer norm.
            features = held.shape[-1]
            outer = (2, 3, 2, *(1,) * length)
            shape = (2, features, *outer[1 : length - 1]) if norm.channels_first else (*outer[: length - 1], features)
            x = ((torch.randn(shape, generator=generator) + 0.7) * scale).to(dtype)
            own = [torch.randn(held.shape, generator=generator).to(dtype) for _ in keys]
            dy = torch.randn(shape, generator=generator).to(dtype)
            gates = [torch.randn(shape, generator=generator).to(dtype)] if norm.gate else []
            leaves = [one.requires_grad_() for one in (*own, x, *gates)]
            module._parameters.update(zip(keys, own, strict=True))  # type: ignore[arg-type]
            with torch.enable_grad():
                y = module.forward(*leaves[len(keys) :])
                if y.shape != x.shape or y.dtype != dtype:
                    return False
                mine = (y, *torch.autograd.grad(y, leaves, dy))
                exactly = [one.detach().double().requires_grad_() for one in leaves]
                known = dict(zip(keys, exactly, strict=False))
                z = _formula(norm, known["weight"], known.get("bias"), exactly[len(keys) :], tiny)
                exact = (z, *torch.autograd.grad(z, exactly, dy.double()))
            for found, its in zip(mine, exact, strict=True):
                if not bool(((found.double() - its).abs() <= 32 * tiny * (its.abs() + its.abs().mean())).all()):
                    return False
    return True


def _formula(norm: KnownNorm, weight: Tensor, bias: Tensor | None, given: Sequence[Tensor], tiny: float) -> Tensor:
    epsilon = tiny if norm.epsilon == _DEFAULT else norm.epsilon
    if norm.response:
        return response_norm(weight, bias, given[0], epsilon=epsilon)
    if norm.centred:
        return layer_norm(weight, bias, given[0], epsilon=epsilon, dim=1 if norm.channels_first else -1)
    return rms_norm(weight, *given, epsilon=epsilon, gate=norm.gate)
