"""Attention with a layer between: of the values of all heads it makes numbers for each head, which the scores take."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EACH, WIDTH = 4, 10


class Gated(nn.Module):
    """As Doge's.

    ``how``: "pairs of numbers" makes two for each head, "all heads first" the first ones of all heads and then the
    second ones, "in halves" a bias of the values from two halves.  "flipped" gives the numbers to other heads, "mean" a
    mean of them to all; "of the input too" calls the layer with a whole tensor as well, "features first" with values in
    another order; "that leaves" returns the numbers, "read by a norm" needs all of them.  In "read on" another layer
    takes them as well.
    """

    def __init__(self, how: str = "", heads: int = 6, p: float = 0.0) -> None:
        super().__init__()
        self.how, width = how, heads * EACH
        self.query, self.key, self.value = (nn.Linear(WIDTH, width) for _ in range(3))
        numbers = {"pairs of numbers": 2, "all heads first": 2, "in halves": 2 * EACH}.get(how, 1)
        self.gate, self.out = nn.Linear(width, numbers * heads), nn.Linear(width, WIDTH)
        self.slope = nn.Parameter(torch.linspace(0.5, 1.5, heads)) if numbers == 1 else None
        self.drop = nn.Dropout(p)
        if how == "of the input too":
            self.query = nn.Linear(width, width)
            self.widen = nn.Linear(WIDTH, width)
        if how == "read on":
            self.last = nn.Linear(heads, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        x = self.widen(x) if self.how == "of the input too" else x
        q, k, v = (
            layer(x if x.shape[-1] == layer.in_features else x[..., :WIDTH])
            .view(batch, length, -1, EACH)
            .transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        joined = v.permute(0, 2, 3, 1) if self.how == "features first" else v.transpose(1, 2)
        numbers = self.gate(joined.reshape(batch, length, -1))
        if self.how == "in halves":
            numbers, others = numbers.chunk(2, -1)
            v = v + (numbers * others).view(batch, length, -1, EACH).transpose(1, 2)
            numbers = v.mean(-1).transpose(1, 2)
        if self.how == "of the input too":
            numbers = numbers + self.gate(x)
        if self.how == "pairs of numbers":
            numbers = numbers.view(batch, length, -1, 2).sum(-1)
        if self.how == "all heads first":
            numbers = numbers.view(batch, length, 2, -1).sum(2)
        if self.how == "flipped":
            numbers = numbers.flip(-1)
        if self.how == "mean":
            numbers = numbers.mean(-1, keepdim=True)
        if self.how == "read by a norm":
            numbers = F.normalize(numbers, dim=-1)
        if self.slope is not None and self.how != "mean":
            numbers = torch.exp(self.slope * F.softplus(numbers))
        scores = q @ k.transpose(-2, -1) + numbers.transpose(-1, -2)[:, :, None, :]
        heads = self.drop(scores.softmax(-1)) @ v
        y: Tensor = self.out(heads.transpose(1, 2).reshape(batch, length, -1))
        if self.how == "read on":
            y = y + self.last(numbers)
        return (y, numbers) if self.how == "that leaves" else y  # type: ignore[return-value]


class Stack(nn.Module):
    """Blocks along a residual, with a number of rows that may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, hidden_states: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Gated()

    def forward(self, hidden_states: Tensor) -> Tensor:
        y: Tensor = hidden_states + self.attention(self.norm(hidden_states))
        return y


def made(how: str) -> Any:
    """By name; "7 heads" is a number of them."""
    heads = int(how[0]) if how[:1].isdigit() else 6
    if how in ("stack", "tied"):
        stack: Any = Stack()
        if how == "tied":  # each of both layers takes and gives parts
            stack.layers[1].attention.gate.weight = stack.layers[0].attention.gate.weight
        return stack
    return Gated(how.partition("heads ")[2] if how[:1].isdigit() else how, heads)
