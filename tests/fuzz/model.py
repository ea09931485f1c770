"""A random model: drawn as data from a seed, and built from that data."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tests.fuzz.attention
import tests.fuzz.experts
import tests.fuzz.heads
import tests.fuzz.written  # noqa: F401 - these register their kinds
from tests.fuzz.modules import free
from tests.fuzz.norms import FED, NORMS, ODD, norm
from tests.fuzz.vocabulary import BLOCKS, Sizes, Spec, build

__all__ = ["Fuzzed", "build_model", "draw_spec", "inputs_of", "sizes_of"]

VOCABULARY = 23
WIDTHS = (8, 12, 16, 18, 24)
STYLES = ("replicate", "column_gather", "row_split", "column", "row")


def draw_spec(seed: int, worlds: tuple[int, ...] = (2, 3, 4), small: bool = False) -> Spec:
    """The model of ``seed``, with how it is used; ``small``: of one block or two."""
    rng = random.Random(seed)
    sizes = Sizes(rng.choice([2, 3]), rng.choice([3, 4, 5, 7]), rng.choice(WIDTHS))
    spec: Spec = {"seed": seed, "world": rng.choice(worlds), "batch": sizes.batch, "length": sizes.length,
                  "width": sizes.width}  # fmt: skip
    spec["stem"] = rng.choice(["floats", "ids", "linear", "ids and positions"])
    spec["head"] = rng.choice(["none", "linear", "tied", "mean", "classes"])
    spec["output"] = rng.choice(["tensor", "tensor", "tuple", "dict", "object"])
    spec["norm"] = rng.choice(["layer", "rms", "none"])
    spec["training"] = rng.random() < 0.7
    spec["blocks"] = []
    for _ in range(rng.choice([1, 1, 2] if small else [1, 2, 2, 2, 3, 3, 4, 6])):
        name = rng.choice(list(BLOCKS))
        options = BLOCKS[name].draw(rng, sizes)
        if options is None:
            continue
        wiring: Spec = {"norm": rng.choice(NORMS if rng.random() < 0.9 else ODD),
                  "residual": rng.choice(["add", "add", "add", "none", "in place", "scaled", "gated"])}  # fmt: skip
        if rng.random() < 0.2:
            wiring["around"] = True
        spec["blocks"].append({"is": name, **options, "wiring": wiring})
    if rng.random() < 0.15 and len(spec["blocks"]) > 1:
        spec["again"] = rng.randrange(len(spec["blocks"]))  # this block runs once more at the end
    if rng.random() < 0.12:
        spec["sequence_parallel"] = True
    if rng.random() < 0.1:
        spec["override"] = [rng.random(), rng.choice(STYLES)]
    if rng.random() < 0.05:
        spec["untraced"] = True
    return spec


def sizes_of(spec: Spec) -> Sizes:
    return Sizes(spec.get("batch", 2), spec.get("length", 4), spec.get("width", 8))


class Wired(nn.Module):
    """A block with its norm and its residual."""

    def __init__(self, sizes: Sizes, spec: Spec, gives: bool) -> None:
        super().__init__()
        spec, self.gives = dict(spec), gives
        wiring = spec.pop("wiring", {})
        self.norm_kind, self.residual = wiring.get("norm", "none"), wiring.get("residual", "add")
        self.norm = norm(self.norm_kind, sizes.width)
        self.block = build(BLOCKS, sizes, spec)
        self.scale = free(sizes.width) if self.residual == "scaled" else None
        self.gate = nn.Linear(sizes.width, sizes.width) if self.residual == "gated" else None

    def forward(self, x: Tensor) -> Any:
        fed = {"like": x} if self.norm_kind in FED else {}
        y = self.block(x if self.norm_kind == "after" else self.norm(x, **fed))
        y, extra = y if isinstance(y, tuple) else (y, None)
        if self.norm_kind == "after":
            y = self.norm(y)
        if self.residual == "in place":
            y = y.add_(x)
        elif self.scale is not None:
            y = x + self.scale * y
        elif self.gate is not None:
            y = x + self.gate(x).sigmoid() * y
        elif self.residual != "none":
            y = x + y
        return (y, extra) if self.gives else y


class Around(nn.Module):
    """One more module around a block."""

    def __init__(self, inner: Wired) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


@dataclass
class Result:
    """As models of transformers give."""

    logits: Tensor
    extra: Any = None


class Fuzzed(nn.Module):
    """The model that a spec tells."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        sizes = sizes_of(spec)
        width = sizes.width
        self.stem_kind, self.head_kind = spec.get("stem", "floats"), spec.get("head", "none")
        self.output, self.again = spec.get("output", "tensor"), spec.get("again")
        if self.stem_kind.startswith("ids"):
            self.embed = nn.Embedding(VOCABULARY, width)
        if self.stem_kind == "ids and positions":
            self.positions = nn.Embedding(sizes.length, width)
        if self.stem_kind == "linear":
            self.stem = nn.Linear(width + 2, width)
        self.gives = any(block.get("gives") for block in spec["blocks"])
        wired = [Wired(sizes, block, self.gives) for block in spec["blocks"]]
        around = [block.get("wiring", {}).get("around") for block in spec["blocks"]]
        self.layers = nn.ModuleList(Around(b) if more else b for b, more in zip(wired, around, strict=True))
        self.norm = norm(spec.get("norm", "none"), width)
        if self.head_kind in ("linear", "tied"):
            self.head = nn.Linear(width, VOCABULARY, bias=False)
        if self.head_kind == "classes":
            self.head = nn.Linear(width, 5)
        if self.head_kind == "tied" and self.stem_kind.startswith("ids"):
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Any:
        if self.stem_kind.startswith("ids"):
            h = self.embed(x)
            if self.stem_kind == "ids and positions":
                h = h + self.positions(torch.arange(x.shape[1]))
        else:
            h = self.stem(x) if self.stem_kind == "linear" else x
        extras = []
        order = list(self.layers)
        if self.again is not None and order:
            order.append(order[self.again % len(order)])
        for layer in order:
            h = layer(h)
            if self.gives:
                h, extra = h
                if extra is not None:
                    extras.append(extra)
        h = self.norm(h)
        if self.head_kind in ("linear", "tied"):
            out = self.head(h)
        elif self.head_kind == "classes":
            out = self.head(F.gelu(h).mean(1))
        else:
            out = h.mean(1) if self.head_kind == "mean" else h
        return self.shaped(out, h, extras)

    def shaped(self, out: Tensor, h: Tensor, extras: list[Tensor]) -> Any:
        if self.output == "tuple":
            return (out, h, *extras)
        if self.output == "dict":
            return {"logits": out, "argmax": out.argmax(-1), "extras": extras}
        if self.output == "object":
            return Result(out, extras)
        return (out, *extras) if extras else out


def build_model(spec: Spec) -> Fuzzed:
    """Equal on every call: parameters all of which matter, in fp64."""
    torch.manual_seed(spec.get("seed", 0))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = Fuzzed(spec)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model.train(spec.get("training", True))


def inputs_of(spec: Spec) -> Tensor:
    sizes, generator = sizes_of(spec), torch.Generator().manual_seed(1 + spec.get("seed", 0))
    stem = spec.get("stem", "floats")
    if stem.startswith("ids"):
        return torch.randint(VOCABULARY, (sizes.batch, sizes.length), generator=generator)
    width = sizes.width + 2 if stem == "linear" else sizes.width
    x = torch.randn(sizes.batch, sizes.length, width, generator=generator, dtype=torch.float64)
    return x.requires_grad_(spec.get("training", True))
