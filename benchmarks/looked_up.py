"""Parameters that are tables: rows of them are looked up and added, and no product reads them.

A table of positions is often a plain parameter, not an ``nn.Embedding``: ViT adds it to its tokens, YOLOS to the tokens
before every layer, Swin adds rows of one to the scores of its attention.  Such a parameter is as little a part of the
body's products as an embedding is, and has the number of places in it, not of features times features.  Which ones
these are is told by a run of the model itself, op by op, and not by names: from the parameter on, tensors may be taken
apart, put together, picked from by whole numbers, resized and scaled by a number; what is made so may meet other
numbers where it is added or put beside them, and nowhere else.  A vector, which has no rows, is none: it is a bias or a
gain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["tables"]

aten = torch.ops.aten
MOST_RUNS = 4
_RESIZED = {
    aten.upsample_bicubic2d, aten.upsample_bilinear2d, aten.upsample_nearest2d, aten.upsample_linear1d,
    aten._upsample_bicubic2d_aa, aten._upsample_bilinear2d_aa,
}  # fmt: skip
_PICKED = {
    aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.expand, aten.slice, aten.select,
    aten.permute, aten.transpose, aten.t, aten.alias, aten.detach, aten.split, aten.split_with_sizes, aten.unbind,
    aten.clone, aten._to_copy, aten.to, aten.repeat, aten.flip, aten.roll, aten.embedding, aten.index, aten.gather,
    aten.index_select, aten.masked_fill, aten.constant_pad_nd, aten.mul, aten.div, aten.neg,
}  # fmt: skip
"""Ops on a table alone, with whole numbers, conditions and plain numbers beside it."""
_JOINED = {aten.add, aten.add_, aten.sub, aten.cat, aten.stack, aten.where}


class _Followed(TorchDispatchMode):
    """One run: which ``parameters`` (by id, with their names) are ``added``, and which are ``read`` in another way."""

    def __init__(self, parameters: Mapping[int, str]) -> None:
        super().__init__()
        self.made = {key: frozenset([name]) for key, name in parameters.items()}
        self.added: set[str] = set()
        self.read: set[str] = set()
        self.kept: list[Any] = []
        """Every tensor seen, so that ids stay theirs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.kept += [*given, out]
        found = [self.made[id(tensor)] for tensor in given if id(tensor) in self.made]
        if not found:
            return out
        names = frozenset[str]().union(*found)
        packet = func.overloadpacket
        numbers = [x for x in given if x.is_floating_point() or x.is_complex()]
        meets = any(id(tensor) not in self.made for tensor in numbers)
        if packet in _JOINED and meets:
            self.added |= names
        elif packet in _JOINED or (packet in _PICKED | _RESIZED and len(numbers) == 1):
            self.made |= {id(leaf): names for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
        else:
            self.read |= names
        return out


def tables(model: nn.Module, calls: Iterable[tuple[str, Mapping[str, Any]]]) -> set[str]:
    """Names of parameters with rows that are added in one of the ``calls`` that the model runs with, and read in no
    other way in any."""
    parameters = {id(one): name for name, one in model.named_parameters() if one.dim() > 1 and one[..., 0].numel() > 1}
    added, read, runs = set[str](), set[str](), 0
    before = {module: module.training for module in model.modules()}
    model.eval()
    for _, arguments in calls:
        followed = _Followed(parameters)
        try:
            with torch.no_grad(), followed:
                model(**arguments)
        except Exception:  # noqa: BLE001, S112 - a call that is a guess can make a model raise anything
            continue
        added, read, runs = added | followed.added, read | followed.read, runs + 1
        if runs == MOST_RUNS:
            break
    for module, training in before.items():
        module.training = training
    return added - read
