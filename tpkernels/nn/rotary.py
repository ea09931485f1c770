"""Rotary position embedding: pairs of a head's features are turned by an angle that grows with the position."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apply_rotary"]


def apply_rotary(x: Tensor, positions: Tensor, *, base: float = 10000.0, interleaved: bool = False) -> Tensor:
    """Turn ``x`` ``[..., S, head_dim]``, the token at ``positions[s]`` by ``positions[s] / base^(2i / head_dim)``.

    Pair i are features i and ``i + head_dim / 2`` (GPT-NeoX, Llama in Transformers), or with ``interleaved`` 2i and
    2i + 1 (the paper's, GPT-J).  Angles, sines and products are fp32 (fp64 for fp64); the result is rounded once.

    Args:
        positions: ``[S]``, or any shape that broadcasts against ``x.shape[:-1]``.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).

    Examples:
        >>> tpk.nn.apply_rotary(torch.ones(1, 4), torch.tensor([0]))  # position 0 is not turned
        tensor([[1., 1., 1., 1.]])
    """
    half = x.shape[-1] // 2
    if 2 * half != x.shape[-1]:
        raise ValueError(f"rotary embedding needs an even number of features per head, got {x.shape[-1]}")
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    exponents = torch.arange(half, dtype=dtype, device=x.device) / half
    angles = positions.to(dtype).unsqueeze(-1) * base**-exponents
    cos, sin = angles.cos(), angles.sin()
    wide = x.to(dtype)
    a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else (wide[..., :half], wide[..., half:])
    turned = a * cos - b * sin, b * cos + a * sin
    result = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return result.to(x.dtype)
