"""Weight gradients that the GEMM adds to a parameter's ``main_grad`` instead of returning them.

Megatron-LM keeps an fp32 gradient beside each bf16 parameter and lets the GEMM of the weight gradient add to it, so
that micro-batches are summed in fp32, and no gradient tensor exists in between.  The convention, which optimizers of
that family expect (``megatron/core/tensor_parallel/layers.py``, ``transformer_engine/pytorch/module/linear.py``):

* A parameter with an attribute ``main_grad`` has its weight gradient added there, and gets no ``grad``.
* Where it also has ``grad_added_to_main_grad``, that is set to True, and autograd is given a tensor without meaning
  (zeros where ``zero_out_wgrad`` is true), because hooks of the parameter must run; they drop it.

Owns: how an op finds a weight's ``main_grad``, and the GEMM.  All gradients of weights go through
:func:`weight_gradients`.  Assumes eager mode: in compiled graphs, and under autocast, the weight gradient is returned
as usual and the mark is left alone, so that the hooks of that family add it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels.comm import timeline
from tpkernels.gemm import widened
from tpkernels.gemm.grouped import TokenRows, matrix_gradients
from tpkernels.ops.plain_calls import is_dtensor

__all__ = [
    "Sink",
    "accumulate",
    "grouped_weight_gradients",
    "linear",
    "sink_of",
    "sinks_of",
    "weight_gradients",
    "with_sink",
]

UPCAST_ROWS = 1024
"""Rows of activations that are copied to fp32 at a time where the device has no GEMM from bf16 to fp32."""


class Sink(NamedTuple):
    """Where a weight's gradient goes: the parameter with the marks, and its ``main_grad`` as a local tensor."""

    parameter: Tensor
    main_grad: Tensor

    def add(self, dz: Tensor, x: Tensor) -> Tensor | None:
        """main_grad += dz^T x; returns what autograd is given."""
        accumulate(self.main_grad, dz, x)
        return self.added(dz.dtype)

    def add_of_expert(self, expert: int, dz: Tensor, x: Tensor) -> None:
        """main_grad[expert] += dz^T x, for a weight with a matrix per expert; :meth:`added` ends it."""
        accumulate(self.main_grad[expert], dz, x)

    def added(self, dtype: torch.dtype) -> Tensor | None:
        """Mark the parameter; returns what autograd is given."""
        if not hasattr(self.parameter, "grad_added_to_main_grad"):
            return None
        self.parameter.grad_added_to_main_grad = True
        make = torch.zeros if getattr(self.parameter, "zero_out_wgrad", False) else torch.empty
        return make(self.main_grad.shape, dtype=dtype, device=self.main_grad.device)


def with_sink(tensor: Tensor, parameter: Tensor) -> Tensor:
    """``tensor``, which is the local part of ``parameter``, remembering whose it is if that has a ``main_grad``."""
    if not torch.compiler.is_compiling() and getattr(parameter, "main_grad", None) is not None:
        tensor._tpkernels_parameter = parameter  # type: ignore[attr-defined]
    return tensor


def sink_of(weight: Tensor) -> Sink | None:
    """The ``main_grad`` behind a weight that an op was given, or None.

    Raises:
        ValueError: it has another shape than the weight.
    """
    parameter = getattr(weight, "_tpkernels_parameter", weight)
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is None or torch.compiler.is_compiling():
        return None
    if is_dtensor(main_grad):
        main_grad = main_grad.to_local()
    if main_grad.dim() > weight.dim() and main_grad.numel() == weight.numel():
        main_grad = main_grad.view(weight.shape)  # of a parameter with a dimension for units
    if main_grad.shape != weight.shape:
        raise ValueError(
            f"main_grad must have the shape of the weight on this rank {tuple(weight.shape)}, got "
            f"{tuple(main_grad.shape)}"
        )
    return Sink(parameter, main_grad)


def sinks_of(weights: Iterable[Tensor]) -> list[Sink | None]:
    return [sink_of(weight) for weight in weights]


def weight_gradients(dzs: Sequence[Tensor], x: Tensor, sinks: Sequence[Sink | None] | None) -> list[Tensor | None]:
    """dz^T x of ``[rows, N]`` and ``[rows, K]`` for each weight, or what autograd is given in its place."""
    with timeline.span("gemm of weight gradients", "gemm"):
        return _products(dzs, x, sinks)


def _products(dzs: Sequence[Tensor], x: Tensor, sinks: Sequence[Sink | None] | None) -> list[Tensor | None]:
    pairs = zip(dzs, sinks or [None] * len(dzs), strict=True)
    return [widened.matmul(dz.t(), x) if sink is None else sink.add(dz, x) for dz, sink in pairs]


def grouped_weight_gradients(
    dzs: Sequence[Tensor], x: Tensor, rows: TokenRows, sinks: Sequence[Sink | None] | None
) -> list[Tensor | None]:
    """:func:`weight_gradients` of weights ``[E, N, K]``: dz by row, x by token."""
    sinks = sinks or [None] * len(dzs)
    with timeline.span("gemm of weight gradients", "gemm"):
        adds = [None if sink is None else sink.add_of_expert for sink in sinks]
        found = matrix_gradients(dzs, x, rows, adds)
    return [one if sink is None else sink.added(x.dtype) for one, sink in zip(found, sinks, strict=True)]


def accumulate(main_grad: Tensor, dz: Tensor, x: Tensor) -> None:
    """main_grad += dz^T x, accumulated in main_grad's dtype: no gradient of the weight exists, nor is one rounded."""
    if main_grad.dtype == x.dtype:
        main_grad.addmm_(dz.t(), x)
    elif x.is_cuda and main_grad.dtype == torch.float32:
        torch.ops.aten.addmm.dtype_out(main_grad, dz.t(), x, torch.float32, out=main_grad)
    else:
        for low in range(0, x.shape[0], UPCAST_ROWS):
            rows = slice(low, low + UPCAST_ROWS)
            main_grad.addmm_(dz[rows].t().to(main_grad.dtype), x[rows].to(main_grad.dtype))


class _Linear(torch.autograd.Function):
    """``F.linear`` on one rank, whose weight gradient goes to a sink."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink_of(weight)
        y = F.linear(x, weight, bias)
        return y.detach() if y._is_view() else y  # of an x with rows of rows; views made in here cannot be written to

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_w, needs_b = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.shape[-1])
        dx = (rows @ weight).view(x.shape) if needs_x else None
        dws = _products([rows], x.reshape(-1, x.shape[-1]), [ctx.sink]) if needs_w else [None]
        return dx, dws[0], rows.sum(0) if needs_b else None


def wants_sink(x: Tensor, weight: Tensor) -> bool:
    wanted = torch.is_grad_enabled() and weight.requires_grad and not torch.is_autocast_enabled(x.device.type)
    return wanted and sink_of(weight) is not None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` that knows of ``main_grad``, outside of autocast regions, whose casts hide whose a weight is."""
    if wants_sink(x, weight):
        y: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return y
    return F.linear(x, weight, bias)
