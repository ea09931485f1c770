"""Attention whose keys and values somebody else has made for all layers, and hands on in a dict or otherwise, as the
assistant of Gemma 4 takes those of another model."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["EACH", "LENGTH", "WIDTH", "Model", "Reading"]

EACH, LENGTH, WIDTH = 4, 5, 12
HANDED = ("in a dict", "in a dict of its own", "in a list", "apart", "by number", "detached")


class Shared(UserDict[str, Any]):
    """A dict of its own kind."""


class Reading(nn.Module):
    """``how``: in what keys and values come, or what else becomes of them here."""

    def __init__(self, how: str, heads: int) -> None:
        super().__init__()
        self.how = how
        self.query, self.out = nn.Linear(WIDTH, heads * EACH), nn.Linear(heads * EACH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor, shared: Any, values: Any = None) -> Tensor:
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, -1, EACH).transpose(1, 2)
        keys, values = self.found(shared, values)
        if self.how == "sums them":
            x = x + keys.sum(1).repeat(1, 1, WIDTH // EACH)
        times = query.shape[1] // keys.shape[1]
        scores = query @ keys.repeat_interleave(times, 1).transpose(-1, -2) + bias
        found = scores.softmax(-1) @ values.repeat_interleave(times, 1)
        y: Tensor = self.out(found.transpose(1, 2).reshape(batch, length, -1))
        return y + x if self.how == "sums them" else y

    def found(self, shared: Any, values: Any) -> tuple[Tensor, Tensor]:
        if self.how == "apart":
            return shared, values
        if self.how == "in a list":
            return shared[0][0], shared[1]
        keys, values = shared[1] if self.how == "by number" else shared["near"]
        if self.how == "writes":
            keys[..., :1].mul_(2.0)
        elif self.how == "stores":
            shared["own"] = keys
        elif self.how == "replaces":
            shared["near"] = (keys, keys)
        elif self.how == "takes out":
            shared.pop("far", None)
        elif self.how == "stores by number":
            shared[3] = keys
        return keys, values


class Model(nn.Module):
    """Keys and values of ``groups`` heads go to all blocks and, whole, out of the model.

    ``how`` they are handed on, or what becomes of them in the last block, behind which nobody reads them.
    """

    def __init__(self, how: str = "in a dict", heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.how, self.groups = how, groups
        self.keys, self.values = (nn.Linear(WIDTH, groups * EACH) for _ in range(2))
        self.bias = nn.Linear(WIDTH, LENGTH)
        self.blocks = nn.ModuleList(Reading(one, heads) for one in (how if how in HANDED else "in a dict", how))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        keys, values = (
            layer(x).view(batch, length, self.groups, EACH).transpose(1, 2) for layer in (self.keys, self.values)
        )
        if self.how == "detached":
            keys, values = keys.detach(), values.detach()
        bias = self.bias(x).unsqueeze(1)
        ends = (F.gelu(keys) * values).sum((1, 3)) + bias.sum((1, 3))
        given = self.handed(keys, values)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(x + block(x, bias, *given))
        return x + ends.unsqueeze(-1)

    def handed(self, keys: Tensor, values: Tensor) -> tuple[Any, ...]:
        if self.how == "apart":
            return keys, values
        if self.how == "in a list":
            return ([(keys, None), values, 3],)
        if self.how == "by number":
            return ({1: (keys, values)},)
        found = {"far": (values, keys), "near": (keys, values)}
        return (Shared(found) if self.how == "in a dict of its own" else found,)
