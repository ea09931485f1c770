"""Two small language models in plain torch, for training runs that are compared bit for bit.

"gpt" has LayerNorm, GELU, biases everywhere and a table of positions; "llama" has RMSNorm, SwiGLU, two query heads per
key-value head, rotary positions and a head tied to the embedding, and none of its sizes divides by 8.  Both drop out
elements of the residual.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpkernels.nn.rotary import apply_rotary
from tpkernels.planning.styles import Column, Row, Style

__all__ = ["SHAPES", "Decoder", "Shape"]


@dataclass(frozen=True)
class Shape:
    """Of the model and of one batch."""

    layers: int = 2
    width: int = 128
    heads: int = 16
    d_ff: int = 256
    vocabulary: int = 256
    length: int = 16
    batch: int = 4
    dropout: float = 0.1


SHAPES = {"gpt": Shape(), "llama": Shape(width=160, heads=20, d_ff=250, vocabulary=251)}
"""By kind; those of the first divide into 8 blocks, those of the second do not: it has 10 key-value heads."""


def _styles(kind: str, group: int, head: int) -> dict[str, str | Style]:
    """How both are cut, as `plan="auto"` cuts them, which takes longer than the training.

    ``group``: features of the query heads that share a key and value; ``head``: of one head.
    """
    styles: dict[str, str | Style] = {
        "embedding": "vocabulary", "head": "column_gather", "**.query": Column(unit=group), "**.key": Column(unit=head),
        "**.value": Column(unit=head), "**.out": Row(unit=group), "**.up": "column", "**.down": "row",
    }  # fmt: skip
    return styles | ({"**.gate": "column"} if kind == "llama" else {})


class Decoder(nn.Module):
    """The mean loss of predicting each token of ``ids`` ``[batch, length + 1]`` but the first."""

    def __init__(self, kind: str, shape: Shape) -> None:
        super().__init__()
        if kind not in SHAPES:
            raise ValueError(f"kind must be one of {list(SHAPES)}, got {kind!r}")
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width) if kind == "gpt" else None
        self.dropout = nn.Dropout(shape.dropout)
        self.layers = nn.ModuleList(_Layer(kind, shape) for _ in range(shape.layers))
        self.norm = _norm(kind, shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for table in self.modules():
            if isinstance(table, nn.Embedding):
                nn.init.normal_(table.weight, std=0.02)
        if kind == "llama":
            self.head.weight = self.embedding.weight
        head = shape.width // shape.heads
        self.styles = _styles(kind, 2 * head if kind == "llama" else head, head)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids[:, :-1])
        if self.positions is not None:
            x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), ids[:, 1:].flatten())


def _norm(kind: str, width: int) -> nn.Module:
    return nn.LayerNorm(width) if kind == "gpt" else nn.RMSNorm(width)


class _Layer(nn.Module):
    def __init__(self, kind: str, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(kind, shape.width), _norm(kind, shape.width)
        self.attention = _Attention(kind, shape)
        self.mlp = _GeluMLP(shape) if kind == "gpt" else _SwigluMLP(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        y: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return y


class _Attention(nn.Module):
    def __init__(self, kind: str, shape: Shape) -> None:
        super().__init__()
        self.rotary = self.grouped = kind == "llama"
        self.head_dim = shape.width // shape.heads
        kv = shape.width // 2 if kind == "llama" else shape.width
        bias = kind == "gpt"
        self.query, self.out = (nn.Linear(shape.width, shape.width, bias=bias) for _ in range(2))
        self.key, self.value = (nn.Linear(shape.width, kv, bias=bias) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            of(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for of in (self.query, self.key, self.value)
        )
        if self.rotary:
            at = torch.arange(x.shape[1], device=x.device)
            q, k = apply_rotary(q, at), apply_rotary(k, at)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        result: Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return result


class _GeluMLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(shape.width, shape.d_ff), nn.Linear(shape.d_ff, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class _SwigluMLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.width, shape.d_ff, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.d_ff, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y
