"""Packed projections whose queries share one key and one value, or a few: multi-query and grouped attention."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, EACH = 24, 4


class SharedKey(nn.Module):
    """``heads`` queries, then a key and a value for all of them, in one projection.

    ``how`` it takes them apart: as "features", as GPT-BigCode does, or as "heads", as Falcon does; or what must not be
    cut so: see the test.
    """

    def __init__(self, how: str, heads: int = 6) -> None:
        super().__init__()
        self.how, self.heads, self.width = how, heads, heads * EACH
        self.qkv, self.out = nn.Linear(WIDTH, self.width + 2 * EACH), nn.Linear(self.width, WIDTH)
        self.norm = nn.LayerNorm(EACH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        packed = self.qkv(x)
        if self.how == "nothing behind":  # a part without features, as in a GLM-5 that is small
            packed, _ = packed.split((packed.shape[-1], 0), -1)
        if self.how == "heads":
            seen = packed.view(batch, length, self.heads + 2, EACH)
            q, k, v = (seen[..., :-2, :], seen[..., [-2], :], seen[..., [-1], :])
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        elif self.how == "places":  # which are others on one rank
            seen = packed.view(batch, length, -1, EACH)
            q, k, v = seen[..., :-2, :], seen[..., [6], :].transpose(1, 2), seen[..., [7], :].transpose(1, 2)
        else:
            q, k, v = packed.split((self.width, EACH, EACH), -1)
            q, k, v = q.view(batch, length, -1, EACH), k.unsqueeze(1), v.unsqueeze(1)
        if self.how == "key that drops out":
            k = F.dropout(k, 0.5)
        if self.how == "another order":  # the last query for the key
            q, k = packed[..., : self.width].view(batch, length, -1, EACH), q[:, :, -1].unsqueeze(1)
        q, k = q.transpose(1, 2), self.norm(k)
        if self.how == "dropout":
            packed = F.dropout(packed, 0.5)
            v = packed[..., -EACH:].unsqueeze(1)
        y: Tensor = self.out(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1))
        if self.how == "value that leaves":
            y = y + v.sum(-1).transpose(1, 2)
        return y


class Grouped(nn.Module):
    """As Phi-3's: groups of queries share a key and a value.  ``how``: "turned" takes the heads in another order."""

    def __init__(self, how: str = "", heads: int = 6, shared: int = 2) -> None:
        super().__init__()
        self.how, self.num_heads, self.head_dim = how, heads, EACH
        self.num_key_value_heads, self.num_key_value_groups = shared, heads // shared
        self.qkv = nn.Linear(WIDTH, (heads + 2 * shared) * EACH)
        self.out = nn.Linear(heads * EACH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        packed, queries = self.qkv(x), self.num_heads * self.head_dim
        keys = queries + self.num_key_value_heads * self.head_dim
        parts = packed[..., :queries], packed[..., queries:keys], packed[..., keys:]
        q, k, v = (part.view(batch, length, -1, self.head_dim).transpose(1, 2) for part in parts)
        if self.how == "turned":
            k = k.flip(1)
        k, v = (
            one[:, :, None].expand(-1, -1, self.num_key_value_groups, -1, -1).reshape(batch, -1, length, self.head_dim)
            for one in (k, v)
        )
        y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        z: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, -1))
        return z
