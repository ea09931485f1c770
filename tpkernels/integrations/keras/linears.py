"""Dense and EinsumDense on a part of their kernel, by the ops of tpkernels.

It owns the calls.  With features of several dimensions flattened, ``x`` whole and ``w_r`` this rank's part::

    column          y_r = act(x w_rᵀ + b_r)                    dx is summed over the ranks
    row             y   = act(Σ_r x_r w_rᵀ + b)                the bias is added once
    column_gather   y   = act(gather_r(x w_rᵀ + b_r))
    row_split       y   = act(Σ_r split(x)_r w_rᵀ + b)
    copied          y_r = act(x w[heads of r]ᵀ + b[heads of r])  dw and db are summed: ranks share heads

LoRA: the factor that has the cut dimension is cut, and the gradient of the other one is summed.  In symbolic calls (on
the meta device) nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from tpkernels.integrations.keras import backend
from tpkernels.integrations.keras.plan import LayerPlan
from tpkernels.integrations.keras.shadow import Equation
from tpkernels.ops import all_gather, copy_matmul, copy_to_group, matmul_all_reduce, shard

__all__ = ["linear"]


def linear(layer: Any, equation: Equation, plan: LayerPlan, rank: int, group: Any) -> Callable[..., Any]:
    """The call of ``layer`` on this rank; its variables are cut already."""
    made, contracted = equation.made, equation.contracted
    order = [equation.kernel.index(letter) for letter in made + contracted]
    inner = [equation.sizes[letter] for letter in made[1:]]
    by_column = plan.style in ("column", "column_gather")
    cut = plan.cuts.get(backend.kernel_of(layer).path)
    letters = made if by_column else contracted
    sizes = [size * prod(equation.sizes[letter] for letter in letters[1:]) for size in cut.sizes] if cut else []

    def kernel() -> Tensor:
        weight: Tensor = backend.kernel_of(layer).value
        if layer.lora_enabled:
            a, b = layer.lora_kernel_a.value, layer.lora_kernel_b.value
            if plan.style != "copied":
                if layer.lora_kernel_b.path in plan.cuts:
                    a = copy_to_group(a, group)
                else:
                    b = copy_to_group(b, group)
            scaled = (layer.lora_alpha / layer.lora_rank) * torch.matmul(a, b)
            weight = (weight + scaled).to(backend.torch_dtype(layer.compute_dtype))
        weight = weight.permute(order)
        weight = weight.reshape(prod(weight.shape[: len(made)]), -1)
        return _own(weight) if plan.style == "copied" else weight

    def bias() -> Tensor | None:
        if layer.bias is None:
            return None
        value: Tensor = layer.bias.value.reshape(-1)
        return _own(value) if plan.style == "copied" else value

    def _own(whole: Tensor) -> Tensor:
        whole = copy_to_group(whole.contiguous(), group)
        return torch.cat([whole[start:stop] for start, stop in plan.copied[rank]])

    def multiplied(x: Tensor) -> Tensor:
        weight, added = kernel(), bias()
        if x.is_meta:
            return x.new_empty((*x.shape[:-1], sum(sizes) if plan.style == "column_gather" else weight.shape[0]))
        if plan.style in ("row", "row_split"):
            if plan.style == "row_split":
                x = shard(x, group, dim=-1, shard_sizes=sizes)
            return matmul_all_reduce(x, weight, group, bias=added)
        out: Tensor = copy_matmul(x, weight, group, bias=added)
        if plan.style == "column_gather":
            return all_gather(out, group, dim=-1, shard_sizes=sizes, replicated_grad=True)
        return out

    def call(inputs: Any, training: object = None) -> Any:
        x = inputs
        if len(contracted) > 1:
            x = x.reshape(*x.shape[: -len(contracted)], -1)
        y = multiplied(x)
        if inner:
            y = y.reshape(*y.shape[:-1], -1, *inner)
        return y if layer.activation is None else layer.activation(y)

    return call
