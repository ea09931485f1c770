"""Attention whose code multiplies by its own parameters, as XLNet's does, and what is not cut so."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EACH, WIDTH = 4, 10


class Attention(nn.Module):
    """As XLNet's.

    ``how``: "heads first" has other dimensions, "two streams" multiplies by some parameters twice.  Not cut:
    "over heads" normalises over them, "one head more" adds what all heads share, "of twice" multiplies by what code
    makes of a parameter, "read as well" reads all of one, "leaves" returns what is of each head, "handed in" is given a
    parameter's product by other code.
    """

    def __init__(self, how: str = "", heads: int = 6, p: float = 0.0) -> None:
        super().__init__()
        self.how, self.drop = how, nn.Dropout(p)
        sizes = (WIDTH, heads, EACH)
        self.q, self.k, self.v = (nn.Parameter(torch.randn(sizes) / 4) for _ in range(3))
        self.o = nn.Parameter(torch.randn((heads, EACH, WIDTH) if how == "heads first" else sizes) / 4)
        self.bias, self.types = (nn.Parameter(torch.randn(heads, EACH)) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def project(self, x: Tensor) -> Tensor:
        return torch.einsum("bth,hnd->btnd", x, 2 * self.q if self.how == "of twice" else self.q)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bind,bjnd->bnij", q + self.bias, k)
        if self.how == "over heads":
            scores = scores.softmax(1)
        heads = torch.einsum("bnij,bjnd->bind", self.drop(scores.softmax(-1)), v)
        y: Tensor = torch.einsum("bind,ndh->bih" if self.how == "heads first" else "bind,hnd->bih", heads, self.o)
        return y

    def forward(self, x: Tensor, q: Tensor | None = None, types: bool = False) -> Tensor:
        q = self.project(x) if q is None else q
        k, v = (torch.einsum("bth, hnd -> btnd", x, one) for one in (self.k, self.v))
        if self.how == "one head more":
            v = v + x.mean(-1).unsqueeze(-1).unsqueeze(-1)
        if types:
            q = q + self.types
        y = x + self.attend(q, k, v)
        if self.how == "two streams":
            y = y + self.attend(self.project(x.flip(1)), k, v)
        if self.how == "read as well":
            y = y * self.v.mean()
        if self.how == "leaves":
            y = y + v.flatten(2)[..., :WIDTH]
        z: Tensor = self.norm(y)
        return z


class Mlp(nn.Module):
    """The same of two layers' weights, and a bias in between."""

    def __init__(self, features: int = 18) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(WIDTH, features) / 4) for _ in range(2))
        self.bias, self.types = (nn.Parameter(torch.randn(features)) for _ in range(2))

    def forward(self, x: Tensor, types: bool = False) -> Tensor:
        inner = torch.einsum("bth,hf->btf", x, self.up) + self.bias
        inner = inner + self.types if types else inner
        y: Tensor = x + torch.einsum("btf,hf->bth", F.gelu(inner), self.down)
        return y


class Model(nn.Module):
    """Two blocks, and layers behind them."""

    def __init__(self, how: str = "", heads: int = 6, p: float = 0.0) -> None:
        super().__init__()
        blocks: Any = (Mlp(3 * heads) if how == "mlp" else Attention(how, heads, p) for _ in range(2))
        self.how = how
        self.blocks: Any = nn.ModuleList(blocks)
        self.first, self.last = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        if how == "tied":
            self.blocks[1].k = self.blocks[0].k

    def forward(self, x: Tensor, types: bool = False) -> Tensor:
        for block in self.blocks:
            if self.how == "handed in":
                x = block(x, block.project(x))
            else:
                x = block(x, types=types) if types else block(x)
        y: Tensor = x + self.last(F.gelu(self.first(x)))
        return y
