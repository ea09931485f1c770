"""Layers whose weights a model's code multiplies by itself, ``F.linear(x, self.qkv.weight, bias)``.

Such a product is recorded as a call of the layer, so that the layer is planned as every other one is; the parallel
model calls it there (:mod:`tpkernels.nn.by_weight`).  What else code does with a weight shows in the ops, and the layer
stays whole; so it does where code converts the weight, which is no op where the dtype is the same already.  A layer
that would be kept in several parameters cannot be read in this way.

Code may multiply a weight in place by a number (RWKV, before an evaluation): ranks do the same to their parts.  It is
no step of a run, because code that notes that it was done does it in one run of several.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tpkernels.nn.by_weight import WeightCalls
from tpkernels.nn.own_call import OwnCalls
from tpkernels.planning.modules.layers import own_base
from tpkernels.planning.runs.tensors import tensors_in
from tpkernels.planning.styles import Replicate, Style

if TYPE_CHECKING:
    from tpkernels.planning.runs.session import Session
    from tpkernels.planning.runs.shadow import Shadow
    from tpkernels.planning.runs.trace import Recording

__all__ = ["WeightReads", "called_by_weight", "scaled_layer", "weights_of_layers", "with_own_product"]


_CONVERSIONS = {Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16}


def weights_of_layers(shadow: Shadow) -> dict[int, str]:
    """Linear layers by the ids of their weights; not those under code of their own, or with a weight that is tied."""
    owners = Counter(id(one) for _, one in shadow.model.named_parameters(remove_duplicate=False))
    return {
        id(module.weight): name
        for name, layer in shadow.layers.items()
        if layer.kind == "linear"
        and own_base(module := shadow.modules[name]) is None
        and owners[id(module.weight)] == 1
    }


_SCALINGS = {torch.ops.aten.mul_, torch.ops.aten.div_}


def scaled_layer(shadow: Shadow, func: Any, args: tuple[Any, ...]) -> str | None:
    """The layer whose weight an op multiplies in place by a number that Python has."""
    by_number = getattr(func, "overloadpacket", None) in _SCALINGS and len(args) == 2 and type(args[1]) in (int, float)
    return shadow.weights.get(id(args[0])) if by_number else None


def with_own_product(module: nn.Module, padding: int | None, reports: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The ``forward`` of a layer of a class of its own, in which the product with its weight ``reports`` the call."""
    forward = module.forward

    @functools.wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        with OwnCalls(module, reports, padding=padding):
            return forward(*args, **kwargs)

    return called


class WeightReads(WeightCalls):
    """Within it, such products are calls of the session's layers, and the session is told what ``einsum`` refused."""

    def __init__(self, session: Session) -> None:
        super().__init__(())
        self.session = session

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = self.session.shadow.weights.get(id(args[0])) if func in _CONVERSIONS else None
        if name is not None and sys._getframe(1).f_globals["__name__"].split(".")[0] != "torch":  # module.to()
            self.session.weight_converted(name)
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except RuntimeError:
            if func is torch.einsum:  # which compares sizes before it runs an op
                self.session.refused = tensors_in(args)
            raise

    def layer_of(self, weight: Any) -> nn.Module | None:
        name = self.session.shadow.weights.get(id(weight))
        if name is None or self.session.quiet is not None:
            return None
        self.session.read_by_weight(name)
        layer: nn.Module = self.session.shadow.modules[name]
        return layer


def called_by_weight(recordings: Iterable[Recording], styles: Mapping[str, Style]) -> dict[str, tuple[str, ...]]:
    """By module: the layers that its code multiplies by, and that no longer are plain modules with ``styles``."""
    found: dict[str, set[str]] = {}
    for recording in recordings:
        for reader, names in recording.by_weight.items():
            changed = {name for name in names if not _is_plain(styles.get(name, Replicate()))}
            if changed:
                found.setdefault(reader, set()).update(changed)
    return {reader: tuple(sorted(names)) for reader, names in sorted(found.items())}


def _is_plain(style: Style) -> bool:
    return isinstance(style, Replicate) and not style.distributed and not style.summed_gradient
