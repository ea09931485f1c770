"""Layers of a class of their own, which is none of torch's: their code multiplies by their own weight, and no more.

I-BERT's ``QuantLinear`` is one, without quantisation: ``return F.linear(x, self.weight, self.bias), None``.  It owns
:func:`own_layer`, which runs a module's code once on tensors without numbers (on the meta device) and sees the one
product with its weight.  What it gives must be the result of that product, alone or in a tuple with no other tensors:
a router, which makes probabilities of its product, is no such layer.

The module keeps its code, which runs around the parallel layer (:mod:`tpkernels.nn.own_call`).  To the planner that
code is a part of the model around the layer, and is proven like all else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tpkernels.nn.own_call import OwnCalls, asks_alone

__all__ = ["OwnLayer", "own_layer"]

_PRODUCTS = {"linear": nn.Linear, "embedding": nn.Embedding}
"""By the name of the function that code calls."""


class OwnLayer(NamedTuple):
    """What such a module computes as."""

    base: type[nn.Module]
    padding: int | None = None
    """The row of a table that gets no gradient."""


class _Other(Exception):
    """The code does more than that."""


def own_layer(module: nn.Module) -> OwnLayer | None:
    """As which of torch's layers ``module`` computes by a product with its own weight; None if it does not."""
    own: dict[str, Any] = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    weight = own.get("weight")
    if weight is None or not own.keys() <= {"weight", "bias"} or module._modules or type(module).forward is _FORWARD:
        return None
    if any(is_lazy(one) or isinstance(one, DTensor) for one in own.values()) or weight.dim() != 2:
        return None
    if type(module).__module__.split(".")[0] == "torch" or not weight.is_floating_point():
        return None
    if "bias" in own and own["bias"].shape != weight.shape[:1]:
        return None
    code = getattr(type(module).forward, "__code__", None)
    for name in () if code is None else sorted(_PRODUCTS.keys() & {*code.co_names}):
        found = _tried(module, name)
        if found is not None:
            return found
    return None


_FORWARD = nn.Module.forward


def _tried(module: nn.Module, name: str) -> OwnLayer | None:
    sample, weight = _sample(module), module._parameters["weight"]
    assert weight is not None
    if name == "embedding":
        if "bias" in {key for key, one in module._parameters.items() if one is not None}:
            return None
        x = torch.empty(2, dtype=torch.int64, device="meta")
    else:
        x = torch.empty(2, weight.shape[1], dtype=weight.dtype, device="meta")
    seen = _Seen(sample, x)
    try:
        with seen:
            out = sample.forward(x)
    except Exception:  # noqa: BLE001 - code of whatever the class does
        return None
    tensors = [leaf for leaf in tree_leaves(out) if not isinstance(leaf, _PLAIN)]
    if len(tensors) != 1 or tensors[0] is not seen.result or type(out) not in (Tensor, tuple, list):
        return None
    return OwnLayer(_PRODUCTS[name], seen.padding)


_PLAIN = (int, float, str, bool, type(None))


def _sample(module: nn.Module) -> Any:
    """A module of the same class and attributes, with tensors of its own."""
    sample: Any = object.__new__(type(module))
    sample.__dict__ = dict(vars(module))
    for held in ("_parameters", "_buffers"):
        sample.__dict__[held] = {
            key: None if one is None else torch.empty_like(one, device="meta", requires_grad=False)
            for key, one in vars(module)[held].items()
        }
    return sample


class _Seen(TorchFunctionMode):
    """Within it, one product of ``x`` with the weight runs, and every other function of tensors raises."""

    def __init__(self, module: Any, x: Tensor) -> None:
        super().__init__()
        self.module, self.x = module, x
        self.result: Tensor | None = None
        self.padding: int | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if asks_alone(func):
            return func(*args, **kwargs)
        if func is F.embedding:
            self.padding = kwargs.get("padding_idx", args[2] if len(args) > 2 else None)
        taken = OwnCalls(self.module, lambda x: x, padding=self.padding).taken(func, args, kwargs)
        if self.result is not None or taken is not self.x:
            raise _Other
        self.result = func(*args, **kwargs)
        return self.result
