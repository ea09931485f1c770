"""Plain calls: those of which nobody could tell whether they went through torch's dispatcher.

Owns the question, and only that: :func:`tpkernels.ops.registration.call` runs an op's kernel at once where the answer
is yes, and :mod:`tpkernels.ops.fast_path` may leave out more.  Two trips from the interpreter through the dispatcher
and back cost 25 us a call, more than an all-reduce between ranks of one host takes (2 us; AMD EPYC, 2026-11-20), and
several times as much when a GEMM has swept the caches.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

# By name: in a call that finds cold caches each step through a module costs as much as what it leads to.
from torch import is_grad_enabled as _is_grad_enabled
from torch._C import (
    _get_tracing_state,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling as _is_traced_by_dynamo

__all__ = ["PLAIN", "is_dtensor", "is_plain"]

PLAIN = (Tensor, torch.nn.Parameter)
"""The types of tensors that do nothing of their own."""


def is_plain(*tensors: object) -> bool:
    """Whether a call with these tensors is plain: they are, no gradient is recorded, and nobody watches."""
    records = _is_grad_enabled()
    for tensor in tensors:
        if type(tensor) not in PLAIN or (records and cast(Tensor, tensor).requires_grad):
            return False
    # The memory of a view with a negative bit has the other sign, which the dispatcher resolves. Dynamo, which watches,
    # cannot trace the question.
    return not (_is_watched() or any(cast(Tensor, tensor).is_neg() for tensor in tensors))


def is_dtensor(value: object) -> bool:
    """Whether it is one; what no tensor of this process can be is not imported, which would take a second."""
    if type(value) in PLAIN or not isinstance(value, Tensor):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _is_watched() -> bool:
    """Whether anybody but autograd sees ops on plain tensors: who traces, profiles, intercepts or transforms them."""
    return bool(
        _is_traced_by_dynamo()
        or _get_tracing_state() is not None
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _profiler_enabled()
        or _is_any_autocast_enabled()
        or forward_ad._current_level >= 0
        or peek_interpreter_stack() is not None
    )
