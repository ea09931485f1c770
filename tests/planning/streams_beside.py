"""Streams of blocks between convolutions: each block has a convolution of single channels, and an MLP (ConvNeXt's, and
those of VibeVoice's tokenizer)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LENGTH = 12


class Norm(nn.Module):
    """RMS norm, by code of its own."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.linspace(0.5, 1.5, features)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class Cache:
    """What convolutions have padded, for the next call of the model alone."""

    def __init__(self) -> None:
        self.layers: dict[nn.Module, Tensor] = {}


class Padded(nn.Module):
    """A convolution of single channels, with what it pads in a cache if it is given one; ``scaled``: over how many."""

    def __init__(self, channels: int, *, scaled: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 3, groups=channels)
        self.in_channels, self.scaled = channels, scaled

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        if cache is None:
            padded = nn.functional.pad(x, (2, 0))
        else:
            before = cache.layers.get(self, x.new_zeros(x.shape[0], self.in_channels, 2))
            padded = torch.cat([before, x], -1)
            cache.layers[self] = padded[..., -2:]
        y: Tensor = self.conv(padded)
        return y / self.in_channels if self.scaled else y


class Block(nn.Module):
    """``how``: what it does beside its MLP.

    "dropped": what a block adds is dropped for whole samples, "noise": for single numbers; "noise within": numbers
    between the layers of the MLP are.  "softmax" needs all channels at once, "mean" adds their mean.  "gated" has one
    of two columns, "packed" one whose column gives two halves, and "parallel" has two that read the same tensor.
    "bare" has no norms, and "scaled" divides by how many channels there are.
    """

    def __init__(self, channels: int, how: str) -> None:
        super().__init__()
        self.how = how
        kind = {"bare": lambda _: nn.Identity(), "layer": nn.LayerNorm}.get(how, Norm)
        self.first, self.second = kind(channels), kind(channels)
        self.mixer = Padded(channels, scaled=how == "scaled")
        self.scale = nn.Parameter(torch.linspace(-1, 1, channels))
        self.up, self.down = nn.Linear(channels, 2 * channels), nn.Linear(2 * channels, channels)
        self.gate = nn.Linear(channels, 2 * channels) if how == "gated" else None
        if how == "packed":
            self.up = nn.Linear(channels, 4 * channels)
        if how == "parallel":
            self.beside = nn.Sequential(nn.Linear(channels, channels), nn.Tanh(), nn.Linear(channels, channels))

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        x = x + self.mixer(self.first(x.transpose(1, 2)).transpose(1, 2), cache) * self.scale.unsqueeze(-1)
        y = self.second(x.transpose(1, 2))
        inner = torch.tanh(self.up(y)) if self.gate is None else torch.tanh(self.up(y)) * self.gate(y)
        if self.how == "packed":
            first, second = inner.chunk(2, -1)
            inner = first * second
        if self.how == "noise within":
            inner = nn.functional.dropout(inner, 0.5, self.training)
        y = self.down(inner) + (self.beside(y) if self.how == "parallel" else 0)
        y = y.transpose(1, 2)
        if self.how == "noise":
            y = nn.functional.dropout(y, 0.5, self.training)
        if self.how == "dropped" and self.training:
            y = y * torch.rand(y.shape[0], 1, 1, dtype=y.dtype).round()
        if self.how == "softmax":
            y = y.softmax(1)
        if self.how == "mean":
            y = y + y.transpose(1, 2).mean(-1, keepdim=True).transpose(1, 2)
        return x + y


class Codec(nn.Module):
    """Two streams between three convolutions, with two blocks in the first of them, and one in the second.

    ``how`` is of the blocks, or "returned": the first stream is a result as well.
    """

    def __init__(self, how: str = "", channels: int = 18, outside: int = 3) -> None:
        super().__init__()
        self.how, wide = how, 2 * channels
        self.stem = nn.Conv1d(outside, channels, 3, padding=1)
        self.one, self.two = Block(channels, how), Block(channels, how)
        self.between = nn.Conv1d(channels, wide, 4, stride=2, padding=1)
        self.three = Block(wide, how)
        self.head = nn.ConvTranspose1d(wide, outside, 4, stride=2, padding=1)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor | tuple[Tensor, Tensor]:
        first = self.two(self.one(self.stem(x), cache), cache)
        y: Tensor = self.head(self.three(self.between(first), cache))
        return (y, first) if self.how == "returned" else y
