"""fp32 gradients beside parameters of any dtype, for optimizers that keep fp32 masters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["use_main_grads"]


def use_main_grads(module: nn.Module, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Give each trainable parameter a ``main_grad`` of zeros that all its gradients are added to; returns the module.

    The weights of linear layers are added by their GEMM (see :mod:`tpkernels.ops.main_grad`), all others by a hook;
    ``grad`` stays None.  ``main_grad`` is a DTensor where the parameter is one, with its placements.  The caller zeroes
    it between steps::

        for parameter in model.parameters():
            master[parameter].grad = parameter.main_grad        # an fp32 copy that the optimizer works on

    A parameter that has a ``main_grad`` already keeps it.

    Examples:
        >>> mlp = tpk.nn.use_main_grads(tpk.nn.ParallelMLP(8, 32, mesh["tp"], dtype=torch.bfloat16))
        >>> mlp(torch.ones(4, 8, dtype=torch.bfloat16)).sum().backward()
        >>> weight = next(mlp.parameters())
        >>> weight.grad is None, weight.main_grad.dtype
        (True, torch.float32)
    """
    for parameter in module.parameters():
        if parameter.requires_grad and getattr(parameter, "main_grad", None) is None:
            zeros = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            parameter.main_grad = zeros  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(_move)
    return module


@torch.no_grad()
def _move(parameter: Tensor) -> None:
    """Add the gradient that autograd has accumulated and no GEMM has added to ``main_grad``, and drop it."""
    added = getattr(parameter, "grad_added_to_main_grad", False) and not getattr(parameter, "zero_out_wgrad", False)
    if parameter.grad is not None and not added:
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None
