"""Attention beside windows of its values, whose kernels are made of queries and of keys that a convolution makes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CUT", "EACH", "HEADS", "WHOLE", "WIDTH", "Mixed", "made"]

HEADS, EACH, WIDTH, PLACES = 6, 4, 10, 3


class Convolved(nn.Module):
    """A convolution of each channel by itself, one over all channels, and a bias for each of these."""

    def __init__(self, taken: int, given: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(taken, taken, 3, padding=1, groups=taken, bias=False)
        self.pointwise = nn.Conv1d(taken, given, 1, bias=False)
        self.bias = nn.Parameter(torch.linspace(-0.5, 0.5, given).view(-1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pointwise(self.depthwise(x))
        x += self.bias
        return x


class Mixed(nn.Module):
    """As ConvBERT's.

    ``how``: "by feature" concatenates what each head has of both, "no bias" and "tables" (GPT-2's kind of layer) are
    other last layers; "three" concatenates the windows twice, "counted" reads numbers of heads and features.  "places
    first" takes the windows for runs of all
    channels, "along heads" slides over heads, "with the input" concatenates what is whole as well, "flipped" hands the
    windows to other heads, and "kernels of all" has one kernel for all heads.
    """

    def __init__(self, how: str = "", heads: int = HEADS) -> None:
        super().__init__()
        self.how, self.heads, self.features = how, heads, heads * EACH
        self.query, self.key, self.value, self.beside = (nn.Linear(WIDTH, self.features) for _ in range(4))
        self.convolved = Convolved(WIDTH, self.features)
        self.kernels = nn.Linear(self.features, PLACES if how == "kernels of all" else heads * PLACES)
        taken = {"three": 3 * self.features, "with the input": 2 * self.features + WIDTH}.get(how, 2 * self.features)
        self.out: Any = nn.Linear(taken, WIDTH, bias=how != "no bias")
        if how == "tables":
            from transformers.pytorch_utils import Conv1D

            self.out = Conv1D(WIDTH, taken)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            layer(x).view(batch, length, -1, EACH).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        keys = self.convolved(x.transpose(1, 2)).transpose(1, 2)
        kernels = self.kernels(keys * self.query(x)).reshape(batch * length, -1, PLACES).softmax(-1)
        if self.how == "kernels of all":
            kernels = kernels.expand(-1, self.features // EACH, -1)
        windows = self._windows(self.beside(x).transpose(1, 2).unsqueeze(-1))
        if self.how == "flipped":
            windows = windows.flip(1)
        mixed = windows @ kernels.reshape(batch * length, -1, PLACES, 1)
        if self.how == "counted":
            mixed = mixed.reshape(batch, -1, self.features)
        mixed = (
            mixed.reshape(batch, -1, self.heads, EACH)
            if self.how == "counted"
            else mixed.reshape(batch, length, -1, EACH)
        )
        heads = ((query @ key.transpose(-2, -1)).softmax(-1) @ value).transpose(1, 2)
        if self.how == "by feature":
            joined = torch.cat([heads, mixed], 3).view(batch, length, -1)
        else:
            joined = torch.cat([heads, mixed, *([mixed] if self.how == "three" else [])], 2).view(batch, length, -1)
        y: Tensor = self.out(torch.cat([joined, x], -1) if self.how == "with the input" else joined)
        return y

    def _windows(self, x: Tensor) -> Tensor:
        """``[batch * length, heads, features of one, places]``."""
        batch, channels, length, _ = x.shape
        if self.how == "along heads":
            x = x.view(batch, channels // EACH, EACH, length).permute(0, 2, 1, 3)
            found = F.unfold(x, (PLACES, 1), padding=(1, 0)).view(batch, EACH, PLACES, -1, length)
            return found.permute(0, 4, 3, 1, 2).reshape(batch * length, -1, EACH, PLACES)
        found = F.unfold(x, (PLACES, 1), padding=(1, 0)).transpose(1, 2)
        if self.how == "places first":
            return found.reshape(batch * length, PLACES, -1, EACH).permute(0, 2, 3, 1)
        return found.reshape(batch * length, -1, EACH, PLACES)


CUT = ("", "by feature", "no bias", "tables", "three", "counted")
WHOLE = ("places first", "along heads", "with the input", "flipped", "kernels of all")


def made(how: str) -> Mixed:
    torch.manual_seed(0)
    return Mixed(how)
