"""Whether code runs for something else than its results: to be compiled, traced, cast, mapped, differentiated forward.

Unlike :mod:`tpkernels.ops.plain_calls` it does not ask who merely watches, so ranks answer alike for a call that one of
them profiles.
"""

from __future__ import annotations

import torch
from torch._C import _get_dispatch_mode, _get_tracing_state, _is_any_autocast_enabled, _TorchDispatchModeKey
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

__all__ = ["is_transformed"]

_TRACERS = (_TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.PROXY, _TorchDispatchModeKey.FUNCTIONAL)


def is_transformed() -> bool:
    """Whether the code that runs now is transformed by torch."""
    return bool(
        torch.compiler.is_compiling()
        or _get_tracing_state() is not None
        or _is_any_autocast_enabled()
        or forward_ad._current_level >= 0
        or peek_interpreter_stack() is not None
        or any(_get_dispatch_mode(key) is not None for key in _TRACERS)
    )
