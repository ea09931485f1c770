"""Models whose code multiplies by a layer's weight itself, after published ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS = 24, 4


class Eva(nn.Module):
    """The attention of EVA-02 and BEiT in timm 1.0.31 (timm/models/eva.py): queries and values alone have a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("k_bias", torch.zeros(WIDTH), persistent=False)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))  # type: ignore[arg-type]
        qkv = F.linear(x, weight=self.qkv.weight, bias=bias)
        q, k, v = qkv.reshape(B, N, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C)
        y: Tensor = self.proj(heads)
        return y


def shifted_window_attention(
    x: Tensor, qkv_weight: Tensor, proj_weight: Tensor, bias: Tensor, qkv_bias: Tensor | None, proj_bias: Tensor | None
) -> Tensor:
    B, N, C = x.shape
    qkv = F.linear(x, qkv_weight, qkv_bias)
    qkv = qkv.reshape(B, N, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
    q, k, v = qkv[0], qkv[1], qkv[2]
    attn = (q * (C // HEADS) ** -0.5) @ k.transpose(-2, -1) + bias
    heads = attn.softmax(dim=-1).matmul(v).transpose(1, 2).reshape(B, N, C)
    return F.dropout(F.linear(heads, proj_weight, proj_bias), p=0.0)


class Swin(nn.Module):
    """One window of torchvision 0.29 (models/swin_transformer.py): a function takes the weights of both layers.

    ``zeroed``: its version 2, which changes a copy of the bias.
    """

    def __init__(self, zeroed: bool = False) -> None:
        super().__init__()
        self.qkv, self.proj, self.zeroed = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), zeroed
        self.table = nn.Parameter(torch.randn(9, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        rows = self.table[((places[:, None] - places).clamp(-4, 4) + 4).view(-1)]
        bias = rows.view(x.shape[1], x.shape[1], -1).permute(2, 0, 1).unsqueeze(0)
        qkv_bias = self.qkv.bias
        if self.zeroed:
            qkv_bias = qkv_bias.clone()
            length = qkv_bias.numel() // 3
            qkv_bias[length : 2 * length].zero_()
        return shifted_window_attention(x, self.qkv.weight, self.proj.weight, bias, qkv_bias, self.proj.bias)


class Pair(nn.Module):
    """An MLP without a call: ``once_more``: it reads the second weight in another way, too; ``converted``: in fp32."""

    def __init__(self, once_more: bool = False, converted: bool = False) -> None:
        super().__init__()
        self.up, self.proj, self.once_more = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH), once_more
        self.converted = converted

    def forward(self, x: Tensor) -> Tensor:
        weight = self.proj.weight.type(torch.float32) if self.converted else self.proj.weight
        y = F.linear(F.gelu(F.linear(x, self.up.weight, self.up.bias)), weight, bias=self.proj.bias)
        return y + self.proj.weight.mean() if self.once_more else y


class Packed(nn.Module):
    """Queries, keys and values that a plan would keep in three parameters, of which the code reads one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, 6)).transpose(1, 2)
            for part in F.linear(x, self.qkv.weight, self.qkv.bias).chunk(3, -1)
        )
        y: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


class Rescaled(nn.Module):
    """Weights are divided before an evaluation and multiplied before training, as RWKV's; or, ``centred``, changed by
    what all of a weight gives."""

    def __init__(self, centred: bool = False) -> None:
        super().__init__()
        self.up, self.proj, self.centred, self.divided = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH), centred, False

    def rescale(self, *weights: nn.Parameter) -> None:
        if self.divided == self.training:
            self.divided = not self.training
            with torch.no_grad():
                for weight in weights:
                    if self.centred:
                        weight.sub_(weight.mean())
                    elif self.training:
                        weight.mul_(2**2)
                    else:
                        weight.div_(2**2)

    def forward(self, x: Tensor) -> Tensor:
        self.rescale(self.up.weight, self.proj.weight)
        y: Tensor = self.proj(F.gelu(self.up(x)))
        return y


class RescaledPacked(Rescaled):
    """One of them is of queries, keys and values that a plan would keep in three parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.rescale(self.qkv.weight)
        q, k, v = (part.unflatten(-1, (-1, 6)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


class Called(nn.Module):
    """One block, as a part of a model."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.norm, self.block = nn.LayerNorm(WIDTH), block

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.block(self.norm(x))
        return y


MADE: dict[str, Any] = {
    "eva": Eva, "swin": Swin, "swin 2": lambda: Swin(zeroed=True), "pair": Pair,
    "read once more": lambda: Pair(once_more=True), "converted": lambda: Pair(converted=True), "packed": Packed,
    "rescaled": Rescaled, "centred": lambda: Rescaled(centred=True), "rescaled packed": RescaledPacked,
}  # fmt: skip


def made(how: str) -> nn.Module:
    return Called(MADE[how]())
