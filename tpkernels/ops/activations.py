"""What may follow a product inside an op: functions of one product, and gates, which are functions of two.

::

    swiglu(gate, up)          = silu(gate) * up
    geglu(gate, up)           = gelu(gate) * up
    clamped_swiglu(gate, up)  = g * sigmoid(1.702 * g) * (u + 1),     g = min(gate, 7),  u = max(-7, min(up, 7))

The last one is that of GPT-OSS (``transformers/models/gpt_oss/modeling_gpt_oss.py``).  It is computed in fp32 (fp64 for
fp64) and rounded once; the others round the activation of the gate, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels.ops.transforms import is_transformed

__all__ = [
    "ACTIVATIONS",
    "CLAMPED",
    "GATED",
    "activation_backward",
    "activation_forward",
    "gate_backward",
    "gate_forward",
]


@dataclass(frozen=True)
class _Activation:
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


ACTIVATIONS: dict[str, _Activation] = {
    "relu": _Activation(F.relu, lambda dy, z: torch.ops.aten.threshold_backward(dy, z, 0)),
    "gelu": _Activation(F.gelu, torch.ops.aten.gelu_backward),
    "gelu_tanh": _Activation(
        lambda z: F.gelu(z, approximate="tanh"),
        lambda dy, z: torch.ops.aten.gelu_backward(dy, z, approximate="tanh"),
    ),
    "silu": _Activation(F.silu, torch.ops.aten.silu_backward),
}


CLAMPED = "clamped_swiglu"
CLAMP, SHARPNESS = 7.0, 1.702
# The clamped one makes nine tensors in fp32 that nobody keeps.  Of so many numbers they stay in a second-level cache;
# those of all at once cost page faults: 40 ms for 8192 x 360 in bf16 (GPT-OSS-20B / 4), 13 ms in blocks (one thread of
# an Intel Xeon with AMX, 2026-11-27).  A multiple of every vector's length, so that the bits are those of one block.
BLOCK_ELEMENTS = 64 * 1024
_INTO = {"silu": torch.ops.aten.silu.out, "gelu": torch.ops.aten.gelu.out}
GATED = {"swiglu": "silu", "geglu": "gelu", CLAMPED: None}
"""Activations of two products, gate and up.  Of those that are ``act(gate) * up``: which act that is."""


def activation_forward(name: str | None, z: Tensor) -> Tensor:
    return z if name is None else ACTIVATIONS[name].forward(z)


def activation_backward(name: str | None, dy: Tensor, z: Tensor | None) -> Tensor:
    """Gradient before the activation, from the one after it and the preactivation ``z``."""
    if name is None:
        return dy
    assert z is not None
    return ACTIVATIONS[name].backward(dy, z)


def gate_forward(name: str, gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """What a gated activation gives; ``out`` may be ``gate``."""
    act = GATED[name]
    if act is not None:
        if out is None or out.dtype != gate.dtype:
            return torch.mul(activation_forward(act, gate), up, out=out)
        activated: Tensor = _INTO[act](gate, out=out)
        return activated.mul_(up)
    if not _goes_by_blocks(gate, up, out):
        return _clamped(gate, up, out)
    out = torch.empty_like(gate) if out is None else out
    flat = [one.view(-1) for one in (gate, up, out)]
    for start in range(0, gate.numel(), BLOCK_ELEMENTS):
        _clamped(*(one[start : start + BLOCK_ELEMENTS] for one in flat))
    return out


def _goes_by_blocks(gate: Tensor, up: Tensor, out: Tensor | None) -> bool:
    """Whether many numbers lie together on the CPU, and nobody records what is done with them."""
    given = (gate, up) if out is None else (gate, up, out)
    if not gate.is_cpu or gate.numel() <= BLOCK_ELEMENTS or is_transformed():
        return False
    recorded = torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)
    return not recorded and all(type(one) is Tensor and one.is_contiguous() for one in given)


def _clamped(gate: Tensor, up: Tensor, out: Tensor | None) -> Tensor:
    wide_gate, wide_up = _wide(gate).clamp(max=CLAMP), _wide(up).clamp(-CLAMP, CLAMP)
    product = wide_gate * torch.sigmoid(SHARPNESS * wide_gate) * (wide_up + 1)
    return product.to(gate.dtype) if out is None else out.copy_(product)


def gate_backward(name: str, dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up from the one of what the activation gives."""
    if name != CLAMPED:
        act = GATED[name]
        return activation_backward(act, dy * up, gate), dy * activation_forward(act, gate)
    wide_dy, wide_gate, wide_up = _wide(dy), _wide(gate), _wide(up)
    g, u = wide_gate.clamp(max=CLAMP), wide_up.clamp(-CLAMP, CLAMP)
    part = torch.sigmoid(SHARPNESS * g)
    of_gate = wide_dy * (u + 1) * (part + SHARPNESS * g * part * (1 - part)) * (wide_gate <= CLAMP)
    of_up = wide_dy * g * part * (wide_up.abs() <= CLAMP)
    return of_gate.to(gate.dtype), of_up.to(up.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
