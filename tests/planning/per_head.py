"""Attention with parameters, norms and numbers of its own for each head, and layers with code of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, EACH = 6, 4
WIDTH = HEADS * EACH
WORDS = 41
NORM_OF_HEADS = ("norm of heads", "layer norm", "bias of a norm")


class RMSNorm(nn.Module):
    """Over all heads at once, as in OLMo 2."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * y).to(x.dtype)


class Centred(RMSNorm):
    """Layer norm without a bias, written out as Cohere's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class AroundMedian(RMSNorm):
    """Looks like it, and is not."""

    def forward(self, x: Tensor) -> Tensor:
        middle = x.median(-1, keepdim=True).values
        y: Tensor = self.weight * (x - middle) * torch.rsqrt((x - middle).square().mean(-1, keepdim=True) + self.eps)
        return y


class Bias(nn.Module):
    """A table of one bias per head and distance, as in Swin."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, heads))

    def forward(self, length: int) -> Tensor:
        places = torch.arange(length)
        distance = (places[:, None] - places).clamp(-4, 4) + 4
        rows = self.table[distance.view(-1)].view(length, length, -1)
        return rows.permute(2, 0, 1).unsqueeze(0)


class Attention(nn.Module):
    def __init__(self, how: str, heads: int = HEADS) -> None:
        super().__init__()
        width = heads * EACH
        self.how, self.config = how, SimpleNamespace(heads=heads, other=3)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * width), nn.Linear(width, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, width) for _ in range(3))
        kinds: Any = {"centred": Centred, "around the median": AroundMedian}
        norm = nn.LayerNorm if how in ("layer norm", "bias of a norm") else kinds.get(how, RMSNorm)
        self.query_norm, self.key_norm = norm(width), norm(width)
        self.sinks, self.bias = nn.Parameter(torch.randn(heads)), Bias(heads)
        self.gain = nn.Parameter(torch.randn(heads, EACH))
        if how == "kernel":
            self.kernel = nn.Parameter(torch.randn(9, heads, EACH))
        if how.startswith("distances"):  # a row for each, which all heads read, as in Conformers and BERT
            self.distances = nn.Embedding(9, EACH)

    def forward(self, x: Tensor, slopes: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        if self.how == "config":
            q, k, v = self.qkv(x).view(batch, length, 3, self.config.heads, EACH).permute(2, 0, 3, 1, 4)
        else:
            parts = [self.query(x), self.key(x), self.value(x)]
            if self.how in ("norms", "centred", "around the median", "norm of both"):
                parts[0], parts[1] = self.query_norm(parts[0]), self.key_norm(parts[1])
            q, k, v = (part.view(batch, length, -1, EACH).transpose(1, 2) for part in parts)
        if self.how == "gain":
            q = (q.transpose(1, 2) * self.gain).transpose(1, 2)
        if self.how == "bias of a kernel":  # torch takes another one where its heads are not those of the queries
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias(length), scale=1.0)
            return self.out(heads.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]
        scores = q @ k.transpose(-2, -1)
        if slopes is not None:  # [batch * heads, 1, length], as Bloom's, or [heads, 1, length], as MPT's
            scores = scores + slopes.view(-1, scores.shape[1], 1, length)
        if self.how.startswith("distances"):
            places = torch.arange(length)
            rows = self.distances((places[:, None] - places).clamp(-4, 4) + 4)
            scores = scores + torch.einsum("bhld,lrd->bhlr", q, rows)
        if self.how == "kernel":  # of constants, as Funnel's and XLNet's: torch refuses one for all heads by itself
            places = torch.linspace(0, 1, 9 * length, dtype=x.dtype).view(length, 9)
            scores = scores + torch.einsum("bhld,rhd->bhlr", q, torch.einsum("rc,chd->rhd", places, self.kernel))
        if self.how == "bias":
            scores = scores + self.bias(length)
        if self.how == "sinks":
            sinks = self.sinks.reshape(1, -1, 1, 1).expand(batch, -1, length, 1)
            both = torch.cat([scores, sinks], -1)
            both = both - both.max(-1, keepdim=True).values
            weights = both.softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        heads = weights @ v
        if self.how == "order of heads":  # a rank has other heads than these places say
            heads = heads * self.sinks.sort().values.view(1, -1, 1, 1)
        if self.how == "sum of all":
            heads = heads * self.sinks.sum()
        joined = heads.transpose(1, 2).reshape(batch, length, -1)
        y: Tensor = self.out(self.query_norm(joined) if self.how in NORM_OF_HEADS else joined)
        if self.how == "norm of both":
            y = y + self.query_norm(y)
        if self.how == "distances read twice":
            y = y * rows.sum()
        if self.how == "bias of a norm":
            y = y + self.query_norm.bias.mean()
        if self.how == "read twice":
            y = y + self.sinks.mean()
        return (y, rows) if self.how == "distances that leave" else y  # type: ignore[return-value]


