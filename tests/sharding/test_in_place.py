"""Models that write to what layers return: ``nn.ReLU(inplace=True)``, ``y += x``, ``embedding(ids).mul_(scale)``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.models.compare import compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

WIDTH, HIDDEN, HEADS, WORDS = 12, 22, 2, 30
LIMIT = 1e-11


class Block(nn.Module):
    """Every output of a layer is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, HIDDEN), nn.ReLU(inplace=True), nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(0.0, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1)
        scores /= WIDTH**0.5
        context = scores.softmax(-1) @ v
        y = self.out(context.transpose(1, 2).reshape(x.shape))
        y += x
        z: Tensor = self.down(self.dropout(self.act(self.up(y))))
        z += y
        return z


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids).mul_(WIDTH**0.5)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        logits.mul_(0.5)
        logits -= logits.mean(-1, keepdim=True)
        return logits


class TiedTwice(nn.Module):
    """A head whose weight is an embedding's, and whose bias belongs to a module that is no layer (Longformer's)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.decoder.weight = self.embedding.weight
        self.bias = self.decoder.bias

    def forward(self, input_ids: Tensor) -> Tensor:
        y: Tensor = self.decoder(self.body(self.embedding(input_ids)))
        return y


def twins(kind: type[nn.Module]) -> list[nn.Module]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(kind().double())
    return models


def compare(kind: type[nn.Module], plan: Any, options: dict[str, Any]) -> list[str]:
    plain, model = twins(kind)
    ids = torch.randint(0, WORDS, (2, 5), generator=torch.Generator().manual_seed(1))
    if plan == "auto":
        plan = tpk.make_plan(model, tp_mesh(), example_inputs=ids, **options)
    tpk.parallelize(model, tp_mesh(), plan)
    y, expected = model(ids), plain(ids)
    problem = differs(y, expected, LIMIT)
    for out in (y, expected):
        out.square().sum().backward()
    return ([] if problem is None else [f"output: {problem}"]) + compare_tensors(model, plain, LIMIT)


EXPLICIT = {
    "embedding": "vocabulary",
    "**.up": "column",
    "**.down": "row",
    "**.qkv": "column_gather",
    "**.out": "row_split",
    "head": "column_gather",
}
CASES: dict[str, tuple[type[nn.Module], Any, dict[str, Any]]] = {
    "auto": (Writes, "auto", {}),
    "by rule": (Writes, "auto", {"strategy": "rules"}),
    "explicit": (Writes, EXPLICIT, {}),
    "explicit, vocabulary alone": (Writes, {"embedding": "features", "**.out": "column_gather"}, {}),
    "sequence parallel": (Writes, "auto", {"sequence_parallel": True}),
    "tied twice": (TiedTwice, "auto", {}),
    "tied twice, by rule": (TiedTwice, "auto", {"strategy": "rules"}),
}


def problems() -> dict[str, list[str]]:
    return {name: wrong for name, case in CASES.items() if (wrong := compare(*case))}


def test_models_that_write_to_outputs_train_as_the_plain_ones(ranks: Pools) -> None:
    assert ranks(2).run(problems, timeout=LIMIT_S) == [{}, {}]
