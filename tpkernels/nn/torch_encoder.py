"""Make torch's own transformer encoder call its layers when layers inside it are cut.

In inference ``nn.TransformerEncoderLayer`` hands the weights of its layers to one fused function instead of calling
them, and ``nn.TransformerEncoder`` drops padded tokens before it (a nested tensor) and puts zeros in their places after
it.  Layers that are cut over ranks must be called.

It owns :func:`call_cut_layers`, which makes both call their layers, and leaves the zeros where torch would have put
them, so that results at padded places are those of the unsharded model, too.  torch 2.11 to 2.13 read the attributes
that it sets.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = ["call_cut_layers"]


def call_cut_layers(model: nn.Module, cut: Collection[nn.Module]) -> None:
    """Let the encoders in ``model`` that hold layers of ``cut`` call them, in inference as in training."""
    changed = {id(module) for module in cut}
    for module in list(model.modules()):
        if not any(id(inner) in changed for inner in module.modules()):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # read by the fused function alone: it knows no other activation
        elif isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
            module.use_nested_tensor = False
            module.register_forward_hook(_fill_padding, with_kwargs=True)


def _fill_padding(encoder: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], y: Tensor) -> Tensor | None:
    """Put zeros, or what the last norm makes of zeros, in the places of padded tokens."""
    given = dict(zip(("src", "mask", "src_key_padding_mask"), args, strict=False)) | dict(kwargs)
    src, mask, padding = (given.get(name) for name in ("src", "mask", "src_key_padding_mask"))
    assert isinstance(encoder, nn.TransformerEncoder) and isinstance(src, Tensor)
    if mask is not None or padding is None or not _drops_padding(encoder, src, padding):
        return None
    zeros = y.new_zeros(y.shape[-1])
    return torch.where(padding.bool().unsqueeze(-1), zeros if encoder.norm is None else encoder.norm(zeros), y)


def _drops_padding(encoder: nn.TransformerEncoder, src: Tensor, padding: Tensor) -> bool:
    """Whether ``nn.TransformerEncoder`` would, of a batch with padding and without another mask."""
    first = cast(nn.Module, encoder.layers[0])
    if not torch.backends.mha.get_fastpath_enabled() or first.training or src.dim() != 3:
        return False
    if torch.is_autocast_enabled():
        return False
    tensors = (src, *first.parameters())
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    if not getattr(encoder, "mask_check", True):
        return True
    kept = padding.bool().logical_not()
    return not torch.compiler.is_compiling() and bool(torch._nested_tensor_from_mask_left_aligned(src, kept))
