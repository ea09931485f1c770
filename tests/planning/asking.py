"""Models that need values of tensors, or keep tensors where a trace could leave fake ones."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Experts(nn.Module):
    """Each token goes to one of four experts, which are found by the values of the router."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(4))
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        if self.how == "writes":
            x.mul_(2)
        if self.how == "tolist":
            order = chosen.argsort()
            pieces = rows[order].split(torch.bincount(chosen, minlength=4).tolist())
            out = torch.cat([self.experts[i](piece) for i, piece in enumerate(pieces)])[order.argsort()]
        else:
            out = torch.zeros_like(rows)
            for index in chosen.unique():
                where = torch.where(chosen == index)[0]
                out = out.index_add(0, where, self.experts[index](rows[where]))
        if self.how == "reads":
            out = out + F.linear(rows, self.experts[chosen[0]][0].weight)[:, :8]
        if self.how == "leaks":
            self.seen = weights
        if self.how == "size":
            return out[chosen == 1]
        return (out * weights[:, None]).view(x.shape)


class Asking(nn.Module):
    """Attention that can be cut, experts that need values, and a linear pair behind."""

    def __init__(self, how: str = "unique") -> None:
        super().__init__()
        self.how = how
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.moe = Experts(how)
        self.after, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).relu()
        if self.how == "part":  # experts that would see a part
            hidden = torch.cat([self.moe(half) for half in hidden.chunk(2, -1)], -1)
        x = x + self.down(hidden)
        if self.how != "part":
            y = self.moe(x)
            x = x + (y.sum() if self.how == "size" else y)
        if self.how == "leaks":
            assert self.moe.seen is not None
            x = x * self.moe.seen.sum()
        x = x + self.last(self.after(x).relu())
        return x


@functools.lru_cache(maxsize=4)
def positions(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float32)


TABLES: dict[int, Any] = {}
SEEN: list[Tensor] = []
HELD: dict[str, Any] = {"last": None}


class Scratch:
    """One for all copies of a model."""

    table: Tensor | None = None

    def __deepcopy__(self, memo: object) -> Scratch:
        return self


class Keeping(nn.Module):
    """Keeps a table where ``how`` says, and uses it ever after."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scratch = Scratch()
        cell: list[Tensor | None] = [None]

        def closure(length: int) -> Tensor:
            nonlocal cell
            if cell[0] is None:
                cell[0] = torch.arange(length, dtype=torch.float32)
            return cell[0]

        self.closure = closure

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        if self.how == "lru_cache":
            table = positions(length)
        elif self.how == "dict":
            if length not in TABLES:
                TABLES[length] = (torch.arange(length, dtype=torch.float32), torch.ones(length))
            table = TABLES[length][0] * TABLES[length][1]
        elif self.how == "class":
            if type(self).__dict__.get("table") is None:
                type(self).table = torch.arange(length, dtype=torch.float32)  # type: ignore[attr-defined]
            table = type(self).table  # type: ignore[attr-defined]
        elif self.how == "shared object":
            if self.scratch.table is None:
                self.scratch.table = torch.arange(length, dtype=torch.float32)
            table = self.scratch.table
        elif self.how == "closure":
            table = self.closure(length)
        else:
            table = torch.arange(length, dtype=torch.float32)
            SEEN.append(table)
        y: Tensor = self.down(self.up(x + table[:, None]).relu())
        return y
