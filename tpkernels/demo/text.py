"""Real text that every machine with Python has: its own documentation and the source of its standard library.

The choice is deterministic for one Python version: help topics in alphabetical order, then the standard library's
top-level modules, up to ``CORPUS_BYTES``.  Batches are a function of seed and step alone, so every rank and the one
process read the same.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["BEGIN", "VOCABULARY", "Batches", "corpus"]

CORPUS_BYTES = 4_000_000
BEGIN = 256
"""The token that starts every sequence; the others are bytes."""
VOCABULARY = 257


def corpus() -> Tensor:
    """The text as bytes in a uint8 tensor."""
    text = bytearray()
    for part in _documentation() + _modules():
        text += part
        if len(text) >= CORPUS_BYTES:
            break
    return torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8)


def _documentation() -> list[bytes]:
    if importlib.util.find_spec("pydoc_data") is None:  # some distributions package it apart
        return []
    from pydoc_data.topics import topics

    return [topics[name].encode() for name in sorted(topics)]


def _modules() -> list[bytes]:
    folder = Path(sysconfig.get_path("stdlib"))
    return [path.read_bytes() for path in sorted(folder.glob("*.py"))]


class Batches:
    """Random pieces of a text: ``[step]`` gives inputs and targets, both ``[batch, length]``, equal everywhere."""

    def __init__(self, text: Tensor, batch: int, length: int, seed: int) -> None:
        if len(text) <= length:
            raise ValueError(f"the text has {len(text)} bytes, too few for a sequence of {length}")
        self.text, self.batch, self.length, self.seed = text, batch, length, seed

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.text) - self.length, (self.batch, 1), generator=generator)
        targets = self.text[starts + torch.arange(self.length)].long()
        inputs = torch.cat([torch.full((self.batch, 1), BEGIN), targets[:, :-1]], dim=1)
        return inputs, targets