class Disentangled(nn.Module):
    """As DeBERTa's: scores have terms of places, which the layers for words project as well, picked for each pair.

    ``how``: "one place" picks of the heads, "places of heads" has numbers for each of them, and "places in another
    order" those of other heads.
    """

    def __init__(self, how: str = "", p: float = 0.0) -> None:
        super().__init__()
        self.how, self.heads = how, HEADS
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.table = nn.Parameter(torch.randn(9, WIDTH))
        self.drop_places, self.drop = nn.Dropout(p), nn.Dropout(p)

    def split(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, self.heads, EACH).transpose(1, 2).flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        if self.how == "drops itself":
            table = F.dropout(self.table, 0.5, self.training).unsqueeze(0)
        else:
            table = self.drop_places(self.table).unsqueeze(0)
        places = torch.arange(length)
        numbers = (places[:, None] - places).clamp(-4, 4) + 4
        each = torch.bmm(k, self.split(self.query(table)).repeat(batch, 1, 1).transpose(1, 2))
        if self.how == "one place":
            term = torch.gather(each, 0, torch.zeros_like(each, dtype=torch.long))[..., :length]
        elif self.how == "places in another order":
            parts = (self.value(x).view(batch, length, self.heads, EACH) > 0).permute(2, 0, 1, 3).flatten(0, 1)
            term = torch.gather(each, -1, parts.long().sum(-1, keepdim=True).expand(-1, -1, length))
        elif self.how == "places of heads":
            term = torch.gather(each, -1, (numbers + torch.arange(batch * HEADS)[:, None, None]) % 9)
        else:
            term = torch.gather(each, -1, numbers.expand(len(q), length, length))
        weights = self.drop((torch.bmm(q, k.transpose(1, 2)) + term).softmax(-1))
        heads = torch.bmm(weights, v).view(batch, self.heads, length, EACH)
        y: Tensor = self.out(heads.transpose(1, 2).reshape(batch, length, -1))
        return y


class Alibi(nn.Module):
    """Biases of all heads are made once, and given to the attention: "one" for all of a batch, or "each" its own.

    "learned": from a parameter; "reversed": the attention takes them in another order.
    """

    def __init__(self, how: str, heads: int = HEADS) -> None:
        super().__init__()
        self.how, self.heads = how, heads
        self.attention = Reversed("", heads) if how == "reversed" else Attention("", heads)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        slopes = torch.linspace(0.1, 2, self.heads, dtype=x.dtype)[:, None, None] * torch.arange(length)
        if self.how == "learned":
            slopes = slopes * self.scale
        if self.how == "each":
            slopes = (slopes * torch.arange(1, batch + 1).view(-1, 1, 1, 1)).view(-1, 1, length)
        y: Tensor = self.attention(x, slopes=slopes) if self.how == "one" else self.attention(x, slopes)
        return y


