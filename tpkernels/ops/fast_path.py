"""The fast path: a call of a decoding step leaves out what the first call of its kind has settled.

Such a call has a few rows on the CPU and records no gradient; Python takes longer there than the exchange, and finds
cold caches.  Owns the decision whether a ``matmul_all_reduce`` is a repetition of one that was made before, and makes
it then: one look-up, one GEMM and one native call, with the lock, call number, fingerprint, errors and poison of any
call.  Ops ask :func:`repeat` first, and make the checked call (:mod:`tpkernels.ops.agreed_call`) where it gives None.
A ``copy_matmul`` that records no gradient sends nothing: :func:`product` is all of it.

Only plain calls are repeated (:mod:`tpkernels.ops.plain_calls`).  Results are bit for bit those of the checked call,
and ranks may mix the two ways.
"""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor

from tpkernels.comm import timeline
from tpkernels.comm.groups import Group, GroupLike, group_size, resolve
from tpkernels.comm.same_bits import anywhere
from tpkernels.gemm import few_rows
from tpkernels.ops import agreed_call
from tpkernels.ops.agreed_call import CheckedCall, facts_of
from tpkernels.ops.contract import MatmulAllReduce, RepeatedSum
from tpkernels.ops.plain_calls import is_plain
from tpkernels.ops.shapes import flat

__all__ = ["product", "repeat"]


def product(group: GroupLike, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """``F.linear`` of a call that sends nothing, if the compiled kernel for few rows was measured to make it.

    None: ``copy_matmul`` looks at the arguments, and takes whichever GEMM it is to take.
    """
    if anywhere() or group_size(group) == 1 or not is_plain(x, weight, weight if bias is None else bias):
        return None
    return few_rows.linear(x, weight, bias) if x.dim() >= 2 else None


def repeat(
    op: str,
    group: GroupLike,
    implementation: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *rest: Tensor | float,
) -> Tensor | None:
    """The sum over the ranks of ``x @ weight^T``, plus bias, if ``op`` was called with equal facts before.

    ``rest``: what else the op was given, which is left to the caller; tensors among it are plain and contiguous if a
    result is returned.
    """
    others = [one for one in rest if not isinstance(one, float)] if rest else rest
    if not is_plain(x, weight, weight if bias is None else bias, *others):
        return None
    state = resolve(group)
    checked = state.checked.get(facts_of(op, implementation, x, weight, bias, *rest))
    if checked is None or timeline.active() or not x.is_contiguous():
        return None
    if bias is not None and not bias.is_contiguous():
        return None
    for one in others:
        if not cast(Tensor, one).is_contiguous():
            return None
    repetition = checked.repetition or _offered(state, checked, x, weight, bias)
    if repetition is None or (repetition.multiply is not None and weight.stride(1) != 1):
        return None
    return _repeated(state, checked, repetition, x, weight, bias)


def _offered(group: Group, checked: CheckedCall, x: Tensor, weight: Tensor, bias: Tensor | None) -> RepeatedSum | None:
    """What the backend has for repetitions of a call; it is asked once, when the call comes for the second time."""
    plan = checked.plan
    if plan is None or checked.is_asked:
        return None
    checked.is_asked = True
    if plan.implementation.repeat is not None:
        arguments = MatmulAllReduce([flat(x)], [weight.t()], bias)
        checked.repetition = plan.implementation.repeat(plan.context(group, 0), plan.arguments(arguments))
    return checked.repetition


def _repeated(
    group: Group, checked: CheckedCall, repetition: RepeatedSum, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """:func:`tpkernels.ops.agreed_call.run_checked` of such a call.

    The monitor learns of it only when it waits for a peer: what takes microseconds is never looked at.
    """
    with group.lock:
        if group.poison is not None or group.verdict is not None:
            agreed_call.raise_end(group)
        outer, call = group.in_flight, group.calls
        group.calls = call + 1
        if group.trail is not None:
            assert checked.plan is not None
            group.trail.add(call, checked.signature, checked.plan.fingerprint)
        try:
            added = 0 if bias is None else bias.data_ptr()
            if repetition.multiply is None:
                y = F.linear(x, weight)
                ended = repetition.start(y.data_ptr(), added)
            else:
                y = x.new_empty((*x.shape[:-1], weight.shape[0]))
                ended = repetition.multiply(
                    x.data_ptr(), weight.data_ptr(), weight.stride(0), weight.shape[1], y.data_ptr(), added
                )
            if not ended:
                group.enter(call, checked.signature)
                repetition.finish(y.data_ptr(), added)
            return y
        except BaseException as error:  # noqa: BLE001 - fail raises what it means
            agreed_call.fail(group, call, checked.signature, repetition.named(error))
        finally:
            if group.in_flight is not outer:
                group.leave(outer)
