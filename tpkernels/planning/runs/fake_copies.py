"""What stands for a model's tensors in a copy of it, and for what cannot be copied."""

from __future__ import annotations

import threading
import types
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["like", "uncopyable"]

_SHARED = (type(threading.Lock()), type(threading.RLock()), types.ModuleType, torch.Generator)
"""What cannot be copied and holds nothing of a run."""


def like(tensor: Tensor) -> Tensor:
    """An empty tensor of the same kind, on the CPU for one on the meta device."""
    device = "cpu" if tensor.is_meta else tensor.device
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def uncopyable(module: nn.Module, memo: dict[int, Any]) -> dict[int, Any]:
    """Attributes that ``deepcopy`` refuses: tensors with a history are copied without it, locks and the like shared."""
    found: dict[int, Any] = {}
    for value in vars(module).values():
        if isinstance(value, Tensor) and not value.is_leaf and id(value) not in memo:
            found[id(value)] = value.detach().clone()
        elif isinstance(value, _SHARED):
            found[id(value)] = value
    return found