class Handing(nn.Module):
    """Attention that makes a constant for all heads where it is given none, and hands it on."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        batch, length, _ = x.shape
        q, k, v = (one(x).view(batch, length, -1, EACH).transpose(1, 2) for one in (self.query, self.key, self.value))
        if bias is None:
            bias = torch.zeros(1, self.heads, length, length, dtype=x.dtype)
        y = (q @ k.transpose(-2, -1) + bias).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, -1)), bias


class Handed(nn.Module):
    """The attention to the encoder in T5's decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Handing(), Handing()

    def forward(self, x: Tensor) -> Tensor:
        y, bias = self.first(x)
        z: Tensor = self.second(x + y, bias)[0]
        return z


class Shared(nn.Module):
    """Tables of biases for the attention of all blocks, as in CPM-Ant and LayoutLMv3."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.other = nn.Parameter(torch.randn(9, HEADS)), nn.Parameter(torch.randn(HEADS, 9))
        self.first, self.second = Handing(), Handing()

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        distance = (places[:, None] - places).clamp(-4, 4) + 4
        bias = F.embedding(distance, self.table).permute(2, 0, 1)
        bias = bias + self.other.index_select(1, distance.flatten()).view(-1, *distance.shape)
        bias = bias.masked_fill(places > places[:, None], torch.tensor(-30.0, dtype=x.dtype))
        z: Tensor = self.second(x + self.first(x, bias)[0], bias)[0]
        return z


class Reversed(Attention):
    def forward(self, x: Tensor, slopes: Tensor | None = None) -> Tensor:
        return super().forward(x, slopes if slopes is None else slopes.flip(0))


class ScaledEmbedding(nn.Embedding):
    """Multiplies what torch's gives, as Gemma 3 does, with a number that is a buffer."""

    def __init__(self, *sizes: int, scale: float) -> None:
        super().__init__(*sizes)
        self.scale = nn.Buffer(torch.tensor(scale), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale.to(self.weight.dtype)


class WrittenOut(nn.Linear):
    """As Falcon's."""

    def forward(self, input: Tensor) -> Tensor:
        y = input @ self.weight.T
        return y if self.bias is None else y + self.bias


class Shifted(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input * 2).relu() + 1


class Again(Shifted):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3


class Rounded(nn.Linear):
    """Computes what torch does for some numbers alone."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.clamp(-50, 50), self.weight, self.bias)


class Words(nn.Module):
    """A table tied to a head, and linears with code of their own."""

    def __init__(self, up: Any = Again, down: Any = WrittenOut) -> None:
        super().__init__()
        self.table = ScaledEmbedding(WORDS, WIDTH, scale=3.0)
        self.up, self.down = up(WIDTH, 18), down(18, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        y: Tensor = self.head(x + self.down(self.up(x)))
        return y


class Projection(nn.Module):
    """A linear that is none of torch's."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Towers(nn.Module):
    """Text alone does not run the tower of images."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = (nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, text: Tensor, image: Tensor | None = None) -> Tensor:
        x = self.text(text)
        if image is not None:
            x = x + self.image(image).mean(1, keepdim=True)
        y: Tensor = self.head(x)
        return y


class Between(Towers):
    """With an image, what text alone has proven to be local is not."""

    def forward(self, text: Tensor, image: Tensor | None = None) -> Tensor:
        x = self.text[0](text)
        if image is not None:
            x = x + self.image[0](image).mean(1, keepdim=True).flip(-1)
        y: Tensor = self.head(self.text[2](x))
        return y


class Latent(nn.Module):
    """Attention whose keys and values come from a latent, and whose keys have a part that all heads share."""

    def __init__(self, how: str = "latent") -> None:
        super().__init__()
        self.how = how
        self.down, self.norm, self.up = nn.Linear(WIDTH, 14), RMSNorm(10), nn.Linear(10, HEADS * 8)
        self.query, self.out = nn.Linear(WIDTH, HEADS * 8), nn.Linear(HEADS * 4, WIDTH)
        self.gate = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        latent, turned = self.down(x).split([10, 4], -1)
        turned = turned.view(batch, 1, length, 4) * torch.linspace(0.5, 2, 4, dtype=x.dtype)
        if self.how == "latent with a gate":
            turned = turned * self.gate(x).unsqueeze(1)
        if self.how == "latent with a whole activation":
            turned = turned * x.mean(-1).view(batch, 1, length, 1)
        both = self.up(self.norm(latent)).view(batch, length, -1, 8).transpose(1, 2)
        near, v = both.split([4, 4], -1)
        k = both.new_empty(*both.shape[:-1], 8)
        k[..., :4].copy_(near)
        k[..., 4:].copy_(turned.expand(-1, near.shape[1], -1, -1))
        q = self.query(x).view(batch, length, -1, 8).transpose(1, 2)
        y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        z: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, -1))
        if self.how == "latent that leaves":
            z = z + latent.mean(-1, keepdim=True)
        if self.how == "latent read by a whole layer":
            z = z + self.gate(torch.cat([latent, latent, turned.squeeze(1)], -1)).sum(-1, keepdim=True)
        return z


class Indexed(nn.Module):
    """Queries from a latent, which an indexer reads as well: it says which keys a token looks at (DeepSeek V3.2)."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.query, self.index = nn.Linear(WIDTH, 6), nn.Linear(6, HEADS * EACH), nn.Linear(6, 4)
        self.of_keys, self.key, self.value = nn.Linear(WIDTH, 4), *(nn.Linear(WIDTH, HEADS * EACH) for _ in range(2))
        self.out = nn.Linear(HEADS * EACH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        latent = self.down(x)
        q, k, v = (
            layer(one).unflatten(-1, (-1, EACH)).transpose(1, 2)
            for layer, one in ((self.query, latent), (self.key, x), (self.value, x))
        )
        best = (self.index(latent) @ self.of_keys(x).transpose(-2, -1)).topk(3, -1).indices
        hidden = best.new_ones(q.shape[0], q.shape[2], q.shape[2], dtype=torch.bool).scatter(-1, best, False)
        scores = (q @ k.transpose(-2, -1)).masked_fill(hidden.unsqueeze(1), -1e4)
        z: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return z


class Convolved(nn.Module):
    """Queries, keys and values of heads, packed, through one convolution of each channel by itself, and a factor per
    head, as in gated delta nets: the weight is read, or the convolution called."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.keys, self.values = how, 2 * HEADS, EACH * HEADS
        channels = 2 * self.keys + self.values
        self.qkv, self.gate = nn.Linear(WIDTH, channels), nn.Linear(WIDTH, HEADS)
        self.conv = nn.Conv1d(channels, channels, 3, groups=channels, padding=2)
        self.decay, self.out = nn.Parameter(torch.randn(HEADS)), nn.Linear(self.values, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        mixed = self.qkv(x).transpose(1, 2)
        if self.how == "convolution called":
            mixed = self.conv(mixed)
        else:
            mixed = F.conv1d(mixed, self.conv.weight, self.conv.bias, padding=2, groups=mixed.shape[1])
        if self.how == "convolved over features":
            mixed = F.conv1d(mixed.flip(1), self.conv.weight, groups=mixed.shape[1])
        parts = mixed[..., :length].transpose(1, 2).split([self.keys, self.keys, self.values], -1)
        q, k, v = (
            part.view(batch, length, -1, size).transpose(1, 2) for part, size in zip(parts, (2, 2, EACH), strict=True)
        )
        factor = (self.gate(x) * self.decay).sigmoid().transpose(1, 2).unsqueeze(-1)
        system = (q * factor) @ k.transpose(-1, -2)
        heads = torch.linalg.solve_triangular(system, v, upper=False, unitriangular=True)
        y: Tensor = self.out(heads.transpose(1, 2).reshape(batch, length, -1))
        return y
