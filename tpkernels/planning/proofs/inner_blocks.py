"""Blocks in lists inside of modules that need values of tensors, such as the experts of a mixture: cut within each.

Inside of such a module nothing is recorded, so its layers would be gathered one by one.  But a block of a list there,
an expert that is called with the rows of its tokens, can be recorded by itself.  It owns the proof that its layers are
columns and rows of each other, so that it takes and gives whole tensors with one sum.

It assumes that a block that no guess reached is called as those like it are.  It refuses blocks of which a layer is
called past the block, or that are called with more than one tensor, and dropout between a column and its row.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.planning.entries.plan_entries import Chosen
from tpkernels.planning.entries.shared_inputs import find_shared
from tpkernels.planning.modules.layers import Layer
from tpkernels.planning.proofs.decision import decide
from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.planning.styles import Column, Row, Style

__all__ = ["find_inner_blocks"]

ROWS = 5
Inner = tuple[dict[str, Chosen], tuple[tuple[str, ...], ...]]
"""Styles of a block's layers, by their names within it; and those that share their input."""


def find_inner_blocks(
    observation: Observation | None, model: nn.Module, world_size: int, excluded: Container[str]
) -> tuple[dict[str, Chosen], list[tuple[str, ...]]]:
    """What happens to the layers of such blocks, and which of them share their input.

    ``excluded``: layers that may not be cut with others.
    """
    shadow = None if observation is None else observation.shadow
    chosen: dict[str, Chosen] = {}
    shared: list[tuple[str, ...]] = []
    if observation is None or shadow is None or observation.recording is None or not shadow.opaque:
        return chosen, shared
    modules = dict(model.named_modules())
    known: dict[Any, Inner] = {}
    for name, module in modules.items():
        if not isinstance(modules.get(name.rpartition(".")[0]), nn.ModuleList | nn.ModuleDict):
            continue
        layers = {key[len(name) + 1 :]: one for key, one in shadow.layers.items() if key.startswith(f"{name}.")}
        if len(layers) < 2 or any(f"{name}.{inner}" in excluded for inner in layers):
            continue
        if not _only_called(observation, name, layers):
            continue
        key = type(module), repr(module), tuple(layers.items())
        if key not in known:
            known[key] = _proven(module, layers, world_size)
        styles, together = known[key]
        chosen |= {f"{name}.{inner}": style for inner, style in styles.items()}
        shared += [tuple(f"{name}.{inner}" for inner in names) for names in together]
    return chosen, shared


def _only_called(observation: Observation, name: str, layers: Mapping[str, Layer]) -> bool:
    """Whether the block, and all like it, are inside of opaque modules, and their layers are called by them alone."""
    place = _place(name)
    for _, recording in observation.recordings:
        seen = set()
        for layer in (*recording.layer_reads, *recording.called_within):
            for inner in layers:
                block = layer.removesuffix(f".{inner}")
                if block == layer or _place(block) != place:
                    continue
                if layer in recording.layer_reads or block not in recording.called_within[layer]:
                    return False
                seen.add(inner)
        if len(seen) < len(layers):
            return False
    return True


def _place(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _proven(module: nn.Module, layers: dict[str, Layer], world_size: int) -> Inner:
    """The columns and rows of one block."""
    first = next(iter(layers.values()))
    parameter = next(module.parameters())
    rows: Tensor = torch.zeros(ROWS, first.in_features, dtype=parameter.dtype, device="meta")
    alone = Observation(module, rows)
    if alone.recording is None or alone.shadow is None or any(alone.shadow.asking) or alone.note:
        return {}, ()
    decision = decide(alone, world_size, {}, {}, feeders=False)
    if decision.random or decision.partial or decision.norms:
        return {}, ()
    styles: dict[str, Style] = {}
    for group, proof in decision.proven.items():
        plain = not (
            proof.attributes or proof.copies or proof.pieces or proof.slices or proof.arguments or proof.states
        )
        if not plain or any(len(sizes) > 1 for sizes in proof.segments.values()) or group.random:
            continue
        if group.scattered or any(layers[name].kind == "embedding" for name in group.columns):
            continue
        styles |= dict.fromkeys(group.columns, Column()) | dict.fromkeys(group.rows, Row())
    together = find_shared([alone.recording], styles)
    columns = ", ".join(name for name, style in styles.items() if isinstance(style, Column))
    ends = ", ".join(name for name, style in styles.items() if isinstance(style, Row))
    reasons = {Column: f"within each block of its list, up to {ends}", Row: f"sums what {columns} cut in its block"}
    return {name: Chosen(style, "data flow", reasons[type(style)]) for name, style in styles.items()}, together
