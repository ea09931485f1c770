"""A Llama for parallelize_module, and plans of our styles that cut it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.checkpoint import checkpoint

from tests.integrations.curves import VOCABULARY, Curve, batches, train
from tests.nn.reference import tp_mesh
from tpkernels.integrations.styles import ColumnParallel, Replicated, RowParallel, SequenceParallel, VocabParallel


class Attention(nn.Module):
    """Grouped keys; sizes from the tensors, as models for parallelize_module are written."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.head = width // heads
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, groups * self.head, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, groups)
        self.gate, self.up, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Model(nn.Module):
    """A Llama with biases; ``tied``: the head is the table."""

    def __init__(
        self, tied: bool = False, positions: bool = True, hidden: int = 57, heads: int = 4, groups: int = 2
    ) -> None:
        super().__init__()
        width = 8 * heads
        self.table = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(16, width) / 8) if positions else None
        self.blocks = nn.ModuleList(Block(width, hidden, heads, groups) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.checkpoints = False
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        if self.position is not None:
            x = x + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(self.norm(x))


def build(**options: Any) -> Model:
    torch.manual_seed(3)
    model = Model(**options)
    with torch.no_grad():
        model.table.weight.mul_(0.3)
    return model


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def plain_layouts() -> dict[str, ParallelStyle]:
    columns = ("attention.q", "attention.k", "attention.v", "gate", "up")
    return {
        "table": VocabParallel(),
        **{f"blocks.*.{name}": ColumnParallel() for name in columns},
        "blocks.*.attention.o": RowParallel(),
        "blocks.*.down": RowParallel(),
        "head": ColumnParallel(output_layouts=Replicate()),
        "": Replicated(),
    }


def sequence_layouts() -> dict[str, ParallelStyle]:
    """The residual is a DTensor, cut along the sequence."""
    cut = Shard(1)
    columns = ("attention.q", "attention.k", "attention.v", "gate", "up")
    norms = ("blocks.*.norm1", "blocks.*.norm2", "norm")
    return {
        "table": VocabParallel(output_layouts=cut, use_local_output=False),
        **{name: SequenceParallel() for name in norms},
        **{f"blocks.*.{name}": ColumnParallel(input_layouts=cut) for name in columns},
        "blocks.*.attention.o": RowParallel(output_layouts=cut, use_local_output=False),
        "blocks.*.down": RowParallel(output_layouts=cut, use_local_output=False),
        "head": ColumnParallel(input_layouts=cut, output_layouts=Replicate()),
        "": Replicated(),
    }


def dtensor_layouts() -> dict[str, ParallelStyle]:
    """DTensors leave every layer and enter the next one."""
    plan = plain_layouts()
    for name, style in plan.items():
        if name.endswith(("gate", "up", "down")):
            plan[name] = type(style)(use_local_output=False)  # type: ignore[call-arg]
    plan["blocks.*.norm2"] = Replicated(use_local_output=False)
    plan["blocks.*.down"] = RowParallel()
    return plan


LAYOUTS: dict[str, Callable[[], dict[str, ParallelStyle]]] = {
    "plain": plain_layouts,
    "sequence": sequence_layouts,
    "dtensors": dtensor_layouts,
}


def run(model: nn.Module) -> Curve:
    return train(model, batches(), loss_of=loss_of)


def parallel(layouts: str, **options: Any) -> Model:
    model = build(**options)
    parallelize_module(model, tp_mesh(), LAYOUTS[layouts]())
    return model
