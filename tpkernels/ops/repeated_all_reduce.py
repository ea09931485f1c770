"""``matmul_all_reduce`` of a decoding step, once more: all that the first such call has settled is left out."""

from __future__ import annotations

from collections.abc import Hashable

import torch.nn.functional as F
from torch import Tensor

from tpkernels.comm import timeline
from tpkernels.comm.groups import Group
from tpkernels.ops import agreed_call
from tpkernels.ops.contract import MatmulAllReduce

__all__ = ["again", "remember"]


def again(
    group: Group, x: Tensor, weight: Tensor, bias: Tensor | None, implementation: str, then: Hashable = None
) -> Tensor | None:
    """The op for plain arguments (:func:`is_plain`) like those of an earlier small call; None if there was none.

    ``then``: what the ranks agreed on that follows the sum, which is left to the caller.

    Host work is what a decoding step has beside its GEMMs, and finds cold caches: this asks for no more than decides.
    The weight's dtype and device are left to ``F.linear``, unless the step multiplies itself; where that refuses, the
    long way says why.
    """
    repeated = group.repeated.get(_repetition(x, weight, bias, implementation, then))
    if repeated is None or timeline.active() or not (x.is_cpu and x.is_contiguous()):
        return None
    if bias is not None and not (bias.is_cpu and bias.is_contiguous()):
        return None
    if repeated.multiply is not None:
        if weight.dtype is not x.dtype or not weight.is_cpu or weight.stride(1) != 1:
            return None
        y = x.new_empty((*x.shape[:-1], weight.shape[0]))
        agreed_call.sum_again(group, repeated, y, bias, (x, weight))
        return y
    try:
        y = F.linear(x, weight)
    except RuntimeError:
        return None
    agreed_call.sum_again(group, repeated, y, bias)
    return y


def remember(
    group: Group,
    known: agreed_call.Known,
    arguments: MatmulAllReduce,
    x: Tensor,
    weight: Tensor,
    implementation: str,
    then: Hashable = None,
) -> None:
    """After the first call of its kind: the next ones may be made by :func:`again`, if the backend offers that."""
    repeated = agreed_call.repeatable(group, known, arguments._replace(tail=None))
    if repeated is not None:
        group.repeated[_repetition(x, weight, arguments.bias, implementation, then)] = repeated


def _repetition(x: Tensor, weight: Tensor, bias: Tensor | None, implementation: str, then: Hashable) -> Hashable:
    facts = None if bias is None else (bias.shape, bias.dtype)
    return ("matmul_all_reduce", implementation, x.shape, weight.shape, x.dtype, facts, then)
