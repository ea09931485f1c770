"""State spaces as in Mamba 2, by heads, and as in Mamba, by channels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, EACH, STATE, RANK = 6, 4, 5, 3
INNER = HEADS * EACH
WIDTH = 12


class GatedNorm(nn.Module):
    """Over all channels of a group at once, of what a gate lets through."""

    def __init__(self, groups: int, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, INNER))
        self.eps, self.size, self.how = 1e-5, INNER // groups, how

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        by = (gate.sigmoid() if self.how == "another gate" else F.silu(gate)).to(x.dtype)
        wide = x if self.how == "gate after" else x * by
        wide = wide - wide.mean(-1, keepdim=True) if self.how == "centred" else wide
        each = wide.unflatten(-1, (wide.shape[-1] // self.size, self.size))
        y = self.weight * (each * torch.rsqrt(each.pow(2).mean(-1, keepdim=True) + self.eps)).flatten(-2)
        return y * by if self.how == "gate after" else y


class StateSpace(nn.Module):
    """Mamba 2: one projection packs the gate, x, B, C and the steps; of B and C there are ``groups`` for all heads."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.groups, self.heads, self.inner = how, 2 if how == "groups" else 1, HEADS, INNER
        self.channels = INNER + 2 * self.groups * STATE
        self.first = nn.Linear(WIDTH, INNER + self.channels + HEADS)
        self.conv = nn.Conv1d(self.channels, self.channels, 3, groups=self.channels)
        self.step, self.decay = nn.Parameter(torch.randn(HEADS)), nn.Parameter(torch.randn(HEADS))
        self.norm, self.out = GatedNorm(self.groups, how), nn.Linear(INNER, WIDTH)
        if how == "gate before":  # the multipliers of Falcon-H1
            self.register_buffer("scale", torch.linspace(0.5, 1.5, self.first.out_features)[None, None])

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        packed = self.first(hidden) * self.scale if self.how == "gate before" else self.first(hidden)
        gate, mixed, dt = packed.split([self.inner, self.channels, self.heads], -1)
        mixed = F.pad(mixed.transpose(1, 2), (2, 0))
        weight = self.conv.weight.squeeze(1).unsqueeze(1)
        mixed = F.silu(F.conv1d(mixed, weight, self.conv.bias, groups=mixed.shape[1])).transpose(1, 2)
        x, b, c = mixed.split([self.inner, self.groups * STATE, self.groups * STATE], -1)
        x = x.view(batch, length, self.heads, EACH)
        each = self.heads // self.groups
        keys, queries = (one.view(batch, length, self.groups, STATE).repeat_interleave(each, 2) for one in (b, c))
        dt = F.softplus(dt + self.step)
        ages = (dt * -self.decay.exp()).cumsum(1)
        ages = (ages[:, :, None] - ages[:, None]).masked_fill(torch.ones(length, length).triu(1)[..., None] > 0, -1e9)
        scores = torch.einsum("blhn,bshn->blsh", queries, keys) * ages.exp()
        scan = torch.einsum("blsh,bshp->blhp", scores, x * dt[..., None]).reshape(batch, length, -1)
        y: Tensor = self.out(self.norm(scan, gate)) + 0 * self.norm.eps  # which code of Mamba 2 reads in training
        return y + c.sum(-1, keepdim=True) if self.how == "what all heads read leaves" else y


class Selective(nn.Module):
    """Mamba: what selects the states is made of all channels, and the weight that makes the steps of it is read."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.select = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, RANK + 2 * STATE, bias=False)
        self.conv, self.step = nn.Conv1d(INNER, INNER, 3, groups=INNER), nn.Linear(RANK, INNER)
        self.decay, self.gain = nn.Parameter(torch.randn(INNER, STATE)), nn.Parameter(torch.randn(INNER))
        self.norm, self.out = nn.LayerNorm(STATE), nn.Linear(INNER, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        x, gate = self.first(hidden).transpose(1, 2).chunk(2, 1)
        x = F.silu(F.conv1d(F.pad(x, (2, 0)), self.conv.weight, self.conv.bias, groups=x.shape[1]))
        steps, b, c = self.select(x.transpose(1, 2)).split([RANK, STATE, STATE], -1)
        steps, b = self.step.weight @ steps.transpose(1, 2), self.norm(b)
        if self.how == "layer called":
            steps = self.step(b[..., :RANK]).transpose(1, 2) + steps
        dt = F.softplus(steps + self.step.bias[:, None])
        decays = torch.exp(-self.decay.exp()[None, :, None] * dt[..., None])
        given = dt[..., None] * b[:, None] * x[..., None]
        state, scans = torch.zeros(*x.shape[:2], STATE, dtype=x.dtype), []
        for place in range(x.shape[2]):
            state = decays[:, :, place] * state + given[:, :, place]
            scans.append((state @ c[:, place, :, None])[..., 0])
        scan = (torch.stack(scans, -1) + x * self.gain[:, None]) * F.silu(gate)
        y: Tensor = self.out(scan.transpose(1, 2))
        return y + steps.mean() if self.how == "selection that leaves" else y


def made(how: str) -> Any:
    selective = how in ("selective", "layer called", "selection that leaves")
    return Selective(how) if selective else StateSpace(how)
