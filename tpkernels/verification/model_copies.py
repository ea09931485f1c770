"""Copies of a model to try things on: with real weights, another dtype, no dropout, and inputs to run them with.

The model itself is never touched.  A copy of a model on the meta device gets random numbers, the same on every rank, of
a size that lets every parameter matter.
"""

from __future__ import annotations

import copy
import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tpkernels.state.staging import computed_buffers

__all__ = ["cast_floats", "copy_of", "dtype_of", "fill", "is_meta", "nudge_", "randomise_", "without_dropout"]

CHANCES = ("drop", "jitter")
"""Parts of the names of attributes that say how much is left to chance."""


def is_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of the first parameter of floating point."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def copy_of(model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy without gradients, with weights, and without dropout; ``dtype`` is for everything of floating point.

    Raises:
        ValueError: the model cannot be copied, or has buffers on the meta device that nobody computes.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if parameter.is_meta:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    computed = {}
    if is_meta(model):
        computed = {(id(module), name): value for module, name, value in computed_buffers(model, device)}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                start = torch.ones if "var" in name else torch.zeros  # statistics of norms
                held = start(buffer.shape, dtype=buffer.dtype, device=device)
                memo[id(buffer)] = computed.get((id(module), name), held)
    try:
        made = copy.deepcopy(model, memo)
    except Exception as error:
        raise ValueError(f"the {type(model).__name__} cannot be copied: {type(error).__name__}: {error}") from error
    if is_meta(model):
        randomise_(made)
    made.zero_grad(set_to_none=True)
    without_dropout(made)
    return made if dtype is None else _as(made, dtype)


def _as(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast, but for complex buffers (``nn.Module.to`` would take their real part)."""
    model._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                vars(module)[name] = value.to(dtype)
        config: Any = getattr(module, "config", None)
        if dtype == torch.float64 and isinstance(getattr(config, "_experts_implementation", None), str):
            config._experts_implementation = "eager"  # torch's grouped GEMM knows no fp64
    return model


def randomise_(model: nn.Module) -> None:
    """Small random weights, the same wherever this runs: gains near 1, biases near 0, products that keep their size."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                values *= parameter.shape[-1] ** -0.5
            else:
                values = values * 0.1 + (0.0 if "bias" in name else 1.0)
            parameter.copy_(values)


def nudge_(model: nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Move every weight by about a rounding of ``dtype``: what jumps beside a rounding then does so."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                step = 1 + torch.finfo(dtype).eps * (torch.rand(parameter.shape, generator=generator) - 0.5)
                parameter.copy_(parameter.double() * step.double().to(parameter.device))


def without_dropout(model: nn.Module) -> None:
    """Set every rate of dropout and jitter to 0, in modules and in the configurations that they read."""
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(vars(holder).items()) if hasattr(holder, "__dict__") else ():
                if isinstance(value, float) and any(word in name for word in CHANCES):
                    setattr(holder, name, 0.0)
                elif name == "p" and isinstance(value, float) and "Dropout" in type(holder).__name__:
                    setattr(holder, name, 0.0)


def cast_floats(value: Any, of: torch.dtype | None, to: torch.dtype) -> Any:
    """Tensors of floating point (of dtype ``of``, or of any) as ``to``; gradients are asked for where they were."""

    def one(tensor: Tensor) -> Tensor:
        wanted = tensor.is_floating_point() and (of is None or tensor.dtype == of)
        fresh = tensor.detach().to(to if wanted else tensor.dtype, copy=True)
        return fresh.requires_grad_(tensor.requires_grad)

    return tree_map_only(Tensor, one, value)


def fill(model: nn.Module, value: Any, device: torch.device) -> Any:
    """Random values in place of tensors on the meta device: normal ones, or indices that the model's tables have."""
    vocabulary = _vocabulary(model)
    dtype = dtype_of(model)

    def one(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        generator = torch.Generator().manual_seed(zlib.crc32(repr(tuple(tensor.shape)).encode()))
        if tensor.is_floating_point():
            # Gradients of inputs are compared, too: a first layer could lose its part of them.
            return torch.randn(tensor.shape, generator=generator).to(device, dtype).requires_grad_()
        low = 3 if vocabulary > 8 else 0  # the first ids are often those of padding, start and end
        made = torch.randint(low, max(vocabulary, low + 1), tensor.shape, generator=generator)
        return made.to(device, tensor.dtype)

    return tree_map_only(Tensor, one, value)


def _vocabulary(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    said = getattr(config, "vocab_size", None)
    if isinstance(said, int):
        return said
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return tables[0] if tables else 2
